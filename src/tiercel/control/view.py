"""The view: a frozen picture of a deployment's load, the only thing that a policy sees.

Responsible for: the facts about instances, operators and sites, in one second; arithmetic on them.
Not responsible for: measuring them (runtime/process/metrics.py), deciding (policies/), limits (governor.py).

A view is plain data, so it can be written to a file, read back, and made up in a test.
"""

from __future__ import annotations

import msgspec

from tiercel.core.model.keys import Key
from tiercel.core.model.topology import site_of

IDLE_RATE = 1.0  # rows per second: below it nothing can be learnt about the cost of a row
BEHIND_MS = 500.0  # age of a waiting row: the instance falls behind
IDLE_WORK = 0.01  # share of a core, likewise


class InstanceView(msgspec.Struct, frozen=True, omit_defaults=True):
    """One instance in one second."""

    name: str
    arrivals: float = 0.0  # rows per second that its router logged for it
    rate: float = 0.0  # rows processed per second
    busy: float = 0.0  # share of wall time in which it had work
    cpu: float | None = None  # share of wall time in which it had a core; None: not measured
    stolen: float = 0.0  # share of wall time in which it waited for a core that another process had
    backlog_rows: int = 0
    oldest_ms: float = 0.0  # age of its oldest waiting row
    state_bytes: int = 0
    state_keys: int = 0
    slots: int = 0  # that it owns
    cores: int = 0  # that its executor lets it use; 0: not known
    executor: str = ""  # of Spark; empty: not known

    @property
    def site(self) -> str:
        return site_of(self.name)

    @property
    def work(self) -> float:
        """Share of the time in which it worked.

        Time that a neighbour took from it is not work, unless rows wait: then it has no time left.
        """
        stolen = self.stolen if self.oldest_ms < BEHIND_MS else 0.0
        return min(1.0, max(self.cpu or 0.0, self.busy - stolen))

    @property
    def capacity(self) -> float | None:
        """Rows per second that it can process (DS2's true rate); None: too idle to tell."""
        if self.rate < IDLE_RATE or self.work < IDLE_WORK:
            return None
        return self.rate / self.work


class HotKey(msgspec.Struct, frozen=True, array_like=True):
    """A heavy key and its rows per second, estimated from a sample."""

    key: Key
    rate: float


class EntryLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """The rows of one operator that enter the deployment at one site."""

    rate: float = 0.0
    slots: dict[int, float] = {}  # the heaviest slots -> rows per second, estimated from a sample
    keys: tuple[HotKey, ...] = ()  # the heaviest keys, heaviest first
    sent_on: tuple[HotKey, ...] = ()  # keys whose rows went on to an owner at another site, counted


class OperatorView(msgspec.Struct, frozen=True, omit_defaults=True):
    """One operator in one second."""

    name: str
    instances: tuple[InstanceView, ...]
    entering: dict[str, EntryLoad] = {}  # by the site at which the rows enter
    owners: dict[int, str] = {}  # slot -> instance
    isolated: dict[Key, str] = {}  # keys with a route of their own -> instance
    spares: tuple[str, ...] = ()  # attached instances that own nothing, kept for the next scale-out
    changing: str = ""  # the move or scaling that runs now

    @property
    def arrivals(self) -> float:
        return sum(instance.arrivals for instance in self.instances)

    @property
    def processed(self) -> float:
        return sum(instance.rate for instance in self.instances)

    @property
    def backlog_rows(self) -> int:
        return sum(instance.backlog_rows for instance in self.instances)

    @property
    def oldest_ms(self) -> float:
        return max((instance.oldest_ms for instance in self.instances), default=0.0)

    @property
    def sites(self) -> dict[str, int]:
        """Site -> number of instances that work there."""
        counts: dict[str, int] = {}
        for instance in self.instances:
            counts[instance.site] = counts.get(instance.site, 0) + 1
        return counts

    @property
    def busiest(self) -> InstanceView | None:
        return max(self.instances, key=lambda instance: (instance.work, instance.name), default=None)

    def at(self, site: str) -> tuple[InstanceView, ...]:
        return tuple(instance for instance in self.instances if instance.site == site)

    def backlog_s(self) -> float:
        """Seconds that the present instances need for what waits; 0 without a measured capacity."""
        rates = [i.capacity for i in self.instances if i.capacity is not None]
        return self.backlog_rows / (sum(rates) / len(rates) * len(self.instances)) if rates else 0.0

    def slot_rates(self) -> dict[int, float]:
        """The heaviest slots -> rows per second, over all sites at which rows enter."""
        rates: dict[int, float] = {}
        for load in self.entering.values():
            for slot, rate in load.slots.items():
                rates[slot] = rates.get(slot, 0.0) + rate
        return rates

    def key_rates(self) -> dict[Key, float]:
        """The heaviest keys -> rows per second, over all sites at which rows enter."""
        rates: dict[Key, float] = {}
        for load in self.entering.values():
            for hot in load.keys:
                rates[hot.key] = rates.get(hot.key, 0.0) + hot.rate
        return rates


class LinkView(msgspec.Struct, frozen=True, array_like=True):
    """The link from one site to another, as its router measures it."""

    rtt_ms: float | None = None  # None: not measured yet
    sent: float = 0.0  # bytes per second
    received: float = 0.0


class SiteView(msgspec.Struct, frozen=True, omit_defaults=True):
    """One site in one second."""

    name: str
    parent: str | None = None
    cores: int = 0  # of the executors there; 0: not known
    free_slots: int | None = None  # task slots for more instances; None: not known, or Spark adds executors
    links: dict[str, LinkView] = {}  # by the other site
    executor: str = ""  # of its router


class View(msgspec.Struct, frozen=True, omit_defaults=True):
    """A deployment in one second."""

    at_s: float  # seconds since 1970
    operators: dict[str, OperatorView]
    sites: dict[str, SiteView] = {}
    failed: dict[str, str] = {}  # instances that were given up or are silent -> the reason

    def operator(self, name: str) -> OperatorView | None:
        return self.operators.get(name)
