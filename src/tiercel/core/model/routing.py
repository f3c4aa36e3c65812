"""Routing tables: the owner of each slot, overrides for single keys, and an epoch on each entry.

Responsible for: look-ups, comparing two tables, merging newer entries, refusing invalid ones.
Not responsible for: deciding a change (a Flip in the log that sequences the entry does).

The table as a whole has no epoch. Each entry has its own, which only the log that sequences the entry
assigns. So two sites that flip different entries at the same time do not invalidate each other's entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from tiercel.core.errors import InvalidRequest
from tiercel.core.model.key_table import KeyTable
from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.keys import slot_of as slot_of
from tiercel.core.model.topology import Operator, site_of


class RoutingTable:
    """Slot -> route, plus per-key overrides."""

    def __init__(
        self, operator: str, slots: list[Route], overrides: Mapping[Key, Route] | None = None
    ) -> None:
        self.operator = operator
        self.slots = slots
        self.count = len(slots)
        self.overrides = KeyTable[Route](self.count, (overrides or {}).items())
        self.floor_ms = max((route.floor_ms for route in [*slots, *self.overrides.values()]), default=0)
        self.version = 0  # counts the changes
        self._changed: set[int] = set()  # slots with changed entries, since `take_changed`

    @classmethod
    def initial(cls, operator: Operator) -> RoutingTable:
        """Contiguous slot ranges over the initial instances, with epoch 1: the same at every site."""
        owners = operator.instances
        return cls(
            operator.name,
            [Route(owners[s * len(owners) // operator.slots], 1) for s in range(operator.slots)],
        )

    def route(self, key: Key) -> Route:
        if self.overrides:
            override = self.overrides.get(key)
            if override is not None:
                return override
        return self.slots[slot_of(key, self.count)]

    def owners(self) -> set[str]:
        return {r.instance for r in self.slots} | {r.instance for r in self.overrides.values()}

    def overrides_in(self, slots: frozenset[int]) -> dict[Key, Route]:
        return {key: self.overrides[key] for key in self.overrides.in_slots(sorted(slots))}

    def clock_ms(self, key: Key, time_ms: int) -> int:
        """The time of a key at a time of the log: the log that the key has left may have been ahead."""
        return time_ms if time_ms >= self.floor_ms else max(time_ms, self.route(key).floor_ms)

    def routes_of(self, keys: KeySet) -> RouteUpdate:
        """The entries of a key set; a slot includes the overrides of its keys."""
        if keys.slots:
            return RouteUpdate({s: self.slots[s] for s in keys.slots}, self.overrides_in(keys.slots))
        return RouteUpdate({}, {k: self.route(k) for k in keys.keys})

    def moved(self, keys: KeySet, source: str, to: str, floor_ms: int = 0) -> RouteUpdate:
        """The entries after a flip of `keys` from `source` to `to`, at `floor_ms` of the log that they leave.

        The new epoch of a slot is above those of the overrides that it sweeps (keys with the same owner), and
        its clock floor is not below theirs. Overrides with another owner stay, and are part of the update.
        """
        if not keys.slots:
            return RouteUpdate({}, {k: self.route(k).to(to, floor_ms) for k in keys.keys})
        slots: dict[int, Route] = {}
        withheld: dict[Key, Route] = {}
        highest = {s: self.slots[s] for s in keys.slots}
        for key, route in self.overrides_in(keys.slots).items():
            slot = slot_of(key, self.count)
            if route.instance == source:
                known = highest[slot]
                highest[slot] = Route("", max(known.epoch, route.epoch), max(known.floor_ms, route.floor_ms))
            else:
                withheld[key] = route
        for slot in keys.slots:
            slots[slot] = highest[slot].to(to, floor_ms)
        return RouteUpdate(slots, withheld)

    def is_newer(self, route: Route, current: Route) -> bool:
        """Rule R14: an entry replaces another only with a higher epoch."""
        return route.epoch > current.epoch

    def is_swept(self, key: Key, slot_route: Route, update: RouteUpdate) -> bool:
        """Rule R15: a newer slot removes the overrides that are older than it and that it does not list."""
        return self.overrides[key].epoch < slot_route.epoch and key not in update.keys

    def accepts_override(self, key: Key, route: Route, update: RouteUpdate) -> bool:
        """Whether an override is newer than what this table has.

        An unknown override counts if it is newer than its slot, or arrives with the version of the slot
        that this table has: a site that knows the epoch of a slot knows all earlier overrides of it.
        """
        current = self.overrides.get(key)
        if current is not None:
            return self.is_newer(route, current)
        slot = slot_of(key, self.count)
        listed = update.slots.get(slot)
        same_version = listed is not None and listed.epoch == self.slots[slot].epoch
        return same_version or self.is_newer(route, self.slots[slot])

    def take(self, update: RouteUpdate) -> TableChange:
        """Merge the newer entries of an update."""
        slots: list[int] = []
        swept: list[Key] = []
        keys: list[Key] = []
        for slot, route in update.slots.items():
            if self.is_newer(route, self.slots[slot]):
                self.slots[slot] = route
                self.floor_ms = max(self.floor_ms, route.floor_ms)
                slots.append(slot)
                for key in self.overrides.in_slots((slot,)):
                    if self.is_swept(key, route, update):
                        del self.overrides[key]
                        swept.append(key)
        for key, route in update.keys.items():
            if self.accepts_override(key, route, update):
                self.overrides[key] = route
                self.floor_ms = max(self.floor_ms, route.floor_ms)
                keys.append(key)
        change = TableChange(slots, swept, keys)
        if change:
            self.version += 1
            self._changed.update(slots, [slot_of(key, self.count) for key in keys])
        return change

    def take_changed(self) -> list[int]:
        """The slots in which an entry has changed since the last call."""
        changed, self._changed = sorted(self._changed), set()
        return changed

    def changed_slots(self) -> list[int]:
        """The slots in which an entry differs from the initial table."""
        with_overrides = self.overrides.slots()
        return [slot for slot, r in enumerate(self.slots) if r.epoch > 1 or slot in with_overrides]

    def difference(self, other: RoutingTable) -> RouteUpdate:
        """The entries of `other` that differ from this table's."""
        return RouteUpdate(
            {s: r for s, r in enumerate(other.slots) if r != self.slots[s]},
            {k: r for k, r in other.overrides.items() if r != self.overrides.get(k)},
        )

    def validate(self, instances: Iterable[str] | None = None) -> None:
        known = set(instances) if instances is not None else None
        for what, route in [*enumerate(self.slots), *self.overrides.items()]:
            if route.epoch < 1:
                raise InvalidRequest(
                    f"{self.operator}: entry {what!r} has epoch {route.epoch}", "expected 1 or more"
                )
            if known is not None and route.instance not in known:
                raise InvalidRequest.unknown("instance", route.instance, sorted(known))


HOW_TO_LIST = "list the owners with: tiercel sim --list operators"


def check_keys(keys: KeySet, operator: Operator) -> None:
    """Refuse a key set that names nothing, both kinds, or slots that do not exist."""
    if not keys.slots and not keys.keys:
        raise InvalidRequest("the key set is empty", "expected at least one slot or one key", HOW_TO_LIST)
    if keys.slots and keys.keys:
        raise InvalidRequest("the key set names slots and keys", "expected one kind", "make two moves of it")
    wrong = sorted(s for s in keys.slots if not 0 <= s < operator.slots)
    if wrong:
        raise InvalidRequest(
            f"slot {wrong[0]} is out of range for {operator.name}",
            f"expected 0 to {operator.slots - 1}",
            HOW_TO_LIST,
        )


def overlap(a: KeySet, b: KeySet, slots: int) -> bool:
    """Whether two key sets share a key. A key overlaps its slot."""
    if a.slots & b.slots or a.keys & b.keys:
        return True
    return any(slot_of(k, slots) in b.slots for k in a.keys) or any(
        slot_of(k, slots) in a.slots for k in b.keys
    )


class Route(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One routing entry: the owner, and the epoch, which counts its changes.

    `floor_ms` is the clock floor of the keys: the highest time of the logs that they have left.
    """

    instance: str
    epoch: int
    floor_ms: int = 0

    def to(self, instance: str, floor_ms: int = 0) -> Route:
        """The next entry: another owner. The clock of the keys does not run backwards."""
        return Route(instance, self.epoch + 1, max(self.floor_ms, floor_ms))

    @property
    def site(self) -> str:
        return site_of(self.instance)


class TableChange(NamedTuple):
    """The entries of a routing table that an update has changed; false if there are none."""

    slots: list[int]
    swept: list[Key]  # overrides that a newer slot has removed
    keys: list[Key]

    def __bool__(self) -> bool:
        return bool(self.slots or self.keys)


class RouteUpdate(msgspec.Struct, frozen=True):
    """Entries of a routing table, as Flip, Adopt and OwnerChanged carry them."""

    slots: dict[int, Route]
    keys: dict[Key, Route]

    def names(self, instance: str) -> bool:
        """Whether an entry gives something to this instance."""
        return any(route.instance == instance for part in (self.slots, self.keys) for route in part.values())
