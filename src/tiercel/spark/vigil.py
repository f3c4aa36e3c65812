"""Processes that give no sign of life, and replicas that share an executor or a machine: put right.

Responsible for: how long silence may last, who is started again, which replica moves to another executor, and
    to another machine where we know of one.
Not responsible for: signs of life (runtime/heart.py), starting (hosting.py), what a suspect does meanwhile:
    it is fenced, so that a false suspicion costs a restart and nothing else.

Silence is measured by this driver's clock alone: only whether there was a new sign since the last look
counts, not when its machine says that it was.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tiercel.runtime.lives import Lives
from tiercel.runtime.place import Place
from tiercel.runtime.registry import Address
from tiercel.runtime.replicated import has_copy
from tiercel.runtime.replication import is_replica, site_of_replica

if TYPE_CHECKING:
    from tiercel.spark.backend import Backend
    from tiercel.spark.hosting import Hosting

log = logging.getLogger(__name__)

LOOKS = 8  # within the time after which silence is suspicious
LOOK_S_MAX = 1.0
APART_S = 5.0  # between attempts to bring two replicas of a site apart
MACHINE_TRIES = 5  # to bring them to two machines: where a task starts is Spark's choice


class Silence:
    """Since when each process is silent. Pure: told the time, and the signs that there are."""

    def __init__(self, suspect_s: float, look_s: float) -> None:
        self._suspect_s, self._look_s = suspect_s, look_s
        self._seen: dict[str, tuple[int, float]] = {}  # the last sign, and when it was noticed
        self._looked_s = 0.0

    def look(self, signs: dict[str, int], now_s: float) -> dict[str, float]:
        """Who has been silent for too long, and for how long. A sign of 0: nobody listens there."""
        asleep = now_s - self._looked_s > 3 * self._look_s  # we were: nobody else is to blame
        self._looked_s = now_s
        silent = {}
        seen: dict[str, tuple[int, float]] = {}
        for name, sign in signs.items():
            before = self._seen.get(name)
            if sign == 0:
                continue
            if before is None or before[0] != sign or asleep:
                seen[name] = (sign, now_s)
            elif now_s - before[1] > self._suspect_s:
                silent[name] = now_s - before[1]
            else:
                seen[name] = before
        self._seen = seen
        return silent


class Vigil:
    """One thread of the driver."""

    def __init__(self, backend: Backend, place: Place, hosting: Hosting, *, apart: bool) -> None:
        self._backend, self._place, self._hosting, self._apart = backend, place, hosting, apart
        suspect_s = place.manifest().settings.suspect_ms / 1e3
        self._look_s = min(LOOK_S_MAX, suspect_s / LOOKS)
        self._silence = Silence(suspect_s, self._look_s)
        self._parted_s = 0.0
        self._crowding = Crowding()
        self._ending = threading.Event()
        self._thread = backend.thread(self._run, "tiercel-vigil")
        self._thread.start()

    def end(self) -> None:
        self._ending.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        while not self._ending.wait(self._look_s):
            try:
                self._look(time.monotonic())
            except Exception:  # whatever it is, the next silence must be noticed
                log.exception("looking for signs of life")

    def _look(self, now_s: float) -> None:
        registry = self._place.registry
        signs = {name: registry.last_beat(name) for name in self._hosting.names}
        for name, silent_s in self._silence.look(signs, now_s).items():
            address = registry.find(name)
            if address is None or not self._backend.waits(address.stage):  # else it is dead, and Spark knows
                self._hosting.suspect(name, silent_s)
        if self._apart and now_s - self._parted_s > APART_S:
            names = self._hosting.names
            shared, what = together(self._place, names), "executor"
            if not shared:
                shared, what = self._crowding.look(self._place, names), "machine"
            for name in shared:
                log.warning("%s is on the %s of another replica of its site: it moves", name, what)
                self._hosting.relocate(name)
                self._parted_s = now_s


class Crowding:
    """Replicas of a site that share a machine although there is another: who moves, a few times at most."""

    def __init__(self) -> None:
        self._tries = 0
        self._machines: set[str] = set()  # that we have tried it with

    def look(self, place: Place, names: list[str]) -> list[str]:
        """One that moves now, or none: it must not hold what nobody else has."""
        found = [place.registry.find(name) for name in names]
        machines = {address.machine for address in found if address is not None} - {""}
        sharing = together(place, names, machine_of)
        if not sharing or machines != self._machines:
            self._tries, self._machines = 0, machines
        if len(machines) < 2 or not sharing or self._tries >= MACHINE_TRIES:
            return []
        mover = sharing[0]
        others = [name for name in names if not is_replica(name)]
        held = [name for name in others if Lives(place.lives, name).holder() == mover]
        if not all(has_copy(place, name) for name in held):
            return []  # somebody may be about to come back from it
        self._tries += 1
        return [mover]


def executor_of(address: Address) -> str:
    return address.executor


def machine_of(address: Address) -> str:
    return address.machine or address.executor  # of those that nobody knows each is taken for another one


def together(place: Place, names: list[str], where: Callable[[Address], str] = executor_of) -> list[str]:
    """Replicas on an executor that has another of the same site: nobody there has a copy elsewhere.

    Of two the younger one is named: the other may hold the only copies that an executor, now lost, has left.
    The same of machines, if that is asked for.
    """
    taken: set[tuple[str, str]] = set()
    found = []
    for name in sorted(filter(is_replica, names), key=place.registry.since):
        address = place.registry.find(name)
        if address is not None:
            here = (site_of_replica(name), where(address))
            if here in taken:
                found.append(name)
            taken.add(here)
    return found
