"""The inbox: the log of one operator at one site, with the routing of its rows.

Responsible for: the order of the log; the part of an entry that a row belongs to.
Not responsible for: its readers (retention.py), numbers of rows (sequencer.py), frames (site_outbox.py),
    moves (core/migration changes the routing here).

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
from tiercel.core.logs.sequencer import Sequencer
from tiercel.core.logs.site_outbox import InboundFrame
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.step import Step
from tiercel.core.model.bundle import are_apart, is_bundle, open_bundle, opened, range_of
from tiercel.core.model.keys import ABSENT_WATERMARK, Key, KeySet
from tiercel.core.model.log import Control, Entry, MovePart, Row, Tick, Watermark
from tiercel.core.model.routing import RouteUpdate, RoutingTable, slot_of
from tiercel.core.model.row_batch import count_rows
from tiercel.core.settings import Settings


def _is_bundle(row: Row) -> bool:
    return is_bundle(row[0])


class MovingKeys(msgspec.Struct, frozen=True):
    """Moving keys: their rows form a part of their own, read by the source, later by the destination."""

    keys: KeySet
    reader: str
    outgoing: bool


class ToSite(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """The target of rows whose key has its owner at another site: the outbox to that site."""

    site: str


class ToMove(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """The target of rows of moving keys: a part of their own."""

    move: str
    reader: str


class ToRows(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """The target of bundles whose keys are not all treated alike: they are taken apart."""


Target = str | ToSite | ToMove | ToRows  # a plain name is an instance of this site
APART = ToRows()


class _Routes(dict[Key, Target]):
    """The targets of keys, looked up at first use."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def __missing__(self, key: Key) -> Target:
        if len(self) >= ROUTES_MAX:
            self.clear()
        target = self[key] = self._inbox.resolve(key)
        return target


TABLES = (
    *("head", "trimmed", "ends", "route", "route_key", "mark", "recent", "count", "count_base"),
    *("reader", "retired", "takeover", "emitted", "pause", "broadcast"),
)
ROUTES_MAX = 1 << 18  # cached targets of keys; beyond it they are looked up again


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
        self._routes = _Routes(self)
        self._ranges: set[Key] = set()  # keys of bundles among the cached routes
        self._to_site: dict[str, ToSite] = {}
        self._move_of_key: dict[Key, str] = {}  # the moves of single keys, and of slots
        self._moves_of_slot: dict[int, list[str]] = {}
        self.sequencer = Sequencer(name, site, table, settings.held_rows_max, self._forget_route)
        self.broadcast: bytes | None = None  # payload of the last row of the operator's broadcast stream
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
            case ("mark", _, marked):
                self.sequencer.marks[marked] = dict(value)
            case ("recent", _, marked):
                self.sequencer.devices.recover(marked, value)
            case ("count", _, counted):
                self.sequencer.counts[counted] = value
            case ("count_base", _):
                self.sequencer.base = value
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
            case ("broadcast", _):
                self.broadcast = value
            case _:
                raise KeyError(key)

    def begin_incarnation(self, step: Step, incarnation: int) -> None:
        """A new incarnation of the router continues this log."""
        # what is trimmed is in a checkpoint of every reader, taken behind the end that was there before
        self.ends = [*(end for end in self.ends if end[1] >= self.trimmed), (incarnation, self.offset)]
        step.put(("ends", self.name), list(self.ends))
        counted = self.sequencer.counts
        self.sequencer.await_own_rows([key for key in counted if self.table.route(key).site == self.site])

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

    def resolve(self, key: Key) -> Target:
        """The part or outbox for the rows of a key, or for a bundle."""
        if is_bundle(key):
            self._ranges.add(key)
            owner = self.owner_of_bundle(key)
            return APART if owner is None else owner
        site = self.table.route(key).site
        if site != self.site:
            return self._outbox_to(site)
        return self._outbox_to(site) if key in self.sequencer.awaiting_own_rows else self._part_of(key)

    def owner_of_bundle(self, key: Key) -> str | None:
        """Rule R46: a bundle stays whole only if one instance of this site owns all of its slots.

        None of their keys may have an owner of its own, move, or wait for rows that are on their way back.
        """
        table = self.table
        count, slots = range_of(key)
        if count != table.count or slots.stop > count or not slots:
            return None
        first = table.slots[slots.start]
        others = {table.slots[slot].instance for slot in slots} - {first.instance}
        if others or first.site != self.site or table.overrides.in_slots(slots):
            return None
        if any(slot in slots for slot in self._moves_of_slot):
            return None
        apart = (*self._move_of_key, *self.sequencer.awaiting_own_rows)
        return None if any(slot_of(each, count) in slots for each in apart) else first.instance

    def _outbox_to(self, site: str) -> ToSite:
        target = self._to_site.get(site)
        if target is None:
            target = self._to_site[site] = ToSite(site)
        return target

    def _part_of(self, key: Key) -> Target:
        """The part for the rows of a key whose owner is at this site."""
        move = self._move_of(key) if self.moving else None
        return self.table.route(key).instance if move is None else ToMove(move, self.moving[move].reader)

    def _move_of(self, key: Key) -> str | None:
        """The move of a key: a slot includes overrides with the same owner, and no others."""
        move = self._move_of_key.get(key)
        if move is not None or not self._moves_of_slot:
            return move
        for of_slot in self._moves_of_slot.get(slot_of(key, self.table.count), ()):
            group, override = self.moving[of_slot], self.table.overrides.get(key)
            if override is None or (group.outgoing and override.instance == group.reader):
                return of_slot
        return None

    def set_moving(self, move: str, group: MovingKeys) -> None:
        """Make the rows of these keys a part of their own from now on."""
        self.clear_moving(move)
        self.moving[move] = group
        for key in group.keys.keys:
            self._move_of_key[key] = move
        for slot in group.keys.slots:
            self._moves_of_slot.setdefault(slot, []).append(move)
        self._forget_routes(group.keys)

    def clear_moving(self, move: str) -> None:
        """End the part of a move: its keys are ordinary again, or another site owns them."""
        group = self.moving.pop(move, None)
        if group is None:
            return
        for key in group.keys.keys:
            if self._move_of_key.get(key) == move:
                del self._move_of_key[key]
        for slot in group.keys.slots:
            self._moves_of_slot[slot].remove(move)
            if not self._moves_of_slot[slot]:
                del self._moves_of_slot[slot]
        self._forget_routes(group.keys)

    def update_table(self, step: Step, update: RouteUpdate) -> bool:
        change = self.table.take(update)
        for slot in change.slots:
            step.put(("route", self.name, slot), self.table.slots[slot])
        for key in change.swept:
            step.delete(("route_key", self.name, key))
        for key in change.keys:
            step.put(("route_key", self.name, key), self.table.overrides[key])
        self._forget_routes(KeySet(frozenset(change.slots), frozenset(change.keys)))
        return bool(change)

    def _forget_routes(self, keys: KeySet) -> None:
        """Look up the targets of these keys again. Keys of a slot are not indexed here: all are forgotten."""
        if keys.slots:
            self._routes.clear()
        for key in keys.keys:
            self._routes.pop(key, None)
        self._forget_bundles()

    def _forget_route(self, key: Key) -> None:
        self._routes.pop(key, None)
        self._forget_bundles()

    def _forget_bundles(self) -> None:
        for key in self._ranges:
            self._routes.pop(key, None)
        self._ranges.clear()

    # -- broadcast ---------------------------------------------------------------------------

    def set_broadcast(self, step: Step, payload: bytes) -> None:
        """Rows that enter from now on carry this row of the operator's broadcast stream."""
        self.broadcast = payload
        step.put(("broadcast", self.name), payload)

    # -- appending ---------------------------------------------------------------------------

    def append_or_forward(self, step: Step, rows: list[Row]) -> dict[str, list[Row]]:
        """Append rows that enter at this site. Returns the stamped rows for other sites, by site."""
        routes = self._routes
        by_target: defaultdict[Target, list[Row]] = defaultdict(list)
        for row in rows:
            target = routes[row[0]]
            if target is APART:
                for single in open_bundle(row):
                    by_target[routes[single[0]]].append(single)
            else:
                by_target[target].append(row)
        if self._ranges:
            for target, mine in by_target.items():
                by_target[target] = self.bundles_first(mine)
        outbound: dict[str, list[Row]] = {}
        for target in [t for t in by_target if type(t) is ToSite]:
            number = self.sequencer.number
            outbound[target.site] = [number(step, row) for row in by_target.pop(target)]
        if by_target:
            self._append_by_target(step, by_target)
        return outbound

    def bundles_first(self, rows: list[Row]) -> list[Row]:
        """Rule R46: readers expect bundles before other rows; a bundle must not overtake rows of its keys."""
        count = sum(map(_is_bundle, rows))
        if all(map(_is_bundle, rows[:count])):
            return rows
        bundles = [row for row in rows if _is_bundle(row)]
        others = [row for row in rows if not _is_bundle(row)]
        return bundles + others if are_apart(bundles, others, self.table.count) else opened(rows)

    def _append_by_target(self, step: Step, by_target: dict[Target, list[Row]]) -> None:
        """Append one entry with a part for each target at this site."""
        parts: dict[str, list[Row]] = {}
        moving: tuple[MovePart, ...] = ()
        for target, rows in by_target.items():
            if type(target) is str:
                parts[target] = rows
            elif type(target) is ToMove:
                moving += (MovePart(target.move, target.reader, rows),)
        self.append(step, parts, moving=moving)

    def append(
        self,
        step: Step,
        parts: dict[str, list[Row]],
        control: Control | None = None,
        moving: tuple[MovePart, ...] = (),
    ) -> Entry:
        """Append one entry to the log and offer it to the live readers that it has parts for."""
        self.offset += 1
        now = int(step.now_ms)
        if now > self.time_ms:
            self.time_ms = now
        entry = Entry(self.offset, self.time_ms, parts, control, moving)
        if type(control) is Watermark:
            self.watermark_ms = control.value_ms
        step.put(("inbox", self.name, self.offset), entry)
        step.put(("head", self.name), (self.offset, self.time_ms, self.watermark_ms))
        count = 0
        if control is None and not moving:
            for name, rows in parts.items():
                of_part = count_rows(rows)
                count += of_part
                cursor = self.cursors.get(name)
                if cursor is not None:
                    cursor.appended(self.offset, of_part, self.time_ms)
                    if cursor.phase is LIVE:
                        cursor.offer(entry, {name: rows} if len(parts) > 1 else parts, of_part)
        else:
            count = self._offer_to_all(entry)
        self.tail.keep(entry, count, self.cursors.values())
        self.count_backlog(count)
        if self.shadow_readers:
            for reader in list(self.shadow_readers.values()):
                reader.shadow_appended(step, entry)
        return entry

    def _offer_to_all(self, entry: Entry) -> int:
        """Offer an entry with a control record or moving keys; returns the number of its rows."""
        parts, control = entry.parts, entry.control
        for cursor in self.cursors.values():
            own = {cursor.instance: parts[cursor.instance]} if cursor.instance in parts else {}
            moving = tuple([part for part in entry.moving if part.reader == cursor.instance])
            rows = sum(map(count_rows, own.values())) + sum(count_rows(part.rows) for part in moving)
            if own or moving:
                cursor.appended(self.offset, rows, self.time_ms)
            if cursor.phase is LIVE and (own or moving or control is not None):
                cursor.offer(entry, own, rows, moving)
        return sum(map(count_rows, parts.values())) + sum(count_rows(part.rows) for part in entry.moving)

    def tick(self, step: Step) -> None:
        self.append(step, {}, Tick())

    # -- rows of other sites -----------------------------------------------------------------

    def sequence(
        self, step: Step, rows: list[Row], frames: tuple[InboundFrame, ...]
    ) -> tuple[dict[str, list[Row]], RouteUpdate | None]:
        """Append the stamped rows that are next; others are dropped, held or forwarded.

        Returns the rows to forward, by site, and the routes that the sender should know.
        """
        ready, onward, correction = self.sequencer.sequence(step, rows, frames)
        if ready:
            self._append_ready(step, ready)
        return onward, correction

    def take_or_defer(self, step: Step, rows: list[Row]) -> list[Row]:
        """Append rows that devices numbered and that enter here, as far as they are next.

        Returns the early ones: they go through the outbox to this site itself, which is durable.
        """
        ready, deferred = self.sequencer.take_or_defer(step, rows)
        if ready:
            self._append_ready(step, ready)
        return deferred

    def close_gaps(self, step: Step) -> None:
        """Go on behind numbers of devices that have been missing for too long."""
        ready = self.sequencer.close_gaps(step)
        if ready:
            self._append_ready(step, ready)

    def _append_ready(self, step: Step, ready: list[Row]) -> None:
        by_target: dict[Target, list[Row]] = {}
        for row in ready:
            target = self._routes[row[0]]
            if type(target) is ToSite:  # newer rows of the key wait for these
                target = self._part_of(row[0])
            if not (self.timed and self.left_out(self, row)):
                by_target.setdefault(target, []).append(row[:3])
        if by_target:
            self._append_by_target(step, by_target)
