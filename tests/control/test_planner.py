"""The planner: which moves spread a load evenly or replace an instance."""

from __future__ import annotations

from machines_in_memory import key_in, topology
from tiercel.control.planner import hand_over, rebalance, split_move
from tiercel.control.plans import Plan, check_plan
from tiercel.core.model.keys import KeySet
from tiercel.core.model.routing import Route

A, B = "op@a#0", "op@b#0"


TOPOLOGY = topology()


def slots(*owners: str) -> dict[int, Route]:
    return {slot: Route(owner, 1) for slot, owner in enumerate(owners)}


def test_an_even_load_needs_no_moves() -> None:
    assert rebalance("op", slots(A, A, B, B), {}, [A, B]) == []


def test_a_new_instance_gets_its_share_and_nothing_else_moves() -> None:
    (move,) = rebalance("op", slots(A, A, A, A), {}, [A, B])
    assert (move.source, move.destination) == (A, B)
    assert move.keys == KeySet(slots=frozenset({2, 3}))


def test_an_instance_left_out_of_the_plan_loses_its_slots_and_single_keys() -> None:
    moves = rebalance("op", slots(A, A, B, B), {b"k": Route(B, 2)}, [A], "pause")
    assert {m.source for m in moves} == {B}
    assert [m.keys for m in moves] == [KeySet(slots=frozenset({2, 3})), KeySet(keys=frozenset({b"k"}))]
    assert {m.strategy for m in moves} == {"pause"}


def test_a_replacement_gets_all_that_the_replaced_instance_owns() -> None:
    along, foreign = key_in(0), key_in(2)  # one in its owner's slot, one from a slot of another instance
    overrides = {along: Route(A, 2), foreign: Route(A, 2), key_in(3): Route(B, 2)}
    moves = hand_over("op", slots(A, A, B, B), overrides, {A: "op@a#7"}, "pause")
    assert [m.keys for m in moves] == [KeySet(slots=frozenset({0, 1})), KeySet(keys=frozenset({foreign}))]
    assert {(m.source, m.destination, m.strategy) for m in moves} == {(A, "op@a#7", "pause")}
    check_plan(Plan(tuple(moves), "they share no key"), TOPOLOGY)
    assert hand_over("op", slots(B, B, B, B), {}, {A: "op@a#7"}) == []


def test_a_move_of_slots_is_split_by_the_number_of_their_keys() -> None:
    slots = KeySet(slots=frozenset(range(8)))
    assert split_move(slots, 64, 0.0) == [slots], "nothing is known of its keys: it has none"
    assert [sorted(p.slots) for p in split_move(slots, 64, 20.0)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [sorted(p.slots) for p in split_move(slots, 64, 1e6)] == [[n] for n in range(8)]
