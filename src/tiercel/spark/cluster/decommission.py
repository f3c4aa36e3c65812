"""Decommissioned executors: all processes of a deployment leave them before they are gone, while rows flow.

Responsible for: noticing them; a new instance elsewhere for each instance there; routers after the instances.
Not responsible for: the moves (control/controller.py), whether an executor leaves (pyspark_internals.py).

    ACTIVE --decommissioned--> moving --all processes have left--> empty --> gone
                                  |
                                  +-- Spark removes it sooner --> lost: handled like a crash

A thread of the driver checks a few times a second, in applications that decommission executors. It has no
durable state: the controller stores the requests, the registry has the executor of each process, and a driver
that restarts starts all tasks again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable

import msgspec

from tiercel.control.controller import ScaleRequest
from tiercel.core.model.topology import Topology, instance_name, operator_of, site_of
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.cluster.backend import Backend
from tiercel.spark.cluster.controller_thread import ControllerThread
from tiercel.spark.cluster.supervisor import Supervisor
from tiercel.spark.pyspark_internals import CannotTell, ExecutorState

log = logging.getLogger(__name__)

POLL_S = 0.25
REPLACE_S_MAX = 20.0  # for new instances to start; then the remaining ones take the keys
ROUTERS_S_MAX = 60.0  # at most, for keys to leave before routers restart


class Handover(msgspec.Struct):
    """The handover of a decommissioned executor."""

    executor: str
    state: str = "moving"  # moving | empty | gone | lost
    instances: dict[str, str] = {}  # an instance that was there -> its replacement
    routers: list[str] = []  # that were restarted elsewhere
    note: str = ""

    def __str__(self) -> str:
        ways = [f"{old} -> {new}" for old, new in self.instances.items()] + self.routers
        return f"executor {self.executor} leaves, {self.state}: {', '.join(ways)} {self.note}".rstrip(": ")


def with_replacements(request: ScaleRequest, leaving: Iterable[str], taken: Collection[str]) -> ScaleRequest:
    """The request with a new instance, at the same site, for each one that leaves."""
    instances, replacing = list(request.instances), dict(request.replacing)
    names = {n for n in (*taken, *instances, *replacing) if operator_of(n) == request.operator}
    for old in leaving:
        if old not in instances:
            continue  # it retires anyway
        site = site_of(old)
        n = 1 + max(int(name.rpartition("#")[2]) for name in names if site_of(name) == site)
        new = instance_name(request.operator, site, n)
        names.add(new)
        instances[instances.index(old)] = new
        replacing = {gone: new if instead == old else instead for gone, instead in replacing.items()}
        replacing[old] = new
    return msgspec.structs.replace(request, instances=tuple(instances), replacing=replacing)


class DecommissionWatcher:
    """A thread of the driver that watches the executors of one deployment."""

    def __init__(
        self,
        backend: Backend,
        deployment: DeploymentDir,
        topology: Topology,
        supervisor: Supervisor,
        controller: ControllerThread,
        *,
        watches: bool = True,
    ) -> None:
        self._backend, self._deployment, self._topology = backend, deployment, topology
        self._supervisor, self._controller = supervisor, controller
        self.handovers: dict[str, Handover] = {}
        self.replace_s_max = REPLACE_S_MAX
        self._begun_s: dict[str, float] = {}  # executor -> when its decommissioning was noticed
        self._deferred: dict[str, ScaleRequest] = {}  # operator -> the request that waits for room
        self._ending = threading.Event()
        self._thread = backend.thread(self._run, "tiercel-executors")
        if watches and backend.decommissions:
            self._thread.start()

    def end(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _run(self) -> None:
        while not self._ending.wait(POLL_S):
            try:
                self._check(time.monotonic())
            except CannotTell as reason:
                if not self._backend.is_stopped():
                    log.warning(
                        "decommissioned executors cannot be noticed, call live.drain first: %s", reason
                    )
                return
            except UserError as reason:  # the controller ends, or does not answer in time
                log.info("watching executors: %s", reason)
            except Exception:  # the next executor that leaves must be noticed
                log.exception("watching executors")

    def _check(self, now_s: float) -> None:
        open_ones = [h.executor for h in self.handovers.values() if h.state in ("moving", "empty")]
        for executor in sorted({*self._processes_by_executor(), *open_ones}):
            state = self._backend.executor(executor)
            # Read the registry after the state: a process that ends cleanly leaves the registry before Spark
            # removes its executor. In the other order it would count as lost.
            names = self._processes_by_executor().get(executor, [])
            if state is ExecutorState.LEAVING:
                self._hand_over(executor, names, now_s)
            elif state is ExecutorState.GONE and executor in open_ones:
                self.handovers[executor].state = "lost" if names else "gone"
                log.warning("%s", self.handovers[executor])
        self._resume_deferred()

    def _processes_by_executor(self) -> dict[str, list[str]]:
        """Executor -> processes that run on it, without those that are stopping."""
        here: dict[str, list[str]] = {}
        for name in self._supervisor.names:
            address = self._deployment.registry.find(name)
            if address is not None and address.executor not in ("", "driver"):
                here.setdefault(address.executor, []).append(name)
        return here

    def _hand_over(self, executor: str, names: list[str], now_s: float) -> None:
        if executor not in self.handovers:
            self.handovers[executor] = Handover(executor)
            self._begun_s[executor] = now_s
            log.warning("executor %s is being decommissioned: %s leave it", executor, ", ".join(names))
        handover = self.handovers[executor]
        passed_s = now_s - self._begun_s[executor]
        instances = [name for name in names if operator_of(name)]
        for operator in sorted({operator_of(name) for name in instances}):
            self._replace(operator, [i for i in instances if operator_of(i) == operator], handover, passed_s)
        if not instances or passed_s > ROUTERS_S_MAX:
            for router in set(names) - set(instances) - set(handover.routers):
                handover.routers.append(router)
                self._supervisor.relocate(router)
        handover.state = "moving" if names else "empty"

    def _replace(self, operator: str, leaving: list[str], handover: Handover, passed_s: float) -> None:
        request, retiring = self._controller.scale_request(operator)
        leaving = [i for i in leaving if i not in retiring]
        if request is None:
            strategy = "live" if self._topology.operator(operator).deterministic else "pause"
            instances = tuple(i for i in self._deployment.desired_instances() if operator_of(i) == operator)
            request = ScaleRequest(operator, instances, strategy, even=False)
        missing = set(request.replacing.values()) - self._controller.running()
        if set(leaving) & set(request.instances):
            request = with_replacements(request, leaving, self._supervisor.names)
            handover.instances |= {i: request.replacing[i] for i in leaving if i in request.replacing}
            self._controller.scale(request)
        elif missing and passed_s > self.replace_s_max and operator not in self._deferred:
            others = tuple(i for i in request.instances if i not in missing)
            if others:
                handover.note = f"(no room for {', '.join(sorted(missing))} yet)"
                self._deferred[operator] = msgspec.structs.replace(request, replacing={}, even=True)
                self._controller.scale(ScaleRequest(operator, others, request.strategy))

    def _resume_deferred(self) -> None:
        """Restore the number of instances, once the remaining ones have taken the keys."""
        for operator, request in list(self._deferred.items()):
            found, retiring = self._controller.scale_request(operator)
            if found is None and not retiring:
                del self._deferred[operator]
                self._controller.scale(request)
