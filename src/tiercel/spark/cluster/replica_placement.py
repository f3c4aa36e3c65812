"""The placement of replicas: how many a site has, and on which executors and machines they run.

Responsible for: the replicas of a deployment; two replicas of a site on different executors, and on different
    machines if another machine has a free slot; starting them before all other processes.
Not responsible for: what they store (runtime/replication/replica.py), when to check their placement again
    (liveness.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir, Durability, Manifest, ReplicaPlan
from tiercel.runtime.net.addresses import machine_here
from tiercel.runtime.net.registry import Address
from tiercel.runtime.recovery.recover import has_replica_copy
from tiercel.runtime.replication.primary import is_replica, replicas_of, site_of_replica
from tiercel.runtime.storage.incarnations import IncarnationClaims
from tiercel.spark.cluster.backend import Backend
from tiercel.spark.cluster.supervisor import Supervisor
from tiercel.spark.cluster.warm_workers import HOLD_S

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)

DURABILITIES: tuple[Durability, ...] = ("os", "disk", "replica")
SEPARATE_S_MAX = 60.0  # for the replicas of a site to be on different executors
MACHINE_TRIES = 5  # to place them on two machines: Spark chooses where a task starts


def replica_plan(backend: Backend, durability: Durability) -> ReplicaPlan | None:
    """One replica per site on a single executor; else two, so that one is on another executor."""
    if durability != "replica":
        return None
    return ReplicaPlan(per_site=1) if backend.local else ReplicaPlan(per_site=2, apart=True)


def replica_names(manifest: Manifest) -> list[str]:
    """The replicas of all sites, each once. A site may host replicas of others, or none at all."""
    names = [name for site in manifest.sites_here for name in replicas_of(manifest, site)]
    return list(dict.fromkeys(names))


def start_replicas(
    backend: Backend, deployment: DeploymentDir, manifest: Manifest, supervisor: Supervisor, others: int
) -> None:
    """Start all replicas before all other processes, while every executor has free slots.

    `others` is the number of processes that start next: the check of the machines warms their workers up.
    """
    names = replica_names(manifest)
    for name in names:
        supervisor.start(name)
    for name in names:
        supervisor.wait(name)
    if manifest.replicas is None or not manifest.replicas.apart:
        return
    separate(deployment, names, supervisor)
    machines: set[str] = set()
    for _ in range(MACHINE_TRIES):
        sharing = colocated(deployment, names, machine_of)
        if sharing and not machines:
            machines = free_machines(backend, others)
        sharing = [name for name in sharing if machines - {supervisor.wait(name).machine}]
        if not sharing:
            return
        _relocate_all(supervisor, sharing)
        separate(deployment, names, supervisor)
    if sharing := colocated(deployment, names, machine_of):
        log.warning("%s shares a machine with another replica of its site", ", ".join(sharing))


def free_machines(backend: Backend, tasks: int) -> set[str]:
    """Machines with a free slot, found by running that many tasks at once."""

    def report(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow as pa

        for _ in batches:
            time.sleep(HOLD_S)  # otherwise one worker would run them all in turn
            yield pa.RecordBatch.from_pydict({"machine": [machine_here()]})

    tried = backend.spark.range(0, tasks, 1, tasks).mapInArrow(report, "machine string")
    return {row.machine for row in tried.collect()}


def separate(deployment: DeploymentDir, names: list[str], supervisor: Supervisor) -> None:
    """Relocate replicas until no two of a site are on one executor."""
    give_up = time.monotonic() + SEPARATE_S_MAX
    while misplaced := colocated(deployment, names):
        if time.monotonic() > give_up:
            raise UserError(
                f"{', '.join(misplaced)}: no other executor has a task slot for it",
                expected="two executors with a free slot each: a replica must be on another one",
                hint="more executors; or durability='disk' with a backup=",
            )
        _relocate_all(supervisor, misplaced)


def _relocate_all(supervisor: Supervisor, names: list[str]) -> None:
    for name in names:
        incarnation = supervisor.wait(name).incarnation
        supervisor.relocate(name)
        supervisor.wait(name, after_incarnation=incarnation)


class AntiAffinity:
    """Picks replicas that share a machine with another of their site, while there is another machine."""

    def __init__(self) -> None:
        self._tries = 0
        self._machines: set[str] = set()  # for which it was tried

    def pick_mover(self, deployment: DeploymentDir, names: list[str]) -> list[str]:
        """A replica to move now, or none: a replica that holds the only copy of something must stay."""
        found = [deployment.registry.find(name) for name in names]
        machines = {address.machine for address in found if address is not None} - {""}
        sharing = colocated(deployment, names, machine_of)
        if not sharing or machines != self._machines:
            self._tries, self._machines = 0, machines
        if len(machines) < 2 or not sharing or self._tries >= MACHINE_TRIES:
            return []
        mover = sharing[0]
        others = [name for name in names if not is_replica(name)]
        held = [name for name in others if IncarnationClaims(deployment.incarnations, name).holder() == mover]
        if not all(has_replica_copy(deployment, name) for name in held):
            return []  # a process may be restoring from it
        self._tries += 1
        return [mover]


def executor_of(address: Address) -> str:
    return address.executor


def machine_of(address: Address) -> str:
    return address.machine or address.executor  # an unknown machine counts as a different one


def colocated(
    deployment: DeploymentDir, names: list[str], where: Callable[[Address], str] = executor_of
) -> list[str]:
    """Replicas that share an executor, or with `where=machine_of` a machine, with another of the same site.

    Of two, this names the younger one: the older may hold the only replica of processes of a lost executor.
    """
    taken: set[tuple[str, str]] = set()
    found = []
    for name in sorted(filter(is_replica, names), key=deployment.registry.registered_since_ns):
        address = deployment.registry.find(name)
        if address is not None:
            here = (site_of_replica(name), where(address))
            if here in taken:
                found.append(name)
            taken.add(here)
    return found
