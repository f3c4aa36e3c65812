"""Policies: what they propose for a made-up view, and why. No JVM, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from machines_in_memory import key_in
from tiercel.control.policies.named import POLICIES, make_policy
from tiercel.control.policies.policy import Policy
from tiercel.control.proposals import MoveLoad, Nothing, Proposal, Replace, Resize, Spread
from tiercel.control.view import EntryLoad, HotKey, InstanceView, LinkView, OperatorView, SiteView, View
from tiercel.core.errors import InvalidRequest
from tiercel.core.model.keys import KeySet

A, B = "op@cloud#1", "op@cloud#2"


def instance(name: str = A, work: float = 0.0, rate: float = 0.0, **more: Any) -> InstanceView:
    return InstanceView(name, **{"busy": work, "rate": rate, "arrivals": rate, **more})


def view(*instances: InstanceView, at_s: float = 0.0, **more: Any) -> View:
    return View(at_s, {"op": OperatorView("op", instances, **more)})


def last(policy: Policy, views: Sequence[View]) -> Proposal:
    """The first proposal for the last of several views."""
    memory: Any = None
    proposals: Sequence[Proposal] = ()
    for each in views:
        proposals, memory = policy.decide(each, memory)
    return proposals[0]


# -- busy ----------------------------------------------------------------------------------------------


def test_busy_adds_an_instance_after_two_reports_above_its_threshold() -> None:
    policy = make_policy("busy", "op")
    hot, cool = view(instance(work=0.9, rate=100)), view(instance(work=0.3, rate=30))
    assert isinstance(last(policy, [hot]), Nothing)
    assert isinstance(last(policy, [hot, cool, hot]), Nothing), "not two in a row"
    proposal = last(policy, [hot, hot])
    assert proposal == Resize("op", "cloud", 2, f"{A} is 90 % busy, above 70 % in 2 reports")


def test_busy_has_a_threshold_for_each_operator() -> None:
    hot = view(instance(work=0.45, rate=100))
    assert isinstance(last(make_policy("busy", "op", {"threshold": 0.4}), [hot, hot]), Resize)


def test_busy_removes_an_instance_only_if_the_busiest_stays_far_below_the_threshold() -> None:
    policy = make_policy("busy", "op")
    proposal = last(policy, [view(instance(A, 0.2, 10), instance(B, 0.1, 10))])
    assert isinstance(proposal, Resize)
    assert proposal.instances == 1
    assert isinstance(last(policy, [view(instance(A, 0.4, 10), instance(B, 0.1, 10))]), Nothing)


def test_a_core_that_a_neighbour_took_is_not_work() -> None:
    taken = InstanceView(A, rate=100, busy=0.95, cpu=0.4, stolen=0.5)
    assert taken.work == pytest.approx(0.45)
    assert isinstance(last(make_policy("busy", "op"), [view(taken)] * 3), Nothing)
    behind = InstanceView(A, rate=100, busy=0.95, cpu=0.4, stolen=0.5, oldest_ms=900.0)
    assert behind.work == pytest.approx(0.95), "whoever took the core, rows wait"
    waits_for_a_service = InstanceView(A, rate=100, busy=0.95, cpu=0.1)
    assert waits_for_a_service.work == pytest.approx(0.95)


# -- rate ----------------------------------------------------------------------------------------------


def test_rate_sizes_in_one_step_from_the_true_rate() -> None:
    overloaded = instance(work=1.0, rate=1_000, arrivals=2_600)
    proposal = last(make_policy("rate", "op"), [view(overloaded)])
    assert isinstance(proposal, Resize)
    assert proposal.instances == 4, "2,600 rows/s at 70 % of 1,000 each"
    assert "2600 rows/s arrive, one instance processes 1000" in proposal.reason


def test_rate_leaves_instances_alone_within_its_band() -> None:
    policy = make_policy("rate", "op")
    for work in (0.55, 0.7, 0.8):
        assert isinstance(last(policy, [view(instance(work=work, rate=1_000 * work))]), Nothing)


def test_rate_counts_the_busiest_instance_not_the_average() -> None:
    """An average of 55 % would hide that one of them has no time left."""
    two = [instance(A, 1.0, 500), instance(B, 0.1, 100)]
    spread, resize = make_policy("rate", "op").decide(view(*two), None)[0]
    assert isinstance(spread, Spread)
    assert f"{A} is 100 % busy" in spread.reason
    assert not isinstance(resize, Resize) or resize.instances >= 2


def test_rate_plans_for_the_backlog_within_its_catch_up_time() -> None:
    behind = instance(work=1.0, rate=1_000, arrivals=600, backlog_rows=40_000)
    proposal = last(make_policy("rate", "op", {"catch_up_s": 20.0}), [view(behind)])
    assert isinstance(proposal, Resize)
    assert proposal.instances == 3, "600 / 0.7 + 40,000 / 20 s = 2,857 rows/s"
    assert "40000 rows wait" in proposal.reason


def test_rate_never_shrinks_an_operator_of_which_an_instance_is_saturated() -> None:
    """Rates alone would say that one instance is enough for 120 rows/s."""
    policy = make_policy("rate", "op")
    memory = policy.decide(view(instance(A, 0.1, 100), instance(B, 0.1, 100)), None)[1]
    stuck = view(instance(A, 1.0, 60, arrivals=60), instance(B, 0.05, 60, arrivals=60))
    assert not any(isinstance(p, Resize) and p.instances < 2 for p in policy.decide(stuck, memory)[0])


def test_rate_says_when_it_cannot_know_what_a_row_costs() -> None:
    proposal = last(make_policy("rate", "op"), [view(instance())])
    assert proposal == Nothing("op", "too idle to measure what a row costs")


# -- hot keys ------------------------------------------------------------------------------------------


SLOTS = dict.fromkeys(range(4), A)


def skewed_view(share: float, key: bytes, cool: float = 0.1) -> View:
    entering = {"cloud": EntryLoad(1_000, {0: 1_000 * share}, (HotKey(key, 1_000 * share),))}
    return view(instance(A, 0.95, 1_000), instance(B, cool, 10), entering=entering, owners=SLOTS)


def test_a_hot_key_is_isolated_on_the_least_busy_instance() -> None:
    key = key_in(0)
    proposal = last(make_policy("hot_keys", "op"), [skewed_view(0.5, key)])
    assert isinstance(proposal, MoveLoad)
    assert (proposal.keys, proposal.to) == (KeySet(keys=frozenset({key})), B)
    assert "makes 50 % of the load" in proposal.reason


def test_one_key_that_is_all_of_the_load_cannot_be_spread_and_the_reason_says_so() -> None:
    proposal = last(make_policy("hot_keys", "op"), [skewed_view(0.97, key_in(0))])
    assert isinstance(proposal, Nothing)
    assert "one key cannot be spread" in proposal.reason


def test_a_hot_key_stays_where_no_instance_is_free_for_it() -> None:
    proposal = last(make_policy("hot_keys", "op"), [skewed_view(0.5, key_in(0), cool=0.8)])
    assert isinstance(proposal, Nothing)
    assert "no instance is free" in proposal.reason


def test_the_other_keys_leave_where_no_instance_is_free_for_a_hot_key() -> None:
    proposal = last(make_policy("hot_keys", "op"), [skewed_view(0.67, key_in(0), cool=0.33)])
    assert isinstance(proposal, Spread)
    assert "the other keys leave" in proposal.reason


def test_a_hot_slot_of_many_keys_is_split() -> None:
    inside = [key_in(0, n) for n in range(4)]
    keys = tuple(HotKey(key, 100) for key in inside)
    entering = {"cloud": EntryLoad(1_000, {0: 500}, keys)}
    hot = view(instance(A, 0.95, 1_000), instance(B, 0.1, 10), entering=entering, owners=SLOTS)
    proposal = last(make_policy("hot_keys", "op"), [hot])
    assert isinstance(proposal, MoveLoad)
    assert len(proposal.keys.keys) == 2
    assert "it is split" in proposal.reason


def test_a_slot_that_was_split_is_not_split_again_for_keys_that_have_left_it() -> None:
    inside = [key_in(0, n) for n in range(4)]
    entering = {"cloud": EntryLoad(1_000, {0: 600.0}, tuple(HotKey(key, 150.0) for key in inside))}
    gone = dict.fromkeys(inside[:2], B)
    hot = view(instance(A, 0.95, 1_000), instance(B, 0.1, 10), entering=entering, owners=SLOTS, isolated=gone)
    policy = make_policy("hot_keys", "op", {"slot_share": 0.4})
    assert isinstance(last(policy, [hot]), Nothing), "300 of the 1,000 rows are left"


# -- offload and failures ------------------------------------------------------------------------------


def at_edge(rate: float, owner: str = A, key: bytes = b"car") -> View:
    entering = {"edge": EntryLoad(rate, {}, (HotKey(key, rate),)), "cloud": EntryLoad(10.0)}
    return view(instance(A, 0.2, rate), entering=entering, owners=SLOTS, isolated={key: owner})


def test_keys_go_to_an_edge_whose_demand_exceeds_its_cost_and_return_when_it_falls() -> None:
    policy = make_policy("offload", "op", {"home": "cloud", "cost": 100.0})
    assert isinstance(last(policy, [at_edge(200)] * 2), Nothing), "three reports in a row"
    out = last(policy, [at_edge(200)] * 3)
    assert isinstance(out, MoveLoad)
    assert (out.to, out.keys) == ("edge", KeySet(keys=frozenset({b"car"})))
    there = "op@edge#1"
    assert isinstance(last(policy, [at_edge(80, there)] * 9), Nothing), (
        "between half of the cost and the cost"
    )
    back = last(policy, [at_edge(20, there)] * 3)
    assert isinstance(back, MoveLoad)
    assert (back.to, back.keys) == ("cloud", KeySet(keys=frozenset({b"car"})))


def test_the_reason_of_an_offload_names_the_measured_round_trip() -> None:
    sites = {"cloud": SiteView("cloud", links={"edge": LinkView(81.6)})}
    seen = msgspec.structs.replace(at_edge(200), sites=sites)
    assert (
        "82 ms from cloud and back"
        in last(make_policy("offload", "op", {"home": "cloud", "cost": 100.0}), [seen] * 3).reason
    )


def test_light_keys_follow_to_the_edge_unless_most_of_their_rows_enter_elsewhere() -> None:
    policy = make_policy("offload", "op", {"home": "cloud", "cost": 100.0})
    light = (HotKey(b"mine", 5.0), HotKey(b"shared", 5.0))
    entering = {"edge": EntryLoad(200.0, sent_on=light), "edge-2": EntryLoad(20.0, sent_on=light[1:])}
    out = last(policy, [view(instance(A, 0.2, 200), entering=entering, owners=SLOTS)] * 3)
    assert isinstance(out, MoveLoad)
    assert out.keys == KeySet(keys=frozenset({b"mine"}))


def test_a_failed_instance_is_replaced_after_two_reports() -> None:
    failed = View(0.0, {"op": OperatorView("op", ())}, failed={A: "no heartbeat", "other@cloud#1": "x"})
    policy = make_policy("failures", "op", {"successors": 2})
    assert isinstance(last(policy, [failed]), Nothing)
    assert last(policy, [failed, failed]) == Replace("op", A, 2, "no heartbeat")


# -- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("rated", {}, "unknown policy 'rated'"),
        ("rate", {"target": 0}, "target = 0"),
        ("rate", {"target": 1.2}, "target = 1.2"),
        ("rate", {"target": True}, "target = True"),
        ("rate", {"lower": 0.8}, "lower = 0.8, target = 0.7"),
        ("rate", {"catch_up_s": 0}, "catch_up_s = 0"),
        ("rate", {"goal": 0.5}, "unknown option of policy rate 'goal'"),
        ("busy", {"threshold": -1}, "threshold = -1"),
        ("offload", {"home": "cloud"}, "cost"),
        ("offload", {"home": "cloud", "cost": 0}, "cost = 0"),
    ],
)
def test_a_policy_that_cannot_work_is_refused_by_name(name: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        make_policy(name, "op", options)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_answers_to_a_view_without_its_operator(name: str) -> None:
    options = {"home": "cloud", "cost": 1.0} if name == "offload" else {}
    assert isinstance(last(make_policy(name, "op", options), [View(0.0, {})]), Nothing)
