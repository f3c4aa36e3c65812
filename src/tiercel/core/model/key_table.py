"""A table with one value for each key, which also finds the keys of a slot.

Responsible for: finding the entries of a key set without looking at the entries of other keys.
Not responsible for: the meaning of the values (the tables of core/logs and core/model/routing.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tiercel.core.model.keys import Key, KeySet, slot_of

V = TypeVar("V")


class KeyTable(dict[Key, V]):
    """A dict by key with an index by slot. A new key costs one hash; a known key costs nothing."""

    def __init__(self, slots: int, items: Iterable[tuple[Key, V]] = ()) -> None:
        super().__init__()
        self._slots = slots
        self._by_slot: dict[int, dict[Key, None]] = {}  # in order, so that a run is a function of its seed
        for key, value in items:
            self[key] = value

    def __setitem__(self, key: Key, value: V) -> None:
        if key not in self:
            self._by_slot.setdefault(slot_of(key, self._slots), {})[key] = None
        dict.__setitem__(self, key, value)

    def __delitem__(self, key: Key) -> None:
        dict.__delitem__(self, key)
        slot = slot_of(key, self._slots)
        of_slot = self._by_slot[slot]
        del of_slot[key]
        if not of_slot:
            del self._by_slot[slot]

    def discard(self, key: Key) -> None:
        """Remove a key if it is here."""
        if key in self:
            del self[key]

    def slots(self) -> set[int]:
        """The slots that have a key here."""
        return set(self._by_slot)

    def in_slots(self, slots: Iterable[int]) -> list[Key]:
        """The keys of these slots."""
        return [key for slot in slots for key in self._by_slot.get(slot, ())]

    def of(self, keys: KeySet) -> list[Key]:
        """The keys of a key set that are here."""
        return [*self.in_slots(sorted(keys.slots)), *(key for key in sorted(keys.keys) if key in self)]
