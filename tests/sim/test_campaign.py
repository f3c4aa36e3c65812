"""Campaigns: many seeds over several processes, and their summary."""

from __future__ import annotations

import msgspec
import pytest

from tiercel.sim.check.checkers import Violation
from tiercel.sim.explore import campaign
from tiercel.sim.explore.campaign import (
    Summary,
    run_crash_points,
    run_safely,
    run_seeds,
    scenario_of,
    stream,
)
from tiercel.sim.explore.crash_points import (
    CRASH_POINTS,
    enumerate_points,
)
from tiercel.sim.explore.run import Result
from tiercel.sim.scenario.scenario import FAULTS, Options

FAULTY = Options(faults=FAULTS)


def test_the_same_seed_gives_the_same_trace_in_any_number_of_processes() -> None:
    hashes: list[list[str]] = []
    for jobs in (1, 2):
        seen: list[str] = []
        run_seeds(range(6), FAULTY, jobs, lambda result, seen=seen: seen.append(result.trace_hash))  # type: ignore[misc]
        hashes.append(seen)
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 6


def test_runs_without_faults_keep_every_promise() -> None:
    summary = run_seeds(range(10), Options(), 1)
    assert summary.violations == []
    assert summary.faults == 0
    assert summary.moves > 0


def test_takeovers_by_several_successors_keep_every_promise() -> None:
    """Seed 306: a recovery was refused, then carried out by the same request that came again."""
    options = Options(
        faults=FAULTS, sites_max=3, scales=True, recoveries=1.0, suspicions=0.0, round_trips=0.0
    )
    seeds = [*range(30), 132, 306]
    recoveries = [a for seed in seeds for a in scenario_of(seed, options).actions if a.kind == "recover"]
    assert len(recoveries) >= len(seeds)
    assert run_seeds(seeds, options, 1).violations == []


def test_seeds_that_once_failed_pass() -> None:
    """2924, 3286: a move flipped while its shadow was still reading the log."""
    options = Options(faults=FAULTS, sites_max=6, scales=True, suspicions=0.0, round_trips=0.0)
    assert run_seeds([2924, 3286], options, 1).violations == []


def test_summary_line_has_the_documented_form() -> None:
    summary = Summary()
    summary.add(
        Result(7, [Violation("state", "…")], {"done": 2, "undone": 1}, 4, [CRASH_POINTS[0]], [], "", 1.0, 0)
    )
    assert summary.line == f"seeds=1 moves=3 faults=4 crash_points=1/{len(CRASH_POINTS)} violations=1"
    assert summary.failed_seeds == [7]


def test_only_crash_points_of_the_chosen_strategies_are_visited() -> None:
    for seed in range(10):
        actions = scenario_of(seed, Options(strategies=("pause",), faults=("step",))).actions
        assert {a.strategy for a in actions} == {"pause"}


def test_an_error_of_the_simulator_is_a_failure_of_its_run_only() -> None:
    broken = msgspec.structs.replace(scenario_of(0, Options()), kinds={})
    result = run_safely(broken)
    assert [violation.checker for violation in result.violations] == ["simulator"]
    assert "KeyError" in result.violations[0].text


def test_results_come_in_the_order_of_their_tasks() -> None:
    assert list(stream(abs, range(-40, 0), 2)) == list(range(40, 0, -1))


def test_a_campaign_of_crash_points_hits_every_point_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = list(enumerate_points(["pause"]))[::25]
    monkeypatch.setattr(campaign, "enumerate_points", lambda strategies: iter(pairs))
    results: list[Result] = []
    summary = run_crash_points(1, results.append, ["pause"])
    assert summary.seeds == len(results) == len(pairs)
    assert summary.points_hit.issuperset(point for point, _ in pairs)
    assert summary.violations == []
