"""Mutants: every planted bug is described, and found by a seed that passes without it."""

from __future__ import annotations

import pytest

from tiercel.core.errors import InvalidRequest
from tiercel.sim.explore import (
    bundle_mutants,
    instance_mutants,
    outage_mutants,
    request_mutants,
    router_mutants,
    site_mutants,
    state_mutants,
)
from tiercel.sim.explore.campaign import (
    run_seed,
)
from tiercel.sim.explore.mutants import DIRECTED, MUTANTS, hunt
from tiercel.sim.scenario.scenario import FAULTS, Options

FAULTY = Options(faults=FAULTS)
PLANTED = Options(faults=FAULTS, mutant="source-forgets-early")


def test_every_planted_bug_is_described_and_every_description_is_planted() -> None:
    tables = (
        *(router_mutants, instance_mutants, outage_mutants, request_mutants, state_mutants),
        *(site_mutants, bundle_mutants),
    )
    planted = {name for table in tables for name in table.PATCHES}
    assert planted == set(MUTANTS) | set(DIRECTED)


def test_a_mutant_is_killed_by_a_seed_that_passes_without_it() -> None:
    kill = hunt(PLANTED.mutant, 40)
    assert kill is not None
    assert run_seed(kill.seed, PLANTED).violations[0].checker == kill.checker
    assert run_seed(kill.seed, FAULTY).violations == []


def test_an_unknown_mutant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown mutant 'nobody'.*timers-not-moved.*--list mutants"):
        hunt("nobody")
