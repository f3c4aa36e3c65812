"""Replicas of the routers and instances of each site: how many, where, started before everyone else.

Responsible for: which replicas a deployment has, and that two of one site are on different executors, and
    on different machines if another one has a free slot.
Not responsible for: what they hold (runtime/keeper.py), keeping them apart later (vigil.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tiercel.errors import UserError
from tiercel.runtime.addresses import machine_here
from tiercel.runtime.place import Durability, Manifest, Place, ReplicaPlan
from tiercel.runtime.replication import replicas_of
from tiercel.spark.backend import Backend
from tiercel.spark.hosting import Hosting
from tiercel.spark.spare import HOLD_S
from tiercel.spark.vigil import MACHINE_TRIES, machine_of, together

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)

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


def start_replicas(backend: Backend, place: Place, manifest: Manifest, hosting: Hosting, others: int) -> None:
    """All of them, before anyone needs one: then they find free slots on every executor.

    `others` are those that start behind them: a look at the machines makes their workers ready.
    """
    names = names_of(manifest)
    for name in names:
        hosting.start(name)
    for name in names:
        hosting.wait(name)
    if manifest.replicas is None or not manifest.replicas.apart:
        return
    part_executors(place, names, hosting)
    machines: set[str] = set()
    for _ in range(MACHINE_TRIES):
        sharing = together(place, names, machine_of)
        if sharing and not machines:
            machines = free_machines(backend, others)
        sharing = [name for name in sharing if machines - {hosting.wait(name).machine}]
        if not sharing:
            return
        _move(hosting, sharing)
        part_executors(place, names, hosting)
    if sharing := together(place, names, machine_of):
        log.warning("%s shares a machine with another replica of its site", ", ".join(sharing))


def free_machines(backend: Backend, tasks: int) -> set[str]:
    """Those with a free slot, as far as so many tasks at once come to be on them."""

    def look(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow as pa

        for _ in batches:
            time.sleep(HOLD_S)  # else one worker would do them all, one after the other
            yield pa.RecordBatch.from_pydict({"machine": [machine_here()]})

    tried = backend.spark.range(0, tasks, 1, tasks).mapInArrow(look, "machine string")
    return {row.machine for row in tried.collect()}


def part_executors(place: Place, names: list[str], hosting: Hosting) -> None:
    """Until no two replicas of a site are on one executor."""
    give_up = time.monotonic() + PLACED_S_MAX
    while misplaced := together(place, names):
        if time.monotonic() > give_up:
            raise UserError(
                f"{', '.join(misplaced)}: no other executor has a task slot for it",
                expected="two executors with a free slot each: durability 'replica' is a copy on another one",
                hint="more executors; or durability='disk' with a backup=",
            )
        _move(hosting, misplaced)


def _move(hosting: Hosting, names: list[str]) -> None:
    for name in names:
        life = hosting.wait(name).life
        hosting.relocate(name)
        hosting.wait(name, after_life=life)
