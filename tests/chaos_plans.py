"""Plans of chaos runs that several tests use."""

from __future__ import annotations

import itertools

from tiercel.chaos.plan import Fault, plan
from tiercel.chaos.supervisor import kinds_of

CLUSTER = "local-cluster[2,6,1024]"


def first(count: int, seed: int = 7, master: str = CLUSTER, durability: str = "backup") -> list[Fault]:
    return list(itertools.islice(plan(seed, kinds_of(master, durability)), count))
