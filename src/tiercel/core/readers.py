"""Who reads an inbox log, how far they are, and what follows from that for the log.

Responsible for: the backlog, trimming what nobody will ask for, stopping dispatch behind an offset.
Not responsible for: what the log holds (inbox.py), what one reader is sent (feed.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from tiercel.core import messages as m
from tiercel.core.feed import Feed, Tail
from tiercel.core.records import ABSENT_WATERMARK, Inheritance
from tiercel.core.settings import Settings
from tiercel.core.step import Step


class Reader(msgspec.Struct, frozen=True):
    """What an instance's last checkpoint covers, and which life of it attached last."""

    life: int
    applied: int
    moves: dict[str, int]  # arriving moves: offset in this log, once they read it
    start_watermark_ms: int = ABSENT_WATERMARK  # the log's, where an instance without a checkpoint begins
    stored: bool = False  # by a checkpoint: the log up to `applied` may be gone


class Pause(msgspec.Struct, frozen=True):
    """Dispatch stops behind `limit` until the operator's instances have been relaunched."""

    limit: int
    awaited: dict[str, int]  # instance -> the life that must end
    released: bool = False  # nothing else holds dispatch up


class Readers:
    """The readers of one log."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.mutant = settings.mutant
        self.offset = 0  # last appended
        self.durable = 0
        self.trimmed = 0
        self.feeds: dict[str, Feed] = {}
        self.readers: dict[str, Reader] = {}  # every instance of this site that may come back for more
        self.pauses: dict[str, Pause] = {}  # by move, restart strategy only
        self.trim_floor: Callable[[], int | None] = lambda: None
        self.heirs: dict[str, Inheritance] = {}  # instances that are taking over from one that died
        self.attaching: dict[str, m.Attach] = {}  # who died and came back while its heirs still need it
        self.tail = Tail(settings.tail_rows_max)
        self._backlog: deque[tuple[int, int]] = deque()
        self.backlog_rows = 0

    def kept_out(self, instance: str) -> bool:
        """Whether others still read its checkpoint: then it must not write a new one."""
        return any(inherited.of == instance for inherited in self.heirs.values())

    def wait_or_end(self, step: Step, attach: m.Attach) -> None:
        """It is kept out. One that reconnects may be whom they succeed: it lives, and must not store."""
        if attach.session > 1:
            step.send(attach.instance, m.Outlived(attach.life))
        else:
            self.attaching[attach.instance] = attach

    def count_backlog(self, rows: int) -> None:
        """The entry that was just appended has this many rows that nobody has processed."""
        self._backlog.append((self.offset, rows))
        self.backlog_rows += rows

    # -- restart strategy: stop behind an offset, relaunch, go on ------------------------------

    def pause(self, step: Step, move: str) -> None:
        awaited = {instance: reader.life for instance, reader in self.readers.items()}
        self._set_pause(step, move, Pause(self.offset, awaited))
        self.say_halt(step, move)

    def _set_pause(self, step: Step, move: str, pause: Pause | None) -> None:
        if pause is None:
            self.pauses.pop(move, None)
            step.delete(("pause", self.name, move))
        else:
            self.pauses[move] = pause
            step.put(("pause", self.name, move), pause)
        self.limit_feeds()

    def limit_feeds(self) -> None:
        limit = min((p.limit for p in self.pauses.values()), default=None)
        for feed in self.feeds.values():
            feed.limit = limit

    def say_halt(self, step: Step, move: str) -> None:
        for instance, life in (self.pauses[move].awaited if move in self.pauses else {}).items():
            step.send_durable(instance, m.Halt(move, life))

    def relaunched(self, step: Step, instance: str, life: int) -> None:
        for move, pause in list(self.pauses.items()):
            if pause.awaited.get(instance, life) < life:
                self._await_no_more(step, move, instance)

    def let_go(self, step: Step, instance: str) -> None:
        """It owns nothing and may never come back: it holds nothing up, no relaunch of it is waited for."""
        self.readers.pop(instance, None)
        step.delete(("reader", self.name, instance))
        step.put(("retired", self.name, instance), True)
        for move, pause in list(self.pauses.items()):
            if instance in pause.awaited:
                self._await_no_more(step, move, instance)
        self.passed(self.slowest_through())

    def _await_no_more(self, step: Step, move: str, instance: str) -> None:
        pause = self.pauses[move]
        awaited = {i: n for i, n in pause.awaited.items() if i != instance}
        over = pause.released and not awaited
        self._set_pause(step, move, None if over else Pause(pause.limit, awaited, pause.released))

    def all_relaunched(self, move: str) -> bool:
        return move not in self.pauses or not self.pauses[move].awaited

    def unpause(self, step: Step, move: str) -> None:
        pause = self.pauses.get(move)
        if pause is not None:
            over = not pause.awaited
            self._set_pause(step, move, None if over else Pause(pause.limit, pause.awaited, released=True))

    # -- reading and trimming ----------------------------------------------------------------

    def passed(self, through: int) -> None:
        """The slowest reader has processed this much."""
        backlog = self._backlog
        while backlog and backlog[0][0] <= through:
            self.backlog_rows -= backlog.popleft()[1]

    def slowest_through(self) -> int:
        low = self.offset
        for feed in self.feeds.values():
            if not feed.idle and feed.instance in self.readers:
                low = min(low, feed.through)
        return low

    def trim_point(self) -> int:
        """Nobody will ever ask for anything at or below this."""
        low = self.offset
        for instance, reader in self.readers.items():
            feed = self.feeds.get(instance)
            if feed is None or not feed.idle or reader.applied < feed.last_sent:
                low = min(low, reader.applied)
            low = min([low, *reader.moves.values()])
        floor = self.trim_floor()
        if floor is not None:
            low = min(low, floor)
        return min(low, self.durable)

    def trim(self, step: Step) -> None:
        """Some of what nobody will ask for; then everyone else has a turn."""
        point = self.trim_point()
        if self.mutant == "log-trimmed-too-early":
            point = min(self.durable, max(point, self.slowest_through()))
        limit = self.trimmed + self.settings.trim_entries_max
        if point > limit:
            point = limit
            step.timer(f"trim|{self.name}", step.now_ms + self.settings.capture_pause_ms)
        for offset in range(self.trimmed + 1, point + 1):
            step.delete(("inbox", self.name, offset))
        if point > self.trimmed:
            self.trimmed = point
            step.put(("trimmed", self.name), point)
