"""Rare paths: a fixed set of seeds walks each of them, and one that is missed is reported."""

from __future__ import annotations

from collections import Counter

from tiercel.sim.explore.campaign import run_seeds
from tiercel.sim.explore.walks import WALKS, missed
from tiercel.sim.scenario.features import DRAWN_FEATURES
from tiercel.sim.scenario.scenario import FAULTS, Options

WALKED = Options(faults=FAULTS, sites_max=6, scales=True, features=DRAWN_FEATURES, walks=True)
# A few of those of `tiercel sim --seeds 300 --walks`; most paths are walked by three of them.
SEEDS = (3, 5, 23, 36, 38, 40, 50, 62, 63, 65, 73, 85, 105, 116, 141, 166, 174, 195, 211, 272, 287, 299)


def test_a_fixed_set_of_seeds_walks_every_rare_path() -> None:
    summary = run_seeds(SEEDS, WALKED, 1)
    assert summary.violations == []
    assert missed(summary.walked) == []


def test_a_path_that_nobody_walks_is_missed_unless_it_is_too_rare_for_seeds() -> None:
    every = Counter(WALKS)
    assert missed(every) == []
    for name, walk in WALKS.items():
        fewer = every.copy()
        del fewer[name]
        assert missed(fewer) == ([name] if walk.by_seeds else [])


def test_counting_does_not_change_a_run() -> None:
    hashes: list[list[str]] = []
    for walks in (False, True):
        seen: list[str] = []
        options = Options(faults=FAULTS, walks=walks)
        run_seeds(range(4), options, 1, lambda result, seen=seen: seen.append(result.trace_hash))  # type: ignore[misc]
        hashes.append(seen)
    assert hashes[0] == hashes[1]
