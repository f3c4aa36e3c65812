"""Executors that are about to go: everything of ours leaves them first, while rows flow.

Responsible for: noticing it, an instance elsewhere in place of each one there, routers after them.
Not responsible for: the moves (control/controller.py), whether an executor leaves (seam.py).

    ACTIVE --decommissioned--> moving --nothing of ours is there--> empty --> gone
                                  |
                                  +-- Spark takes it away sooner --> lost: a crash, and it is recovered

A thread of the driver looks a few times a second, in applications that decommission at all. It keeps
nothing that must survive: what was wished for is durable with the controller, where everyone runs stands
in the registry, and a driver that starts anew finds all tasks new.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable

import msgspec

from tiercel.control.controller import Scale
from tiercel.core.topology import Topology, instance_name, operator_of, site_of
from tiercel.errors import UserError
from tiercel.runtime.place import Place
from tiercel.spark.backend import Backend
from tiercel.spark.console import Console
from tiercel.spark.hosting import Hosting
from tiercel.spark.seam import CannotTell, ExecutorState

log = logging.getLogger(__name__)

LOOK_S = 0.25
REPLACE_S_MAX = 20.0  # for instances to start elsewhere; then the others take the keys, and may do so at once
ROUTERS_S_MAX = 60.0  # routers wait for the keys to leave before they restart, but no longer than this


class Handover(msgspec.Struct):
    """What became of an executor that was to go."""

    executor: str
    state: str = "moving"  # moving | empty | gone | lost
    instances: dict[str, str] = {}  # who was there -> who is in its place
    routers: list[str] = []  # that were started again elsewhere
    note: str = ""

    def __str__(self) -> str:
        ways = [f"{old} -> {new}" for old, new in self.instances.items()] + self.routers
        return f"executor {self.executor} leaves, {self.state}: {', '.join(ways)} {self.note}".rstrip(": ")


def replaced(wish: Scale, leaving: Iterable[str], taken: Collection[str]) -> Scale:
    """The wish with a new instance, at the same site, in place of each that leaves."""
    instances, replacing = list(wish.instances), dict(wish.replacing)
    names = {n for n in (*taken, *instances, *replacing) if operator_of(n) == wish.operator}
    for old in leaving:
        if old not in instances:
            continue  # it is to go anyway
        site = site_of(old)
        n = 1 + max(int(name.rpartition("#")[2]) for name in names if site_of(name) == site)
        new = instance_name(wish.operator, site, n)
        names.add(new)
        instances[instances.index(old)] = new
        replacing = {gone: new if instead == old else instead for gone, instead in replacing.items()}
        replacing[old] = new
    return msgspec.structs.replace(wish, instances=tuple(instances), replacing=replacing)


class Watch:
    """Looks after the executors of one deployment."""

    def __init__(
        self, backend: Backend, place: Place, topology: Topology, hosting: Hosting, console: Console
    ) -> None:
        self._backend, self._place, self._topology = backend, place, topology
        self._hosting, self._console = hosting, console
        self.handovers: dict[str, Handover] = {}
        self.replace_s_max = REPLACE_S_MAX
        self._begun_s: dict[str, float] = {}  # executor -> when it was noticed
        self._owed: dict[str, Scale] = {}  # operator -> the wish that began without those who had no room
        self._ending = threading.Event()
        self._thread = backend.thread(self._run, "tiercel-executors")
        if backend.decommissions:
            self._thread.start()

    def end(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _run(self) -> None:
        while not self._ending.wait(LOOK_S):
            try:
                self._look(time.monotonic())
            except CannotTell as reason:
                if not self._backend.is_stopped():
                    log.warning("executors that leave cannot be noticed, call live.drain first: %s", reason)
                return
            except UserError as reason:  # the controller ends, or does not answer in time; look again
                log.info("looking after executors: %s", reason)
            except Exception:  # whatever it is, the next executor that leaves must be noticed
                log.exception("looking after executors")

    def _look(self, now_s: float) -> None:
        open_ones = [h.executor for h in self.handovers.values() if h.state in ("moving", "empty")]
        for executor in sorted({*self._who_is_where(), *open_ones}):
            state = self._backend.executor(executor)
            # Asked behind the state: who ends well leaves the registry first, then its task ends, then Spark
            # takes the executor away. Before, somebody who was just leaving was taken for lost.
            names = self._who_is_where().get(executor, [])
            if state is ExecutorState.LEAVING:
                self._hand_over(executor, names, now_s)
            elif state is ExecutorState.GONE and executor in open_ones:
                self.handovers[executor].state = "lost" if names else "gone"
                log.warning("%s", self.handovers[executor])
        self._pay_what_is_owed()

    def _who_is_where(self) -> dict[str, list[str]]:
        """Executor -> who runs on it, and has not said that it leaves."""
        here: dict[str, list[str]] = {}
        for name in self._hosting.names:
            address = self._place.registry.find(name)
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
                self._hosting.relocate(router)
        handover.state = "moving" if names else "empty"

    def _replace(self, operator: str, leaving: list[str], handover: Handover, passed_s: float) -> None:
        wish, retiring = self._console.wish(operator)
        leaving = [i for i in leaving if i not in retiring]
        if wish is None:
            strategy = "live" if self._topology.operator(operator).deterministic else "pause"
            instances = tuple(i for i in self._place.wanted() if operator_of(i) == operator)
            wish = Scale(operator, instances, strategy, even=False)
        missing = set(wish.replacing.values()) - self._console.running()
        if set(leaving) & set(wish.instances):
            wish = replaced(wish, leaving, self._hosting.names)
            handover.instances |= {i: wish.replacing[i] for i in leaving if i in wish.replacing}
            self._console.scale(wish)
        elif missing and passed_s > self.replace_s_max and operator not in self._owed:
            others = tuple(i for i in wish.instances if i not in missing)
            if others:
                handover.note = f"(no room for {', '.join(sorted(missing))} yet)"
                self._owed[operator] = msgspec.structs.replace(wish, replacing={}, even=True)
                self._console.scale(Scale(operator, others, wish.strategy))

    def _pay_what_is_owed(self) -> None:
        """Keys have left for the instances that there were; now the number of instances as it was."""
        for operator, wish in list(self._owed.items()):
            found, retiring = self._console.wish(operator)
            if found is None and not retiring:
                del self._owed[operator]
                self._console.scale(wish)
