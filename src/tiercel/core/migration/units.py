"""Units: the parts in which the state of a move travels, each on its own and in any order.

Responsible for: the unit of a key, the units of a key set, the queue of units that a source has to send.
Not responsible for: the order of the queue (orders.py), the messages (source_instance.py).

A unit is a fixed function of the key: (slot, sub-group), as one number. It is whole once the destination has
its end mark, and a key that a whole unit does not mention had no state. So units need no common sequence:
each one is requested, sent and acknowledged by its number.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from tiercel.core.migration.orders import ORDERS, TransferFacts
from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.log import Row
from tiercel.core.model.row_batch import count_rows

SUB_GROUPS = 4  # of a slot: a hot key waits for a quarter of its slot at most

Unit = int


def unit_of(key: Key, slots: int) -> Unit:
    """The unit of a key: the same in all processes."""
    digest = xxhash.xxh3_64_intdigest(key)
    return (digest % slots) * SUB_GROUPS + (digest >> 48) % SUB_GROUPS


def units_of(keys: KeySet, slots: int) -> set[Unit]:
    """All units of a key set, also those without a key that has state."""
    units = {slot * SUB_GROUPS + group for slot in keys.slots for group in range(SUB_GROUPS)}
    units.update(unit_of(key, slots) for key in keys.keys)
    return units


def count_waiting(waiting: dict[Unit, tuple[int, int]], rows: Iterable[Row], offset: int, slots: int) -> None:
    """Count the rows of an entry that wait for each unit: the offset of the first, and their number."""
    for row in rows:
        unit = unit_of(row[0], slots)
        first, count = waiting.get(unit, (offset, 0))
        waiting[unit] = (first, count + count_rows([row]))


class UnitQueue:
    """The units that a source still has to send, in the order of its strategy, with their keys."""

    def __init__(self, move: str, order: str, units: Iterable[Unit], keys: Iterable[Key], slots: int) -> None:
        self.facts = TransferFacts(move)
        self._order = ORDERS[order]
        self.keys: dict[Unit, list[Key]] = {unit: [] for unit in units}
        for key in sorted(keys):
            self.keys[unit_of(key, slots)].append(key)
        self.facts.sizes = {unit: len(of_unit) for unit, of_unit in self.keys.items()}
        self._left: dict[Unit, list[Key]] = {}  # last key first
        self._turns: list[Unit] = []  # last unit first
        self._sorted = False
        self.current: Unit | None = None  # a unit that is sent in part
        self.request(self.keys)

    def __bool__(self) -> bool:
        return bool(self._left)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._left

    def request(self, units: Iterable[Unit]) -> None:
        """Put units into the queue, again if they were sent before."""
        for unit in units:
            if unit in self.keys and unit not in self._left:
                self._left[unit] = self.keys[unit][::-1]
        self._sorted = False

    def reorder(self) -> None:
        """Sort the queue again before its next unit: the facts have changed."""
        self._sorted = False

    def first(self) -> Unit | None:
        """The unit whose turn it is; None if nothing is left to send."""
        if self.current is None and self._left:
            if not self._sorted:
                self._turns = sorted(self._left, key=lambda unit: self._order(unit, self.facts), reverse=True)
                self._sorted = True
            self.current = self._turns.pop()
        return self.current

    def left_of(self, unit: Unit) -> list[Key]:
        """The keys of a unit that are not sent yet; the sender pops them from the end."""
        return self._left[unit]

    def ended(self, unit: Unit) -> None:
        """The unit is sent."""
        del self._left[unit]
        self.current = None

    def ahead(self, count: int) -> list[Key]:
        """About the next `count` keys to send."""
        found: list[Key] = []
        first = self.first()
        for unit in ([first] if first is not None else []) + self._turns[::-1]:
            found += self._left[unit][: -count - 1 : -1]
            if len(found) >= count:
                break
        return found[:count]
