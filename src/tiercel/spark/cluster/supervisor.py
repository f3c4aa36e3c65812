"""The supervisor of a deployment's processes: each router, instance and replica is one long-lived Spark task.

Responsible for: one Spark job per process, in a driver thread, with a tag; submitting the job again when
    Spark has given up; finding where a process listens; stopping processes.
Not responsible for: what runs inside the task (task.py), how many tasks fit (task_slots.py), noticing
    processes that are silent (liveness.py).

    driver: start(name) --> thread: spark.range(1).mapInArrow(task) --> worker: Host.run ... end
                              |  ^                                          |
                              |  +-- Spark has used up its retries <-- Spark retries
                              +-- stop requested: the job ends

The supervisor stops a process by a stop request in the registry. Cancelling its job looks like a crash.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from tiercel.core.errors import OperatorFailed
from tiercel.core.model.topology import operator_of, site_of
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.net.registry import Address
from tiercel.runtime.replication.primary import is_replica
from tiercel.spark.cluster.backend import Backend
from tiercel.spark.cluster.task import PROGRESS_SCHEMA, Build, build_host, task
from tiercel.spark.cluster.task_slots import ALLOCATION_S_MAX, RESERVED_SLOTS
from tiercel.spark.cluster.waiting import wait_until
from tiercel.spark.job_errors import could_not_start, reason_of
from tiercel.spark.operators.plans import OperatorPlan

log = logging.getLogger(__name__)

START_S_MAX = 90.0  # a first Python worker on a busy machine
END_S_MAX = 15.0
HEALTHY_S = 20.0  # a job that failed after this long was healthy before
FAILURES_MAX = 4  # in a row, each sooner than HEALTHY_S: the process cannot work, and is given up
PAUSE_S = 0.2  # before a job is submitted again
DISK_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
DISK_FULL_PAUSE_S = 1.0  # on top of PAUSE_S: a disk may stay full for long

_supervisors: weakref.WeakSet[Supervisor] = weakref.WeakSet()  # of this driver


def running_processes(application: str) -> int:
    """How many processes of this driver's deployments hold a slot of a Spark application."""
    return sum(len(each.names) for each in _supervisors if each.application == application)


def free_slots(backend: Backend) -> int | None:
    """Task slots for more processes; None: not known, or Spark adds executors."""
    slots = None if backend.allocates else backend.slots()
    if slots is None:
        return None
    return max(0, slots - running_processes(backend.application) - RESERVED_SLOTS)


class Supervisor:
    """The processes of one deployment in one Spark application."""

    def __init__(
        self,
        backend: Backend,
        deployment: DeploymentDir,
        build: Build = build_host,
        resources: Mapping[str, Any] | None = None,
    ) -> None:
        """`resources`: operator -> the ResourceProfile of the tasks of its instances."""
        self._backend = backend
        self._build = build
        self.application = backend.application
        self._deployment = deployment
        self._registry = deployment.registry
        self._threads: dict[str, threading.Thread] = {}
        self._supervised: dict[str, threading.Thread] = {}  # threads that still submit jobs
        self._stopping: set[str] = set()
        self._ended = False
        self._lock = threading.Lock()
        self.failures: dict[str, str] = {}  # of processes that were given up: the reason
        self.submissions: dict[str, int] = {}
        self.suspicions: dict[str, int] = {}  # how often a process was suspected to be dead
        self._suspected: set[str] = set()  # processes whose job was cancelled for that
        self._resources = resources or {}
        _supervisors.add(self)

    @property
    def names(self) -> list[str]:
        return sorted(set(self._threads) - self._stopping)

    def tag(self, name: str) -> str:
        """The tag of a process's jobs. Deployments of one application may have processes of the same name."""
        where = hashlib.sha256(os.fsencode(self._deployment.directory)).hexdigest()[:8]
        return f"{quote(name, safe='@# ')}:{where}"  # Spark refuses a comma

    def start(self, name: str, plan: OperatorPlan | None = None) -> None:
        """Ask Spark for a task that hosts this process: a router, or with a plan an instance.

        A process that was asked to stop and has not ended yet first ends. Its thread then starts it again.
        """
        with self._lock:
            if self._ended:
                raise UserError(
                    f"{name} is not started: the deployment was stopped", expected="one that runs"
                )
            if name in self._supervised:
                if name in self._stopping:
                    self._stopping.discard(name)
                    self._registry.clear_stop_request(name)
                return
            self._stopping.discard(name)
            self.failures.pop(name, None)
            self._registry.clear_stop_request(name)
            work = functools.partial(self._run, name, plan)
            self._threads[name] = thread = self._backend.thread(work, f"tiercel-{name}")
            self._supervised[name] = thread
            thread.start()

    def _run(self, name: str, plan: OperatorPlan | None) -> None:
        try:
            self._run_jobs(name, plan)
        except Exception as error:  # Spark refuses the job itself
            log.exception("the job of %s", name)
            self.failures[name] = reason_of(error)
        with self._lock:
            if self._supervised.get(name) is threading.current_thread():
                del self._supervised[name]

    def _is_wanted(self, name: str) -> bool:
        """Whether this thread submits another job. If not, the next `start` makes another thread."""
        with self._lock:
            if name in self._stopping:
                del self._supervised[name]
            return name in self._supervised

    def _run_jobs(self, name: str, plan: OperatorPlan | None) -> None:
        """Submits one job after the other until a stop is requested, or the process cannot work at all."""
        self._backend.enter(self.tag(name), described(name))
        work = task(self._deployment.directory, name, plan, self._build)
        job = self._backend.hosting_job(work, PROGRESS_SCHEMA, self._resources.get(operator_of(name)))
        in_a_row = 0
        while self._is_wanted(name):
            begun = time.monotonic()
            self.submissions[name] = self.submissions.get(name, 0) + 1
            try:
                job.run()
                if name not in self._stopping:  # it was asked to leave its executor, and starts on another
                    self._registry.clear_stop_request(name)
            except Exception as error:
                if name in self._stopping:
                    continue
                if self._backend.is_stopped():
                    self.failures[name] = "the Spark session was stopped"
                    return
                reason = reason_of(error)
                if name in self._suspected:
                    self._suspected.discard(name)
                    in_a_row = 0  # this driver cancelled the job: the process may have been healthy
                elif any(full in str(error) for full in DISK_FULL):
                    in_a_row = 0  # it works again as soon as the disk has room
                    time.sleep(DISK_FULL_PAUSE_S)
                else:
                    in_a_row = 1 if time.monotonic() - begun > HEALTHY_S else in_a_row + 1
                log.warning("the job of %s failed (%d in a row): %s", name, in_a_row, reason)
                if in_a_row >= FAILURES_MAX or self._is_permanent(name, error):
                    self.failures[name] = reason
                    return
                time.sleep(PAUSE_S)

    def _is_permanent(self, name: str, error: Exception) -> bool:
        """Whether a restart cannot help: the operator failed by design, or the process has never started."""
        kinds = [OperatorFailed] if self._registry.find(name) is not None else [OperatorFailed, UserError]
        return any(f"{kind.__module__}.{kind.__name__}: " in str(error) for kind in kinds)

    def wait(self, name: str, after_incarnation: int = 0) -> Address:
        """Where a process listens, as soon as an incarnation above `after_incarnation` does."""
        limit, seconds = self.start_s_max

        def address() -> Address | None:
            found = self._registry.find(name)
            if found is not None and found.incarnation > after_incarnation:
                return found
            if name in self.failures:
                raise could_not_start(name, self.failures[name])
            return None

        def failure() -> UserError:
            return UserError(
                f"{name} did not start within {seconds:g} s ({limit})",
                expected="a free task slot for it",
                hint="see Spark's UI for what holds the slots, and the log of its executors",
            )

        found = wait_until(address, seconds, failure)
        assert found is not None
        return found

    @property
    def start_s_max(self) -> tuple[str, float]:
        """How long a process may take to start, and the name of that limit."""
        if self._backend.allocates:
            return "ALLOCATION_S_MAX", ALLOCATION_S_MAX
        return "START_S_MAX", START_S_MAX

    @property
    def waiting(self) -> list[str]:
        """Processes that were started and do not listen yet."""
        return [name for name in self.names if self._registry.find(name) is None]

    def relocate(self, name: str) -> None:
        """Stop a process where it runs. Spark starts it again, and not on an executor that leaves."""
        self._registry.request_stop(name)

    def suspect(self, name: str, silent_s: float) -> None:
        """Restart a process that sends no heartbeat: cancel its job and start another incarnation.

        If the old incarnation is still alive, the new one fences it.
        """
        log.warning("%s sent no heartbeat for %.1f s: it is restarted", name, silent_s)
        self.suspicions[name] = self.suspicions.get(name, 0) + 1
        self._suspected.add(name)
        self._registry.clear_stop_request(name)
        self._backend.cancel(self.tag(name))

    def stop_leftovers(self) -> None:
        """Stop processes of an earlier driver. Behind Spark Connect they survive a killed driver."""
        left = [found for name in self._registry.names() if (found := self._registry.find(name))]
        for address in left:
            self._registry.request_stop(address.name)
        wait_until(lambda: not any(map(listens, left)), END_S_MAX)

    def request_stop(self, name: str) -> None:
        """Stop one process for good; returns at once."""
        self._stopping.add(name)
        self._registry.request_stop(name)

    def end(self) -> None:
        """Stop every process; cancel the jobs of processes that do not end by themselves."""
        with self._lock:
            self._ended = True
        for name in self._threads:
            self.request_stop(name)
        give_up = time.monotonic() + END_S_MAX
        for name, thread in self._threads.items():
            thread.join(max(0.0, give_up - time.monotonic()))
            if thread.is_alive() and not self._backend.is_stopped():
                self._backend.cancel(self.tag(name))
        for name in self._threads:
            self._registry.deregister(name)


def described(name: str) -> str:
    """A process as Spark's UI shows its job."""
    if is_replica(name):
        return f"Tiercel: replica {name}"
    if operator_of(name):
        return f"Tiercel: instance {name} of operator {operator_of(name)} at site {site_of(name)}"
    return f"Tiercel: router of site {name}"


def listens(address: Address) -> bool:
    try:
        socket.create_connection((address.host, address.port), timeout=1.0).close()
    except OSError:
        return False
    return True
