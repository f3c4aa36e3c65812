"""The planner: turns a request for instances into moves. It is pure: routing tables in, moves out.

Responsible for: choosing the slots to move, as few as possible; replacing one instance by another.
Not responsible for: the time of a move (policies), its strategy, carrying it out (controller.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from tiercel.control.plans import PlannedMove
from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.routing import Route, slot_of

T = TypeVar("T")


def split_move(keys: KeySet, at_most: int, keys_per_slot: float) -> list[KeySet]:
    """Split a key set into parts of about `at_most` keys, so that a key stops only for its own part."""
    if keys.keys:
        return [KeySet(keys=frozenset(some)) for some in _batches(sorted(keys.keys), at_most)]
    slots = max(1, int(at_most / keys_per_slot)) if keys_per_slot else len(keys.slots)
    return [KeySet(slots=frozenset(some)) for some in _batches(sorted(keys.slots), slots)]


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def rebalance(
    operator: str,
    slots: dict[int, Route],
    overrides: dict[Key, Route],
    wanted: Sequence[str],
    strategy: str = "live",
) -> list[PlannedMove]:
    """Moves that leave every wanted instance with an even share of the slots, and the others with nothing.

    An instance that keeps slots keeps its lowest ones; only the surplus moves. Overrides move only
    when their owner is not wanted any more.
    """
    owned: dict[str, list[int]] = {name: [] for name in wanted}
    for slot in sorted(slots):
        owned.setdefault(slots[slot].instance, []).append(slot)
    total, count = len(slots), len(wanted)
    share = {name: total // count + (1 if i < total % count else 0) for i, name in enumerate(sorted(wanted))}
    surplus: list[tuple[str, int]] = []
    for name in sorted(owned):
        keep = share.get(name, 0)
        surplus += [(name, slot) for slot in owned[name][keep:]]
    moves: dict[tuple[str, str], set[int]] = {}
    for name in sorted(wanted):
        missing = share[name] - min(len(owned[name]), share[name])
        for _ in range(missing):
            source, slot = surplus.pop()
            moves.setdefault((source, name), set()).add(slot)
    planned = [
        PlannedMove(operator, KeySet(slots=frozenset(s)), source, destination, strategy)
        for (source, destination), s in sorted(moves.items())
    ]
    homeless: dict[str, set[Key]] = {}
    for key, route in overrides.items():
        if route.instance not in share:
            homeless.setdefault(route.instance, set()).add(key)
    for source in sorted(homeless):
        planned.append(
            PlannedMove(
                operator, KeySet(keys=frozenset(homeless[source])), source, sorted(wanted)[0], strategy
            )
        )
    return planned


def hand_over(
    operator: str,
    slots: Mapping[int, Route],
    overrides: Mapping[Key, Route],
    replacing: Mapping[str, str],
    strategy: str = "live",
) -> list[PlannedMove]:
    """Moves that give everything of an instance to the one in its place, and leave all others alone.

    A slot brings along the overridden keys with the same owner. Overridden keys of other slots form a
    move of their own, which shares no key with the move of the slots.
    """
    planned = []
    for source, destination in sorted(replacing.items()):
        owned = frozenset(slot for slot, route in slots.items() if route.instance == source)
        single = frozenset(
            key
            for key, route in overrides.items()
            if route.instance == source and slot_of(key, len(slots)) not in owned
        )
        for keys in (KeySet(slots=owned), KeySet(keys=single)):
            if keys.slots or keys.keys:
                planned.append(PlannedMove(operator, keys, source, destination, strategy))
    return planned
