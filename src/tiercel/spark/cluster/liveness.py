"""The liveness monitor: restarts processes without heartbeats, and separates replicas of a site.

Responsible for: how long a process may be silent; restarting it; moving a replica that shares an executor,
    or a machine, with another replica of its site.
Not responsible for: heartbeats (runtime/process/heartbeat.py), restarts (supervisor.py), where replicas may
    run (replica_placement.py). A suspected process that is alive is fenced, so a false suspicion costs a
    restart only.

Silence is measured by the clock of this driver alone: the detector asks whether a heartbeat is new since
the last check, not when the process sent it.
"""

from __future__ import annotations

import logging
import threading
import time

from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.cluster.backend import Backend
from tiercel.spark.cluster.replica_placement import AntiAffinity, colocated
from tiercel.spark.cluster.supervisor import Supervisor

log = logging.getLogger(__name__)

CHECKS = 8  # within the time after which a silent process is suspected
CHECK_S_MAX = 1.0
SEPARATE_S = 5.0  # between attempts to separate two replicas of a site


class FailureDetector:
    """Finds silent processes. Pure: the caller passes the time and the last heartbeats."""

    def __init__(self, suspect_s: float, check_s: float) -> None:
        self._suspect_s, self._check_s = suspect_s, check_s
        self._seen: dict[str, tuple[int, float]] = {}  # the last heartbeat, and when it was noticed
        self._checked_s = 0.0

    def observe(self, beats: dict[str, int], now_s: float) -> dict[str, float]:
        """Processes that have been silent for too long, and for how long.

        A heartbeat of 0: it does not run.
        """
        asleep = now_s - self._checked_s > 3 * self._check_s  # the driver itself was asleep
        self._checked_s = now_s
        silent = {}
        seen: dict[str, tuple[int, float]] = {}
        for name, beat in beats.items():
            before = self._seen.get(name)
            if beat == 0:
                continue
            if before is None or before[0] != beat or asleep:
                seen[name] = (beat, now_s)
            elif now_s - before[1] > self._suspect_s:
                silent[name] = now_s - before[1]
            else:
                seen[name] = before
        self._seen = seen
        return silent


class LivenessMonitor:
    """A thread of the driver that checks all processes of a deployment."""

    def __init__(
        self, backend: Backend, deployment: DeploymentDir, supervisor: Supervisor, *, apart: bool
    ) -> None:
        self._backend, self._deployment, self._supervisor, self._apart = (
            backend,
            deployment,
            supervisor,
            apart,
        )
        suspect_s = deployment.manifest().settings.suspect_ms / 1e3
        self._check_s = min(CHECK_S_MAX, suspect_s / CHECKS)
        self._detector = FailureDetector(suspect_s, self._check_s)
        self._separated_s = 0.0
        self._anti_affinity = AntiAffinity()
        self._ending = threading.Event()
        self._thread = backend.thread(self._run, "tiercel-liveness")
        self._thread.start()

    def end(self) -> None:
        self._ending.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        while not self._ending.wait(self._check_s):
            try:
                self._check(time.monotonic())
            except Exception:  # for any error: the next silence must be noticed
                log.exception("checking heartbeats")

    def _check(self, now_s: float) -> None:
        registry = self._deployment.registry
        beats = {name: registry.last_beat(name) for name in self._supervisor.names}
        for name, silent_s in self._detector.observe(beats, now_s).items():
            address = registry.find(name)
            if address is None or not self._backend.waits(address.stage):  # else Spark restarts it
                self._supervisor.suspect(name, silent_s)
        if self._apart and now_s - self._separated_s > SEPARATE_S:
            names = self._supervisor.names
            shared, what = colocated(self._deployment, names), "executor"
            if not shared:
                shared, what = self._anti_affinity.pick_mover(self._deployment, names), "machine"
            for name in shared:
                log.warning("%s is on the %s of another replica of its site: it moves", name, what)
                self._supervisor.relocate(name)
                self._separated_s = now_s
