"""The policy `offload`: keys go to the edge at which their rows enter while demand there is high, as in PAM.

Responsible for: demand at each edge against the cost of working there; the way back when demand falls.
Not responsible for: sources that move from edge to edge (mobility.py), the number of instances (rate.py).

An operator starts at its home. `cost` is the demand in rows per second that makes an edge worth its price.
Between `back` x cost and cost nothing changes, so demand around the cost moves nothing to and fro.
"""

from __future__ import annotations

import msgspec

from tiercel.control.policies.policy import Memory, check_above, check_share, percent
from tiercel.control.proposals import MoveLoad, Nothing, Proposal
from tiercel.control.view import EntryLoad, OperatorView, View
from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.routing import slot_of
from tiercel.core.model.topology import site_of


class Offload(msgspec.Struct, frozen=True):
    """Options of the policy."""

    operator: str
    home: str
    cost: float  # rows per second at an edge that are worth an instance there
    edges: tuple[str, ...] = ()  # empty: every other site at which rows enter
    back: float = 0.5  # part of the cost below which the keys return
    reports: int = 3  # views in a row, for either way
    share: float = 0.8  # part of a key's rows that enter at the edge

    def __post_init__(self) -> None:
        check_above("cost", self.cost)
        check_above("reports", self.reports)
        check_share("back", self.back)
        check_share("share", self.share)

    def decide(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        operator = view.operator(self.operator)
        if operator is None:
            return [Nothing(self.operator, "it is not in this view")], memory
        edges = self.edges or tuple(sorted({*operator.entering, *operator.sites} - {self.home}))
        before: dict[str, int] = memory or {}
        after: dict[str, int] = {}
        proposals: list[Proposal] = []
        for edge in edges:
            demand = operator.entering.get(edge, EntryLoad()).rate
            run = before.get(edge, 0)
            if demand > self.cost:
                after[edge] = max(run, 0) + 1
            elif demand < self.back * self.cost:
                after[edge] = min(run, 0) - 1
            else:
                after[edge] = 0
            facts = f"{demand:.0f} rows/s enter at {edge}, which costs {self.cost:.0f}"
            rtt_ms = self._rtt_ms(view, edge)
            facts += "" if rtt_ms is None else f", {rtt_ms:.0f} ms from {self.home} and back"
            proposals.append(self._at(operator, edge, facts, after[edge]))
        return proposals or [Nothing(self.operator, "no rows enter at an edge")], after

    def _rtt_ms(self, view: View, edge: str) -> float | None:
        """The measured round trip between home and an edge."""
        for a, b in ((self.home, edge), (edge, self.home)):
            link = view.sites[a].links.get(b) if a in view.sites else None
            if link is not None and link.rtt_ms is not None:
                return link.rtt_ms
        return None

    def _at(self, operator: OperatorView, edge: str, facts: str, run: int) -> Proposal:
        if run >= self.reports:
            keys = self._at_home_for(operator, edge)
            if keys:
                return MoveLoad(operator.name, KeySet(keys=keys), edge, facts)
            return Nothing(operator.name, f"{facts}; its keys are there")
        if run <= -self.reports:
            slots = frozenset(s for s, owner in operator.owners.items() if site_of(owner) == edge)
            single = frozenset(k for k, owner in operator.isolated.items() if site_of(owner) == edge)
            if slots or single:
                back = KeySet(slots=slots) if slots else KeySet(keys=single)
                return MoveLoad(operator.name, back, self.home, f"{facts}: they return")
        return Nothing(operator.name, facts)

    def _at_home_for(self, operator: OperatorView, edge: str) -> frozenset[Key]:
        """Keys whose rows enter at the edge, mostly, and whose owner is elsewhere.

        The sample names the heaviest keys; rows that go on to another site are counted by key, so light ones
        follow when the heavy ones are there.
        """
        rates = {site: _key_rates(load) for site, load in operator.entering.items()}
        found = set()
        for key, rate in rates.get(edge, {}).items():
            owner = operator.isolated.get(key) or operator.owners.get(
                slot_of(key, max(1, len(operator.owners))), ""
            )
            total = sum(at_site.get(key, 0.0) for at_site in rates.values())
            if site_of(owner) != edge and rate >= self.share * total:
                found.add(key)
        return frozenset(found)

    def __str__(self) -> str:
        return f"offload of {self.operator} beyond {self.cost:g} rows/s ({percent(self.back)} back)"


def _key_rates(load: EntryLoad) -> dict[Key, float]:
    """Rows per second by key, sampled or counted."""
    rates = {hot.key: hot.rate for hot in load.keys}
    for hot in load.sent_on:
        rates[hot.key] = max(hot.rate, rates.get(hot.key, 0.0))
    return rates
