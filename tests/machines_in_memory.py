"""A small deployment on the in-memory driver, shared by the tests of the core.

Responsible for: its topology, its keys, and the operators of tiercel.sim.workload as its code.
Not responsible for: the driver (tiercel.testing.in_memory_driver).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.routing import slot_of
from tiercel.core.model.topology import Operator, Stream, Topology
from tiercel.core.settings import Settings
from tiercel.sim.workload import KINDS, PlainCode
from tiercel.testing.in_memory_driver import REQUESTER, InMemoryDriver

__all__ = ["REQUESTER", "SLOTS", "SmallDeployment", "key_in", "topology"]

SLOTS = 4
DEADLINE_MS = 30_000.0  # of every move; a deployment's clock starts at 1000


def key_in(slot: int, number: int = 0) -> Key:
    """The `number`-th key of a slot."""
    found = (b"k%d" % n for n in range(10_000))
    return [k for k, _ in zip((k for k in found if slot_of(k, SLOTS) == slot), range(number + 1))][-1]  # noqa: B905


def topology(sites: Iterable[str] = ("a", "b"), kind: str = "chained", **operator: Any) -> Topology:
    """Stream `in` -> operator `op`, one instance per site -> stream `out`, at home at the first site."""
    sites = tuple(sites)
    instances = operator.pop("instances", tuple(f"op@{site}#0" for site in sites))
    return Topology(
        dict.fromkeys(sites),
        {
            "in": Stream("in", sites[0], logged=False),
            "out": Stream("out", sites[0]),
            "dead": Stream("dead", sites[0]),
        },
        {
            "op": Operator(
                "op",
                ("in",),
                "out",
                instances,
                slots=SLOTS,
                dead_letters="dead",
                time_mode=KINDS[kind].time_mode,
                **operator,
            )
        },
    )


class SmallDeployment(InMemoryDriver):
    """A driver of `topology()` whose instances run the simulator's operator `kind`."""

    def __init__(
        self, facts: Topology | None = None, settings: Settings | None = None, kind: str = "chained"
    ) -> None:
        super().__init__(
            facts or topology(kind=kind), lambda instance: PlainCode(KINDS[kind](instance[:2])), settings
        )

    def move(
        self,
        keys: KeySet,
        source: str,
        to: str,
        strategy: str = "live",
        name: str = "m1",
        deadline_ms: float | None = DEADLINE_MS,
    ) -> None:
        super().move(keys, source, to, strategy, name, deadline_ms)
