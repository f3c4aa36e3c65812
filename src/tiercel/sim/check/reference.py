"""The sequential reference: one key after the other, one entry after the other, no moves, no faults.

Responsible for: the history of each key, built from the logs, and the outputs of user code for it.
Not responsible for: comparing (checkers.py).

A key's history is its rows, ticks and watermarks in log order: the log of its first owner's site,
and at each Flip that takes it along the log of the next site, from Adopt on. If that log's watermark is
ahead, Adopt is a watermark for the key: it sees no time at which a timer of its own is due and has not fired.
"""

from __future__ import annotations

from typing import Any

from tiercel.core.instance.user_code import ProcessorRunner
from tiercel.core.model.bundle import opened
from tiercel.core.model.keys import Key
from tiercel.core.model.log import Adopt, Entry, Flip, Output, Row, TakenOver, Tick, Watermark
from tiercel.core.model.routing import Route, RoutingTable, slot_of
from tiercel.core.model.topology import Operator, site_of
from tiercel.core.state.handle import KeyState
from tiercel.sim.check.model import Call
from tiercel.sim.check.recorder import Recorder
from tiercel.sim.workload import KINDS, PlainCode, plain


class ReferenceRunner(ProcessorRunner):
    """Calls processors by the rules as they are, also while a planted bug replaces one of them."""

    reset_attributes = ProcessorRunner.reset_attributes
    undo_call = ProcessorRunner.undo_call
    rows_to_retry = ProcessorRunner.rows_to_retry


class KeyHistory:
    """The rows of one key, and the outputs and state that they should have led to."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.rows: list[Row] = []
        self.outputs: list[Output] = []
        self.dead_letters: list[Output] = []
        self.owners: list[str] = []  # sites, in order
        self.instance = ""
        self.instances: list[str] = []  # owners, in order
        self.calls: list[Call] = []  # for the model, which shares no code with the core
        self.late: list[str] = []
        self.state = KeyState(1, (key,))


class Reference:
    """The reference run of one operator."""

    def __init__(
        self,
        operator: Operator,
        kind: str,
        coarser: bool,
        recorder: Recorder,
        encodes: bool = False,
        joins: bool = True,
    ) -> None:
        self.operator = operator
        self.recorder = recorder
        self.engine = ReferenceRunner(
            PlainCode(KINDS[kind](operator.name, coarser), encodes=encodes, joins=joins), operator
        )
        self.logs = {
            site: sorted(log.items()) for (site, name), log in recorder.logs.items() if name == operator.name
        }
        self.adopts: dict[str, tuple[str, int, Adopt]] = {}
        self.flips: dict[str, list[tuple[int, str]]] = {}
        self.taken_over: dict[str, list[tuple[int, TakenOver]]] = {}
        self.keys: set[Key] = set()
        self.table = RoutingTable.initial(operator)
        self.missing: list[str] = []
        self.by_key: dict[str, dict[Key, dict[int, list[Row]]]] = {}
        self.control: dict[str, list[tuple[int, Entry]]] = {}
        for site, log in self.logs.items():
            self._index(site, log)

    def _index(self, site: str, log: list[tuple[int, Entry]]) -> None:
        rows_here = self.by_key.setdefault(site, {})
        controls = self.control.setdefault(site, [])
        for offset, entry in log:
            for rows in (*entry.parts.values(), *(part.rows for part in entry.moving)):
                for row in opened(rows):
                    rows_here.setdefault(row[0], {}).setdefault(offset, []).append(row)
            if isinstance(entry.control, Tick | Watermark):
                controls.append((offset, entry))
            elif isinstance(entry.control, Flip):
                self.flips.setdefault(site, []).append((offset, entry.control.move))
            elif isinstance(entry.control, TakenOver):
                self.taken_over.setdefault(site, []).append((offset, entry.control))
            elif isinstance(entry.control, Adopt):
                self.adopts[entry.control.move] = (site, offset, entry.control)
        self.keys.update(rows_here)

    def takes(self, adopt: Adopt, key: Key) -> bool:
        """Whether a move includes this key; a key with an override to another instance stays there."""
        if key in adopt.keys.keys:
            return True
        return slot_of(key, self.operator.slots) in adopt.keys.slots and key not in adopt.update.keys

    def run(self) -> dict[Key, KeyHistory]:
        for site, flips in self.flips.items():
            for offset, move in flips:
                if move not in self.adopts:
                    self.missing.append(f"{move} was flipped at {site}:{offset} and never adopted")
        return {key: self._history(key) for key in sorted(self.keys)}

    def _history(self, key: Key) -> KeyHistory:
        history = KeyHistory(key)
        first = self.table.route(key)
        history.instance = first.instance
        history.instances.append(first.instance)
        site, after, floor_time, floor_wm = first.site, 0, 0, -1
        history.state.epoch = first.epoch
        while True:
            history.owners.append(site)
            flip, following = self._next_flip(site, after, key)
            while (found := self._next_successor(site, after, flip, history)) is not None:
                upto, route = found
                self._replay(history, site, after, upto, floor_time, floor_wm)
                after, history.state.epoch, history.instance = upto, route.epoch, route.instance
                history.instances.append(route.instance)
            wm = self._replay(history, site, after, flip, floor_time, floor_wm)
            if following is None:
                return history
            flipped_ms = self.recorder.logs[site, self.operator.name][flip].time_ms
            site, after, adopt = following
            route = adopt.update.keys.get(key) or adopt.update.slots[slot_of(key, self.operator.slots)]
            # a slot takes over the clock floor of a single key that it brings along
            floor_time, floor_wm = max(floor_time, flipped_ms, route.floor_ms), wm
            history.state.epoch = route.epoch
            history.instance = route.instance
            history.instances.append(route.instance)
            assert site_of(route.instance) == site
            if adopt.own_watermark_ms > floor_wm and self.engine.event_time:
                self._fire(history, adopt.own_watermark_ms, floor_time, adopt.own_watermark_ms, after)

    def _next_successor(
        self, site: str, after: int, before: int, history: KeyHistory
    ) -> tuple[int, Route] | None:
        """The offset and route of the next takeover of this key, if its owner died."""
        for offset, control in self.taken_over.get(site, []):
            if after < offset < before and control.of == history.instance:
                slot = slot_of(history.key, self.operator.slots)
                return offset, control.update.keys.get(history.key) or control.update.slots[slot]
        return None

    def _next_flip(self, site: str, after: int, key: Key) -> tuple[int, tuple[str, int, Adopt] | None]:
        for offset, move in self.flips.get(site, []):
            if offset > after and move in self.adopts and self.takes(self.adopts[move][2], key):
                return offset, self.adopts[move]
        return 1 << 60, None

    def _replay(
        self, history: KeyHistory, site: str, after: int, upto: int, floor_time: int, floor_wm: int
    ) -> int:
        items: list[tuple[int, int, Any]] = [
            (offset, 0, rows)
            for offset, rows in self.by_key.get(site, {}).get(history.key, {}).items()
            if after < offset <= upto
        ]
        items += [(offset, 1, entry) for offset, entry in self.control.get(site, []) if offset <= upto]
        engine, state, key = self.engine, history.state, history.key
        log = self.recorder.logs.get((site, self.operator.name), {})
        watermark = floor_wm
        for offset, kind, item in sorted(items, key=lambda i: (i[0], i[1])):
            entry = log[offset]
            if isinstance(entry.control, Watermark):
                watermark = max(watermark, entry.control.value_ms)
            if offset <= after:
                continue
            time_ms = max(entry.time_ms, floor_time)
            if kind == 0:
                out: list[Output] = []
                history.rows += item
                history.late += [str(one) for r in item if 0 <= r[1] <= watermark for one in plain(r)]
                due_ms = watermark if engine.event_time else time_ms
                history.calls.append(Call(item, due_ms, time_ms, watermark))
                engine.call(state, key, item, time_ms, watermark, offset, out)
                self._collect(history, out)
            elif isinstance(entry.control, Watermark) and engine.event_time:
                self._fire(history, max(entry.control.value_ms, floor_wm), time_ms, watermark, offset)
            elif isinstance(entry.control, Tick) and engine.has_timers and not engine.event_time:
                self._fire(history, time_ms, time_ms, watermark, offset)
        return watermark

    def _fire(self, history: KeyHistory, due_ms: int, time_ms: int, watermark_ms: int, offset: int) -> None:
        history.calls.append(Call([], due_ms, time_ms, watermark_ms))
        if history.state.timers:
            out: list[Output] = []
            self.engine.fire(history.state, history.key, due_ms, time_ms, watermark_ms, offset, out)
            self._collect(history, out)

    def _collect(self, history: KeyHistory, out: list[Output]) -> None:
        engine = self.engine
        history.outputs += out
        history.dead_letters += engine.dead_letters
        engine.dead_letters = []
        engine.handle.new_timers.clear()
