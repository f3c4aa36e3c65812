"""Promises of campaigns: crash points, seeds, mutants, shrinking, and the large scenario's arithmetic."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

import tiercel.core
from tiercel.core.faults import InvalidRequest
from tiercel.core.strategies import STRATEGIES
from tiercel.sim import campaign, deployment, large
from tiercel.sim.campaign import Summary, run_points, run_safely, run_seed, run_seeds, scenario_of, stream
from tiercel.sim.checkers import Violation
from tiercel.sim.crash_points import STEPS
from tiercel.sim.mutants import DIRECTED, MUTANTS, hunt
from tiercel.sim.points import (
    CRASH_POINTS,
    ROLES,
    CrashPoint,
    Sketch,
    discover,
    enumerate_points,
    points_of,
)
from tiercel.sim.points import scenario_of as small_scenario
from tiercel.sim.run import Result, run
from tiercel.sim.scenario import FAULTS, Options
from tiercel.sim.shrink import render, shrink

FAULTY = Options(faults=FAULTS)
PLANTED = Options(faults=FAULTS, mutant="source-forgets-early")


def failing_seed() -> int:
    kill = hunt(PLANTED.mutant, 40)
    assert kill is not None
    return kill.seed


# -- crash points --------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STEPS)
def test_the_table_of_crash_points_has_every_step_that_moves_take(strategy: str) -> None:
    expected = [point for point in CRASH_POINTS if point.strategy == strategy]
    found = discover([strategy])
    forgotten, gone = sorted(set(found) - set(expected)), sorted(set(expected) - set(found))
    hint = "python -m tiercel.sim.points prints the table as it should be"
    assert not forgotten, f"not in the table: {forgotten}; {hint}"
    assert not gone, f"no longer seen: {gone}; {hint}"
    assert found == expected


def test_every_strategy_has_crash_points_in_every_role() -> None:
    assert list(STEPS) == sorted(STRATEGIES)
    for strategy, roles in STEPS.items():
        assert tuple(roles) == ROLES, strategy


def test_each_step_is_two_points() -> None:
    points = points_of([("live", "source", "Capture")])
    assert [point.after for point in points] == [False, True]
    assert len(set(CRASH_POINTS)) == len(CRASH_POINTS)


def test_the_death_of_an_enumerated_point_happens_and_is_the_only_one_there() -> None:
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
            twin = (strategy, other.get(role, role), step)
            assert (strategy, role, step) in known or twin in known, f"seed {seed}"


# -- seeds ---------------------------------------------------------------------------------------------


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


def test_instances_that_are_succeeded_by_several_keep_every_promise() -> None:
    """Seed 306: a recovery was refused, then carried out by the same request that came again."""
    options = Options(
        faults=FAULTS, sites_max=3, scales=True, recoveries=1.0, suspicions=0.0, round_trips=0.0
    )
    seeds = [*range(30), 132, 306]
    recoveries = [a for seed in seeds for a in scenario_of(seed, options).actions if a.kind == "recover"]
    assert len(recoveries) >= len(seeds)
    assert run_seeds(seeds, options, 1).violations == []


def test_seeds_that_broke_a_promise_once_keep_every_one() -> None:
    """2924, 3286: a move flipped while its shadow was still reading the log."""
    options = Options(faults=FAULTS, sites_max=6, scales=True, suspicions=0.0, round_trips=0.0)
    assert run_seeds([2924, 3286], options, 1).violations == []


def test_the_summary_line_has_its_one_form() -> None:
    summary = Summary()
    summary.add(
        Result(7, [Violation("state", "…")], {"done": 2, "undone": 1}, 4, [CRASH_POINTS[0]], [], "", 1.0, 0)
    )
    assert summary.line == f"seeds=1 moves=3 faults=4 crash_points=1/{len(CRASH_POINTS)} violations=1"
    assert summary.failed_seeds == [7]


def test_only_the_crash_points_of_the_strategies_asked_for_are_visited() -> None:
    for seed in range(10):
        actions = scenario_of(seed, Options(strategies=("pause",), faults=("step",))).actions
        assert {a.strategy for a in actions} == {"pause"}


def test_an_error_of_the_simulator_is_a_failure_of_its_run_only() -> None:
    broken = msgspec.structs.replace(scenario_of(0, Options()), kinds={})
    result = run_safely(broken)
    assert [violation.checker for violation in result.violations] == ["simulator"]
    assert "KeyError" in result.violations[0].text


def test_outcomes_come_in_the_order_of_their_tasks() -> None:
    assert list(stream(abs, range(-40, 0), 2)) == list(range(40, 0, -1))


def test_a_campaign_of_crash_points_hits_every_point_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = list(enumerate_points(["pause"]))[::25]
    monkeypatch.setattr(campaign, "enumerate_points", lambda strategies: iter(pairs))
    heard: list[Result] = []
    summary = run_points(1, heard.append, ["pause"])
    assert summary.seeds == len(heard) == len(pairs)
    assert summary.points_hit.issuperset(point for point, _ in pairs)
    assert summary.violations == []


# -- mutants -------------------------------------------------------------------------------------------


def test_every_planted_bug_is_described_and_every_description_is_planted() -> None:
    files = sorted(Path(tiercel.core.__file__).parent.rglob("*.py"))
    files.append(Path(deployment.__file__))  # what drivers can do wrong
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    planted = set(re.findall(r'\bmutant\s*[!=]=\s*"([^"]+)"', text))
    planted |= {
        name
        for names in re.findall(r"mutant in \(([^)]*)\)", text)
        for name in re.findall(r'"([^"]+)"', names)
    }
    assert planted == set(MUTANTS) | set(DIRECTED)


def test_a_mutant_is_killed_by_a_seed_that_passes_without_it() -> None:
    kill = hunt(PLANTED.mutant, 40)
    assert kill is not None
    assert run_seed(kill.seed, PLANTED).violations[0].checker == kill.checker
    assert run_seed(kill.seed, FAULTY).violations == []


def test_an_unknown_mutant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown mutant 'nobody'.*timers-not-moved.*--list mutants"):
        hunt("nobody")


# -- shrinking -----------------------------------------------------------------------------------------


def test_a_shrunk_scenario_is_shorter_and_breaks_the_same_promise() -> None:
    scenario = scenario_of(failing_seed(), PLANTED)
    short = shrink(scenario, runs_max=60)
    assert short is not None
    assert short.runs <= 60
    assert len(short.scenario.actions) < len(scenario.actions)
    assert short.checker == run(scenario).violations[0].checker
    assert short.checker in [violation.checker for violation in run(short.scenario).violations]


def test_a_scenario_that_passes_is_not_shrunk() -> None:
    assert shrink(small_scenario(Sketch("plain", "live", 1))) is None


def test_a_scenario_reads_as_a_script() -> None:
    text = render(small_scenario(Sketch("plain", "live", 2)))
    assert "site edge1 below cloud" in text
    assert "130.0 ms  move slots 0 1 of alpha to alpha@edge1#1 (live)" in text


# -- the large scenario --------------------------------------------------------------------------------


def test_the_large_scenario_is_as_large_as_it_says() -> None:
    scenario = large.scenario()
    moves = [action.strategy for action in scenario.actions]
    assert len(scenario.topology.sites) == 50
    assert len(moves) == 200
    assert set(moves) == {"live", "pause", "restart"}
    assert min(scenario.latency_ms.values()) >= 1.0
    assert max(scenario.latency_ms.values()) <= 30.0
    assert len({row[0] for t in scenario.traffic for frame in t.frames for row in frame}) == 20_000


def test_a_planted_stop_shows_as_the_stoppage_of_its_key() -> None:
    rows = [(due, 7.0 if due != 1_050 else 57.0) for due in range(800, 1_800, 10)]
    assert large.stoppage_ms(rows, 1_000.0, 1_100.0) == 50.0


def test_a_longer_way_after_a_move_is_not_a_stop() -> None:
    rows = [(due, 7.0 if due < 1_050 else 22.0) for due in range(800, 1_800, 10)]
    assert large.stoppage_ms(rows, 1_000.0, 1_100.0) == 0.0


def test_a_quantile_is_a_value_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [large.quantile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert large.quantile([], 0.5) is None
