"""A trial: one policy under one load, beside an oracle that knows the future.

Responsible for: the run, the figures (changes, time above the target latency, instance-seconds, turns).
Not responsible for: the policy (control/policies), the load (traces.py), the operator (operator_model.py).

The oracle knows the load of the next seconds and what a row costs. It starts instances just before they are
needed, leaves none idle, and stops them when they are not needed for longer than a start takes: about the
fewest instance-seconds with which no row waits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from tiercel.control.governor import Governor
from tiercel.control.limits import Limits
from tiercel.control.policies.named import make_policy
from tiercel.control.policies.policy import Decide
from tiercel.control.proposals import Decision, MoveLoad, Resize, Spread
from tiercel.core.errors import InvalidRequest
from tiercel.sim.policies.operator_model import OPERATOR, OperatorModel
from tiercel.sim.policies.traces import ONE, TRACES, Trace, turns

LATENCY_S_MAX = 1.0
COUNT_MAX = 16


class TrialResult(msgspec.Struct, frozen=True):
    """The figures of one trial."""

    trace: str
    policy: str
    seed: int
    seconds: int
    changes: int
    turns: int  # changes of direction of the policy
    load_turns: int  # changes of direction of the load
    late_s: int  # seconds in which a row waited longer than the target latency
    longest_s: float  # that a row waited
    instance_seconds: int
    oracle_instance_seconds: int
    oracle_changes: int
    unmoved_late_s: int  # the same without any change, on as many instances as the policy used on average
    instances_max: int

    @property
    def flaps(self) -> bool:
        """More than one change of direction for each one of the load; the first way up is free."""
        return self.turns > self.load_turns + 1


def run_trial(
    trace_name: str,
    policy_name: str,
    *,
    seed: int = 1,
    options: Mapping[str, Any] | None = None,
    limits: Limits | None = None,
    decide: Decide | None = None,
    start_s: float = 5.0,
) -> tuple[TrialResult, list[Decision]]:
    """Run a policy over a trace. `decide` replaces the shipped policy of that name."""
    if trace_name not in TRACES:
        raise InvalidRequest.unknown("trace", trace_name, sorted(TRACES), "tiercel policy list")
    trace = TRACES[trace_name](seed)
    governor = Governor()
    chosen = decide or make_policy(policy_name, OPERATOR, options).decide
    governor.add(policy_name, chosen, limits or Limits(instances_max={"*": COUNT_MAX}))
    model = OperatorModel(start_s)
    late_s = instance_seconds = direction = policy_turns = changes = most = 0
    longest_s = 0.0
    for second in trace:
        waited_s = model.step(second)
        late_s += waited_s > LATENCY_S_MAX
        longest_s = max(longest_s, waited_s)
        instance_seconds += model.count
        most = max(most, model.count)
        for decision in governor.decide(model.view()):
            if not decision.is_change:
                continue
            changes += 1
            proposal = decision.proposal
            if isinstance(proposal, Resize):
                way = 1 if proposal.instances > len(model.instances) else -1
                policy_turns += direction not in (0, way)
                direction = way
            if isinstance(proposal, Resize | MoveLoad | Spread):
                model.carry_out(proposal)
    needed = oracle(trace, start_s)
    result = TrialResult(
        trace_name,
        policy_name,
        seed,
        len(trace),
        changes,
        policy_turns,
        turns(trace),
        late_s,
        round(longest_s, 2),
        instance_seconds,
        sum(needed),
        sum(1 for a, b in itertools.pairwise(needed) if a != b),
        late_on(trace, max(1, round(instance_seconds / len(trace)))),
        most,
    )
    return result, governor.history


def oracle(trace: Trace, start_s: float) -> list[int]:
    """Instances that are needed in each second, if the load of the next seconds is known."""
    lead = int(start_s)
    needed = []
    for t in range(len(trace)):
        ahead = trace[max(0, t - lead) : t + lead + 1]
        needed.append(max(1, math.ceil(max(s.rate for s in ahead) / ONE)))
    return needed


def late_on(trace: Trace, count: int) -> int:
    """Seconds above the target latency on a fixed number of instances with an even load."""
    waiting, late_s = 0.0, 0
    for second in trace:
        waiting = max(0.0, waiting + second.rate - count * ONE)
        late_s += waiting / (count * ONE) > LATENCY_S_MAX
    return late_s
