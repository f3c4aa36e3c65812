"""The governor: which changes it lets through, which it takes back, and what it writes down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tiercel.control.governor import Governor, instances_after
from tiercel.control.limits import Limits, parse_quiet
from tiercel.control.proposals import Decision, MoveLoad, Nothing, Outcome, Proposal, Replace, Resize
from tiercel.control.view import InstanceView, OperatorView, SiteView, View
from tiercel.core.errors import InvalidRequest
from tiercel.core.model.keys import KeySet

SITE = "cloud"
Answer = Callable[[View], Proposal]


def names(count: int) -> list[str]:
    return [f"op@{SITE}#{n}" for n in range(1, count + 1)]


def view(at_s: float, count: int = 2, *, free: int | None = None, changing: str = "", **facts: Any) -> View:
    each = {"rate": 500.0, "arrivals": 500.0, "busy": 0.5, **facts}
    instances = tuple(InstanceView(name, **each) for name in names(count))
    operator = OperatorView("op", instances, owners=dict.fromkeys(range(4), names(1)[0]), changing=changing)
    return View(at_s, {"op": operator}, {SITE: SiteView(SITE, free_slots=free)})


def resize(count: int) -> Answer:
    return lambda _: Resize("op", SITE, count, "because")


def governed(answer: Answer, **limits: Any) -> Governor:
    governor = Governor()
    governor.add("mine", lambda seen, memory: ([answer(seen)], memory), Limits(**limits))
    return governor


def only(decisions: list[Decision]) -> Decision:
    (decision,) = decisions
    return decision


def outcome(governor: Governor, seen: View) -> tuple[Outcome, str]:
    decision = only(governor.decide(seen))
    return decision.outcome, decision.reason


def test_a_scale_out_is_let_through_at_once() -> None:
    decision = only(governed(resize(3)).decide(view(0)))
    assert (decision.outcome, decision.proposal) == (Outcome.CARRIED_OUT, Resize("op", SITE, 3, "because"))


def test_doing_nothing_is_a_decision_with_a_reason() -> None:
    governor = governed(lambda _: Nothing("op", "all is well"))
    governor.decide(view(0))
    assert [(d.outcome, d.reason) for d in governor.history] == [(Outcome.NOTHING, "all is well")]


def test_equal_decisions_in_a_row_are_one_line_of_the_history() -> None:
    governor = governed(lambda seen: Nothing("op", f"at {seen.at_s:g}"))
    for second in range(5):
        governor.decide(view(second))
    line = only(governor.history)
    assert (line.at_s, line.repeated, line.reason) == (0, 4, "at 4")


def test_one_change_of_an_operator_at_a_time() -> None:
    governor = governed(resize(3), cool_down_s=0)
    governor.add("other", lambda seen, memory: ([Resize("op", SITE, 4, "too")], memory), Limits())
    first, second = governor.decide(view(0))
    assert (first.outcome, second.outcome) == (Outcome.CARRIED_OUT, Outcome.REFUSED)
    assert outcome(governed(resize(3)), view(0, changing="m7 runs"))[1].endswith(
        "one change at a time: m7 runs"
    )


def test_after_a_change_the_operator_cools_down() -> None:
    governor = governed(lambda seen: Resize("op", SITE, len(seen.operators["op"].instances) + 1, "more"))
    governor.decide(view(0, 1))
    governor.decide(view(2, 1, changing="scaling"))
    assert outcome(governor, view(5, 2))[1].endswith("cool-down of 10 s"), "it ended at 5"
    assert outcome(governor, view(14, 2))[0] is Outcome.REFUSED
    assert outcome(governor, view(15, 2))[0] is Outcome.CARRIED_OUT


def test_the_budget_of_changes_per_hour_is_not_exceeded() -> None:
    governor = governed(
        lambda seen: Resize("op", SITE, 3 if len(seen.operators["op"].instances) == 2 else 4, "more"),
        cool_down_s=0,
        changes_per_hour_max=2,
    )
    found = [outcome(governor, view(10.0 * n, 2 + n % 2)) for n in range(4)]
    assert [o for o, _ in found] == [Outcome.CARRIED_OUT] * 2 + [Outcome.REFUSED] * 2
    assert "budget of 2 changes an hour" in found[-1][1]
    assert outcome(governor, view(3_700))[0] is Outcome.CARRIED_OUT


def test_minimum_and_maximum_of_a_site_hold() -> None:
    decision = only(governed(resize(20), instances_max={"*": 9, SITE: 4}).decide(view(0)))
    assert isinstance(decision.proposal, Resize)
    assert decision.proposal.instances == 4
    assert decision.reason == "because; limited to 1 to 4 at cloud"
    assert outcome(governed(resize(20), instances_max={"*": 2}), view(0))[0] is Outcome.REFUSED


def test_an_operator_below_its_minimum_grows_although_its_policy_wants_nothing() -> None:
    governor = governed(lambda _: Nothing("op", "all is well"), instances_min={"*": 3})
    decision = only(governor.decide(view(0)))
    assert decision.is_change
    assert decision.proposal == Resize("op", SITE, 3, "the minimum at cloud is 3")


def test_a_scale_in_never_goes_below_the_minimum() -> None:
    """The largest number of the window was taken as it was wanted, and not as it was allowed."""
    governor = governed(resize(1), instances_min={"*": 2}, scale_in_after_s=1)
    found = [d for second in range(5) for d in governor.decide(view(second, 4)) if d.is_change]
    assert [d.proposal.instances for d in found if isinstance(d.proposal, Resize)] == [2]


def test_a_site_without_free_task_slots_is_named_and_nothing_changes() -> None:
    found = outcome(governed(resize(4)), view(0, free=0))
    assert found == (Outcome.REFUSED, "because; cloud has 0 free task slots")
    decision = only(governed(resize(4)).decide(view(0, free=1)))
    assert isinstance(decision.proposal, Resize)
    assert decision.proposal.instances == 3, "as many as fit"


def test_keys_do_not_go_to_a_site_that_has_no_room_for_their_instance() -> None:
    keys = KeySet(keys=frozenset({b"car"}))
    governor = governed(lambda _: MoveLoad("op", keys, "edge", "demand"))
    full = view(0)
    full = msgspec.structs.replace(full, sites={**full.sites, "edge": SiteView("edge", free_slots=0)})
    found, reason = outcome(governor, full)
    assert found is Outcome.REFUSED
    assert "edge has 0 free task slots" in reason
    spare = msgspec.structs.replace(full.operators["op"], spares=("op@edge#1",))
    roomy = msgspec.structs.replace(full, at_s=1.0, operators={"op": spare})
    assert outcome(governor, roomy)[0] is Outcome.CARRIED_OUT, "a spare instance is there"


def test_nothing_changes_in_a_quiet_window() -> None:
    governor = governed(resize(3), quiet=parse_quiet(["22:00-06:00"]))
    for hour, expected in ((23, Outcome.REFUSED), (5, Outcome.REFUSED), (7, Outcome.CARRIED_OUT)):
        assert outcome(governor, view(hour * 3600.0))[0] is expected


def test_a_dry_run_decides_and_changes_nothing() -> None:
    decision = only(governed(resize(3), dry_run=True).decide(view(0)))
    assert (decision.outcome, decision.is_change) == (Outcome.DRY_RUN, False)


# -- scale-in ------------------------------------------------------------------------------------------


def test_a_scale_in_waits_and_then_goes_to_the_largest_number_of_its_window() -> None:
    governor = governed(lambda seen: Resize("op", SITE, 3 if seen.at_s == 40 else 1, "less"))
    for second in range(0, 60, 10):
        assert outcome(governor, view(second, 4))[0] is Outcome.REFUSED
    decision = only(governor.decide(view(60, 4)))
    assert decision.is_change
    assert isinstance(decision.proposal, Resize)
    assert decision.proposal.instances == 3, "3 were wanted 20 s ago"


def test_a_scale_in_that_was_not_wanted_all_the_time_waits_longer() -> None:
    governor = governed(
        lambda seen: Nothing("op", "no") if seen.at_s == 50 else Resize("op", SITE, 1, "less")
    )
    found = [only(governor.decide(view(second, 4))).outcome for second in range(0, 130, 10)]
    assert Outcome.CARRIED_OUT not in found[:12]
    assert found[12] is Outcome.CARRIED_OUT, "60 s after the first view since in which one was wanted"


def test_a_policy_that_wants_no_number_does_not_hold_back_the_scale_in_of_another() -> None:
    governor = governed(resize(1))
    governor.add("failures", lambda seen, memory: ([Nothing("op", "none has failed")], memory), Limits())
    for second in range(0, 60, 10):
        assert not any(d.is_change for d in governor.decide(view(second, 2)))
    assert any(d.is_change for d in governor.decide(view(60, 2)))


def test_a_scale_in_goes_to_the_largest_number_that_any_policy_wants() -> None:
    governor = governed(resize(1))
    governor.add("other", lambda seen, memory: ([Resize("op", SITE, 2, "two")], memory), Limits())
    for second in range(0, 60, 10):
        governor.decide(view(second, 4))
    (change,) = [d for d in governor.decide(view(60, 4)) if d.is_change]
    assert isinstance(change.proposal, Resize)
    assert change.proposal.instances == 2
    governor.remove("other")
    found = [any(d.is_change for d in governor.decide(view(second, 2))) for second in range(80, 160, 10)]
    assert any(found), "a policy that was removed wants nothing any more"


def test_nothing_is_scaled_in_while_a_backlog_drains() -> None:
    governor = governed(resize(1))
    for second in range(0, 200, 10):
        outcome_now, reason = outcome(governor, view(second, 3, backlog_rows=5_000))
        assert outcome_now is Outcome.REFUSED
    assert "drains" in reason
    assert outcome(governor, view(200, 3))[0] is Outcome.CARRIED_OUT


def test_a_pinned_instance_stays_and_keeps_its_keys() -> None:
    governor = governed(resize(1), pins=(names(2)[1], names(3)[2]))
    for second in range(0, 70, 10):
        governor.decide(view(second, 3))
    decision = only(governor.decide(view(70, 3)))
    assert isinstance(decision.proposal, Resize)
    move = MoveLoad("op", KeySet(slots=frozenset({0})), names(2)[1], "hot")
    pinned = governed(lambda _: move, pins=(names(1)[0],))
    assert outcome(pinned, view(0)) == (Outcome.REFUSED, "hot; op@cloud#1 is pinned")
    after = instances_after(view(0, 3).operators["op"], Resize("op", SITE, 1, ""), pins=[names(3)[2]])
    assert after == (names(3)[2],)


# -- judging a change afterwards -----------------------------------------------------------------------


def test_a_scale_in_that_makes_rows_wait_is_undone_and_not_tried_again() -> None:
    governor = governed(resize(1), scale_in_after_s=1, judge_after_s=5, cool_down_s=0)
    seconds = iter(range(0, 1_000, 2))
    while not only(governor.decide(view(next(seconds)))).is_change:
        pass
    slow = {"arrivals": 1_000.0, "rate": 900.0, "busy": 1.0, "oldest_ms": 4_000.0}
    undone: list[Decision] = []
    while not undone:
        undone = [d for d in governor.decide(view(next(seconds), 1, **slow)) if d.is_change]
    assert undone[0].outcome is Outcome.UNDONE
    assert isinstance(undone[0].proposal, Resize)
    assert undone[0].proposal.instances == 2
    assert "rows wait 4000 ms since, 0 ms before" in undone[0].reason
    for _ in range(20):
        assert outcome(governor, view(next(seconds)))[0] is Outcome.REFUSED
    assert "the last one: rows wait" in governor.history[-1].reason


def test_after_an_undo_the_operator_cools_down_from_its_end() -> None:
    governor = governed(resize(1), scale_in_after_s=1, judge_after_s=1, cool_down_s=5, blocked_s=1)
    seconds = iter(range(1_000))
    while not only(governor.decide(view(next(seconds)))).is_change:
        pass
    slow = {"arrivals": 1_000.0, "rate": 900.0, "busy": 1.0, "oldest_ms": 4_000.0}
    while not any(d.is_change for d in governor.decide(view(next(seconds), 1, **slow))):
        pass
    for _ in range(20):  # it takes its time
        governor.decide(view(next(seconds), 1, changing="scaling", **slow))
    found = [outcome(governor, view(next(seconds)))[0] for _ in range(7)]
    assert Outcome.CARRIED_OUT not in found[:5]


def test_a_scale_out_that_made_no_difference_is_not_repeated() -> None:
    governor = governed(
        lambda seen: Resize("op", SITE, len(seen.operators["op"].instances) + 1, "more"),
        judge_after_s=5,
        cool_down_s=5,
    )
    late = {"oldest_ms": 5_000.0, "arrivals": 600.0, "rate": 500.0, "busy": 1.0}
    assert only(governor.decide(view(0, 1, **late))).is_change
    half = {"oldest_ms": 5_000.0, "arrivals": 300.0, "rate": 250.0, "busy": 1.0}  # they share the one core
    found = [d for second in range(1, 30) for d in governor.decide(view(second, 2, **half))]
    assert not any(d.is_change for d in found)
    assert any("it made no difference: 500 rows/s with 2 instances, 500 with 1" in d.reason for d in found)


def test_a_change_is_not_judged_under_another_load() -> None:
    governor = governed(resize(1), scale_in_after_s=1, judge_after_s=5, cool_down_s=0)
    seconds = iter(range(0, 1_000, 2))
    while not only(governor.decide(view(next(seconds)))).is_change:
        pass
    crowd = {"arrivals": 5_000.0, "rate": 900.0, "busy": 1.0, "oldest_ms": 4_000.0}
    found = [d for _ in range(10) for d in governor.decide(view(next(seconds), 1, **crowd))]
    assert not any(d.outcome is Outcome.UNDONE for d in found)


# -- user code -----------------------------------------------------------------------------------------


def broken(seen: View, memory: Any) -> Any:
    raise ZeroDivisionError("of mine")


def no_proposals(seen: View, memory: Any) -> Any:
    return ["scale out!"], memory


def nothing_at_all(seen: View, memory: Any) -> Any:
    return None


@pytest.mark.parametrize("policy", [broken, no_proposals, nothing_at_all])
def test_a_policy_that_raises_is_named_and_harms_nobody(policy: Any) -> None:
    governor = Governor()
    governor.add("bad", policy, Limits())
    governor.add("good", lambda seen, memory: ([Resize("op", SITE, 3, "because")], memory), Limits())
    first, second = governor.decide(view(0))
    assert (first.policy, first.outcome) == ("bad", Outcome.FAILED)
    assert "the last decision stands" in first.reason
    assert second.outcome is Outcome.CARRIED_OUT


def test_a_policy_of_a_user_gets_its_memory_back() -> None:
    seen: list[Any] = []

    def counting(view: View, memory: Any) -> Any:
        seen.append(memory)
        return [], (memory or 0) + 1

    governor = Governor()
    governor.add("counting", counting, Limits())
    for second in range(3):
        governor.decide(view(second))
    assert seen == [None, 1, 2]


def test_an_unknown_operator_is_refused_by_name() -> None:
    governor = governed(lambda _: Resize("po", SITE, 3, "because"))
    assert outcome(governor, view(0)) == (Outcome.REFUSED, "because; there is no operator 'po'")


def test_what_the_controller_refuses_is_in_the_history_and_uses_no_budget() -> None:
    governor = governed(resize(3), changes_per_hour_max=1, cool_down_s=0)
    decision = only(governor.decide(view(0)))
    governor.refused(decision, "no such site", 1.0)
    assert (governor.history[-1].outcome, governor.history[-1].reason) == (Outcome.FAILED, "no such site")
    assert outcome(governor, view(2))[0] is Outcome.CARRIED_OUT


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"instances_min": {"*": 5}, "instances_max": {"*": 2}}, "min = 5 is above max = 2"),
        ({"instances_min": {"*": 0}}, "min = 0"),
        ({"changes_per_hour_max": 0}, "changes_per_hour_max = 0"),
        ({"cool_down_s": -1}, "cool_down_s = -1"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(limits: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        Limits(**limits)


@pytest.mark.parametrize("window", ["22-6", "25:00-06:00", "", "22:00", "10:60-11:00"])
def test_a_quiet_window_that_is_none_is_refused(window: str) -> None:
    with pytest.raises(InvalidRequest, match="quiet window"):
        parse_quiet([window])


def test_decisions_survive_a_file() -> None:
    proposals = [
        Resize("op", SITE, 2, "r"),
        MoveLoad("op", KeySet(keys=frozenset({b"k\xff"})), "edge", "r"),
        Replace("op", "op@cloud#1", 2, "r"),
        Nothing("op", "r"),
    ]
    for proposal in proposals:
        decision = Decision(1.0, "op", "p", Outcome.CARRIED_OUT, proposal, "r")
        assert msgspec.json.decode(msgspec.json.encode(decision), type=Decision) == decision


def test_spares_are_used_before_new_instances_are_started() -> None:
    operator = msgspec.structs.replace(view(0, 1).operators["op"], spares=("op@cloud#7",))
    assert instances_after(operator, Resize("op", SITE, 3, "")) == ("op@cloud#1", "op@cloud#2", "op@cloud#7")


def test_where_spark_releases_executors_the_emptiest_one_is_left_first() -> None:
    seen = view(0, 3).operators["op"]
    places = ("1", "0", "1")  # the router is on executor 0, which stays
    instances = tuple(
        msgspec.structs.replace(i, executor=place, state_bytes=n)
        for n, (i, place) in enumerate(zip(seen.instances, places, strict=True))
    )
    operator = msgspec.structs.replace(seen, instances=instances)
    one = Resize("op", SITE, 1, "")
    assert instances_after(operator, one, executors={"0": 1_001, "1": 2}) == ("op@cloud#2",)
    assert instances_after(operator, one) == ("op@cloud#3",), "elsewhere the one with the most state stays"
