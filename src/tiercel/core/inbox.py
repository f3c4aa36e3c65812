"""One operator's inbox log at one site: appending, late-binding routing, sequencing of stamped rows.

Responsible for: the order of the log; which part of an entry a row goes to; what is dropped as a
    duplicate or held because it came too early.
Not responsible for: who reads it (readers.py), the lanes' frames, moves (departures.py and arrivals.py
    change the routing here).

Life of a row here: `intake` (from this site's producers and instances) or `sequence` (from another
site or a mobile source) -> a part of an `Entry` -> the live feeds. A row whose key is owned
elsewhere goes into the lane to that site, numbered per key; so does a row of a key that has just
come home while older rows of it, sent away earlier, are still on their way back (lane to self).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import msgspec

from tiercel.core.feed import LIVE, Feed
from tiercel.core.lanes import Inbound
from tiercel.core.readers import Readers
from tiercel.core.records import (
    ABSENT_WATERMARK,
    Control,
    Entry,
    Key,
    KeySet,
    Route,
    Row,
    TableUpdate,
    Tick,
    Watermark,
)
from tiercel.core.routing import RoutingTable, slot_of
from tiercel.core.runs import count_rows
from tiercel.core.settings import Settings
from tiercel.core.step import Step


class Group(msgspec.Struct, frozen=True):
    """Keys on the move: their rows are a part of their own, read by the source, later the destination."""

    keys: KeySet
    reader: str
    leaving: bool


class Held:
    """A row that cannot be appended yet, and the frames that are not settled before it is."""

    __slots__ = ("frames", "row")

    def __init__(self, row: Row, frames: tuple[Inbound, ...]) -> None:
        self.row = row
        self.frames: list[Inbound] = []
        self.also(frames)

    def also(self, frames: tuple[Inbound, ...]) -> None:
        for inbound in frames:
            if inbound not in self.frames:
                self.frames.append(inbound)
                inbound.held += 1

    def release(self) -> None:
        for inbound in self.frames:
            inbound.held -= 1


class _Routes(dict[Key, str]):
    """Targets that were looked up; a key that was not is looked up by its first use."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def __missing__(self, key: Key) -> str:
        return self._inbox.resolve(key)


AWAY = ">"  # first character of a route to another site; instance names never start with it


class Inbox(Readers):
    """The log of one operator at one site, and the routing that fills it."""

    def __init__(self, name: str, site: str, table: RoutingTable, settings: Settings) -> None:
        super().__init__(name, settings)
        self.site = site
        self.table = table
        self.time_ms = 0
        self.watermark_ms = ABSENT_WATERMARK
        self.ends: list[tuple[int, int]] = []
        self.emitted: dict[str, int] = {}  # instance -> outputs are admitted through this offset
        self.groups: dict[str, Group] = {}  # by move
        self.counts: dict[Key, int] = {}  # rows of a key that this site numbered and sent away
        self.marks: dict[Key, dict[str, int]] = {}  # key -> origin -> last n appended
        self.returning: set[Key] = set()  # owned here, but older rows of ours are still under way
        self.held: dict[tuple[Key, str], dict[int, Held]] = {}
        self.waiting: list[Held] = []  # their sender knows a newer epoch than we
        self.shadow_hook: Callable[[Step, Entry], None] | None = None  # set only while a move needs it
        self._routes = _Routes(self)
        self.stored_overrides: set[Key] = set(table.overrides)
        self.timed: frozenset[int] = frozenset()  # inputs whose rows are left out when they are late
        self.left_out: Callable[[Inbox, Row], bool] = lambda inbox, row: False  # asked for those inputs

    # -- routing -----------------------------------------------------------------------------

    def new_feed(self, instance: str) -> Feed:
        settings = self.settings
        feed = Feed(instance, settings.dispatch_rows_max, settings.read_entries_max, self.table.count)
        self.feeds[instance] = feed
        return feed

    def resolve(self, key: Key) -> str:
        """The part or lane a key's rows go to, looked up once and then remembered until a change."""
        route = self.table.route(key)
        if route.site != self.site:
            target = AWAY + route.site
        elif key in self.returning:
            target = AWAY + self.site
        else:
            target = route.instance
            for move, group in self.groups.items():
                if self._in_group(key, group):
                    target = f"{move}|{group.reader}"
                    break
        self._routes[key] = target
        return target

    def _in_group(self, key: Key, group: Group) -> bool:
        """A slot's move takes along the overrides that live with the slot's owner, and no others."""
        if key in group.keys.keys:
            return True
        if slot_of(key, self.table.count) not in group.keys.slots:
            return False
        override = self.table.overrides.get(key)
        return override is None or (group.leaving and override.instance == group.reader)

    def rerouted(self) -> None:
        """Some entry changed: every look-up is made anew."""
        self._routes.clear()

    def update_table(self, step: Step, update: TableUpdate) -> bool:
        stale, sweep = self.mutant == "stale-moved-believed", self.mutant == "epoch-not-compared"
        if not self.table.take(update, stale_too=stale, sweep_all=sweep):
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
        self.rerouted()
        return True

    # -- appending ---------------------------------------------------------------------------

    def intake(self, step: Step, rows: list[Row]) -> dict[str, list[Row]]:
        """Rows that enter the system at this site. Returns those that must travel, by site, stamped."""
        routes = self._routes
        by_target: defaultdict[str, list[Row]] = defaultdict(list)
        for row in rows:
            by_target[routes[row[0]]].append(row)
        parts = dict(by_target)
        away: dict[str, list[Row]] = {}
        for target in [t for t in parts if t[0] == AWAY]:
            away[target[1:]] = [self._number(step, row) for row in parts.pop(target)]
        if parts:
            self.append(step, parts)
        return away

    def _number(self, step: Step, row: Row) -> Row:
        key = row[0]
        n = self.counts.get(key, 0) + 1
        self.counts[key] = n
        step.put(("count", self.name, key), n)
        return (key, row[1], row[2], self.site, n, self.table.route(key).epoch)

    def append(self, step: Step, parts: dict[str, list[Row]], control: Control | None = None) -> Entry:
        """One entry at the end of the log, handed to the live feeds it concerns."""
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
        if control is None and not self.groups:
            for name, rows in parts.items():
                feed = self.feeds.get(name)
                if feed is not None:
                    feed.appended(self.offset, counts[name])
                    if feed.phase is LIVE:
                        feed.offer(entry, {name: rows} if len(parts) > 1 else parts, counts[name])
        else:
            for feed in self.feeds.values():
                share = {n: r for n, r in parts.items() if n == feed.instance or n.endswith(feed.suffix)}
                rows_of_it = sum(counts[name] for name in share)
                if share:
                    feed.appended(self.offset, rows_of_it)
                if feed.phase is LIVE and (share or control is not None):
                    feed.offer(entry, share, rows_of_it)
        self.tail.keep(entry, count, self.feeds.values())
        self.count_backlog(count)
        if self.shadow_hook is not None:
            self.shadow_hook(step, entry)
        return entry

    def tick(self, step: Step) -> None:
        self.append(step, {}, Tick())

    # -- sequencing rows from elsewhere ------------------------------------------------------

    def sequence(
        self, step: Step, rows: list[Row], frames: tuple[Inbound, ...]
    ) -> tuple[dict[str, list[Row]], TableUpdate | None]:
        """Stamped rows: append what is next, drop what is known, hold what is early, forward the rest.

        Returns what must travel on, by site, and what the sender should learn.
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
                self.waiting.append(Held(row, frames))
        if ready:
            self._append_ready(step, ready)
        return onward, self._correction(corrections) if corrections else None

    def _sequence_here(self, step: Step, row: Row, frames: tuple[Inbound, ...], ready: list[Row]) -> None:
        key, origin, n = row[0], row[3], row[4]
        marks = self.marks.setdefault(key, {})
        last = marks.get(origin, 0)
        if n <= last:
            return
        if n > last + 1 and self.mutant != "early-rows-not-held":
            held = self.held.setdefault((key, origin), {})
            if n in held:
                held[n].also(frames)
            else:
                held[n] = Held(row, frames)
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
            if key in self.returning and self.marks[key].get(self.site, 0) >= self.counts.get(key, 0):
                self.returning.discard(key)
                self._routes.pop(key, None)
            target = self._routes.get(key)
            if target is None or target[0] == AWAY:
                target = self._local_target(key)
            if not (self.timed and self.left_out(self, row)):
                parts.setdefault(target, []).append(row[:3])
        if parts:
            self.append(step, parts)

    def _local_target(self, key: Key) -> str:
        if key in self.returning:
            self.returning.discard(key)
            target = self.resolve(key)
            self.returning.add(key)
            self._routes.pop(key, None)
            return target
        return self.resolve(key)

    def _correction(self, routes: dict[Key, Route]) -> TableUpdate:
        """What a stale sender should know: the slots of these keys with all their overrides."""
        slots: dict[int, Route] = {}
        keys: dict[Key, Route] = {}
        for key, route in routes.items():
            slot = slot_of(key, self.table.count)
            if slot not in slots:
                slots[slot] = self.table.slots[slot]
                keys.update(self.table.overrides_in(frozenset((slot,))))
            if key in self.table.overrides:
                keys[key] = route
        return TableUpdate(slots, keys)

    # -- taking keys over and giving them away ----------------------------------------------

    def release_waiting(self) -> list[Held]:
        """Rows that waited for our table to catch up with their sender's."""
        waiting, self.waiting = self.waiting, []
        for held in waiting:
            held.release()
        return waiting

    def give_marks(self, step: Step, members: Callable[[Key], bool]) -> dict[Key, dict[str, int]]:
        """The marks of keys that leave."""
        given = {k: m for k, m in self.marks.items() if members(k) and m}
        for key in given:
            del self.marks[key]
            step.delete(("mark", self.name, key))
        return given

    def drop_held(self, members: Callable[[Key], bool]) -> list[Held]:
        """Early rows of keys that have left: they travel on instead of waiting here."""
        out: list[Held] = []
        for key, origin in [k for k in self.held if members(k[0])]:
            for held in self.held.pop((key, origin)).values():
                held.release()
                out.append(held)
        return out

    def install_marks(
        self, step: Step, marks: dict[Key, dict[str, int]], members: Callable[[Key], bool]
    ) -> None:
        """The marks of keys that arrive, before the first append of any of them."""
        if self.mutant == "marks-not-moved":
            marks = {}
        for key, of_key in marks.items():
            self.marks[key] = dict(of_key)
            step.put(("mark", self.name, key), dict(of_key))
        self.find_returning(members)

    def find_returning(self, members: Callable[[Key], bool]) -> None:
        for key, count in self.counts.items():
            under_way = count > self.marks.get(key, {}).get(self.site, 0)
            if under_way and members(key) and self.mutant != "home-coming-not-held":
                self.returning.add(key)
