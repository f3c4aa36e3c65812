"""The judgement of rows that devices number: processed once in order, or named in a dead letter.

Responsible for: the numbers of each row, the gaps that a key's history has, and the dead letters about them.
Not responsible for: losses and repeats of rows (checkers.py), what is brought (scenario/devices.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from itertools import pairwise
from typing import Any

import msgspec

from tiercel.core.model.keys import Key
from tiercel.sim.check.reference import KeyHistory
from tiercel.sim.scenario.deployment import Deployment
from tiercel.sim.scenario.devices import DEAD_LETTERS, STREAM
from tiercel.sim.workload import plain

_GAP = re.compile(r"numbers (\d+) to (\d+) did not come .* went on with (\d+)")
Item = tuple[Any, Any]  # key, payload as the operator sees it


class NumberedRows:
    """The numbered rows of a run, and the dead letters about them; empty for operators that read none."""

    def __init__(self, deployment: Deployment | None = None) -> None:
        self.numbers: dict[Item, int] = {}
        self.refused: set[Item] = set()  # rows that a dead letter has
        self._gaps: set[tuple[Key, int, int]] = set()  # key, first missing number, number that came
        self._first = 1
        if deployment is None or STREAM not in deployment.topology.streams:
            return
        self._first = deployment.topology.streams[STREAM].first_number
        inputs = next(iter(deployment.topology.operators.values())).inputs
        tag = inputs.index(STREAM)
        for script in deployment.scenario.traffic:
            for frame, numbers in zip(script.frames, script.numbers, strict=False):
                for (key, _, payload), number in zip(frame, numbers, strict=True):
                    self.numbers[key, (tag, payload)] = number
        for entry in deployment.listeners[DEAD_LETTERS].entries:
            for output in entry.outputs:
                reason, key, _, row = output.row[2][:4]
                if row is not None:
                    self.refused.add((key, (tag, tuple(msgspec.json.decode(row)))))
                elif found := _GAP.search(reason):
                    self._gaps.add((key, int(found[1]), int(found[3])))

    def check(self, histories: Mapping[Key, KeyHistory], late: Set[Item] = frozenset()) -> list[str]:
        """What is wrong: numbers out of order, gaps that nothing names, and names of what is no gap.

        A late row came, so its number is no gap: it is left out only where its turn has come.
        """
        found: list[str] = []
        came: dict[Key, set[int]] = {}
        for item in self.numbers.keys() & late:
            came.setdefault(item[0], set()).add(self.numbers[item])
        for key, history in histories.items():
            following = self._first
            for row in [one for taken in history.rows for one in plain(taken)]:
                item = (row[0], _plain(row[2]))
                number = self.numbers.get(item)
                if number is None:
                    continue
                if item in self.refused:
                    found.append(f"{item} was processed, and is a dead letter")
                if number < following:
                    found.append(f"{item} has number {number}, and came where {following} was next")
                following = number + 1
                came.setdefault(key, set()).add(number)
        gaps = {
            (key, before + 1, number)
            for key, numbers in came.items()
            for before, number in pairwise([self._first - 1, *sorted(numbers)])
            if number > before + 1
        }
        found += [f"no dead letter names the gap {gap}" for gap in sorted(gaps - self._gaps)]
        found += [f"a dead letter names {gap}, which is no gap" for gap in sorted(self._gaps - gaps)]
        return found[:3]


def _plain(payload: Any) -> Any:
    return tuple(_plain(part) if isinstance(part, list | tuple) else part for part in payload)
