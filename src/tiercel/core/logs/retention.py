"""The readers of an inbox and their positions, which determine the retention of the log.

Responsible for: the backlog, trimming entries that no reader needs, pausing dispatch behind an offset.
Not responsible for: the contents of the log (inbox.py), sending entries to one reader (dispatch.py).
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from tiercel.core import messages as m
from tiercel.core.logs.dispatch import DispatchCursor, TailCache
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import DispatchPause, LogReader
from tiercel.core.model.log import Entry, Takeover
from tiercel.core.settings import Settings


class ShadowReader(Protocol):
    """A move that reads the log for its destination."""

    def shadow_appended(self, step: Step, entry: Entry) -> None:
        """Handle an entry that was just appended."""

    def trim_floor(self) -> int:
        """The move needs the log above this offset."""


class Readers:
    """The readers of one log."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.offset = 0  # last appended
        self.durable = 0
        self.trimmed = 0
        self.cursors: dict[str, DispatchCursor] = {}
        self.readers: dict[str, LogReader] = {}  # every instance of this site that may attach again
        self.pauses: dict[str, DispatchPause] = {}  # by move, restart strategy only
        self.shadow_readers: dict[str, ShadowReader] = {}  # by move; empty while nothing moves
        self.successors: dict[str, Takeover] = {}  # successor -> its share of a dead instance
        self.attaching: dict[str, m.Attach] = {}  # dead instances that returned while successors need them
        self.tail = TailCache(settings.tail_rows_max)
        self._backlog: deque[tuple[int, int]] = deque()
        self.backlog_rows = 0

    def is_fenced_by_takeover(self, instance: str) -> bool:
        """Whether successors still read its checkpoint: then it must not write a new one."""
        return any(takeover.of == instance for takeover in self.successors.values())

    def defer_or_fence_attach(self, step: Step, attach: m.Attach) -> None:
        """Defer the attach of a new process. Fence one that reconnects: it still runs, and must not store."""
        if attach.session > 1:
            step.send(attach.instance, m.InstanceFenced(attach.incarnation))
        else:
            self.attaching[attach.instance] = attach

    def count_backlog(self, rows: int) -> None:
        """Count the rows of the entry that was just appended as unprocessed."""
        self._backlog.append((self.offset, rows))
        self.backlog_rows += rows

    # -- restart strategy: pause behind an offset, relaunch, resume ----------------------------

    def pause(self, step: Step, move: str) -> None:
        awaited = {instance: reader.incarnation for instance, reader in self.readers.items()}
        self._set_pause(step, move, DispatchPause(self.offset, awaited))
        self.request_restarts(step, move)

    def _set_pause(self, step: Step, move: str, pause: DispatchPause | None) -> None:
        if pause is None:
            self.pauses.pop(move, None)
            step.delete(("pause", self.name, move))
        else:
            self.pauses[move] = pause
            step.put(("pause", self.name, move), pause)
        self.limit_feeds()

    def limit_feeds(self) -> None:
        limit = min((p.limit for p in self.pauses.values()), default=None)
        for cursor in self.cursors.values():
            cursor.limit = limit

    def request_restarts(self, step: Step, move: str) -> None:
        for instance, incarnation in (self.pauses[move].awaited if move in self.pauses else {}).items():
            step.send_durable(instance, m.RestartRequest(move, incarnation))

    def relaunched(self, step: Step, instance: str, incarnation: int) -> None:
        for move, pause in list(self.pauses.items()):
            if pause.awaited.get(instance, incarnation) < incarnation:
                self._await_no_more(step, move, instance)

    def let_go(self, step: Step, instance: str) -> None:
        """Forget a reader that owns nothing: neither trimming nor a relaunch waits for it."""
        self.readers.pop(instance, None)
        step.delete(("reader", self.name, instance))
        step.put(("retired", self.name, instance), True)
        self.await_no_more(step, instance)
        self.passed(self.slowest_through())

    def await_no_more(self, step: Step, instance: str) -> None:
        """No relaunch waits for an instance that does not return."""
        for move, pause in list(self.pauses.items()):
            if instance in pause.awaited:
                self._await_no_more(step, move, instance)

    def _await_no_more(self, step: Step, move: str, instance: str) -> None:
        pause = self.pauses[move]
        awaited = {i: n for i, n in pause.awaited.items() if i != instance}
        over = pause.released and not awaited
        self._set_pause(step, move, None if over else DispatchPause(pause.limit, awaited, pause.released))

    def all_relaunched(self, move: str) -> bool:
        return move not in self.pauses or not self.pauses[move].awaited

    def unpause(self, step: Step, move: str) -> None:
        pause = self.pauses.get(move)
        if pause is not None:
            over = not pause.awaited
            self._set_pause(
                step, move, None if over else DispatchPause(pause.limit, pause.awaited, released=True)
            )

    # -- reading and trimming ----------------------------------------------------------------

    def passed(self, through: int) -> None:
        """Shrink the backlog: the slowest reader has processed entries up to this offset."""
        backlog = self._backlog
        while backlog and backlog[0][0] <= through:
            self.backlog_rows -= backlog.popleft()[1]

    def slowest_through(self) -> int:
        low = self.offset
        for cursor in self.cursors.values():
            if not cursor.idle and cursor.instance in self.readers:
                low = min(low, cursor.through)
        return low

    def all_processed(self, offset: int) -> bool:
        """Whether the outputs of every entry up to this offset have arrived, from all instances."""
        for instance in self.readers:
            cursor = self.cursors.get(instance)
            if cursor is None or (cursor.through < offset and not cursor.idle):
                return False
        return True

    def trim_point(self) -> int:
        """The offset up to which no reader needs the log."""
        low = self.offset
        for instance, reader in self.readers.items():
            cursor = self.cursors.get(instance)
            if cursor is None or not cursor.idle or reader.applied < cursor.last_sent:
                low = min(low, reader.applied)
            low = min([low, *reader.moves.values()])
        for shadow in self.shadow_readers.values():
            low = min(low, shadow.trim_floor())
        return min(low, self.durable)

    def trim(self, step: Step) -> None:
        """Delete some entries that no reader needs; then other work has its turn."""
        point = self.trim_point()
        limit = self.trimmed + self.settings.trim_entries_max
        if point > limit:
            point = limit
            step.timer(Timer(TimerKind.TRIM, self.name), step.now_ms + self.settings.capture_pause_ms)
        for offset in range(self.trimmed + 1, point + 1):
            step.delete(("inbox", self.name, offset))
        if point > self.trimmed:
            self.trimmed = point
            step.put(("trimmed", self.name), point)
