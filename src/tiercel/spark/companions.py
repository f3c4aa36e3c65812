"""Replicas of the routers and instances of each site: how many, where, started before everyone else.

Responsible for: which replicas a deployment has, and that two of one site are on different executors.
Not responsible for: what they hold (runtime/keeper.py), keeping them apart later (vigil.py).
"""

from __future__ import annotations

import time

from tiercel.errors import UserError
from tiercel.runtime.place import Durability, Manifest, Place, ReplicaPlan
from tiercel.runtime.replication import replicas_of
from tiercel.spark.backend import Backend
from tiercel.spark.hosting import Hosting
from tiercel.spark.vigil import together

DURABILITIES: tuple[Durability, ...] = ("os", "disk", "replica")
PLACED_S_MAX = 60.0  # for the replicas of a site to come to be on different executors


def check_durability(durability: str) -> None:
    if durability not in DURABILITIES:
        raise UserError(f"durability {durability!r}", expected="'os', 'disk' or 'replica'")


def replica_plan(backend: Backend, durability: Durability) -> ReplicaPlan | None:
    """One per site where there is one executor only; else two, so that each process has one elsewhere."""
    if durability != "replica":
        return None
    return ReplicaPlan(per_site=1) if backend.local else ReplicaPlan(per_site=2, apart=True)


def names_of(manifest: Manifest) -> list[str]:
    """Each once: a site may hold the copies of others, and one whose copies are elsewhere may hold none."""
    names = [name for site in manifest.topology.sites for name in replicas_of(manifest, site)]
    return list(dict.fromkeys(names))


def start_replicas(place: Place, manifest: Manifest, hosting: Hosting) -> None:
    """All of them, before anyone needs one: then they find free slots on every executor."""
    names = names_of(manifest)
    for name in names:
        hosting.start(name)
    for name in names:
        hosting.wait(name)
    if manifest.replicas is None or not manifest.replicas.apart:
        return
    give_up = time.monotonic() + PLACED_S_MAX
    while misplaced := together(place, names):
        if time.monotonic() > give_up:
            raise UserError(
                f"{', '.join(misplaced)}: no other executor has a task slot for it",
                expected="two executors with a free slot each: durability 'replica' is a copy on another one",
                hint="more executors; or durability='disk' with a backup=",
            )
        for name in misplaced:
            life = hosting.wait(name).life
            hosting.relocate(name)
            hosting.wait(name, after_life=life)
