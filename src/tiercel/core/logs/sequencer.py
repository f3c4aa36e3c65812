"""The sequencer of an inbox: the numbers of rows per key and origin.

Responsible for: numbering the rows that leave this site; of the rows that arrive, dropping repeats and
    holding early ones; marks that travel with their keys; rows that wait for a newer routing table.
Not responsible for: the log and the parts of an entry (inbox.py), frames (site_outbox.py).

The owner's site sequences a key. It appends the rows of an origin in the order of their numbers, whatever
path they took. If a key returns to a site while rows that this site has forwarded are still on their way
back, new rows of it are numbered too, and wait behind the older ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from itertools import islice
from typing import NamedTuple

from tiercel.core.logs.device_numbers import DeviceNumbers
from tiercel.core.logs.site_outbox import InboundFrame
from tiercel.core.machine.step import Step
from tiercel.core.model.key_table import KeyTable
from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.log import Row
from tiercel.core.model.routing import Route, RouteUpdate, RoutingTable, slot_of


class HeldRow:
    """A row that cannot be appended yet, and the frames that it keeps from being settled."""

    __slots__ = ("frames", "row")

    def __init__(self, row: Row, frames: tuple[InboundFrame, ...]) -> None:
        self.row = row
        self.frames: list[InboundFrame] = []
        self.also(frames)

    def also(self, frames: tuple[InboundFrame, ...]) -> None:
        for inbound in frames:
            if inbound not in self.frames:
                self.frames.append(inbound)
                inbound.held += 1

    def release(self) -> None:
        for inbound in self.frames:
            inbound.held -= 1


class Sequenced(NamedTuple):
    """The result of sequencing rows of other sites."""

    ready: list[Row]  # to append, in this order
    onward: dict[str, list[Row]]  # to forward, by site
    correction: RouteUpdate | None  # the routes that the sender should know


class Sequencer:
    """The numbers of one inbox."""

    def __init__(
        self, inbox: str, site: str, table: RoutingTable, held_rows_max: int, rerouted: Callable[[Key], None]
    ) -> None:
        self._inbox = inbox
        self._site = site
        self._table = table
        self._held_rows_max = held_rows_max
        self.origin = site  # of the rows that this site numbers
        self._rerouted = rerouted  # the inbox forgets where rows of this key go
        self.counts = KeyTable[int](table.count)  # key -> last number of a row that this site forwarded
        self.base = 0  # no forgotten number is above this one
        self.marks = KeyTable[dict[str, int]](table.count)  # key -> origin -> last n appended
        self.awaiting_own_rows = KeyTable[None](table.count)  # owned here, older rows are in flight
        self.held = KeyTable[dict[str, dict[int, HeldRow]]](table.count)  # key -> origin -> n -> row
        self.held_rows = 0
        self.devices = DeviceNumbers(inbox, table.count)
        self.waiting: list[HeldRow] = []  # their sender knows a newer epoch than this site
        # rows over the limit: only their numbers are here; their frames are sent again when they are next
        self.sent_back = KeyTable[dict[str, dict[int, list[InboundFrame]]]](table.count)
        self._sent_back_waiting: dict[InboundFrame, int] = {}  # the same for rows that wait for the table
        self._wanted: dict[InboundFrame, None] = {}

    # -- rows that leave ---------------------------------------------------------------------

    def number(self, step: Step, row: Row) -> Row:
        """The stamped form of a row for another site."""
        key = row[0]
        known = self.counts.get(key)
        n = self.counts[key] = (self.base if known is None else known) + 1
        step.put(("count", self._inbox, key), n)
        stamp = -n if known is None and n > 1 else n  # negative: all earlier rows of the key are settled
        return (key, row[1], row[2], self.origin, stamp, self._table.route(key).epoch)

    def forget_numbers(self, step: Step, unsettled: Set[Key]) -> dict[Key, int]:
        """Forget the numbers of keys without rows under way, oldest first, half of all; returns them.

        A later row of such a key gets a number above all forgotten ones, and its owner takes it at once.
        """
        some = islice((key for key in self.counts if key not in unsettled), len(self.counts) // 2)
        forgotten = {key: self.counts[key] for key in some}
        for key in forgotten:
            del self.counts[key]
            step.delete(("count", self._inbox, key))
        if forgotten:
            self.base = max(self.base, *forgotten.values())
            step.put(("count_base", self._inbox), self.base)
        return forgotten

    def forget_marks(self, step: Step, origin: str, numbers: dict[Key, int]) -> None:
        """Forget the marks of an origin that has forgotten its numbers."""
        for key, n in numbers.items():
            marks = self.marks.get(key)
            if marks is not None and marks.get(origin) == n:
                del marks[origin]
                if marks:
                    step.put(("mark", self._inbox, key), dict(marks))
                else:
                    del self.marks[key]
                    step.delete(("mark", self._inbox, key))

    def begin_origin(self, step: Step, origin: str, *, new: bool) -> None:
        """Number rows under this name. A new storage numbers under a new name: its counts start again."""
        self.origin = origin
        if new:
            self.forget_all_numbers(step)

    def forget_all_numbers(self, step: Step) -> None:
        for key in list(self.counts):
            del self.counts[key]
            step.delete(("count", self._inbox, key))
        self.base = 0
        step.delete(("count_base", self._inbox))

    # -- rows that arrive --------------------------------------------------------------------

    def sequence(self, step: Step, rows: list[Row], frames: tuple[InboundFrame, ...]) -> Sequenced:
        """Sequence stamped rows: take the next ones, drop repeats, hold early ones, forward the rest."""
        ready: list[Row] = []
        onward: dict[str, list[Row]] = {}
        corrections: dict[Key, Route] = {}
        for row in rows:
            key, epoch = row[0], row[5]
            if self.sent_back:
                self.came_again(row, frames)
            route = self._table.route(key)
            if route.site == self._site:
                self._sequence_here(step, row, frames, ready)
            elif route.epoch > epoch:
                onward.setdefault(route.site, []).append((*row[:5], route.epoch))
                corrections[key] = route
            elif self.may_hold(frames):
                self.waiting.append(HeldRow(row, frames))
            else:
                self._send_back_until_table(frames)
        if self.awaiting_own_rows:
            self._stop_awaiting(ready)
        return Sequenced(ready, onward, self._correction(corrections) if corrections else None)

    def must_hold(self, last: int, n: int) -> bool:
        """Rule R1: a row waits until the row before it, of the same key and origin, is appended."""
        return n > last + 1

    def take_or_defer(self, step: Step, rows: list[Row]) -> tuple[list[Row], list[Row]]:
        """Of rows of devices that enter here: those that are next, and those that come too early.

        Rule R45: an early row is in the outbox before it is held, because its producer will not repeat it.
        """
        ready: list[Row] = []
        deferred: list[Row] = []
        for row in rows:
            marks = self.marks.get(row[0])
            if self.must_hold(marks.get(row[3], 0) if marks is not None else 0, row[4]):
                deferred.append(row)
            else:
                self._sequence_here(step, row, (), ready)
        return ready, deferred

    def close_gaps(self, step: Step) -> list[Row]:
        """Go on behind the numbers that have been missing for too long; returns the rows to append."""
        ready: list[Row] = []
        for key, origin in self.devices.overdue(step.now_ms):
            held = self.held.get(key, {}).get(origin, {})
            last = self.marks.get(key, {}).get(origin, 0)
            early = (n for n in (*held, *self.sent_back.get(key, {}).get(origin, {})) if n > last)
            n = min(early, default=last + 1)
            if n == last + 1:  # nothing is missing: the next row was sent back, and is asked for
                self.devices.gap_closed(key, origin)
                continue
            if key not in self.marks:
                self.marks[key] = {}
            marks = self.marks[key]
            self.devices.gap_skipped(step, key, origin, last + 1, n)
            marks[origin] = n - 1
            if n in held:
                first = held.pop(n)
                self.held_rows -= 1
                first.release()
                self._sequence_here(step, first.row, (), ready)
            else:
                step.put(("mark", self._inbox, key), dict(marks))
                self._want_next(key, origin, n - 1)
        return ready

    def _sequence_here(
        self, step: Step, row: Row, frames: tuple[InboundFrame, ...], ready: list[Row]
    ) -> None:
        key, origin, n = row[0], row[3], row[4]
        numbered = origin in self.devices.gap_ms
        n = n if numbered else abs(n)  # a device may number its rows below its first number: that is refused
        marks = self.marks.get(key)
        last = marks.get(origin, 0) if marks is not None else 0
        if n <= last:
            if numbered:
                self.devices.came_behind(step, row, last)
            return
        if n != last + 1 and row[4] > 0 and self.must_hold(last, n):
            self._hold(step, row, frames)
            return
        if marks is None:
            marks = self.marks[key] = {}
        ready.append(row)
        marks[origin] = n
        if numbered:
            self.devices.take(step, row)
        of_key = self.held.get(key)
        held_rows = of_key.get(origin) if of_key is not None else None
        while held_rows:
            n += 1
            entry = held_rows.pop(n, None)
            if entry is None:
                break
            self.held_rows -= 1
            ready.append(entry.row)
            marks[origin] = n
            entry.release()
            if numbered:
                self.devices.take(step, entry.row)
        if numbered:
            self._next_gap(step, key, origin)
        if of_key is not None and held_rows is not None and not held_rows:
            del of_key[origin]
            if not of_key:
                del self.held[key]
        step.put(("mark", self._inbox, key), dict(marks))
        if self.sent_back:
            self._want_next(key, origin, marks[origin])

    def _next_gap(self, step: Step, key: Key, origin: str) -> None:
        """A gap of a device has closed; behind it there may be another one."""
        self.devices.gap_closed(key, origin)
        if self.held.get(key, {}).get(origin) or self.sent_back.get(key, {}).get(origin):
            self.devices.gap_opened(step, key, origin)

    def _hold(self, step: Step, row: Row, frames: tuple[InboundFrame, ...]) -> None:
        key, origin, n = row[0], row[3], row[4]
        self.devices.gap_opened(step, key, origin)
        of_key = self.held.get(key)
        if of_key is None:
            of_key = self.held[key] = {}
        held = of_key.setdefault(origin, {})
        if n in held:
            held[n].also(frames)
        elif self.may_hold(frames):
            held[n] = HeldRow(row, frames)
            self.held_rows += 1
        else:
            self._send_back(row, frames)

    # -- rows over the limit: sent again when they are next ------------------------------------

    def may_hold(self, frames: tuple[InboundFrame, ...]) -> bool:
        """Rule R44: a row over the limit is not held; its frame is sent again when the row is next.

        Frames of this site to itself are in its outbox, so that holding their rows needs no memory.
        """
        if self.held_rows + len(self.waiting) < self._held_rows_max:
            return True
        return all(inbound.id.sender == self._site for inbound in frames)

    def _send_back(self, row: Row, frames: tuple[InboundFrame, ...]) -> None:
        key, origin, n = row[0], row[3], row[4]
        if key not in self.sent_back:
            self.sent_back[key] = {}
        known = self.sent_back[key].setdefault(origin, {}).setdefault(n, [])
        for inbound in frames:
            if inbound not in known:
                known.append(inbound)
                inbound.missing += 1

    def came_again(self, row: Row, frames: tuple[InboundFrame, ...]) -> None:
        """A row that was sent back is here again."""
        of_origin = self.sent_back.get(row[0], {}).get(row[3], {})
        known = of_origin.get(row[4], [])
        for inbound in frames:
            if inbound in known:
                known.remove(inbound)
                inbound.missing -= 1
                if not known:
                    del of_origin[row[4]]
                    self._tidy_sent_back(row[0], row[3])

    def _tidy_sent_back(self, key: Key, origin: str) -> None:
        of_key = self.sent_back[key]
        if not of_key[origin]:
            del of_key[origin]
            if not of_key:
                del self.sent_back[key]

    def _want_next(self, key: Key, origin: str, mark: int) -> None:
        """A mark has advanced: rows up to it are here, and the frame of the next one is sent again."""
        of_origin = self.sent_back.get(key, {}).get(origin)
        if of_origin is None:
            return
        for n in [n for n in of_origin if n <= mark]:
            for inbound in of_origin.pop(n):
                inbound.missing -= 1
        self._wanted.update(dict.fromkeys(of_origin.get(mark + 1, ())))
        self._tidy_sent_back(key, origin)

    def _send_back_until_table(self, frames: tuple[InboundFrame, ...]) -> None:
        for inbound in frames:
            self._sent_back_waiting[inbound] = self._sent_back_waiting.get(inbound, 0) + 1
            inbound.missing += 1

    def frame_came_again(self, inbound: InboundFrame) -> None:
        """A frame that was sent back is here again: its rows are sequenced as if they were new."""
        inbound.missing -= self._sent_back_waiting.pop(inbound, 0)

    def take_wanted(self) -> list[InboundFrame]:
        """The frames to send again, because one of their rows is next."""
        if not self._wanted:
            return []
        wanted, self._wanted = [inbound for inbound in self._wanted if inbound.missing], {}
        return wanted

    def _correction(self, routes: dict[Key, Route]) -> RouteUpdate:
        """The routes for a sender with old ones: the slots of these keys with all their overrides."""
        slots: dict[int, Route] = {}
        keys: dict[Key, Route] = {}
        for key, route in routes.items():
            slot = slot_of(key, self._table.count)
            if slot not in slots:
                slots[slot] = self._table.slots[slot]
                keys.update(self._table.overrides_in(frozenset((slot,))))
            if key in self._table.overrides:
                keys[key] = route
        return RouteUpdate(slots, keys)

    def release_waiting(self) -> list[HeldRow]:
        """The rows that waited until this site's table is as new as their sender's."""
        waiting, self.waiting = self.waiting, []
        for held in waiting:
            held.release()
        self._wanted.update(dict.fromkeys(self._sent_back_waiting))
        return waiting

    # -- keys that arrive and leave ----------------------------------------------------------

    def give_marks(
        self, step: Step, keys: KeySet, leaves: Callable[[Key], bool]
    ) -> dict[Key, dict[str, int]]:
        """Remove and return the marks of keys that leave."""
        given = {key: self.marks[key] for key in self.marks.of(keys) if leaves(key) and self.marks[key]}
        for key in given:
            del self.marks[key]
            step.delete(("mark", self._inbox, key))
        return given

    def drop_held(self, keys: KeySet, leaves: Callable[[Key], bool]) -> list[HeldRow]:
        """Remove the held rows of keys that have left: they are forwarded."""
        out: list[HeldRow] = []
        for key in [key for key in self.held.of(keys) if leaves(key)]:
            for of_origin in self.held[key].values():
                out += of_origin.values()
            del self.held[key]
        for held in out:
            held.release()
        self.held_rows -= len(out)
        for key in [key for key in self.sent_back.of(keys) if leaves(key)]:
            for of_number in self.sent_back[key].values():
                for inbound in [inbound for frames in of_number.values() for inbound in frames]:
                    self._wanted[inbound] = None
        return out

    def install_marks(
        self, step: Step, marks: dict[Key, dict[str, int]], keys: KeySet, arrives: Callable[[Key], bool]
    ) -> None:
        """Rule R2: install the marks of the old sequencer before the first append of the new one."""
        for key, of_key in marks.items():
            self.marks[key] = dict(of_key)
            step.put(("mark", self._inbox, key), dict(of_key))
        self.await_own_rows([key for key in self.counts.of(keys) if arrives(key)])

    def await_own_rows(self, keys: Iterable[Key]) -> None:
        """Rule R4: a key that has returned waits for the rows that this site had forwarded."""
        for key in keys:
            if not self._has_own_rows(key):
                self.awaiting_own_rows[key] = None
                self._rerouted(key)

    def _has_own_rows(self, key: Key) -> bool:
        """Whether all rows of a key that this site has forwarded are in its log."""
        marks = self.marks.get(key)
        return (marks.get(self.origin, 0) if marks is not None else 0) >= self.counts.get(key, 0)

    def _stop_awaiting(self, ready: list[Row]) -> None:
        for row in ready:
            if row[0] in self.awaiting_own_rows and self._has_own_rows(row[0]):
                del self.awaiting_own_rows[row[0]]
                self._rerouted(row[0])

    def await_no_own_rows(self, keys: KeySet, leaves: Callable[[Key], bool]) -> None:
        """Stop waiting for rows of keys that have left: their next sequencer waits for them."""
        for key in [key for key in self.awaiting_own_rows.of(keys) if leaves(key)]:
            del self.awaiting_own_rows[key]
            self._rerouted(key)
