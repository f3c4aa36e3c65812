"""A model of one operator: instances with a capacity, slots with owners, rows that wait.

Responsible for: what waits and how long, second by second; starting, rebalancing and retiring instances with
    the time that this takes; the view of a second.
Not responsible for: deciding (control/), the load (traces.py). It moves no real keys: sim/scenario does.

Rows are a fluid: an instance works off its own queue at its own speed. A change runs for `start_s`, until the
new instances work; then the planner by load gives the slots to their new owners, and their queues go along.
"""

from __future__ import annotations

import msgspec

from tiercel.control.governor import instances_after
from tiercel.control.load_planner import rebalance_by_load
from tiercel.control.proposals import MoveLoad, Proposal, Resize, Spread
from tiercel.control.view import EntryLoad, InstanceView, OperatorView, SiteView, View
from tiercel.core.model.routing import Route
from tiercel.sim.policies.traces import ONE, SLOTS, LoadSecond

OPERATOR, SITE = "op", "cloud"
HEAVIEST = 16  # slots in a view, as the gauges report a bounded number


class Running(msgspec.Struct):
    """A change that is under way."""

    until_s: float
    proposal: Proposal


class OperatorModel:
    """One operator under a load."""

    def __init__(self, start_s: float = 5.0, move_s: float = 1.0) -> None:
        self.start_s, self.move_s = start_s, move_s
        self.instances = [f"{OPERATOR}@{SITE}#1"]
        self.owners = dict.fromkeys(range(SLOTS), self.instances[0])
        self.waiting = dict.fromkeys(range(SLOTS), 0.0)  # rows, by slot
        self.running: Running | None = None
        self.now_s = 0.0
        self._view = View(0.0, {})

    @property
    def count(self) -> int:
        """Instances that take up room: also those that start or have not left yet."""
        coming = 0
        if self.running is not None and isinstance(self.running.proposal, Resize):
            coming = max(0, self.running.proposal.instances - len(self.instances))
        return len(self.instances) + coming

    def step(self, second: LoadSecond) -> float:
        """Work for one second; returns the longest time that a row waits at its end."""
        self.now_s += 1.0
        if self.running is not None and self.now_s >= self.running.until_s:
            self._finish(self.running.proposal, second)
            self.running = None
        arrivals = {slot: second.rate * second.weights[slot] for slot in range(SLOTS)}
        for slot in range(SLOTS):
            self.waiting[slot] += arrivals[slot]
        views, longest_s = [], 0.0
        for place, name in enumerate(self.instances):
            capacity = ONE * second.slow.get(place, 1.0)
            mine = [slot for slot, owner in self.owners.items() if owner == name]
            total = sum(self.waiting[slot] for slot in mine)
            done = min(total, capacity)
            left = total - done
            for slot in mine:
                self.waiting[slot] *= left / total if total else 0.0
            longest_s = max(longest_s, left / capacity)
            views.append(
                InstanceView(
                    name,
                    arrivals=sum(arrivals[slot] for slot in mine),
                    rate=done,
                    busy=done / capacity,
                    backlog_rows=int(left),
                    oldest_ms=left / capacity * 1e3,
                    slots=len(mine),
                )
            )
        heaviest = sorted(arrivals, key=lambda slot: (-arrivals[slot], slot))[:HEAVIEST]
        entering = {SITE: EntryLoad(second.rate, {slot: arrivals[slot] for slot in heaviest})}
        changing = "" if self.running is None else str(self.running.proposal)
        operator = OperatorView(OPERATOR, tuple(views), entering, dict(self.owners), changing=changing)
        self._view = View(self.now_s, {OPERATOR: operator}, {SITE: SiteView(SITE, cores=64)})
        return longest_s

    def view(self) -> View:
        return self._view

    def carry_out(self, proposal: Proposal) -> None:
        """Begin a change."""
        grows = isinstance(proposal, Resize) and proposal.instances > len(self.instances)
        self.running = Running(self.now_s + (self.start_s if grows else self.move_s), proposal)

    def _finish(self, proposal: Proposal, second: LoadSecond) -> None:
        operator = self._view.operators[OPERATOR]
        if isinstance(proposal, Resize | Spread):
            if isinstance(proposal, Resize):
                self.instances = list(instances_after(operator, proposal))
            speeds = {i.name: i.capacity for i in operator.instances if i.capacity is not None}
            routes = {slot: Route(owner, 1) for slot, owner in self.owners.items()}
            rates, total = operator.slot_rates(), second.rate
            moves = rebalance_by_load(OPERATOR, routes, {}, self.instances, rates, total=total, speeds=speeds)
            for move in moves:
                self.owners.update(dict.fromkeys(move.keys.slots, move.destination))
        elif isinstance(proposal, MoveLoad):
            self.owners.update(dict.fromkeys(proposal.keys.slots, proposal.to))
