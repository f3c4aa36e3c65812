"""Moves as users hold them: progress while they run, a report when they have ended.

Responsible for: handles and reports.
Not responsible for: carrying moves out (control/controller.py, core/).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from tiercel.control.controller import MoveState, TrackedMove
from tiercel.control.plans import WantedMove
from tiercel.core.records import KeySet
from tiercel.core.topology import operator_of
from tiercel.errors import UserError
from tiercel.spark.hosting import could_not_start

if TYPE_CHECKING:
    from tiercel.spark.console import Console
    from tiercel.spark.hosting import Hosting

LOOK_S = 0.02  # a look costs the driver, and whoever works beside it, while the move runs
ENDINGS = ["undone", "queued", "asked", "done"]  # of several, the first of these is that of the whole
SCALE_S_MAX = 180.0


class MoveUndone(UserError):
    """The move did not happen: its keys are where they were, and nothing was lost."""


class MoveReport(msgspec.Struct, frozen=True):
    """How one move went. Times are in ms after the request, as the driver saw them.

    A large move goes in pieces (m7.1, m7.2, ...), so that its keys need not wait for each other. The
    report is about all of them: a phase is reached when the last piece has reached it.
    """

    move: str
    operator: str
    source: str
    destination: str
    strategy: str
    state: str  # queued | asked | done | undone
    reason: str
    keys: int
    bytes_moved: int
    phases: dict[str, float]
    pieces: int = 1

    @property
    def duration_ms(self) -> float:
        return max(self.phases.values(), default=0.0)

    def __str__(self) -> str:
        ended = f"{self.state} after {self.duration_ms:.1f} ms"
        what = f"{self.keys} keys, {self.bytes_moved:,} bytes"
        way = f"{self.source} -> {self.destination} ({self.strategy})"
        return f"{self.move}: {way} {ended}, {what} {self.reason}".rstrip()


class Moving:
    """The moves that one request became: one for each instance that owned some of the keys."""

    def __init__(self, console: Console, names: list[str]) -> None:
        self._console = console
        self.names = names
        self.asked_s = time.monotonic()

    @property
    def done(self) -> bool:
        """Whether all of them have ended, this way or that."""
        ended = (MoveState.DONE.value, MoveState.UNDONE.value)
        return all(tracked.state in ended for tracked in self._latest())

    def _latest(self) -> list[TrackedMove]:
        """The moves as they are now: of one that was undone and tried again, the last try."""
        moves = self._console.moves()
        names, found = list(self.names), []
        while names:
            tracked = moves.get(names[0]) or _forgotten(names[0])
            names = names[1:] + list(tracked.again)
            if not tracked.again:
                found.append(tracked)
        return found

    def reports(self) -> list[MoveReport]:
        """One for each instance that keys leave."""
        by_source: dict[str, list[TrackedMove]] = {}
        for tracked in self._latest():
            by_source.setdefault(tracked.wanted.source, []).append(tracked)
        return [self._report(moved) for moved in by_source.values()]

    def _report(self, moved: list[TrackedMove]) -> MoveReport:
        phases: dict[str, float] = {}
        keys = size_bytes = 0
        for tracked in moved:
            story = self._console.story(tracked.move)
            reached = {stage.phase: stage.at_s for stage in reversed(story)}
            for phase, at_s in sorted(reached.items(), key=lambda item: item[1]):
                phases[phase] = max(phases.get(phase, 0.0), round((at_s - self.asked_s) * 1e3, 3))
            keys += max((stage.keys for stage in story), default=0)
            size_bytes += max((stage.size_bytes for stage in story), default=0)
        worst = min(moved, key=lambda tracked: ENDINGS.index(tracked.state))
        return MoveReport(
            worst.move if len(moved) == 1 or worst.reason else worst.move.partition(".")[0],
            worst.wanted.operator,
            worst.wanted.source,
            worst.wanted.destination,
            worst.wanted.strategy,
            worst.state,
            worst.reason,
            keys,
            size_bytes,
            phases,
            len(moved),
        )

    def progress(self) -> str:
        """One line: where each of them is."""
        parts = []
        for tracked in self._latest():
            story = self._console.story(tracked.move)
            parts.append(f"{tracked.move} {story[-1].phase if story else tracked.state}")
        return ", ".join(parts) or "nothing to move"

    def wait(self, timeout_s: float = 60.0) -> list[MoveReport]:
        """Until all have ended. Raises `MoveUndone` if one was undone, `UserError` if it takes too long."""
        give_up = time.monotonic() + timeout_s
        while not self.done:
            self._console.check_runs()
            if time.monotonic() > give_up:
                raise UserError(f"not ended within {timeout_s:g} s: {self.progress()}", hint="wait longer")
            time.sleep(LOOK_S)
        reports = self.reports()
        for report in reports:
            if report.state == MoveState.UNDONE.value:
                raise MoveUndone(
                    f"move {report.move} was undone: {report.reason}",
                    hint="its keys are where they were; ask again, or with retries=",
                )
        return reports

    def __str__(self) -> str:
        return "\n".join(str(report) for report in self.reports()) or "nothing to move"


def _forgotten(move: str) -> TrackedMove:
    """Nobody has heard of it but us: it was never asked of a router, so its keys are where they were."""
    nothing = WantedMove("", KeySet(), "", "")
    reason = "the controller failed before it had stored the request"
    return TrackedMove(move, nothing, MoveState.UNDONE.value, reason)


class Scaling:
    """A wish for a number of instances, being carried out."""

    def __init__(
        self, console: Console, hosting: Hosting, operator: str, instances: Iterable[str] = (), life: int = 0
    ) -> None:
        """`instances` were asked for in that life of the controller."""
        self._console, self._hosting = console, hosting
        self._operator = operator
        self._instances, self._life = set(instances), life
        self.asked_s = time.monotonic()

    @property
    def done(self) -> bool:
        return not self._console.scaling(self._operator)

    def wait(self, timeout_s: float | None = None) -> float:
        """Until the instances run and the load is even; returns the seconds it took.

        They may take START_S_MAX to get a task slot, or ALLOCATION_S_MAX where executors come when tasks
        wait for them, and the moves SCALE_S_MAX; or all of it `timeout_s`.
        """
        limit, slots_s_max = self._hosting.start_s_max
        give_up_s = slots_s_max + SCALE_S_MAX if timeout_s is None else timeout_s
        while not self.done:
            self._console.check_runs()
            self._check_starts()
            passed_s = time.monotonic() - self.asked_s
            if passed_s > min(slots_s_max, give_up_s) and (waiting := self._hosting.waiting):
                raise UserError(
                    f"no task slot for {', '.join(waiting)} within {passed_s:.0f} s ({limit})",
                    expected="free task slots for the new instances",
                    hint="the wish stands until live.scale(...) asks for something else",
                )
            if passed_s > give_up_s:
                raise UserError(
                    f"scaling {self._operator!r} has not ended within {give_up_s:g} s",
                    hint="live.status() shows which instances run",
                )
            time.sleep(0.02)
        self._check_kept()
        return time.monotonic() - self.asked_s

    def _check_starts(self) -> None:
        for name in self._hosting.waiting if self._hosting.failures else ():
            if operator_of(name) == self._operator and name in self._hosting.failures:
                raise could_not_start(name, self._hosting.failures[name])

    def _check_kept(self) -> None:
        """A controller that has failed meanwhile may have carried the wish out, or never have stored it."""
        here = {name for name in self._hosting.names if operator_of(name) == self._operator}
        if self._instances and self._console.lives != self._life and here != self._instances:
            raise UserError(
                f"scaling {self._operator!r}: the controller failed, perhaps before it had stored the wish",
                expected=f"{', '.join(sorted(self._instances))}; there are {', '.join(sorted(here))}",
                hint="it has started again by itself; ask again",
            )
