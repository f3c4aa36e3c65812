"""The rows that wait in an instance: control messages overtake them, and they are processed in slices.

Responsible for: the order of waiting entries and shadow rows, the size of a slice, the measured service time.
Not responsible for: processing them (processing.py, core/migration), other messages (instance.py).

    Dispatch --> own entries ---+
                                +--> slices in turn --> processing --> Continue --> the next slice
    Shadow ----> shadow rows ---+

Rows that waited for the state of their keys (destination_instance.py) have every second slice.

Between two slices the instance handles everything else that has arrived. A slice takes about `slice_ms`, by
the service time that the driver has measured; it holds at least one entry, because an entry is never split.

The order that the queue keeps:

- entries of the inbox among themselves, and the shadow rows of one move among themselves;
- an `Adopt` behind all shadow rows of its move: behind it the rows come from the instance's own log.

Everything else may overtake. A router sends control messages also to an instance that has no credit, so an
instance must always expect them before rows that were logged earlier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from tiercel.core.messages.site_link import ShadowNotice
from tiercel.core.model.log import Adopt, Entry
from tiercel.core.model.row_batch import count_rows

FIRST_ROWS = 16  # rows of a slice before the first measurement
MEASURED_FIRST = 8  # slices at the start that are all measured; later ones if more rows wait, or now and then
MEASURED_EVERY = 32
OWN_SLICES = 3  # slices of entries for one of shadow rows, if both kinds wait
NEWEST_SHARE = 0.2  # of a new measurement in the mean


class Slice(NamedTuple):
    """Rows to process in one step: entries of the inbox, or shadow rows of a move."""

    entries: list[Entry]
    shadow: list[ShadowNotice]
    move: str = ""


class ServiceTime:
    """The mean time of one row in this instance, as the driver measures it."""

    def __init__(self) -> None:
        self.row_ms: float | None = None  # None: not measured yet

    def add(self, rows: int, took_ms: float) -> None:
        one_ms = max(0.0, took_ms) / max(1, rows)
        if self.row_ms is None:
            self.row_ms = one_ms
        else:
            self.row_ms += NEWEST_SHARE * (one_ms - self.row_ms)

    def rows_in(self, duration_ms: float) -> float:
        """The number of rows that take this long."""
        if self.row_ms is None:
            return FIRST_ROWS
        return duration_ms / self.row_ms if self.row_ms > 0 else float("inf")


class RowQueue:
    """Entries and shadow rows that wait for their slice, in two queues that take turns."""

    def __init__(self, slice_ms: float) -> None:
        self.slice_ms = slice_ms
        self.service = ServiceTime()
        self.entries: deque[Entry] = deque()
        self.shadows: dict[str, deque[ShadowNotice]] = {}
        self.is_measured = False  # the driver has been asked to continue, and measures the slice before
        self._rows = 0  # of that slice
        self._took = (0, 0.0)  # rows and time of a slice that is not in the mean yet
        self._slices = 0
        self._own_in_a_row = 0  # slices of entries since the last one of shadow rows
        self._gave_way = False  # in the last slice, to rows that waited for the state of their keys
        self._first: str = ""  # the move whose shadow rows come first

    # -- arrivals ------------------------------------------------------------------------------

    def add_entries(self, entries: list[Entry]) -> None:
        self.entries.extend(entries)

    def add_shadow(self, move: str, rows: list[ShadowNotice]) -> None:
        if rows:
            self.shadows.setdefault(move, deque()).extend(rows)

    def drop_shadow(self, move: str) -> None:
        """Drop the shadow rows of a move that is undone."""
        self.shadows.pop(move, None)

    def hurry(self, move: str) -> None:
        """Process the shadow rows of this move first: its source has stopped, and nobody else emits."""
        self._first = move

    def clear(self) -> None:
        """Drop everything: it came over a connection that is lost, and the router sends it again."""
        self.entries.clear()
        self.shadows.clear()

    def __bool__(self) -> bool:
        return bool(self.entries or self.shadows)

    @property
    def is_free(self) -> bool:
        """Whether rows that arrive now are processed in their own event: nothing else waits for its turn."""
        return not self.is_measured and not self

    # -- slices --------------------------------------------------------------------------------

    def must_wait(self, entry: Entry) -> bool:
        """An adoption waits for the shadow rows of its move, which were sent before it."""
        return type(entry.control) is Adopt and entry.control.move in self.shadows

    def takes_shadow(self) -> bool:
        """Whether the next slice is one of shadow rows: every fourth one, if both kinds wait."""
        if not self.shadows or not self.entries:
            return bool(self.shadows)
        late = self._own_in_a_row >= OWN_SLICES or self._first in self.shadows
        return late or self.must_wait(self.entries[0])

    def peek(self) -> Slice:
        """The next slice. Nothing changes, so that the driver can read the state that it needs."""
        if self.takes_shadow():
            most, count = self.service.rows_in(self.slice_ms), 0
            move, shadow = self._next_shadow()
            taken: list[ShadowNotice] = []
            for notice in shadow:
                if count >= most:
                    break
                taken.append(notice)
                count += 1 + count_rows(notice.rows)
            return Slice([], taken, move)
        return Slice(self.first_of(self.entries), [])

    def first_of(self, waiting: Iterable[Entry]) -> list[Entry]:
        """The first of these entries, as many as one slice takes."""
        most, count = self.service.rows_in(self.slice_ms), 0
        entries: list[Entry] = []
        for entry in waiting:
            if count >= most or self.must_wait(entry):
                break
            entries.append(entry)
            count += _rows_of(entry)
        return entries

    def _next_shadow(self) -> tuple[str, deque[ShadowNotice]]:
        first = self.entries[0].control if self.entries else None
        if type(first) is Adopt and first.move in self.shadows:
            return first.move, self.shadows[first.move]
        if self._first in self.shadows:
            return self._first, self.shadows[self._first]
        return next(iter(self.shadows.items()))

    def take(self) -> Slice:
        """Remove the next slice."""
        taken = self.peek()
        if taken.move:
            shadow = self.shadows[taken.move]
            for _ in taken.shadow:
                shadow.popleft()
            del self.shadows[taken.move]
            if shadow:
                self.shadows[taken.move] = shadow  # behind the other moves
        else:
            for _ in taken.entries:
                self.entries.popleft()
        self._own_in_a_row = 0 if taken.move else self._own_in_a_row + 1
        return taken

    def gives_way(self) -> bool:
        """Whether the next slice is one of rows that waited for the state of their keys: every second one."""
        self._gave_way = not self._gave_way or not self
        return self._gave_way

    def took(self, rows: int) -> None:
        """Count a slice for the measurement: this many rows were given to user code; others may wait on."""
        self._slices += 1
        if not self.is_measured:
            self._rows = rows

    def must_continue(self, *, more: bool = False) -> bool:
        """Whether to ask the driver to continue: rows wait, here or elsewhere, or it is time to measure."""
        if self.is_measured:
            return False  # it has been asked
        slow = self._rows >= self.service.rows_in(self.slice_ms)  # control messages come before the next rows
        if not (self or more or slow) and self._slices > MEASURED_FIRST and self._slices % MEASURED_EVERY:
            return False
        self.is_measured = True
        return True

    def continued(self, took_ms: float) -> None:
        """The driver continues: the slice before the question took this long.

        It counts from the slice after the next on: the driver has read the state that the next one needs.
        """
        self.is_measured = False
        self._took = (self._rows, took_ms)

    def count_measured(self) -> None:
        """Count the last measurement."""
        rows, took_ms = self._took
        self._took = (0, 0.0)
        if rows:
            self.service.add(rows, took_ms)

    @property
    def service_us(self) -> float:
        """The time of one row in microseconds; 0 before the first measurement."""
        return 0.0 if self.service.row_ms is None else self.service.row_ms * 1e3


def _rows_of(entry: Entry) -> int:
    count = sum([count_rows(rows) for rows in entry.parts.values()])
    return count + sum([count_rows(part.rows) for part in entry.moving]) if entry.moving else count
