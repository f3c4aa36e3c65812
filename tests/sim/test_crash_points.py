"""Crash points: the table has every step, and every death happens."""

from __future__ import annotations

import pytest

from tiercel.core.migration.strategies import PRINCIPAL
from tiercel.sim.explore.campaign import (
    run_seed,
)
from tiercel.sim.explore.crash_points import (
    CRASH_POINTS,
    ROLES,
    CrashPoint,
    discover,
    enumerate_points,
    points_of,
)
from tiercel.sim.explore.crash_points_table import STEPS
from tiercel.sim.explore.run import run
from tiercel.sim.scenario.scenario import FAULTS, Options

FAULTY = Options(faults=FAULTS)
# Steps that follow when a source dies for good: no crash point is such a death, `dead-in-moves` draws them.
AFTER_A_DEATH_FOR_GOOD = {"ServedBy", "ServedByNotice"}


@pytest.mark.parametrize("strategy", STEPS)
def test_the_table_of_crash_points_has_every_step_that_moves_take(strategy: str) -> None:
    expected = [point for point in CRASH_POINTS if point.strategy == strategy]
    found = discover([strategy])
    forgotten, gone = sorted(set(found) - set(expected)), sorted(set(expected) - set(found))
    hint = "python -m tiercel.sim.explore.crash_points prints the table as it should be"
    assert not forgotten, f"not in the table: {forgotten}; {hint}"
    assert not gone, f"no longer seen: {gone}; {hint}"
    assert found == expected, f"in another order than discovered; {hint}"


def test_every_strategy_has_crash_points_in_every_role() -> None:
    assert list(STEPS) == sorted(PRINCIPAL), "the orders of `push` take the same steps"
    for strategy, roles in STEPS.items():
        assert tuple(roles) == ROLES, strategy


def test_each_step_has_a_crash_point_before_and_after_it() -> None:
    points = points_of([("live", "source", "Capture")])
    assert [point.after for point in points] == [False, True]
    assert len(set(CRASH_POINTS)) == len(CRASH_POINTS)


def test_enumerated_crash_point_happens_exactly_once() -> None:
    pairs = list(enumerate_points(["live"]))
    assert {point for point, _ in pairs} == {p for p in CRASH_POINTS if p.strategy == "live"}
    for point, scenario in pairs[:: len(pairs) // 8]:
        hit = [CrashPoint(*p) for p in run(scenario).points_hit]
        assert point in hit
        assert [p for p in hit if p.step == point.step and p.role == point.role] == [point]


def test_steps_seen_with_random_faults_are_in_the_table_too() -> None:
    """At one site a router has both roles: then a step may be in the table under the other one."""
    other = {"origin": "target", "target": "origin"}
    known = {point[:3] for point in CRASH_POINTS}
    for seed in range(25):
        for strategy, role, step in run_seed(seed, FAULTY).steps_seen:
            if step in AFTER_A_DEATH_FOR_GOOD:
                continue
            twin = (strategy, other.get(role, role), step)
            assert (strategy, role, step) in known or twin in known, f"seed {seed}"
