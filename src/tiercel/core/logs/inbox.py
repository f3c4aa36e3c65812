"""The inbox: the log of one operator at one site, with the routing and sequencing of its rows.

Responsible for: the order of the log; the part of an entry that a row belongs to; dropping repeated rows and
    holding early ones.
Not responsible for: its readers (retention.py), frames (site_outbox.py), moves (core/migration changes the
    routing here).

The path of a row: `append_or_forward` (from this site's producers and instances) or `sequence` (from another
site or a mobile source) -> a part of an `Entry` -> the live readers. A row whose key has its owner at another
site goes into the outbox to that site, numbered per key. If a key has just returned while older rows of it
are still on their way back, new rows go into the outbox to this site itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from tiercel.core.logs.dispatch import LIVE, DispatchCursor
from tiercel.core.logs.retention import Readers
from tiercel.core.logs.site_outbox import InboundFrame
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.step import Step
from tiercel.core.model.keys import ABSENT_WATERMARK, Key, KeySet
from tiercel.core.model.log import Control, Entry, Row, Tick, Watermark
from tiercel.core.model.routing import Route, RouteUpdate, RoutingTable, slot_of
from tiercel.core.model.row_batch import count_rows
from tiercel.core.settings import Settings


class MovingKeys(msgspec.Struct, frozen=True):
    """Moving keys: their rows form a part of their own, read by the source, later by the destination."""

    keys: KeySet
    reader: str
    outgoing: bool


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


class _Routes(dict[Key, str]):
    """The targets of keys, looked up at first use."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def __missing__(self, key: Key) -> str:
        return self._inbox.resolve(key)


TABLES = (
    *("head", "trimmed", "ends", "route", "route_key", "mark", "count"),
    *("reader", "retired", "takeover", "emitted", "pause"),
)
TO_SITE = ">"  # first character of a route to another site; instance names never start with it


class Inbox(Readers):
    """The log of one operator at one site, and the routing that fills it."""

    def __init__(self, name: str, site: str, table: RoutingTable, settings: Settings) -> None:
        super().__init__(name, settings)
        self.site = site
        self.table = table
        self.time_ms = 0
        self.watermark_ms = ABSENT_WATERMARK
        self.ends: list[tuple[int, int]] = []
        self.emitted: dict[str, int] = {}  # instance -> outputs are admitted up to this offset
        self.moving: dict[str, MovingKeys] = {}  # by move
        self.frozen_ms: dict[str, int] = {}  # incoming move -> limit of the site's output watermark
        self.counts: dict[Key, int] = {}  # rows of a key that this site numbered and forwarded
        self.marks: dict[Key, dict[str, int]] = {}  # key -> origin -> last n appended
        self.awaiting_own_rows: set[Key] = set()  # owned here, while older rows of this site are in flight
        self.held: dict[tuple[Key, str], dict[int, HeldRow]] = {}
        self.waiting: list[HeldRow] = []  # their sender knows a newer epoch than this site
        self._routes = _Routes(self)
        self.stored_overrides: set[Key] = set(table.overrides)
        self.timed: frozenset[int] = frozenset()  # inputs whose late rows are dropped
        self.left_out: Callable[[Inbox, Row], bool] = lambda inbox, row: False  # for rows of `timed`

    # -- after a restart ---------------------------------------------------------------------

    def load(self, key: StorageKey, value: Any) -> None:
        """Load one stored item of this log."""
        match key:
            case ("head", _):
                self.recover_head(*value)
            case ("trimmed", _):
                self.trimmed = value
            case ("ends", _):
                self.ends = list(value)
            case ("route", _, slot):
                self.table.slots[slot] = value
            case ("route_key", _, routed):
                self.table.overrides[routed] = value
                self.stored_overrides.add(routed)
            case ("mark", _, marked):
                self.marks[marked] = dict(value)
            case ("count", _, counted):
                self.counts[counted] = value
            case ("reader", _, instance):
                self.readers[instance] = value
            case ("retired", _, instance):
                self.readers.pop(instance, None)
            case ("takeover", _, instance):
                self.successors[instance] = value
            case ("emitted", _, instance):
                self.recover_emitted(instance, value)
            case ("pause", _, move):
                self.pauses[move] = value
            case _:
                raise KeyError(key)

    def begin_incarnation(self, step: Step, incarnation: int) -> None:
        """A new incarnation of the router continues this log."""
        self.ends = [*self.ends, (incarnation, self.offset)]
        step.put(("ends", self.name), list(self.ends))
        self.find_awaiting_own_rows(lambda key: self.table.route(key).site == self.site)

    def recover_head(self, offset: int, time_ms: int, watermark_ms: int) -> None:
        """Rule R19: a restarted log continues with its clock and its watermark."""
        self.offset = self.durable = offset
        self.time_ms, self.watermark_ms = time_ms, watermark_ms

    def recover_emitted(self, instance: str, through: int) -> None:
        """Rule R8: a restarted router remembers which outputs it has admitted."""
        self.emitted[instance] = through

    # -- routing -----------------------------------------------------------------------------

    def new_feed(self, instance: str) -> DispatchCursor:
        settings = self.settings
        cursor = DispatchCursor(
            instance,
            settings.dispatch_rows_max,
            settings.read_entries_max,
            self.table.count,
            settings.dispatch_ms_max,
        )
        self.cursors[instance] = cursor
        return cursor

    def resolve(self, key: Key) -> str:
        """The part or outbox for the rows of a key, cached until a route changes."""
        route = self.table.route(key)
        if route.site != self.site:
            target = TO_SITE + route.site
        elif key in self.awaiting_own_rows:
            target = TO_SITE + self.site
        else:
            target = route.instance
            for move, group in self.moving.items():
                if self._in_group(key, group):
                    target = f"{move}|{group.reader}"
                    break
        self._routes[key] = target
        return target

    def _in_group(self, key: Key, group: MovingKeys) -> bool:
        """Whether a key belongs to a move: a slot includes overrides with the same owner, and no others."""
        if key in group.keys.keys:
            return True
        if slot_of(key, self.table.count) not in group.keys.slots:
            return False
        override = self.table.overrides.get(key)
        return override is None or (group.outgoing and override.instance == group.reader)

    def set_moving(self, move: str, group: MovingKeys) -> None:
        """Make the rows of these keys a part of their own from now on."""
        self.moving[move] = group
        self._routes.clear()

    def clear_moving(self, move: str) -> None:
        """End the part of a move: its keys are ordinary again, or another site owns them."""
        self.moving.pop(move, None)
        self._routes.clear()

    def update_table(self, step: Step, update: RouteUpdate) -> bool:
        if not self.table.take(update):
            return False
        for slot, route in update.slots.items():
            if self.table.slots[slot] == route:
                step.put(("route", self.name, slot), route)
        for key in [k for k in self.stored_overrides if k not in self.table.overrides]:
            self.stored_overrides.discard(key)
            step.delete(("route_key", self.name, key))
        for key, route in update.keys.items():
            if self.table.overrides.get(key) == route:
                self.stored_overrides.add(key)
                step.put(("route_key", self.name, key), route)
        self._routes.clear()
        return True

    # -- appending ---------------------------------------------------------------------------

    def append_or_forward(self, step: Step, rows: list[Row]) -> dict[str, list[Row]]:
        """Append rows that enter at this site. Returns the stamped rows for other sites, by site."""
        routes = self._routes
        by_target: defaultdict[str, list[Row]] = defaultdict(list)
        for row in rows:
            by_target[routes[row[0]]].append(row)
        parts = dict(by_target)
        outbound: dict[str, list[Row]] = {}
        for target in [t for t in parts if t[0] == TO_SITE]:
            outbound[target[1:]] = [self._number(step, row) for row in parts.pop(target)]
        if parts:
            self.append(step, parts)
        return outbound

    def _number(self, step: Step, row: Row) -> Row:
        key = row[0]
        n = self.counts.get(key, 0) + 1
        self.counts[key] = n
        step.put(("count", self.name, key), n)
        return (key, row[1], row[2], self.site, n, self.table.route(key).epoch)

    def append(self, step: Step, parts: dict[str, list[Row]], control: Control | None = None) -> Entry:
        """Append one entry to the log and offer it to the live readers that it has parts for."""
        self.offset += 1
        now = int(step.now_ms)
        if now > self.time_ms:
            self.time_ms = now
        entry = Entry(self.offset, self.time_ms, parts, control)
        if type(control) is Watermark:
            self.watermark_ms = control.value_ms
        step.put(("inbox", self.name, self.offset), entry)
        step.put(("head", self.name), (self.offset, self.time_ms, self.watermark_ms))
        counts = {name: count_rows(rows) for name, rows in parts.items()}
        count = sum(counts.values())
        if control is None and not self.moving:
            for name, rows in parts.items():
                cursor = self.cursors.get(name)
                if cursor is not None:
                    cursor.appended(self.offset, counts[name])
                    if cursor.phase is LIVE:
                        cursor.offer(entry, {name: rows} if len(parts) > 1 else parts, counts[name])
        else:
            for cursor in self.cursors.values():
                share = {n: r for n, r in parts.items() if n == cursor.instance or n.endswith(cursor.suffix)}
                rows_of_it = sum(counts[name] for name in share)
                if share:
                    cursor.appended(self.offset, rows_of_it)
                if cursor.phase is LIVE and (share or control is not None):
                    cursor.offer(entry, share, rows_of_it)
        self.tail.keep(entry, count, self.cursors.values())
        self.count_backlog(count)
        if self.shadow_readers:
            for reader in list(self.shadow_readers.values()):
                reader.shadow_appended(step, entry)
        return entry

    def tick(self, step: Step) -> None:
        self.append(step, {}, Tick())

    # -- sequencing rows of other sites ------------------------------------------------------

    def sequence(
        self, step: Step, rows: list[Row], frames: tuple[InboundFrame, ...]
    ) -> tuple[dict[str, list[Row]], RouteUpdate | None]:
        """Sequence stamped rows: append the next ones, drop repeats, hold early ones, forward the rest.

        Returns the rows to forward, by site, and the routes that the sender should know.
        """
        ready: list[Row] = []
        onward: dict[str, list[Row]] = {}
        corrections: dict[Key, Route] = {}
        for row in rows:
            key, epoch = row[0], row[5]
            route = self.table.route(key)
            if route.site == self.site:
                self._sequence_here(step, row, frames, ready)
            elif route.epoch > epoch:
                onward.setdefault(route.site, []).append((*row[:5], route.epoch))
                corrections[key] = route
            else:
                self.waiting.append(HeldRow(row, frames))
        if ready:
            self._append_ready(step, ready)
        return onward, self._correction(corrections) if corrections else None

    def must_hold(self, last: int, n: int) -> bool:
        """Rule R1: a row waits until the row before it, of the same key and origin, is appended."""
        return n > last + 1

    def _sequence_here(
        self, step: Step, row: Row, frames: tuple[InboundFrame, ...], ready: list[Row]
    ) -> None:
        key, origin, n = row[0], row[3], row[4]
        marks = self.marks.setdefault(key, {})
        last = marks.get(origin, 0)
        if n <= last:
            return
        if n != last + 1 and self.must_hold(last, n):
            held = self.held.setdefault((key, origin), {})
            if n in held:
                held[n].also(frames)
            else:
                held[n] = HeldRow(row, frames)
            return
        ready.append(row)
        marks[origin] = n
        held_rows = self.held.get((key, origin))
        while held_rows:
            n += 1
            entry = held_rows.pop(n, None)
            if entry is None:
                break
            ready.append(entry.row)
            marks[origin] = n
            entry.release()
        if held_rows is not None and not held_rows:
            self.held.pop((key, origin), None)
        step.put(("mark", self.name, key), dict(marks))

    def _append_ready(self, step: Step, ready: list[Row]) -> None:
        parts: dict[str, list[Row]] = {}
        for row in ready:
            key = row[0]
            if key in self.awaiting_own_rows and self.marks[key].get(self.site, 0) >= self.counts.get(key, 0):
                self.awaiting_own_rows.discard(key)
                self._routes.pop(key, None)
            target = self._routes.get(key)
            if target is None or target[0] == TO_SITE:
                target = self._local_target(key)
            if not (self.timed and self.left_out(self, row)):
                parts.setdefault(target, []).append(row[:3])
        if parts:
            self.append(step, parts)

    def _local_target(self, key: Key) -> str:
        if key in self.awaiting_own_rows:
            self.awaiting_own_rows.discard(key)
            target = self.resolve(key)
            self.awaiting_own_rows.add(key)
            self._routes.pop(key, None)
            return target
        return self.resolve(key)

    def _correction(self, routes: dict[Key, Route]) -> RouteUpdate:
        """The routes for a sender with old ones: the slots of these keys with all their overrides."""
        slots: dict[int, Route] = {}
        keys: dict[Key, Route] = {}
        for key, route in routes.items():
            slot = slot_of(key, self.table.count)
            if slot not in slots:
                slots[slot] = self.table.slots[slot]
                keys.update(self.table.overrides_in(frozenset((slot,))))
            if key in self.table.overrides:
                keys[key] = route
        return RouteUpdate(slots, keys)

    # -- keys that arrive and leave ----------------------------------------------------------

    def release_waiting(self) -> list[HeldRow]:
        """The rows that waited until this site's table is as new as their sender's."""
        waiting, self.waiting = self.waiting, []
        for held in waiting:
            held.release()
        return waiting

    def give_marks(self, step: Step, members: Callable[[Key], bool]) -> dict[Key, dict[str, int]]:
        """Remove and return the marks of keys that leave."""
        given = {k: m for k, m in self.marks.items() if members(k) and m}
        for key in given:
            del self.marks[key]
            step.delete(("mark", self.name, key))
        return given

    def drop_held(self, members: Callable[[Key], bool]) -> list[HeldRow]:
        """Remove the held rows of keys that have left: they are forwarded."""
        out: list[HeldRow] = []
        for key, origin in [k for k in self.held if members(k[0])]:
            for held in self.held.pop((key, origin)).values():
                held.release()
                out.append(held)
        return out

    def install_marks(
        self, step: Step, marks: dict[Key, dict[str, int]], members: Callable[[Key], bool]
    ) -> None:
        """Rule R2: install the marks of the old sequencer before the first append of the new one."""
        for key, of_key in marks.items():
            self.marks[key] = dict(of_key)
            step.put(("mark", self.name, key), dict(of_key))
        self.find_awaiting_own_rows(members)

    def find_awaiting_own_rows(self, members: Callable[[Key], bool]) -> None:
        """Rule R4: a key that has returned waits for the rows that this site had forwarded."""
        for key, count in self.counts.items():
            under_way = count > self.marks.get(key, {}).get(self.site, 0)
            if under_way and members(key):
                self.awaiting_own_rows.add(key)
                self._routes.pop(key, None)

    def await_no_own_rows(self, members: Callable[[Key], bool]) -> None:
        """Stop waiting for rows of keys that have left: their next sequencer waits for them."""
        self.awaiting_own_rows.difference_update([key for key in self.awaiting_own_rows if members(key)])
        self._routes.clear()
