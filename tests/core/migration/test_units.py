"""Units and orders: every unit is sent once, whatever the order, and again when it is requested."""

from __future__ import annotations

import itertools

import pytest

from tiercel.core.errors import InvalidRequest
from tiercel.core.migration.orders import ORDERS, TransferFacts, Waiting
from tiercel.core.migration.strategies import STRATEGIES, ordered
from tiercel.core.migration.units import SUB_GROUPS, UnitQueue, unit_of, units_of
from tiercel.core.model.keys import KeySet
from tiercel.core.model.routing import slot_of

SLOTS = 4
KEYS = [b"k%d" % n for n in range(40)]
ALL = KeySet(slots=frozenset(range(SLOTS)))


def sent(queue: UnitQueue) -> list[tuple[int, list[bytes]]]:
    found = []
    while (unit := queue.first()) is not None:
        keys = list(reversed(queue.left_of(unit)))
        queue.left_of(unit).clear()
        queue.ended(unit)
        found.append((unit, keys))
    return found


def test_the_units_of_a_slot_hold_exactly_the_keys_of_the_slot() -> None:
    for key in KEYS:
        assert unit_of(key, SLOTS) // SUB_GROUPS == slot_of(key, SLOTS)
    assert units_of(KeySet(keys=frozenset(KEYS)), SLOTS) <= units_of(ALL, SLOTS)
    assert len(units_of(ALL, SLOTS)) == SLOTS * SUB_GROUPS


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_sends_every_unit_with_all_of_its_keys_once(order: str) -> None:
    queue = UnitQueue("m1", order, units_of(ALL, SLOTS), KEYS, SLOTS)
    queue.facts.waiting = {unit_of(KEYS[0], SLOTS): Waiting(7, 3)}
    queue.facts.ask([unit_of(KEYS[1], SLOTS)])
    found = sent(queue)
    assert {unit for unit, _ in found} == units_of(ALL, SLOTS)
    assert len(found) == len(units_of(ALL, SLOTS))
    assert sorted(key for _, keys in found for key in keys) == sorted(KEYS)
    assert not queue


def test_a_requested_unit_is_sent_again_and_no_other() -> None:
    queue = UnitQueue("m1", "sorted", units_of(ALL, SLOTS), KEYS, SLOTS)
    first = dict(sent(queue))
    lost = next(unit for unit in first if first[unit])
    queue.request([lost])
    assert sent(queue) == [(lost, first[lost])]


def waiting(rows: dict[int, tuple[int, int]], sizes: dict[int, int]) -> TransferFacts:
    facts = TransferFacts("m1")
    facts.waiting = {unit: Waiting(*found) for unit, found in rows.items()}
    facts.sizes = sizes
    return facts


def first_of(order: str, facts: TransferFacts, units: range = range(4)) -> list[int]:
    return sorted(units, key=lambda unit: ORDERS[order](unit, facts))


def test_orders_look_at_what_waits() -> None:
    facts = waiting({1: (9, 1), 2: (3, 2), 3: (5, 6)}, {0: 1, 1: 1, 2: 8, 3: 3})
    assert first_of("fifo", facts) == [2, 3, 1, 0]
    assert first_of("skew", facts) == [3, 2, 1, 0]
    assert first_of("pam", facts) == [3, 1, 2, 0]
    assert first_of("sorted", facts) == [0, 1, 2, 3]
    facts.ask([2, 1])
    assert first_of("asked", facts) == [2, 1, 0, 3]


def test_random_is_the_same_for_the_same_move_and_another_one_for_another() -> None:
    one, again, other = (
        sorted(range(20), key=lambda unit: ORDERS["random"](unit, facts))
        for facts in (TransferFacts("m1"), TransferFacts("m1"), TransferFacts("m2"))
    )
    assert one == again != other


def total_wait(units: tuple[int, ...], facts: TransferFacts) -> int:
    """The sum over all waiting rows of the state that is sent before their unit has arrived."""
    passed = total = 0
    for unit in units:
        passed += facts.sizes[unit]
        total += passed * (facts.waiting[unit].rows if unit in facts.waiting else 0)
    return total


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_pam_is_as_good_as_the_best_of_all_orders(seed: int) -> None:
    rows = {unit: (unit * 7 % 5, 1 + (seed * 31 + unit * 17) % 9) for unit in range(6)}
    sizes = {unit: 1 + (seed * 13 + unit * 29) % 11 for unit in range(6)}
    facts = waiting(rows, sizes)
    best = min(total_wait(units, facts) for units in itertools.permutations(range(6)))
    assert total_wait(tuple(first_of("pam", facts, range(6))), facts) == best


def test_an_order_belongs_to_push_and_has_a_name() -> None:
    assert ordered("push", "") == ordered("push", "pam") == "push"
    assert STRATEGIES[ordered("push", "skew")].order == "skew"
    with pytest.raises(InvalidRequest, match="unknown order 'alphabetic'; expected one of: pam, fifo"):
        ordered("push", "alphabetic")
    with pytest.raises(InvalidRequest, match="strategy 'live' has no order"):
        ordered("live", "pam")
