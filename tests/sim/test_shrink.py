"""Shrinking: a shorter scenario that breaks the same promise."""

from __future__ import annotations

from tiercel.sim.explore.campaign import (
    scenario_of,
)
from tiercel.sim.explore.crash_points import (
    Sketch,
)
from tiercel.sim.explore.crash_points import scenario_of as small_scenario
from tiercel.sim.explore.mutants import hunt
from tiercel.sim.explore.run import run
from tiercel.sim.explore.shrink import render, shrink
from tiercel.sim.scenario.scenario import FAULTS, Options

PLANTED = Options(faults=FAULTS, mutant="source-forgets-early")


def failing_seed() -> int:
    kill = hunt(PLANTED.mutant, 40)
    assert kill is not None
    return kill.seed


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
