"""Faults of plans and scale requests: each has a test, and a refused request changes nothing."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import msgspec
import pytest

from machines_in_memory import SmallDeployment, key_in, topology
from tiercel.cli.sim import LISTS
from tiercel.control.controller import ScaleRequest
from tiercel.control.plans import Plan, PlanFault, PlannedMove, check_limits, check_plan, faults_of
from tiercel.core.errors import InvalidRequest
from tiercel.core.model.keys import KeySet

A, B = "op@a#0", "op@b#0"
TOPOLOGY = topology()
GOOD = PlannedMove("op", KeySet(slots=frozenset({0})), A, B)


def plan(*moves: PlannedMove) -> Plan:
    return Plan(moves or (GOOD,), "a test")


def but(**changes: Any) -> Plan:
    return plan(msgspec.structs.replace(GOOD, **changes))


BAD: list[tuple[PlanFault, Plan, str, str]] = [
    (PlanFault.UNKNOWN_OPERATOR, but(operator="nobody"), "unknown operator 'nobody'", "op"),
    (PlanFault.UNKNOWN_SITE, but(destination="op@mars#0"), "unknown site 'mars'", "a, b"),
    (PlanFault.UNKNOWN_STRATEGY, but(strategy="teleport"), "'teleport'", "bins, fetch, live, meces, pause"),
    (PlanFault.WRONG_OPERATOR, but(destination="x@b#0"), "'x@b#0' is not an instance of 'op'", "op@site#0"),
    (PlanFault.TO_ITSELF, but(destination=A), f"move from '{A}' to itself", "two different instances"),
    (PlanFault.KEYS, but(keys=KeySet()), "the key set is empty", "at least one slot or one key"),
    (PlanFault.KEYS, but(keys=KeySet(slots=frozenset({4}))), "slot 4 is out of range for op", "0 to 3"),
    (PlanFault.KEYS, but(keys=KeySet(slots=frozenset({-1}))), "slot -1 is out of range for op", "0 to 3"),
    (
        PlanFault.KEYS,
        but(keys=KeySet(frozenset({0}), frozenset({b"k"}))),
        "the key set names slots and keys",
        "one kind",
    ),
    (
        PlanFault.OVERLAPPING,
        plan(GOOD, msgspec.structs.replace(GOOD, keys=KeySet(keys=frozenset({key_in(0)})))),
        "moves 0 and 1 share keys of 'op'",
        "disjoint key sets",
    ),
]


def test_a_valid_plan_has_no_faults() -> None:
    assert faults_of(plan(), TOPOLOGY, running=[A, B]) == []
    check_plan(plan(), TOPOLOGY)


@pytest.mark.parametrize(("fault", "bad", "what", "expected"), BAD)
def test_a_fault_names_the_value_and_what_is_allowed(
    fault: PlanFault, bad: Plan, what: str, expected: str
) -> None:
    found = faults_of(bad, TOPOLOGY)
    assert [f for f, _ in found] == [fault]
    assert what in found[0][1].what
    assert expected in found[0][1].expected


def test_a_destination_that_is_not_running_is_a_fault() -> None:
    ((fault, error),) = faults_of(plan(), TOPOLOGY, running=[A])
    assert fault is PlanFault.DEAD_TARGET
    assert f"'{B}'" in error.what
    assert A in error.expected


def test_a_strategy_that_runs_user_code_twice_needs_it_to_be_deterministic() -> None:
    erratic = topology(deterministic=False)
    ((fault, error),) = faults_of(plan(), erratic)
    assert fault is PlanFault.NOT_DETERMINISTIC
    assert "'live'" in error.what
    assert faults_of(but(strategy="pause"), erratic) == []


def test_every_fault_has_a_test() -> None:
    assert {f for f, *_ in BAD} | {PlanFault.DEAD_TARGET, PlanFault.NOT_DETERMINISTIC} == set(PlanFault)


def test_all_faults_of_a_plan_are_found() -> None:
    found = faults_of(but(strategy="teleport", destination=A, keys=KeySet()), TOPOLOGY)
    assert {f for f, _ in found} == {PlanFault.UNKNOWN_STRATEGY, PlanFault.TO_ITSELF, PlanFault.KEYS}


# -- at the controller ---------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "bad", "what", "expected"), BAD)
@pytest.mark.parametrize("place", ["alone", "behind a good one"])
def test_a_refused_plan_changes_nothing(
    fault: PlanFault, bad: Plan, what: str, expected: str, place: str
) -> None:
    driver = SmallDeployment().start("a", "b", A, B, "controller")
    controller = driver.machines["controller"]
    before = copy.deepcopy((controller.moves, controller.next_id, controller.journal.written))
    if place == "behind a good one":
        good = msgspec.structs.replace(GOOD, keys=KeySet(slots=frozenset({1})))
        bad = Plan((good, *bad.moves), "a test")
    with pytest.raises(InvalidRequest, match=re.escape(expected)):
        controller.request(bad, 0.0)
    assert (controller.moves, controller.next_id, controller.journal.written) == before
    assert driver.disks["controller"] == {}


@pytest.mark.parametrize(
    ("scaling", "what"),
    [
        (ScaleRequest("nobody", (A,)), "unknown operator 'nobody'"),
        (ScaleRequest("op", ()), "no instances were named"),
        (ScaleRequest("op", ("x@a#0",)), "'x@a#0' is not an instance of 'op'"),
        (ScaleRequest("op", ("op@mars#0",)), "unknown site 'mars'"),
        (ScaleRequest("op", (A,), "teleport"), "unknown strategy 'teleport'"),
    ],
)
def test_a_refused_scale_request_changes_nothing(scaling: ScaleRequest, what: str) -> None:
    driver = SmallDeployment().start("a", "b", A, B, "controller")
    controller = driver.machines["controller"]
    with pytest.raises(InvalidRequest, match=re.escape(what)):
        controller.scale(scaling, 0.0)
    assert controller.scales == {}
    assert controller.journal.written == 0


@pytest.mark.parametrize("numbers", [{"deadline_ms": -1.0}, {"deadline_ms": math.nan}, {"retries": -1}])
def test_an_impossible_deadline_or_retry_count_is_refused(numbers: dict[str, Any]) -> None:
    driver = SmallDeployment().start("a", "b", A, B, "controller")
    with pytest.raises(InvalidRequest):
        driver.machines["controller"].request(plan(), 0.0, **numbers)


LISTED = [
    b for b in BAD if b[0] in (PlanFault.UNKNOWN_OPERATOR, PlanFault.UNKNOWN_SITE, PlanFault.UNKNOWN_STRATEGY)
]


@pytest.mark.parametrize(("fault", "bad", "what", "expected"), LISTED)
def test_an_unknown_name_says_which_command_lists_the_known_ones(
    fault: PlanFault, bad: Plan, what: str, expected: str
) -> None:
    ((_, error),) = faults_of(bad, TOPOLOGY)
    assert error.hint.startswith("list them with: tiercel ")


@pytest.mark.parametrize(("fault", "bad", "what", "expected"), LISTED)
def test_the_command_that_lists_the_known_names_exists(
    fault: PlanFault, bad: Plan, what: str, expected: str
) -> None:
    ((_, error),) = faults_of(bad, TOPOLOGY)
    assert error.hint.rpartition(" ")[2] in LISTS


@pytest.mark.parametrize("value", [0, -1, 2e9, math.nan])
def test_an_impossible_deadline_is_refused_by_name(value: float) -> None:
    check_limits(5.0, 0)
    with pytest.raises(InvalidRequest, match=r"deadline_ms = .*; expected a number above 0"):
        check_limits(value, 0)
