"""The processes that faults can hit.

Responsible for: the processes of one application by name and kind; killing an executor with its disk.
Not responsible for: when (supervisor.py, plan.py), which process belongs to which (processes.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from tiercel.chaos.processes import below, executor_of, kill, members
from tiercel.chaos.workload import SITES
from tiercel.core.model.topology import operator_of
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.recovery.recover import has_replica_copy
from tiercel.runtime.replication.primary import is_replica
from tiercel.runtime.storage.incarnations import IncarnationClaims


def kill_with_disk(executor: int, session: int, disks: Path) -> str:
    """Kill an executor and all below it, and delete its disk; returns its name with Spark.

    The executor is stopped first, so that no process restarts while its disk is still there.
    """
    os.kill(executor, signal.SIGSTOP)
    words = Path(f"/proc/{executor}/cmdline").read_bytes().split(b"\0")
    name = words[words.index(b"--executor-id") + 1].decode()
    for pid in below(executor, session):  # looked up first: orphans have no ancestors
        kill(pid)
    gone = disks / f".gone-{name}"
    with contextlib.suppress(FileNotFoundError):  # nothing is stored there yet
        (disks / name).rename(gone)
    os.kill(executor, signal.SIGKILL)
    shutil.rmtree(gone, ignore_errors=True)
    return name


class Targets:
    """The processes of an application by name; every pid is checked to belong to it."""

    def __init__(self, storage: Path, application: int) -> None:
        self._place = DeploymentDir(storage)
        self._application = application

    def instances(self) -> dict[str, int]:
        return {name: pid for name, pid in self._workers() if operator_of(name)}

    def routers(self) -> dict[str, int]:
        return {name: pid for name, pid in self._workers() if not operator_of(name) and not is_replica(name)}

    def replicas(self) -> dict[str, int]:
        return {name: pid for name, pid in self._workers() if is_replica(name)}

    def without_copy(self) -> list[str]:
        """With replicas: the processes whose data has only one copy now, on their disk or with their replica.

        Counts processes that should run, because a killed process may still be registered and a restarted one
        is not registered yet.
        """
        running = {name for name, _, _ in self._on_executors()}
        meant = {*SITES, *self._place.desired_instances()}
        holder = {name: IncarnationClaims(self._place.incarnations, name).holder() for name in meant}
        return [
            name
            for name in sorted(holder)
            if not ({name, holder[name]} <= running and has_replica_copy(self._place, name))
        ]

    def executors(self) -> dict[str, int]:
        """JVMs that run workers; in a local session that is the driver's, and none of ours to kill alone."""
        return {f"executor {executor}": executor for _, _, executor in self._on_executors()}

    def everyone(self) -> dict[str, int]:
        """All that can be stopped for a while: workers, executors, the driver."""
        return dict(self._workers()) | self.executors() | {"driver": self._application}

    def writers(self) -> list[int]:
        """Processes that write to the storage: the workers, and the controller in the driver."""
        return [*dict(self._workers()).values(), self._application]

    def _workers(self) -> Iterator[tuple[str, int]]:
        ours = set(members(self._application)) - {self._application}  # the controller runs in the driver
        for name in self._place.registry.names():
            address = self._place.registry.find(name)
            if address is not None and address.pid in ours:
                yield name, address.pid

    def _on_executors(self) -> Iterator[tuple[str, int, int]]:
        """Workers with their executors; not those whose executor is dead, which soon end too."""
        for name, pid in self._workers():
            with contextlib.suppress(OSError, UserError):  # it has just ended
                yield name, pid, executor_of(pid, [self._application])
