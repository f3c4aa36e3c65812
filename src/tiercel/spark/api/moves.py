"""Moves and scalings as users hold them: progress while they run, a report when they have ended.

Responsible for: handles and reports.
Not responsible for: carrying moves out (control/controller.py, core/).
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from tiercel.control.controller import MoveState, TrackedMove
from tiercel.control.plans import PlannedMove
from tiercel.control.predict import Prediction
from tiercel.core.model.keys import KeySet
from tiercel.core.model.topology import operator_of
from tiercel.errors import UserError
from tiercel.spark.cluster.controller_thread import ENDED, ControllerThread
from tiercel.spark.cluster.supervisor import Supervisor
from tiercel.spark.cluster.waiting import POLL_S, wait_until
from tiercel.spark.job_errors import could_not_start
from tiercel.spark.move_history import MoveReport, merged

PARTS_SHOWN = 4  # of a move that runs, in one line
SCALE_S_MAX = 180.0


class MoveUndone(UserError):
    """The move did not happen: its keys are where they were, and nothing was lost."""


class MoveHandle:
    """The moves that one request became: one for each instance that owned some of the keys."""

    def __init__(
        self, controller: ControllerThread, names: list[str], prediction: Prediction | None = None
    ) -> None:
        self._controller = controller
        self.names = names
        self.prediction = prediction  # of `strategy="auto"`
        self.requested_s = time.monotonic()

    @property
    def done(self) -> bool:
        """Whether all of them have ended, done or undone."""
        return all(tracked.state in ENDED for tracked in self._latest())

    @property
    def undone(self) -> bool:
        """Whether one of them was undone: its keys are where they were."""
        return any(tracked.state == MoveState.UNDONE.value for tracked in self._latest())

    def _latest(self) -> list[TrackedMove]:
        """The moves as they are now. Of a move that was undone and retried, this is the last try."""
        moves = self._controller.moves()
        names, found = list(self.names), []
        while names:
            tracked = moves.get(names[0]) or _never_stored(names[0])
            names = names[1:] + list(tracked.again)
            if not tracked.again:
                found.append(tracked)
        return found

    def reports(self) -> list[MoveReport]:
        """One report for each source instance."""
        by_source: dict[str, list[TrackedMove]] = {}
        for tracked in self._latest():
            by_source.setdefault(tracked.wanted.source, []).append(tracked)
        return [merged([self._controller.report(part) for part in parts]) for parts in by_source.values()]

    @property
    def remaining_s(self) -> float | None:
        """About how long it still takes: from the parts that have ended, or else from the prediction."""
        latest = self._latest()
        ended = sum(tracked.state in ENDED for tracked in latest)
        passed_s = time.monotonic() - self.requested_s
        if ended == len(latest):
            return 0.0
        if ended:
            return passed_s / ended * (len(latest) - ended)
        if self.prediction is not None:
            return max(0.0, self.prediction.duration_ms / 1e3 - passed_s)
        return None

    def progress(self) -> str:
        """The phase of each move, in one line."""
        parts = []
        for tracked in self._latest():
            story = self._controller.story(tracked.move)
            parts.append(f"{tracked.move} {story[-1].phase if story else tracked.state}")
        shown = [part for part in parts if not part.endswith(" done")][:PARTS_SHOWN]
        text = ", ".join(shown if len(parts) > PARTS_SHOWN else parts) or "nothing to move"
        if len(parts) > PARTS_SHOWN:
            text += f" ({len(parts)} parts, {sum(part.endswith(' done') for part in parts)} done)"
        left_s = self.remaining_s
        return text if not left_s else f"{text}; about {left_s:.1f} s left"

    def wait(self, timeout_s: float = 60.0) -> list[MoveReport]:
        """Wait until all have ended.

        Raises `MoveUndone` if one was undone, `UserError` if it takes too long.
        """

        def done() -> bool:
            self._controller.check_runs()
            return self.done

        def failure() -> UserError:
            return UserError(f"not ended within {timeout_s:g} s: {self.progress()}", hint="wait longer")

        wait_until(done, timeout_s, failure)
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


def _never_stored(move: str) -> TrackedMove:
    """A move that the controller never stored. No router got it, so its keys are where they were."""
    nothing = PlannedMove("", KeySet(), "", "")
    reason = "the controller failed before it stored the request"
    return TrackedMove(move, nothing, MoveState.UNDONE.value, reason)


class ScaleHandle:
    """A requested number of instances, while the controller carries the request out."""

    def __init__(
        self,
        controller: ControllerThread,
        supervisor: Supervisor,
        operator: str,
        instances: Iterable[str] = (),
        incarnation: int = 0,
    ) -> None:
        """`instances` were requested from that incarnation of the controller."""
        self._controller, self._supervisor = controller, supervisor
        self._operator = operator
        self._instances, self._incarnation = set(instances), incarnation
        self.requested_s = time.monotonic()

    @property
    def done(self) -> bool:
        return not self._controller.scaling(self._operator)

    def wait(self, timeout_s: float | None = None) -> float:
        """Wait until the instances run and the load is even; returns the seconds it took.

        The instances may take START_S_MAX to get a task slot, or ALLOCATION_S_MAX with dynamic allocation,
        and the moves SCALE_S_MAX. `timeout_s` replaces all of these limits.
        """
        limit, slots_s_max = self._supervisor.start_s_max
        give_up_s = slots_s_max + SCALE_S_MAX if timeout_s is None else timeout_s
        while not self.done:
            self._controller.check_runs()
            self._check_starts()
            passed_s = time.monotonic() - self.requested_s
            if passed_s > min(slots_s_max, give_up_s) and (waiting := self._supervisor.waiting):
                raise UserError(
                    f"no task slot for {', '.join(waiting)} within {passed_s:.0f} s ({limit})",
                    expected="free task slots for the new instances",
                    hint="the request stands until live.scale(...) asks for something else",
                )
            if passed_s > give_up_s:
                raise UserError(
                    f"scaling {self._operator!r} has not ended within {give_up_s:g} s",
                    hint="live.status() shows which instances run",
                )
            time.sleep(POLL_S)
        self._check_outcome()
        return time.monotonic() - self.requested_s

    def _check_starts(self) -> None:
        for name in self._supervisor.waiting if self._supervisor.failures else ():
            if operator_of(name) == self._operator and name in self._supervisor.failures:
                raise could_not_start(name, self._supervisor.failures[name])

    def _check_outcome(self) -> None:
        """A controller that failed meanwhile may have carried the request out, or never have stored it."""
        here = {name for name in self._supervisor.names if operator_of(name) == self._operator}
        if self._instances and self._controller.incarnations != self._incarnation and here != self._instances:
            raise UserError(
                f"scaling {self._operator!r}: the controller failed, perhaps before it stored the request",
                expected=f"{', '.join(sorted(self._instances))}; there are {', '.join(sorted(here))}",
                hint="the controller has restarted by itself; ask again",
            )
