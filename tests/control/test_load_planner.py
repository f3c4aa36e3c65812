"""The planner by load: few moves, even load, and an end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from machines_in_memory import key_in
from tiercel.control.load_planner import TOLERANCE, rebalance_by_load, slot_loads
from tiercel.control.plans import PlannedMove
from tiercel.core.model.keys import KeySet
from tiercel.core.model.routing import Route

A, B, C = "op@a#1", "op@a#2", "op@a#3"


def routes(*owners: str) -> dict[int, Route]:
    return {slot: Route(owner, 1) for slot, owner in enumerate(owners)}


def after(slots: dict[int, Route], moves: list[PlannedMove]) -> dict[int, Route]:
    found = dict(slots)
    for move in moves:
        for slot in move.keys.slots:
            assert found[slot].instance == move.source
            found[slot] = Route(move.destination, 2)
    return found


def work(slots: dict[int, Route], rates: dict[int, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for slot, route in slots.items():
        found[route.instance] = found.get(route.instance, 0.0) + rates.get(slot, 0.0)
    return found


def test_one_slot_with_half_of_the_load_is_all_that_moves() -> None:
    slots = routes(*[A] * 8)
    rates = {0: 70.0} | {n: 10.0 for n in range(1, 8)}
    (move,) = rebalance_by_load("op", slots, {}, [A, B], rates)
    assert move.keys == KeySet(slots=frozenset({0}))


def test_a_heavy_slot_that_fits_nowhere_stays_and_the_others_leave_it() -> None:
    slots = routes(A, A, A, B, B, B)
    rates = {
        0: 1_350.0,
        1: 345.0,
        2: 345.0,
        3: 220.0,
        4: 220.0,
        5: 220.0,
    }  # B with 0: as A now
    moves = rebalance_by_load("op", slots, {}, [A, B], rates)
    assert [move.keys for move in moves] == [KeySet(slots=frozenset({1, 2}))]


def test_an_even_load_is_left_alone_however_uneven_the_number_of_slots() -> None:
    slots = routes(A, B, B, B)
    assert rebalance_by_load("op", slots, {}, [A, B], {0: 30.0, 1: 10.0, 2: 10.0, 3: 10.0}) == []


def test_of_two_slots_with_the_same_load_the_smaller_one_moves() -> None:
    rates = {0: 50.0, 1: 50.0}
    (move,) = rebalance_by_load("op", routes(A, A), {}, [A, B], rates, size_bytes={0: 9e6, 1: 1e3})
    assert move.keys == KeySet(slots=frozenset({1}))


def test_an_instance_that_is_not_wanted_loses_everything() -> None:
    foreign = key_in(0)
    moves = rebalance_by_load("op", routes(A, A, B, B), {foreign: Route(B, 2)}, [A], {})
    assert {m.source for m in moves} == {B}
    assert KeySet(slots=frozenset({2, 3})) in [m.keys for m in moves]
    assert KeySet(keys=frozenset({foreign})) in [m.keys for m in moves]


def test_without_a_measured_load_slots_are_spread_by_their_number() -> None:
    moves = rebalance_by_load("op", routes(*[A] * 8), {}, [A, B], {})
    assert sum(len(m.keys.slots) for m in moves) == 4


def test_slots_without_a_measured_load_share_the_rest_of_the_total() -> None:
    assert slot_loads(routes(A, A, A), {0: 80.0}, 100.0) == {0: 80.0, 1: 10.0, 2: 10.0}


def test_a_slow_instance_gets_less() -> None:
    slots, rates = routes(*[A] * 5, *[B] * 5), dict.fromkeys(range(10), 10.0)
    moves = rebalance_by_load("op", slots, {}, [A, B], rates, speeds={A: 250.0, B: 1_000.0})
    assert work(after(slots, moves), rates) == {A: 20.0, B: 80.0}
    assert rebalance_by_load("op", slots, {}, [A, B], rates, speeds={A: 900.0, B: 1_000.0}) == []


@given(
    st.lists(st.tuples(st.sampled_from([A, B, C]), st.floats(0, 1_000)), min_size=1, max_size=24),
    st.sets(st.sampled_from([A, B, C]), min_size=1),
)
def test_a_plan_is_final_and_never_makes_the_busiest_busier(
    slots_and_rates: list[tuple[str, float]], wanted: set[str]
) -> None:
    slots = routes(*[owner for owner, _ in slots_and_rates])
    rates = {slot: rate for slot, (_, rate) in enumerate(slots_and_rates)}
    moves = rebalance_by_load("op", slots, {}, sorted(wanted), rates)
    new = after(slots, moves)
    assert {route.instance for route in new.values()} <= wanted
    assert rebalance_by_load("op", new, {}, sorted(wanted), rates) == [] or not moves_matter(
        new, rates, wanted
    )
    if {route.instance for route in slots.values()} <= wanted:
        assert max(work(new, rates).values()) <= max(work(slots, rates).values()) + 1e-6


def moves_matter(slots: dict[int, Route], rates: dict[int, float], wanted: set[str]) -> bool:
    """Whether the load is uneven beyond the tolerance, and a slot could still relieve the busiest."""
    loads = dict.fromkeys(wanted, 0.0) | work(slots, rates)
    mean = sum(loads.values()) / len(wanted)
    return max(loads.values()) > mean * (1 + TOLERANCE) and len(slots) <= len(wanted)
