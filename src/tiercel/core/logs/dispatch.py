"""The dispatch cursor: the position and the credit of one instance that reads an inbox.

Responsible for: credit, falling behind (the cursor reads the log later), catching up.
Not responsible for: the contents of an entry, the owners of keys.

    DETACHED --attach--> FENCED --resume--> CATCHING_UP --at the end--> LIVE
                                                ^------- no credit -------+

A live reader gets entries from memory as they are appended. A reader without credit gets nothing until it has
credit again; then it reads the tail in memory, or else the log. So slow instances use no more memory than the
limit of the tail, and instances that keep up use none.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator

from tiercel.core.errors import check_limit
from tiercel.core.machine.step import Step
from tiercel.core.messages import Dispatch
from tiercel.core.model.bundle import opened
from tiercel.core.model.log import OWN, Entry, MovePart, Position, Row, Takeover
from tiercel.core.model.routing import slot_of
from tiercel.core.model.row_batch import count_rows


class DispatchPhase(enum.Enum):
    """The phases of a reader."""

    DETACHED = "detached"  # no connection, or an incarnation that has not attached
    FENCED = "fenced"  # older incarnations are refused; it has not sent its position
    CATCHING_UP = "catching up"  # entries are read from the log
    LIVE = "live"  # entries are sent as they are appended


FIRST_CREDIT_ROWS = 1_000  # until the instance has measured its service time

LIVE = DispatchPhase.LIVE  # used for every entry; looking up an enum member is slow


class DispatchCursor:
    """The router's side of one instance's reading of its inbox."""

    def __init__(
        self, instance: str, rows_max: int, read_max: int, slots: int = 1, ms_max: float = float("inf")
    ) -> None:
        self.instance = instance
        self._slots = slots
        self.rows_max = rows_max
        self.ms_max = ms_max
        self.credit_rows = min(rows_max, FIRST_CREDIT_ROWS)
        self.read_max = read_max
        self.phase = DispatchPhase.DETACHED
        self.incarnation = 0
        self.session = 0
        self.cursor = 0  # all entries for it up to here were sent (while not LIVE)
        self.applied = 0  # its own position when it resumed: nothing at or below is sent again
        self.move_positions: dict[str, Position] = {}
        self.last_sent = 0  # highest offset with rows for it
        self.through = 0  # highest offset whose outputs have arrived
        self.flush_no = 0  # last admitted flush of this incarnation
        self.watermark_ms = -1
        self.keys = 0  # number of keys with state that it last reported
        self.timers = False
        self.moves: dict[str, int] = {}  # as in its last `Outputs`
        self.takeover: Takeover | None = None  # its share of a dead instance's parts
        self.limit: int | None = None  # restart strategy: nothing above this is sent for now
        self.reading = False
        self.pending: list[Entry] = []  # of this step
        self._inflight: deque[tuple[int, int]] = deque()
        self._inflight_rows = 0
        self.lag_rows = 0  # rows in the log for it whose outputs have not arrived
        self.arrived_rows = 0  # in the log for it since this incarnation of the router began
        self._lagging: deque[tuple[int, int, int]] = deque()

    def measured(self, service_us: float) -> None:
        """Set the credit: the rows that the instance processes in `ms_max`, at most `rows_max`."""
        if service_us > 0:
            self.credit_rows = max(1, int(min(self.rows_max, self.ms_max * 1e3 / service_us)))

    def detach(self) -> None:
        self.phase = DispatchPhase.DETACHED
        self.pending = []
        self.reading = False
        self._inflight.clear()
        self._inflight_rows = 0

    def attach(self, incarnation: int, session: int) -> None:
        self.detach()
        if incarnation != self.incarnation:
            self.flush_no = 0
        self.moves = {}
        self.incarnation, self.session = incarnation, session
        self.phase = DispatchPhase.FENCED

    def is_fenced(self, incarnation: int) -> bool:
        """Rule R29: the router accepts only the incarnation of an instance that attached last."""
        return incarnation != self.incarnation

    def resume(self, applied: int, moves: dict[str, Position], trimmed: int) -> None:
        self.applied = applied
        self.move_positions = dict(moves)
        own = [offset for stage, offset in moves.values() if stage == OWN]
        self.cursor = max(min([applied, *own]), trimmed)  # trimmed entries had nothing for it
        self.last_sent = max(self.last_sent, applied)  # an earlier incarnation of the router sent these
        self.phase = DispatchPhase.CATCHING_UP
        self.reading = False
        self._inflight.clear()
        self._inflight_rows = 0

    def wants_read(self) -> bool:
        return (
            self.phase is DispatchPhase.CATCHING_UP
            and not self.reading
            and (self.limit is None or self.cursor < self.limit)
            and self._inflight_rows < self.credit_rows
        )

    def offer(
        self, entry: Entry, parts: dict[str, list[Row]], count: int, moving: tuple[MovePart, ...] = ()
    ) -> None:
        """Send a live reader its parts of an entry that was just appended, with `count` rows."""
        if self._inflight_rows >= self.credit_rows or (self.limit is not None and entry.offset > self.limit):
            self.phase = DispatchPhase.CATCHING_UP
            self.cursor = entry.offset - 1
            return
        self._push(entry, parts, count, moving)

    def share_of(self, entry: Entry) -> tuple[dict[str, list[Row]], tuple[MovePart, ...]]:
        """The parts of a logged entry that this reader still needs."""
        rows = entry.parts.get(self.instance) if entry.offset > self.applied else None
        parts = {self.instance: rows} if rows is not None else {}
        moving = [part for part in entry.moving if part.reader == self.instance and self._needs(part, entry)]
        if self.takeover is not None and entry.offset <= self.takeover.through:
            dead = self.takeover.readers
            parts_of = [entry.parts.get(name, []) for name in dead] if entry.offset > self.applied else []
            rows = self._taken_over([row for part in parts_of for row in part], self.takeover)
            if rows:
                parts[self.instance] = parts.get(self.instance, []) + rows
            for part in entry.moving:
                if part.reader in dead and self._needs(part, entry):
                    rows = self._taken_over(part.rows, self.takeover)
                    moving += [MovePart(part.move, self.instance, rows)] if rows else []
        return parts, tuple(moving)

    def _needs(self, part: MovePart, entry: Entry) -> bool:
        """Whether this reader has not processed its part of a move."""
        stage, position = self.move_positions.get(part.move, (OWN, self.applied))
        return stage != OWN or entry.offset > position

    def _taken_over(self, rows: list[Row], takeover: Takeover) -> list[Row]:
        """Its share of the rows of the dead instance."""
        return [row for row in opened(rows) if takeover.keys.has(row[0], slot_of(row[0], self._slots))]

    def replay(self, entries: Iterable[Entry], end: int) -> None:
        """Send entries of the log; the reader is live once they reach its end."""
        self.reading = False
        if self.phase is not DispatchPhase.CATCHING_UP:
            return
        for entry in entries:
            if self._inflight_rows >= self.credit_rows or (
                self.limit is not None and entry.offset > self.limit
            ):
                return
            if entry.offset <= self.cursor:
                continue
            self.cursor = entry.offset
            parts, moving = self.share_of(entry)
            # moves behind its own position need the records again
            if parts or moving or entry.control is not None:
                count = sum(map(count_rows, parts.values())) + sum(count_rows(part.rows) for part in moving)
                self._push(entry, parts, count, moving)
        if self.cursor >= end:
            self.phase = DispatchPhase.LIVE

    def _push(
        self, entry: Entry, parts: dict[str, list[Row]], count: int, moving: tuple[MovePart, ...]
    ) -> None:
        if parts is not entry.parts:
            entry = Entry(entry.offset, entry.time_ms, parts, entry.control, moving)
        self.pending.append(entry)
        self.last_sent = entry.offset
        self._inflight.append((entry.offset, count))
        self._inflight_rows += count

    def appended(self, offset: int, rows: int, time_ms: int) -> None:
        """Count rows for it in the log, whether they can be sent now or not."""
        self._lagging.append((offset, rows, time_ms))
        self.lag_rows += rows
        self.arrived_rows += rows

    @property
    def oldest_at_ms(self) -> int:
        """The log time of the oldest rows whose outputs have not arrived; 0: none wait."""
        return self._lagging[0][2] if self._lagging else 0

    def processed(self, through: int) -> None:
        self.through = max(self.through, through)
        lagging = self._lagging
        while lagging and lagging[0][0] <= through:
            self.lag_rows -= lagging.popleft()[1]
        inflight = self._inflight
        while inflight and inflight[0][0] <= through:
            self._inflight_rows -= inflight.popleft()[1]

    def flush(self, step: Step) -> None:
        if self.pending:
            step.send(self.instance, Dispatch(self.pending))
            self.pending = []

    def validate(self) -> None:
        last = self._inflight[-1][1] if self._inflight else 0  # credit is checked per entry
        check_limit(f"rows on their way to {self.instance}", self._inflight_rows - last, self.rows_max)

    @property
    def idle(self) -> bool:
        return self.phase is LIVE and not self._inflight


class TailCache:
    """The end of an inbox in memory while a reader lags, because reading and decoding the log costs more."""

    __slots__ = ("_entries", "_rows", "rows_max")

    def __init__(self, rows_max: int) -> None:
        self.rows_max = rows_max
        self._entries: dict[int, tuple[Entry, int]] = {}  # without gaps
        self._rows = 0

    def keep(self, entry: Entry, count: int, cursors: Iterable[DispatchCursor]) -> None:
        """Add an entry that was just appended, and drop entries that no reader waits for."""
        waited_for = [cursor.cursor for cursor in cursors if cursor.phase is DispatchPhase.CATCHING_UP]
        if not waited_for:
            if self._entries:
                self._entries.clear()
                self._rows = 0
            return
        self._entries[entry.offset] = (entry, count)
        self._rows += count
        lowest, oldest = min(waited_for), next(iter(self._entries))
        while self._entries and (oldest <= lowest or self._rows > self.rows_max):
            self._rows -= self._entries.pop(oldest)[1]
            oldest += 1

    def behind(self, cursor: int) -> Iterator[Entry] | None:
        """The entries behind this offset; None if they are not in memory."""
        if cursor + 1 not in self._entries:
            return None
        withheld = self._entries
        return (withheld[offset][0] for offset in range(cursor + 1, next(reversed(withheld)) + 1))

    def validate(self) -> None:
        check_limit("rows in the tail of an inbox", self._rows, self.rows_max)
