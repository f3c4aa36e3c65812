"""The plan of a chaos run."""

from __future__ import annotations

from collections import Counter

import pytest

from chaos_plans import first
from tiercel.chaos.plan import DECK, Kind, chosen


def test_the_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    assert first(50) == first(50)
    assert first(50) != first(50, seed=8)


def test_every_kind_comes_once_before_any_comes_twice() -> None:
    for seed in range(20):
        assert sorted(f.kind for f in first(len(Kind), seed, durability="replica")) == sorted(Kind)


@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_faults_have_five_of_each_kind_and_thirty_that_are_meant_for_moves(seed: int) -> None:
    for durability in ("backup", "replica"):
        faults = first(100, seed, durability=durability)
        assert min(Counter(fault.kind for fault in faults).values()) >= 5
        assert sum(fault.in_move for fault in faults) >= 30
        assert any(fault.change and fault.change.what == "scale" for fault in faults)
        assert all(fault.change is not None for fault in faults if fault.in_move)


def test_every_kind_has_its_share_of_the_plan() -> None:
    assert set(DECK) == set(Kind)


def test_draw_chooses_each_candidate_with_equal_probability() -> None:
    assert [chosen("abc", draw / 6) for draw in range(6)] == list("aabbcc")
