"""The policy `rate`: as many instances as the rows need, in one step, as DS2 and Flink's autoscaler do.

Responsible for: demand, capacity and the band in which nothing changes.
Not responsible for: waiting before a scale-in, checking that a change helped (governor.py).

    demand = arrivals + backlog / catch-up time      capacity = rows per second / share of time at work
    instances = demand / (target x capacity of one)

A move stops nothing here, so Flink's terms for the time of a restart are absent. The capacity of one instance
is that of the busiest: an average hides skew. An instance that is busy all the time is a floor: whatever the
rates say, its operator does not shrink.
"""

from __future__ import annotations

import math

import msgspec

from tiercel.control.policies.policy import Memory, check_above, check_share, percent, skewed
from tiercel.control.proposals import Nothing, Proposal, Resize, Spread
from tiercel.control.view import OperatorView, View
from tiercel.core.errors import InvalidRequest

RISING = 2  # views: a load that rises is as high as in the last ones, not as in the window
SATURATED = 0.95  # share of time at work: more rows would wait


class SiteMemory(msgspec.Struct, frozen=True):
    """What the policy knows of an operator at one site."""

    arrivals: tuple[float, ...] = ()  # of the last views
    capacity: float | None = None  # of one instance, smoothed


class Rate(msgspec.Struct, frozen=True):
    """Options of the policy."""

    operator: str
    target: float = 0.7  # share of the time at work that it plans for
    upper: float = 0.85  # above this share it scales out
    lower: float = 0.5  # below this share it scales in
    catch_up_s: float = 20.0  # time in which a backlog should be worked off
    window: int = 5  # views over which arrivals are averaged
    smoothing: float = 0.3  # weight of the newest capacity

    def __post_init__(self) -> None:
        for name in ("target", "upper", "lower", "smoothing"):
            check_share(name, getattr(self, name))
        check_above("catch_up_s", self.catch_up_s)
        check_above("window", self.window)
        if not self.lower <= self.target <= self.upper:
            what = f"lower = {self.lower}, target = {self.target}, upper = {self.upper}"
            raise InvalidRequest(what, "expected lower <= target <= upper")

    def decide(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        operator = view.operator(self.operator)
        if operator is None or not operator.instances:
            return [Nothing(self.operator, "it has no instance in this view")], memory
        before: dict[str, SiteMemory] = memory or {}
        after = {
            site: self._remember(operator, site, before.get(site, SiteMemory())) for site in operator.sites
        }
        found: list[Proposal] = []
        for site in sorted(operator.sites):
            wanted = self._at(operator, site, after[site])
            grows = isinstance(wanted, Resize) and wanted.instances > len(operator.at(site))
            busiest = None if grows else skewed(operator.at(site), self.upper)
            if busiest is not None:  # a scale-out spreads the load as well
                reason = f"{busiest.name} is {percent(busiest.work)} busy, the others are not"
                found.append(Spread(operator.name, site, reason))
            found.append(wanted)
        return found, after

    def _remember(self, operator: OperatorView, site: str, before: SiteMemory) -> SiteMemory:
        here = operator.at(site)
        arrivals = (*before.arrivals, sum(i.arrivals for i in here))[-self.window :]
        found = [i for i in here if i.capacity is not None]
        if not found:
            return SiteMemory(arrivals, before.capacity)
        busiest = max(found, key=lambda i: (i.work, i.name))  # the same instance gives rate and time
        newest = busiest.capacity
        assert newest is not None
        if before.capacity is not None:
            newest = before.capacity + self.smoothing * (newest - before.capacity)
        return SiteMemory(arrivals, newest)

    def _at(self, operator: OperatorView, site: str, known: SiteMemory) -> Proposal:
        here = operator.at(site)
        count, one = len(here), known.capacity
        if one is None:
            return Nothing(operator.name, "too idle to measure what a row costs")
        recent = known.arrivals[-RISING:]
        arrivals = max(sum(known.arrivals) / len(known.arrivals), sum(recent) / len(recent))
        backlog = sum(i.backlog_rows for i in here)
        catch_up = backlog / self.catch_up_s if backlog > one * count else 0.0  # less than a second: normal
        needed = max(1, math.ceil((arrivals / self.target + catch_up) / one - 1e-9))
        share = (arrivals + catch_up) / (one * count)
        facts = f"{arrivals:.0f} rows/s arrive, one instance processes {one:.0f}"
        if catch_up:
            facts += f", {backlog} rows wait"
        if needed > count and (share > self.upper or catch_up):
            return Resize(operator.name, site, needed, f"{facts}: {count} would be {percent(share)} busy")
        if needed < count and share < self.lower and not catch_up:
            busiest = max(i.work for i in here)
            if busiest > SATURATED:
                reason = f"an instance is {percent(busiest)} busy, although {facts}"
                return Nothing(operator.name, reason)
            return Resize(operator.name, site, needed, f"{facts}: {count} are {percent(share)} busy")
        return Nothing(operator.name, f"{facts}: {count} are {percent(share)} busy")
