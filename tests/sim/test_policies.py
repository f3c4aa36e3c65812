"""Policies on made-up loads: no flapping, few late seconds, not many more instances than an oracle needs."""

from __future__ import annotations

from typing import Any

import pytest

from tiercel.control.proposals import Outcome, Resize
from tiercel.control.view import View
from tiercel.core.errors import InvalidRequest
from tiercel.sim.policies.traces import TRACES, LoadSecond, turns
from tiercel.sim.policies.trial import run_trial


@pytest.mark.parametrize("policy", ["busy", "rate"])
@pytest.mark.parametrize("trace", sorted(TRACES))
def test_a_policy_changes_its_direction_at_most_once_for_each_change_of_the_load(
    trace: str, policy: str
) -> None:
    for seed in (1, 2, 3):
        result, _ = run_trial(trace, policy, seed=seed)
        assert not result.flaps, result


@pytest.mark.parametrize("trace", sorted(TRACES))
def test_the_rate_policy_is_seldom_late_and_uses_at_most_twice_the_instances_of_an_oracle(trace: str) -> None:
    result, _ = run_trial(trace, "rate")
    assert result.late_s <= 0.06 * result.seconds, result
    assert result.instance_seconds <= 2.1 * result.oracle_instance_seconds, result


def test_without_any_policy_the_flash_crowd_is_late_for_minutes() -> None:
    idle, _ = run_trial("flash-crowd", "none", decide=lambda view, memory: ([], memory))
    scaled, _ = run_trial("flash-crowd", "rate")
    assert idle.late_s > 5 * scaled.late_s
    assert idle.changes == 0


def test_a_policy_that_flaps_is_noticed() -> None:
    def nervous(view: View, memory: Any) -> Any:
        count = len(view.operators["op"].instances)
        return [Resize("op", "cloud", 3 if count == 1 else 1, "why not")], memory

    from tiercel.control.limits import Limits

    hasty = Limits(cool_down_s=0, scale_in_after_s=1, changes_per_hour_max=1_000)
    result, history = run_trial("noise", "nervous", decide=nervous, limits=hasty)
    assert result.flaps
    assert sum(d.outcome is Outcome.CARRIED_OUT for d in history) > 10


def test_changes_of_a_load_are_counted_and_noise_is_none() -> None:
    expected = {"ramp": 1, "noise": 0, "square": 6, "drifting-skew": 4, "slow-instance": 2}
    assert {name: turns(TRACES[name](1)) for name in expected} == expected
    assert turns(tuple(LoadSecond(100.0) for _ in range(100))) == 0


def test_an_unknown_trace_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="unknown trace 'sawtooth'"):
        run_trial("sawtooth", "rate")
