"""One reader of an inbox: an attached instance, how far it was sent, and how much it may be sent.

Responsible for: credit, falling behind (the log is read again later), catching up.
Not responsible for: what is in an entry, or who owns what.

    DETACHED --attach--> FENCED --resume--> CATCHING_UP --at the end--> LIVE
                                                ^------- no credit -------+

A live reader gets entries as they are appended, from memory. One that has no credit left is
forgotten until it has; then it reads what the tail has kept for it, or else the log. So a slow instance
costs no more memory here than the tail's limit, and one that keeps up costs none.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator

from tiercel.core.faults import within
from tiercel.core.messages import Dispatch
from tiercel.core.records import OWN, Entry, Inheritance, Position, Row
from tiercel.core.routing import slot_of
from tiercel.core.runs import count_rows
from tiercel.core.step import Step


class Phase(enum.Enum):
    """Where it is; what each phase means stands beside it."""

    DETACHED = "detached"  # no connection, or a life that has not attached
    FENCED = "fenced"  # older lives are refused; it has not said where it is
    CATCHING_UP = "catching up"  # entries are read from the log
    LIVE = "live"  # entries are handed over as they are appended


LIVE = Phase.LIVE  # asked for with every entry, and a member is looked up slowly


class Feed:
    """The router's side of one instance's reading of its inbox."""

    def __init__(self, instance: str, rows_max: int, read_max: int, slots: int = 1) -> None:
        self.instance = instance
        self._slots = slots
        self.suffix = "|" + instance
        self.rows_max = rows_max
        self.read_max = read_max
        self.phase = Phase.DETACHED
        self.life = 0
        self.session = 0
        self.cursor = 0  # everything up to here was sent or did not concern it (while not LIVE)
        self.applied = 0  # its own position when it resumed: nothing at or below is sent again
        self.move_positions: dict[str, Position] = {}
        self.last_sent = 0  # highest offset that held something for it
        self.through = 0  # highest offset whose outputs came back
        self.flush_no = 0  # last flush of this life that was admitted
        self.watermark_ms = -1
        self.keys = 0  # how many have state there, as it last told
        self.timers = False
        self.inherited: Inheritance | None = None  # what it reads besides its own parts
        self.limit: int | None = None  # restart strategy: nothing above this is sent for now
        self.reading = False
        self.pending: list[Entry] = []  # of this step
        self._inflight: deque[tuple[int, int]] = deque()
        self._inflight_rows = 0
        self.lag_rows = 0  # in the log for it, and its outputs have not come back
        self._lagging: deque[tuple[int, int]] = deque()

    def detach(self) -> None:
        self.phase = Phase.DETACHED
        self.pending = []
        self.reading = False
        self._inflight.clear()
        self._inflight_rows = 0

    def attach(self, life: int, session: int) -> None:
        self.detach()
        if life != self.life:
            self.flush_no = 0
        self.life, self.session = life, session
        self.phase = Phase.FENCED

    def resume(self, applied: int, moves: dict[str, Position], trimmed: int) -> None:
        self.applied = applied
        self.move_positions = dict(moves)
        own = [offset for stage, offset in moves.values() if stage == OWN]
        self.cursor = max(min([applied, *own]), trimmed)  # what was trimmed did not concern it
        self.last_sent = max(self.last_sent, applied)  # an earlier router may have sent it; it counts as well
        self.phase = Phase.CATCHING_UP
        self.reading = False
        self._inflight.clear()
        self._inflight_rows = 0

    def wants_read(self) -> bool:
        return (
            self.phase is Phase.CATCHING_UP
            and not self.reading
            and (self.limit is None or self.cursor < self.limit)
            and self._inflight_rows < self.rows_max
        )

    def offer(self, entry: Entry, parts: dict[str, list[Row]], count: int) -> None:
        """A live reader's share of an entry that was just appended, and how many rows that is."""
        if self._inflight_rows >= self.rows_max or (self.limit is not None and entry.offset > self.limit):
            self.phase = Phase.CATCHING_UP
            self.cursor = entry.offset - 1
            return
        self._push(entry, parts, count)

    def share_of(self, entry: Entry) -> dict[str, list[Row]]:
        """The parts of a logged entry that this reader still needs."""
        parts: dict[str, list[Row]] = {}
        for name, rows in entry.parts.items():
            if name == self.instance:
                if entry.offset > self.applied:
                    parts[name] = rows
            elif name.endswith(self.suffix):
                stage, position = self.move_positions.get(name.partition("|")[0], (OWN, self.applied))
                if stage != OWN or entry.offset > position:
                    parts[name] = rows
        if self.inherited is not None and self.applied < entry.offset <= self.inherited.through:
            parts.update(self._inherited_parts(entry, self.inherited))
        return parts

    def _inherited_parts(self, entry: Entry, inherited: Inheritance) -> dict[str, list[Row]]:
        """Its share of what the dead instance would have read, under its own name."""
        parts: dict[str, list[Row]] = {}
        for name, rows in entry.parts.items():
            if name.rpartition("|")[2] == inherited.of:
                mine = [row for row in rows if inherited.keys.has(row[0], slot_of(row[0], self._slots))]
                if mine:
                    parts[name.removesuffix(inherited.of) + self.instance] = mine
        return parts

    def replay(self, entries: Iterable[Entry], end: int) -> None:
        """Entries of the log; becomes live when they reach its end."""
        self.reading = False
        if self.phase is not Phase.CATCHING_UP:
            return
        for entry in entries:
            if self._inflight_rows >= self.rows_max or (self.limit is not None and entry.offset > self.limit):
                return
            if entry.offset <= self.cursor:
                continue
            self.cursor = entry.offset
            parts = self.share_of(entry)
            if parts or entry.control is not None:  # moves behind our own position need controls again
                self._push(entry, parts, sum(map(count_rows, parts.values())))
        if self.cursor >= end:
            self.phase = Phase.LIVE

    def _push(self, entry: Entry, parts: dict[str, list[Row]], count: int) -> None:
        self.pending.append(
            entry if parts is entry.parts else Entry(entry.offset, entry.time_ms, parts, entry.control)
        )
        self.last_sent = entry.offset
        self._inflight.append((entry.offset, count))
        self._inflight_rows += count

    def appended(self, offset: int, rows: int) -> None:
        """Rows for it are in the log, whether it can be sent them now or not."""
        self._lagging.append((offset, rows))
        self.lag_rows += rows

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
        last = self._inflight[-1][1] if self._inflight else 0  # credit is checked before an entry, not within
        within(f"rows on their way to {self.instance}", self._inflight_rows - last, self.rows_max)

    @property
    def idle(self) -> bool:
        return self.phase is LIVE and not self._inflight


class Tail:
    """The end of an inbox in memory, while a reader is behind: to read and decode it again costs more."""

    __slots__ = ("_entries", "_rows", "rows_max")

    def __init__(self, rows_max: int) -> None:
        self.rows_max = rows_max
        self._entries: dict[int, tuple[Entry, int]] = {}  # without gaps
        self._rows = 0

    def keep(self, entry: Entry, count: int, feeds: Iterable[Feed]) -> None:
        """One that was just appended, with so many rows; what nobody waits for is let go."""
        waited_for = [feed.cursor for feed in feeds if feed.phase is Phase.CATCHING_UP]
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
        """The entries behind this one; None if they are not here."""
        if cursor + 1 not in self._entries:
            return None
        kept = self._entries
        return (kept[offset][0] for offset in range(cursor + 1, next(reversed(kept)) + 1))

    def validate(self) -> None:
        within("rows in the tail of an inbox", self._rows, self.rows_max)
