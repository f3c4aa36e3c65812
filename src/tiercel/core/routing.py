"""Who owns a key: slots, per-key overrides, and an epoch on each entry.

Responsible for: look-ups, comparing two tables, taking in newer entries, refusing nonsense.
Not responsible for: deciding a change (that is a Flip in the log that sequences the entry).

There is no epoch of the whole table. Each entry has its own, minted only by the log that sequences
it, so two sites that flip different entries at once never outdate each other.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from tiercel.core.faults import InvalidRequest
from tiercel.core.records import Key, KeySet, Route, TableUpdate
from tiercel.core.topology import Operator


def slot_of(key: Key, slots: int) -> int:
    """Stable over processes, machines and versions: state on disk is laid out by it."""
    return xxhash.xxh3_64_intdigest(key) % slots


class RoutingTable:
    """Slot -> route, plus per-key overrides."""

    def __init__(self, operator: str, slots: list[Route], overrides: dict[Key, Route] | None = None) -> None:
        self.operator = operator
        self.slots = slots
        self.overrides = overrides or {}
        self.count = len(slots)
        self.version = 0  # counts the changes

    @classmethod
    def initial(cls, operator: Operator) -> RoutingTable:
        """Contiguous slot ranges over the first instances, epoch 1: the same on every site."""
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
        return {k: r for k, r in self.overrides.items() if slot_of(k, self.count) in slots}

    def routes_of(self, keys: KeySet) -> TableUpdate:
        """The entries a key set is made of; a slot brings the overrides of its keys along."""
        if keys.slots:
            return TableUpdate({s: self.slots[s] for s in keys.slots}, self.overrides_in(keys.slots))
        return TableUpdate({}, {k: self.route(k) for k in keys.keys})

    def moved(self, keys: KeySet, source: str, to: str) -> TableUpdate:
        """The entries after a flip of `keys` from `source` to `to`.

        A slot's new epoch is above those of the overrides it sweeps (keys that live with the
        slot's owner); overrides that live elsewhere stay and travel along.
        """
        if not keys.slots:
            return TableUpdate({}, {k: Route(to, self.route(k).epoch + 1) for k in keys.keys})
        slots: dict[int, Route] = {}
        kept: dict[Key, Route] = {}
        highest = {s: self.slots[s].epoch for s in keys.slots}
        for key, route in self.overrides_in(keys.slots).items():
            slot = slot_of(key, self.count)
            if route.instance == source:
                highest[slot] = max(highest[slot], route.epoch)
            else:
                kept[key] = route
        for slot in keys.slots:
            slots[slot] = Route(to, highest[slot] + 1)
        return TableUpdate(slots, kept)

    def take(self, update: TableUpdate, *, stale_too: bool = False, sweep_all: bool = False) -> bool:
        """Take in what is newer; True if anything changed.

        A newer slot sweeps older overrides that it does not list. An override that is new to us is
        believed if it is newer than its slot, or came together with the slot's version we have:
        whoever knows a slot's epoch knows the overrides that were made out of it before.
        """
        changed = False
        single: dict[int, list[Key]] = {}
        for key in self.overrides if update.slots else ():
            single.setdefault(slot_of(key, self.count), []).append(key)
        for slot, route in update.slots.items():
            if route.epoch > self.slots[slot].epoch or (stale_too and route != self.slots[slot]):
                self.slots[slot] = route
                changed = True
                for key in single.get(slot, ()):
                    old = self.overrides[key]
                    if (old.epoch < route.epoch and key not in update.keys) or sweep_all:
                        del self.overrides[key]
        for key, route in update.keys.items() if not (sweep_all and update.slots) else ():
            current = self.overrides.get(key)
            if current is not None:
                newer = route.epoch > current.epoch
            else:
                slot = slot_of(key, self.count)
                listed = update.slots.get(slot)
                newer = route.epoch > self.slots[slot].epoch or (
                    listed is not None and listed.epoch == self.slots[slot].epoch
                )
            if newer or (stale_too and route != current):
                self.overrides[key] = route
                changed = True
        self.version += changed
        return changed

    def difference(self, other: RoutingTable) -> TableUpdate:
        """The entries of `other` that differ from ours."""
        return TableUpdate(
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


HOW_TO_LIST = "list who owns what with: tiercel sim --list operators"


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
