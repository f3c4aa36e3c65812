"""The governor: runs policies over a view, and lets through only the changes that the limits allow.

Responsible for: one change of an operator at a time, cool-down, budget, minimum and maximum, pins, quiet
    windows, dry run, patience before a scale-in; judging a change afterwards and taking back one that made
    things worse; the history, in which every decision stands with its reason.
Not responsible for: what is wanted (policies/), carrying it out (spark/cluster/policy_thread.py).

A policy that raises is named in the history, and nothing changes: the last decision stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tiercel.control.limits import Limits
from tiercel.control.policies.policy import Decide, Memory
from tiercel.control.proposals import Decision, MoveLoad, Nothing, Outcome, Proposal, Replace, Resize, Spread
from tiercel.control.view import OperatorView, View
from tiercel.core.model.routing import slot_of
from tiercel.core.model.topology import site_of

HISTORY_MAX = 2_000
HOUR_S = 3_600.0
ARRIVALS_DIFFER = 0.25  # by this part: another load, which an earlier change says nothing about
WORSE = 3.0  # times as old as before is the oldest waiting row
NO_DIFFERENCE = "it made no difference"
GAIN_MIN = 0.1  # of the promised gain; below it a scale-out did not help


class GovernedPolicy(msgspec.Struct):
    """A policy, its limits, and what it returned to remember."""

    name: str
    decide: Decide
    limits: Limits
    memory: Memory = None


class Change(msgspec.Struct):
    """A change that was carried out, and the operator before it."""

    proposal: Proposal
    before: OperatorView
    at_s: float
    limits: Limits
    policy: str
    gain: float = 0.0  # promised: the share of instances added
    ended_s: float | None = None  # nothing runs any more
    is_undo: bool = False  # it is not judged: what it took back is blocked for a while


class Record(msgspec.Struct):
    """What the governor remembers of one operator."""

    changes: deque[float] = msgspec.field(default_factory=deque)  # times, within the last hour
    change: Change | None = None  # the last one, until it is judged
    ended_s: float | None = None  # end of the last change
    wanted: dict[tuple[str, str], deque[tuple[float, int]]] = {}  # policy, site -> instances it wanted
    blocked: dict[str, tuple[float, float, str]] = {}  # direction -> until, arrivals then, why


class Governor:
    """Decides what is changed, one view after the other."""

    def __init__(self) -> None:
        self.policies: dict[str, GovernedPolicy] = {}
        self._lines: dict[int, Decision] = {}  # the history, by number
        self._last: dict[tuple[str, str, str], int] = {}  # policy, operator, site -> its last line
        self._noted = 0
        self._records: dict[str, Record] = {}

    def add(self, name: str, decide: Decide, limits: Limits) -> None:
        """Add a policy, or replace the one of this name."""
        self.policies[name] = GovernedPolicy(name, decide, limits)

    def remove(self, name: str) -> bool:
        for record in self._records.values():  # what it wanted holds nobody back any more
            record.wanted = {what: window for what, window in record.wanted.items() if what[0] != name}
        return self.policies.pop(name, None) is not None

    # -- decisions ---------------------------------------------------------------------------

    def decide(self, view: View) -> list[Decision]:
        """The decisions for this view. The caller carries out those whose `is_change` is true."""
        decisions: list[Decision] = []
        wanted = [(policy, self._proposals(policy, view, decisions)) for policy in self.policies.values()]
        for policy, proposals in wanted:
            self._remember_wanted(view, policy, proposals)
        taken = {name for name in view.operators if self._follow(view, name, decisions)}
        for policy, proposals in wanted:
            for proposal in proposals:
                decision = self._judge_proposal(policy, view, proposal, taken)
                if decision.outcome is Outcome.CARRIED_OUT:
                    taken.add(decision.operator)
                    self._changed(policy, view, decision.proposal)
                decisions.append(decision)
        for decision in decisions:
            self.note(decision)
        return decisions

    def refused(self, decision: Decision, reason: str, at_s: float) -> None:
        """The controller refused a change that was let through: nothing has changed."""
        record = self._record(decision.operator)
        record.change = None
        if record.changes:
            record.changes.pop()
        record.ended_s = at_s
        self.note(msgspec.structs.replace(decision, at_s=at_s, outcome=Outcome.FAILED, reason=reason))

    @property
    def history(self) -> list[Decision]:
        """Every decision, oldest first; equal ones in a row are one line."""
        return list(self._lines.values())

    def note(self, decision: Decision) -> None:
        """Add a decision to the history."""
        what = (decision.policy, decision.operator, getattr(decision.proposal, "site", ""))
        number = self._last.get(what, -1)
        last = self._lines.get(number)
        if last is not None and _alike(last, decision):
            repeated = last.repeated + 1
            self._lines[number] = msgspec.structs.replace(last, repeated=repeated, reason=decision.reason)
            return
        self._noted += 1
        self._lines[self._noted] = decision
        self._last[what] = self._noted
        if len(self._lines) > HISTORY_MAX:
            del self._lines[next(iter(self._lines))]

    def _proposals(self, policy: GovernedPolicy, view: View, decisions: list[Decision]) -> Sequence[Proposal]:
        """What a policy wants. User code may do anything: its failures stay here."""
        try:
            proposals, memory = policy.decide(view, policy.memory)
            found = list(proposals)
            for proposal in found:
                if not isinstance(proposal, Resize | Spread | MoveLoad | Replace | Nothing):
                    raise TypeError(f"{proposal!r:.100} is no proposal")
        except Exception as error:
            reason = f"the policy raised {type(error).__name__}: {error}; the last decision stands"
            nothing = Nothing("", reason)
            decisions.append(Decision(view.at_s, "", policy.name, Outcome.FAILED, nothing, reason))
            return []
        policy.memory = memory
        return found

    def _judge_proposal(
        self, policy: GovernedPolicy, view: View, proposal: Proposal, taken: set[str]
    ) -> Decision:
        def decided(outcome: Outcome, why: str = "", what: Proposal = proposal) -> Decision:
            reason = f"{proposal.reason}; {why}" if why else proposal.reason
            return Decision(view.at_s, proposal.operator, policy.name, outcome, what, reason)

        operator = view.operator(proposal.operator)
        if operator is None:
            return decided(Outcome.REFUSED, f"there is no operator {proposal.operator!r}")
        if isinstance(proposal, Nothing):
            few = [site for site, count in operator.sites.items() if count < policy.limits.least(site)]
            if not few:
                return decided(Outcome.NOTHING)
            least = policy.limits.least(few[0])
            proposal = Resize(operator.name, few[0], least, f"the minimum at {few[0]} is {least}")
        record, limits = self._record(operator.name), policy.limits
        allowed, why = proposal, ""
        if isinstance(proposal, Resize):
            allowed, why = self._within(operator, view, proposal, limits)
            here = len(operator.at(proposal.site))
            if allowed.instances == here:
                return decided(Outcome.REFUSED if why else Outcome.NOTHING, why or "it has them")
            if allowed.instances < here:
                patient = self._patience(record, view, operator, allowed, policy)
                if isinstance(patient, str):
                    return decided(Outcome.REFUSED, patient)
                allowed = patient
        why_not = self._obstacle(record, view, operator, allowed, limits, taken)
        if why_not:
            return decided(Outcome.REFUSED, why_not)
        return decided(Outcome.DRY_RUN if limits.dry_run else Outcome.CARRIED_OUT, why, allowed)

    # -- rules: each one may refuse ----------------------------------------------------------

    def _within(
        self, operator: OperatorView, view: View, proposal: Resize, limits: Limits
    ) -> tuple[Resize, str]:
        """The nearest number between minimum and maximum, pins and free task slots."""
        site, wanted = proposal.site, proposal.instances
        here = operator.at(site)
        pinned = sum(1 for i in here if i.name in limits.pins)
        low, high = max(limits.least(site), pinned), limits.most(site)
        count = min(max(wanted, low), max(high, low))
        why = "" if count == wanted else f"limited to {low} to {high} at {site}"
        facts = view.sites.get(site)
        if facts is not None and facts.free_slots is not None and count > len(here):
            spares = sum(1 for name in operator.spares if name.startswith(f"{operator.name}@{site}#"))
            room = len(here) + spares + facts.free_slots
            if count > room:
                count, why = room, f"{site} has {facts.free_slots} free task slots"
        return msgspec.structs.replace(proposal, instances=count), why

    def _patience(
        self, record: Record, view: View, operator: OperatorView, proposal: Resize, policy: GovernedPolicy
    ) -> Resize | str:
        """A scale-in to the largest number that any policy wanted in the window, or why it has to wait."""
        backlog_s, limits = operator.backlog_s(), policy.limits
        if self.drains(operator, limits):
            return f"a backlog of {backlog_s:.1f} s drains"
        wanted = record.wanted.get((policy.name, proposal.site))
        if not wanted or view.at_s - wanted[0][0] < limits.scale_in_after_s:
            return f"scale-in waits until it was wanted for {limits.scale_in_after_s:g} s"
        windows = [window for (_, site), window in record.wanted.items() if site == proposal.site]
        largest = max(proposal.instances, *(count for window in windows for _, count in window))
        if largest >= len(operator.at(proposal.site)):
            return f"{largest} were wanted within the last {limits.scale_in_after_s:g} s"
        return msgspec.structs.replace(proposal, instances=largest)

    def drains(self, operator: OperatorView, limits: Limits) -> bool:
        """Whether rows wait: then fewer instances would make them wait longer."""
        return operator.backlog_s() > limits.backlog_s_max or operator.oldest_ms > limits.latency_ms_max

    def _obstacle(
        self,
        record: Record,
        view: View,
        operator: OperatorView,
        proposal: Proposal,
        limits: Limits,
        taken: Iterable[str],
    ) -> str:
        if operator.name in taken:
            return "one change at a time: another one was decided"
        if operator.changing:
            return f"one change at a time: {operator.changing}"
        if isinstance(proposal, MoveLoad) and (pinned := _pinned_source(operator, proposal, limits)):
            return f"{pinned} is pinned"
        if isinstance(proposal, MoveLoad) and (full := _full_site(operator, view, proposal.to)):
            return f"{full} has 0 free task slots, and no instance of {operator.name}"
        if limits.is_quiet(view.at_s):
            return "this is a quiet window"
        if self.cools_down(record, view.at_s, limits):
            return f"cool-down of {limits.cool_down_s:g} s"
        while record.changes and record.changes[0] < view.at_s - HOUR_S:
            record.changes.popleft()
        if len(record.changes) >= limits.changes_per_hour_max:
            return f"the budget of {limits.changes_per_hour_max} changes an hour is used up"
        blocked = record.blocked.get(_direction(operator, proposal))
        if blocked is not None:
            until_s, arrivals, why = blocked
            if view.at_s < until_s and not _differ(arrivals, operator.arrivals):
                return why
        return ""

    def cools_down(self, record: Record, at_s: float, limits: Limits) -> bool:
        """Whether the last change ended a moment ago: its effect is not in the figures yet."""
        return record.ended_s is not None and at_s - record.ended_s < limits.cool_down_s

    # -- after a change ----------------------------------------------------------------------

    def _record(self, operator: str) -> Record:
        return self._records.setdefault(operator, Record())

    def _changed(self, policy: GovernedPolicy, view: View, proposal: Proposal) -> None:
        record = self._record(proposal.operator)
        before = view.operators[proposal.operator]
        gain = 0.0
        if isinstance(proposal, Resize):
            gain = proposal.instances / max(1, len(before.at(proposal.site))) - 1
        record.changes.append(view.at_s)
        record.wanted = {}
        record.change = Change(proposal, before, view.at_s, policy.limits, policy.name, gain)

    def _follow(self, view: View, name: str, decisions: list[Decision]) -> bool:
        """Judge the last change; True if it is taken back now."""
        operator, record = view.operators[name], self._record(name)
        change = record.change
        if change is None or operator.changing or view.at_s <= change.at_s:
            return False
        if change.ended_s is None:
            change.ended_s = record.ended_s = view.at_s
            if change.is_undo:
                record.change = None
                return False
        if view.at_s - change.ended_s < change.limits.judge_after_s:
            return False
        record.change = None
        verdict = self._verdict(change, operator)
        if not verdict:
            return False
        direction = _direction(change.before, change.proposal)
        until_s = view.at_s + change.limits.blocked_s
        record.blocked[direction] = (until_s, operator.arrivals, f"the last one: {verdict}")
        undo = _undo(change, operator, verdict)
        if undo is None:
            nothing = Nothing(name, verdict)
            decisions.append(Decision(view.at_s, name, change.policy, Outcome.NOTHING, nothing, verdict))
            return False
        outcome = Outcome.DRY_RUN if change.limits.dry_run else Outcome.UNDONE
        decisions.append(Decision(view.at_s, name, change.policy, outcome, undo, verdict))
        record.changes.append(view.at_s)
        record.wanted = {}
        record.change = Change(undo, operator, view.at_s, change.limits, change.policy, is_undo=True)
        return True

    def _remember_wanted(self, view: View, policy: GovernedPolicy, proposals: Sequence[Proposal]) -> None:
        """Remember how many instances are wanted: a scale-in goes to the largest number of its window.

        A policy that has never wanted a number, such as `failures`, holds nobody back.
        """
        named = {(p.operator, p.site): p.instances for p in proposals if isinstance(p, Resize)}
        for name in {proposal.operator for proposal in proposals} & view.operators.keys():
            operator = view.operators[name]
            known = self._record(name).wanted
            for site, count in operator.sites.items():
                if (name, site) not in named and (policy.name, site) not in known:
                    continue
                wanted = known.setdefault((policy.name, site), deque())
                wanted.append((view.at_s, named.get((name, site), count)))
                while len(wanted) > 1 and wanted[1][0] <= view.at_s - policy.limits.scale_in_after_s:
                    wanted.popleft()

    def _verdict(self, change: Change, now: OperatorView) -> str:
        """Why a change made things worse or did not help; empty if it did no harm."""
        before = change.before
        if _differ(before.arrivals, now.arrivals):
            return ""  # another load: the figures cannot be compared
        if isinstance(change.proposal, Spread):
            busy, busy_now = _most_work(before), _most_work(now)
            same = busy_now > (1 - GAIN_MIN) * busy
            return f"{NO_DIFFERENCE}: an instance is {busy_now:.0%} busy, {busy:.0%} before" if same else ""
        harm_ms = change.limits.latency_ms_max
        older = now.oldest_ms > max(harm_ms, WORSE * before.oldest_ms)
        if not isinstance(change.proposal, Resize) or change.gain < 0:
            if older:
                return f"rows wait {now.oldest_ms:.0f} ms since, {before.oldest_ms:.0f} ms before"
            return ""
        if older and now.processed < 0.9 * before.processed:
            return f"{now.processed:.0f} rows/s are processed since, {before.processed:.0f} before"
        waits = before.oldest_ms > harm_ms and now.oldest_ms > harm_ms
        if waits and now.processed < before.processed * (1 + GAIN_MIN * change.gain):
            return (
                f"{NO_DIFFERENCE}: {now.processed:.0f} rows/s with {len(now.instances)} instances, "
                f"{before.processed:.0f} with {len(before.instances)}"
            )
        return ""


def _undo(change: Change, now: OperatorView, verdict: str) -> Proposal | None:
    """What takes a change back; None if it may stay."""
    before, proposal = change.before, change.proposal
    reason = f"undo: {verdict}"
    if isinstance(proposal, Resize):
        if verdict.startswith(NO_DIFFERENCE):
            return None
        count = max(len(before.at(proposal.site)), change.limits.least(proposal.site))
        same = count == len(now.at(proposal.site))
        return None if same else Resize(now.name, proposal.site, count, reason)
    if isinstance(proposal, MoveLoad):
        owners = {before.owners.get(slot, "") for slot in proposal.keys.slots}
        owners |= {_owner(before, key) for key in proposal.keys.keys}
        running = {instance.name for instance in now.instances}
        if len(owners) == 1 and owners <= running:
            return MoveLoad(now.name, proposal.keys, owners.pop(), reason)
    return None


def _owner(operator: OperatorView, key: bytes) -> str:
    return operator.isolated.get(key) or operator.owners.get(slot_of(key, max(1, len(operator.owners))), "")


def _full_site(operator: OperatorView, view: View, to: str) -> str:
    """The destination, if it is a site that needs a first instance and has no room for one."""
    facts = view.sites.get(to)
    has_one = operator.at(to) or any(site_of(name) == to for name in operator.spares)
    return to if facts is not None and facts.free_slots == 0 and not has_one else ""


def _pinned_source(operator: OperatorView, proposal: MoveLoad, limits: Limits) -> str:
    owners = {operator.owners.get(slot, "") for slot in proposal.keys.slots}
    owners |= {_owner(operator, key) for key in proposal.keys.keys}
    return next(iter(sorted(owners & set(limits.pins))), "")


def _direction(operator: OperatorView, proposal: Proposal) -> str:
    if isinstance(proposal, Resize):
        grows = proposal.instances > len(operator.at(proposal.site))
        return f"{'out' if grows else 'in'} {proposal.site}"
    return type(proposal).__name__


def _most_work(operator: OperatorView) -> float:
    return max((instance.work for instance in operator.instances), default=0.0)


def _differ(before: float, now: float) -> bool:
    return abs(now - before) > ARRIVALS_DIFFER * max(before, now, 1.0)


def _alike(a: Decision, b: Decision) -> bool:
    """Whether two decisions differ at most in their figures."""
    return (a.outcome, str(a.proposal)) == (b.outcome, str(b.proposal)) and not a.is_change


def instances_after(
    operator: OperatorView,
    resize: Resize,
    pins: Iterable[str] = (),
    taken: Iterable[str] = (),
    executors: Mapping[str, int] | None = None,
) -> tuple[str, ...]:
    """The instances after a resize. Pinned ones stay, those with least state leave, spares come first.

    `executors` has the processes of each executor that Spark may release: where few are, instances leave.
    """
    others = [i.name for i in operator.instances if i.site != resize.site]
    load = executors or {}
    here = sorted(
        operator.at(resize.site),
        key=lambda i: (i.name not in set(pins), -load.get(i.executor, 0), -i.state_bytes, i.name),
    )
    chosen = [i.name for i in here[: resize.instances]]
    prefix = f"{operator.name}@{resize.site}#"
    chosen += [s for s in operator.spares if s.startswith(prefix)][: resize.instances - len(chosen)]
    known, number = {*others, *chosen, *taken, *operator.spares}, 1
    while len(chosen) < resize.instances:
        name = f"{prefix}{number}"
        number += 1
        if name not in known:
            chosen.append(name)
    return tuple(sorted([*others, *chosen]))
