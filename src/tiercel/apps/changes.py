"""What happens to an application while it runs: a live move, a scale-out, a `kill -9`.

Responsible for: carrying out one change; when it began and ended; which keys it was about.
Not responsible for: when (run.py), what it does to latency (figures.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

import msgspec

from tiercel import Live, ProcessStatus, UserError
from tiercel.apps.app import SITE, App, Event
from tiercel.chaos.processes import check_ours, kill

CHANGE_S_MAX = 180.0
SLOTS = 4096  # of an operator that does not say otherwise
MOVED_SHARE = 2  # a move takes every second slot of an instance
KINDS = ("none", "move", "half", "scale", "restart", "kill")
STILL_S = 1.0


class Change(msgspec.Struct, frozen=True):
    """One change that was carried out."""

    kind: str
    begin_ns: int
    end_ns: int
    about: str
    bytes_moved: int = 0
    killed: str = ""  # instance
    keys: int | None = None  # that it was about, among those that had output rows; None: not asked

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(frozen=True)
class Scene:
    """What a change needs to know about the run."""

    live: Live
    app: App[Any]
    options: Any
    operator: str
    sent: Callable[[], Sequence[Event]]

    def instances(self) -> list[ProcessStatus]:
        """The instances of the operator, from the one with the most slots to the one with the fewest."""
        found = [p for p in self.live.status().processes if p.name.startswith(f"{self.operator}@")]
        return sorted(found, key=lambda instance: (-instance.slots, instance.name))

    def perform(self, kind: str) -> Change:
        """Carry out one change; returns when it has ended."""
        match kind:
            case "none":
                begin_ns = monotonic_ns()
                time.sleep(STILL_S)
                return Change(kind, begin_ns, monotonic_ns(), "no change")
            case "move":
                return self._move(kind, slots=range(0, SLOTS, MOVED_SHARE), source=self.instances()[0].name)
            case "half":
                return self._move(kind, source=self.instances()[0].name)
            case "scale":
                return self._scale_out(kind, "live")
            case "restart":
                return self._scale_out(kind, "restart")
            case "kill":
                return self._kill()
            case _:
                return self._move(kind, keys=self.app.key_sets[kind](self.options, self.sent()))

    def _move(self, kind: str, **what: Any) -> Change:
        destination = self.instances()[-1].name
        begin_ns = monotonic_ns()
        moving = self.live.move(self.operator, to=destination, retries=3, **what)
        reports = moving.wait(CHANGE_S_MAX)
        last_ms = max((report.duration_ms for report in reports), default=0.0)
        end_ns = max(begin_ns + 1, int(moving.requested_s * 1e9 + last_ms * 1e6))
        about = "; ".join(map(str, reports)) or "nothing to move: all keys are there"
        return Change(kind, begin_ns, end_ns, about, sum(report.bytes_moved for report in reports))

    def _scale_out(self, kind: str, strategy: str) -> Change:
        before = len(self.instances())
        begin_ns = monotonic_ns()
        self.live.scale(self.operator, {SITE: before + 1}, strategy=strategy).wait()
        about = f"{self.operator}: {before} to {before + 1} instances ({strategy})"
        return Change(kind, begin_ns, monotonic_ns(), about)

    def _kill(self) -> Change:
        """SIGKILL for the instance with the most slots; ends when its next incarnation is attached."""
        killed = self.instances()[0]
        name = killed.name
        begin_ns = monotonic_ns()
        kill(check_ours(killed.pid, [os.getpid()]))
        give_up = time.monotonic() + CHANGE_S_MAX
        while time.monotonic() < give_up:
            found = next((p for p in self.instances() if p.name == name), None)
            if found is not None and found.incarnation > killed.incarnation and found.state == "running":
                about = f"{name}: process {killed.pid} killed, incarnation {found.incarnation} runs"
                return Change("kill", begin_ns, monotonic_ns(), about, killed=name)
            time.sleep(0.02)
        raise UserError(f"{name} did not start again within {CHANGE_S_MAX:g} s after its process was killed")

    def affected(self, change: Change, keys: Iterable[Any], before: dict[Any, str]) -> list[Any]:
        """Keys that have another owner now, or whose owner was killed."""
        if change.killed:
            return [key for key, owner in before.items() if owner == change.killed]
        after = self.live.owners(self.operator, keys)
        return [key for key, owner in after.items() if before.get(key) != owner]


def check_changes(app: App[Any], kinds: Sequence[str]) -> None:
    allowed = (*KINDS, *app.key_sets)
    for kind in kinds:
        if kind not in allowed:
            raise UserError(f"{app.name}: unknown change {kind!r}", expected=f"some of: {', '.join(allowed)}")
