"""Processes of one application, and what can be done to them.

Responsible for: finding who runs in it; killing and stopping them, and nobody else.
Not responsible for: when (supervisor.py, plan.py), who belongs to whom (bench/processes.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from tiercel.bench.processes import below, executor_of, kill, members
from tiercel.chaos.ledger import SITES
from tiercel.core.topology import operator_of
from tiercel.errors import UserError
from tiercel.runtime.lives import Lives
from tiercel.runtime.place import Place
from tiercel.runtime.replicated import has_copy
from tiercel.runtime.replication import is_replica


def kill_with_disk(executor: int, session: int, disks: Path) -> str:
    """Kill an executor and all below it, and delete its disk; returns its name with Spark.

    It stands still first: nobody is started again, here or elsewhere, while its disk is still there.
    """
    os.kill(executor, signal.SIGSTOP)
    words = Path(f"/proc/{executor}/cmdline").read_bytes().split(b"\0")
    name = words[words.index(b"--executor-id") + 1].decode()
    for pid in below(executor, session):  # looked up before the first dies: orphans are below nobody
        kill(pid)
    gone = disks / f".gone-{name}"
    with contextlib.suppress(FileNotFoundError):  # nobody has stored anything there yet
        (disks / name).rename(gone)
    os.kill(executor, signal.SIGKILL)
    shutil.rmtree(gone, ignore_errors=True)
    return name


class Victims:
    """Who runs in an application, by name, with a pid that is certainly one of its processes."""

    def __init__(self, storage: Path, application: int) -> None:
        self._place = Place(storage)
        self._application = application

    def instances(self) -> dict[str, int]:
        return {name: pid for name, pid in self._workers() if operator_of(name)}

    def routers(self) -> dict[str, int]:
        return {name: pid for name, pid in self._workers() if not operator_of(name) and not is_replica(name)}

    def replicas(self) -> dict[str, int]:
        return {name: pid for name, pid in self._workers() if is_replica(name)}

    def without_copy(self) -> list[str]:
        """With replicas: who has only one copy now, on its disk or with its replica.

        Whoever is meant to run counts, and only who does run has a copy: who was just killed may still be
        registered, who is started again is not yet, and who was retired and killed at once stays so for ever.
        """
        running = {name for name, _, _ in self._on_executors()}
        meant = {*SITES, *self._place.wanted()}
        holder = {name: Lives(self._place.lives, name).holder() for name in meant}
        return [
            name
            for name in sorted(holder)
            if not ({name, holder[name]} <= running and has_copy(self._place, name))
        ]

    def executors(self) -> dict[str, int]:
        """JVMs that run workers; in a local session that is the driver's, and none of ours to kill alone."""
        return {f"executor {executor}": executor for _, _, executor in self._on_executors()}

    def everyone(self) -> dict[str, int]:
        """All that can be stopped for a while: workers, executors, the driver."""
        return dict(self._workers()) | self.executors() | {"driver": self._application}

    def writers(self) -> list[int]:
        """Who writes to the storage: the workers, and the controller in the driver."""
        return [*dict(self._workers()).values(), self._application]

    def _workers(self) -> Iterator[tuple[str, int]]:
        ours = set(members(self._application)) - {self._application}  # the controller lives in the driver
        for name in self._place.registry.names():
            address = self._place.registry.find(name)
            if address is not None and address.pid in ours:
                yield name, address.pid

    def _on_executors(self) -> Iterator[tuple[str, int, int]]:
        """Workers with their executors; not those whose executor is dead, which soon end too."""
        for name, pid in self._workers():
            with contextlib.suppress(OSError, UserError):  # it has just ended
                yield name, pid, executor_of(pid, [self._application])
