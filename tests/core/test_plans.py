"""What can be wrong with a plan or a setting: each fault has its test, and a bad one changes nothing."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import msgspec
import pytest

from playing import Stage, key_in, topology
from tiercel.cli_sim import LISTS
from tiercel.control.controller import Scale
from tiercel.control.planner import hand_over, rebalance
from tiercel.control.plans import Fault, Plan, WantedMove, check_limits, check_plan, faults_of
from tiercel.core.faults import InvalidRequest
from tiercel.core.records import KeySet, Route
from tiercel.core.settings import Settings

A, B = "op@a#0", "op@b#0"
TOPOLOGY = topology()
GOOD = WantedMove("op", KeySet(slots=frozenset({0})), A, B)


def plan(*moves: WantedMove) -> Plan:
    return Plan(moves or (GOOD,), "a test")


def but(**changes: Any) -> Plan:
    return plan(msgspec.structs.replace(GOOD, **changes))


BAD: list[tuple[Fault, Plan, str, str]] = [
    (Fault.UNKNOWN_OPERATOR, but(operator="nobody"), "unknown operator 'nobody'", "op"),
    (Fault.UNKNOWN_SITE, but(destination="op@mars#0"), "unknown site 'mars'", "a, b"),
    (Fault.UNKNOWN_STRATEGY, but(strategy="teleport"), "'teleport'", "live, pause, restart"),
    (Fault.WRONG_OPERATOR, but(destination="x@b#0"), "'x@b#0' is not an instance of 'op'", "op@site#0"),
    (Fault.TO_ITSELF, but(destination=A), f"move from '{A}' to itself", "two different instances"),
    (Fault.KEYS, but(keys=KeySet()), "the key set is empty", "at least one slot or one key"),
    (Fault.KEYS, but(keys=KeySet(slots=frozenset({4}))), "slot 4 is out of range for op", "0 to 3"),
    (Fault.KEYS, but(keys=KeySet(slots=frozenset({-1}))), "slot -1 is out of range for op", "0 to 3"),
    (
        Fault.KEYS,
        but(keys=KeySet(frozenset({0}), frozenset({b"k"}))),
        "the key set names slots and keys",
        "one kind",
    ),
    (
        Fault.OVERLAPPING,
        plan(GOOD, msgspec.structs.replace(GOOD, keys=KeySet(keys=frozenset({key_in(0)})))),
        "moves 0 and 1 share keys of 'op'",
        "disjoint key sets",
    ),
]


def test_a_plan_that_can_be_carried_out_has_no_faults() -> None:
    assert faults_of(plan(), TOPOLOGY, running=[A, B]) == []
    check_plan(plan(), TOPOLOGY)


@pytest.mark.parametrize(("fault", "bad", "what", "expected"), BAD)
def test_a_fault_names_the_value_and_what_is_allowed(
    fault: Fault, bad: Plan, what: str, expected: str
) -> None:
    found = faults_of(bad, TOPOLOGY)
    assert [f for f, _ in found] == [fault]
    assert what in found[0][1].what
    assert expected in found[0][1].expected


def test_a_destination_that_is_not_running_is_a_fault() -> None:
    ((fault, error),) = faults_of(plan(), TOPOLOGY, running=[A])
    assert fault is Fault.DEAD_TARGET
    assert f"'{B}'" in error.what
    assert A in error.expected


def test_a_strategy_that_runs_user_code_twice_needs_it_to_be_deterministic() -> None:
    erratic = topology(deterministic=False)
    ((fault, error),) = faults_of(plan(), erratic)
    assert fault is Fault.NOT_DETERMINISTIC
    assert "'live'" in error.what
    assert faults_of(but(strategy="pause"), erratic) == []


def test_every_fault_has_a_test() -> None:
    assert {f for f, *_ in BAD} | {Fault.DEAD_TARGET, Fault.NOT_DETERMINISTIC} == set(Fault)


def test_all_faults_of_a_plan_are_found() -> None:
    found = faults_of(but(strategy="teleport", destination=A, keys=KeySet()), TOPOLOGY)
    assert {f for f, _ in found} == {Fault.UNKNOWN_STRATEGY, Fault.TO_ITSELF, Fault.KEYS}


# -- at the controller ---------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "bad", "what", "expected"), BAD)
@pytest.mark.parametrize("place", ["alone", "behind a good one"])
def test_a_bad_plan_changes_nothing(fault: Fault, bad: Plan, what: str, expected: str, place: str) -> None:
    stage = Stage().start("a", "b", A, B, "controller")
    controller = stage.machines["controller"]
    before = copy.deepcopy((controller.moves, controller.next_id, controller.journal.written))
    if place == "behind a good one":
        good = msgspec.structs.replace(GOOD, keys=KeySet(slots=frozenset({1})))
        bad = Plan((good, *bad.moves), "a test")
    with pytest.raises(InvalidRequest, match=re.escape(expected)):
        controller.request(bad, 0.0)
    assert (controller.moves, controller.next_id, controller.journal.written) == before
    assert stage.disks["controller"] == {}


@pytest.mark.parametrize(
    ("wish", "what"),
    [
        (Scale("nobody", (A,)), "unknown operator 'nobody'"),
        (Scale("op", ()), "no instances were named"),
        (Scale("op", ("x@a#0",)), "'x@a#0' is not an instance of 'op'"),
        (Scale("op", ("op@mars#0",)), "unknown site 'mars'"),
        (Scale("op", (A,), "teleport"), "unknown strategy 'teleport'"),
    ],
)
def test_a_bad_wish_changes_nothing(wish: Scale, what: str) -> None:
    stage = Stage().start("a", "b", A, B, "controller")
    controller = stage.machines["controller"]
    with pytest.raises(InvalidRequest, match=re.escape(what)):
        controller.scale(wish, 0.0)
    assert controller.scales == {}
    assert controller.journal.written == 0


@pytest.mark.parametrize("numbers", [{"deadline_ms": -1.0}, {"deadline_ms": math.nan}, {"retries": -1}])
def test_an_absurd_deadline_is_refused(numbers: dict[str, Any]) -> None:
    stage = Stage().start("a", "b", A, B, "controller")
    with pytest.raises(InvalidRequest):
        stage.machines["controller"].request(plan(), 0.0, **numbers)


LISTED = [b for b in BAD if b[0] in (Fault.UNKNOWN_OPERATOR, Fault.UNKNOWN_SITE, Fault.UNKNOWN_STRATEGY)]


@pytest.mark.parametrize(("fault", "bad", "what", "expected"), LISTED)
def test_an_unknown_name_says_which_command_lists_the_known_ones(
    fault: Fault, bad: Plan, what: str, expected: str
) -> None:
    ((_, error),) = faults_of(bad, TOPOLOGY)
    assert error.hint.startswith("list them with: tiercel ")


@pytest.mark.parametrize(("fault", "bad", "what", "expected"), LISTED)
def test_the_command_that_lists_the_known_names_exists(
    fault: Fault, bad: Plan, what: str, expected: str
) -> None:
    ((_, error),) = faults_of(bad, TOPOLOGY)
    assert error.hint.rpartition(" ")[2] in LISTS


# -- settings ----------------------------------------------------------------------------------

NUMBERS = [name for name in Settings.__struct_fields__ if name not in ("mutant", "memory_bytes_max")]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [0, -1, -0.5, 2e9, math.inf, math.nan])
def test_a_setting_that_could_never_work_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Settings(**{name: value}).validate()
    assert refusal.value.what == f"setting {name} = {value!r}"
    assert refusal.value.expected == "expected a number above 0 and at most 1e9"
    assert refusal.value.hint


@pytest.mark.parametrize("value", [-1, 2e15, math.inf, math.nan, True])
def test_a_memory_limit_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Settings(memory_bytes_max=value).validate()  # type: ignore[arg-type]
    assert refusal.value.expected == "expected 0 for no limit, or bytes, at most 1e15"


def test_a_setting_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        Settings(retry_ms="soon").validate()  # type: ignore[arg-type]


def test_the_defaults_are_fine() -> None:
    assert Settings().validate() == Settings()


@pytest.mark.parametrize("value", [0, -1, 2e9, math.nan])
def test_an_absurd_number_of_a_wish_is_refused_by_name(value: float) -> None:
    check_limits(5.0, 0)
    with pytest.raises(InvalidRequest, match=r"deadline_ms = .*; expected a number above 0"):
        check_limits(value, 0)


# -- the planner ---------------------------------------------------------------------------------


def slots(*owners: str) -> dict[int, Route]:
    return {slot: Route(owner, 1) for slot, owner in enumerate(owners)}


def test_an_even_load_needs_no_moves() -> None:
    assert rebalance("op", slots(A, A, B, B), {}, [A, B]) == []


def test_a_newcomer_gets_its_share_and_nothing_else_moves() -> None:
    (move,) = rebalance("op", slots(A, A, A, A), {}, [A, B])
    assert (move.source, move.destination) == (A, B)
    assert move.keys == KeySet(slots=frozenset({2, 3}))


def test_one_that_is_not_wanted_is_left_with_nothing_also_no_single_keys() -> None:
    moves = rebalance("op", slots(A, A, B, B), {b"k": Route(B, 2)}, [A], "pause")
    assert {m.source for m in moves} == {B}
    assert [m.keys for m in moves] == [KeySet(slots=frozenset({2, 3})), KeySet(keys=frozenset({b"k"}))]
    assert {m.strategy for m in moves} == {"pause"}


def test_one_in_place_of_another_gets_all_that_it_owns_and_others_keep_theirs() -> None:
    along, foreign = key_in(0), key_in(2)  # one lives with its slot, one came from a slot of another
    overrides = {along: Route(A, 2), foreign: Route(A, 2), key_in(3): Route(B, 2)}
    moves = hand_over("op", slots(A, A, B, B), overrides, {A: "op@a#7"}, "pause")
    assert [m.keys for m in moves] == [KeySet(slots=frozenset({0, 1})), KeySet(keys=frozenset({foreign}))]
    assert {(m.source, m.destination, m.strategy) for m in moves} == {(A, "op@a#7", "pause")}
    check_plan(Plan(tuple(moves), "they share no key"), TOPOLOGY)
    assert hand_over("op", slots(B, B, B, B), {}, {A: "op@a#7"}) == []
