"""Whatever the load and whatever a policy wants: the limits of the governor hold."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.control.governor import Governor
from tiercel.control.limits import Limits
from tiercel.control.policies.named import make_policy
from tiercel.control.proposals import MoveLoad, Outcome, Resize, Spread
from tiercel.control.view import View
from tiercel.core.model.keys import KeySet
from tiercel.sim.policies.operator_model import OPERATOR, SITE, OperatorModel
from tiercel.sim.policies.traces import SLOTS, LoadSecond

rates = st.lists(st.tuples(st.floats(0, 8_000), st.integers(1, 20)), min_size=1, max_size=8)
wanted_by_a_user = st.lists(st.integers(0, 12), min_size=1, max_size=20)  # instances, one after the other
limits_of_all_kinds = st.builds(
    lambda low, more, cool, patience, budget: Limits(
        instances_min={"*": low},
        instances_max={"*": low + more},
        cool_down_s=cool,
        judge_after_s=min(cool, 5) + 1,
        scale_in_after_s=patience,
        changes_per_hour_max=budget,
    ),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(0, 15),
    st.integers(1, 30),
    st.integers(1, 10),
)


def capricious(wanted: list[int]) -> Any:
    """A policy that wants one thing after the other, whatever the load."""

    def decide(view: View, memory: Any) -> Any:
        place = memory or 0
        count = wanted[place % len(wanted)]
        if count == 0:
            proposal: Any = MoveLoad(
                OPERATOR, KeySet(slots=frozenset({place % SLOTS})), f"{OPERATOR}@{SITE}#1", "x"
            )
        elif count == 11:
            proposal = Spread(OPERATOR, SITE, "x")
        else:
            proposal = Resize(OPERATOR, SITE, count, "x")
        return [proposal], place + 1

    return decide


@settings(max_examples=40, deadline=None)
@given(rates, wanted_by_a_user, limits_of_all_kinds, st.sampled_from(["rate", "busy", "capricious"]))
def test_limits_hold_under_any_load(
    load: list[tuple[float, int]], wanted: list[int], limits: Limits, policy: str
) -> None:
    governor = Governor()
    decide = capricious(wanted) if policy == "capricious" else make_policy(policy, OPERATOR).decide
    governor.add(policy, decide, limits)
    model = OperatorModel(start_s=2.0)
    ended_s, changed = -1e9, 0
    for rate, seconds in load:
        for _ in range(seconds):
            was_running = model.running is not None
            model.step(LoadSecond(rate))
            view = model.view()
            operator = view.operators[OPERATOR]
            if was_running and model.running is None:
                ended_s = view.at_s
            changes = [d for d in governor.decide(view) if d.is_change]
            assert len(changes) <= 1, "one change at a time"
            for decision in changes:
                assert not operator.changing
                changed += 1
                if decision.outcome is not Outcome.UNDONE:
                    assert view.at_s - ended_s >= limits.cool_down_s
                    assert changed <= limits.changes_per_hour_max
                proposal = decision.proposal
                if isinstance(proposal, Resize):
                    assert limits.least(SITE) <= proposal.instances <= limits.most(SITE)
                    shrinks = proposal.instances < len(operator.instances)
                    if shrinks and decision.outcome is not Outcome.UNDONE:
                        assert not governor.drains(operator, limits)
                model.carry_out(proposal)
    assert all(decision.reason for decision in governor.history)
