"""Spark's own `transformWithState`, stopped, repartitioned offline and restarted under the same load.

Responsible for: the load as files, the rescaling, the figures.
Not responsible for: the query (scenarios/recover_apps.py), its process (scenarios/recover_systems.py).
"""

from __future__ import annotations

import tempfile
import threading
import time
from array import array
from pathlib import Path
from time import monotonic_ns

import numpy as np

from tiercel.bench.metrics import Moments, judge
from tiercel.bench.report import Line
from tiercel.bench.rivals.rival import RivalOptions, ShowProgress
from tiercel.bench.scenarios.recover_apps import Setup
from tiercel.bench.scenarios.recover_systems import Reading, Spark

TICK_NS = 10_000_000
STRIDE = 389  # prime to the number of keys: all keys in turn, in no simple order
DRAINED_S_MAX = 60.0
PROBES = 500


class FileLoad(threading.Thread):
    """Hands over what is due, at a rate, until it is stopped."""

    def __init__(self, system: Spark, keys: int, rate: int) -> None:
        super().__init__(name="tiercel-file-load", daemon=True)
        self._system, self._keys, self._rate = system, keys, rate
        self.sensor, self.due_ns = array("q"), array("q")
        self._counts = [0] * keys
        self._over = threading.Event()

    def run(self) -> None:
        begun_ns, sent = monotonic_ns(), 0
        while not self._over.wait(TICK_NS / 1e9):
            now_ns = monotonic_ns()
            due = int((now_ns - begun_ns) * self._rate / 1e9)
            rows: list[Reading] = []
            for number in range(sent, due):
                sensor = number * STRIDE % self._keys
                n = self._counts[sensor] = self._counts[sensor] + 1
                due_ns = begun_ns + int(number * 1e9 / self._rate)
                self.sensor.append(sensor)
                self.due_ns.append(due_ns)
                rows.append((sensor, n, due_ns, float(n)))
            sent = due
            self._system.send(rows)

    def stop(self) -> None:
        self._over.set()
        self.join()
        self._system.flush()


def measure(options: RivalOptions, show_progress: ShowProgress) -> Line:
    """One rescaling from one partition to two."""
    show_progress("spark-repartition: starting the query")
    with tempfile.TemporaryDirectory(prefix="tiercel-rival-", ignore_cleanup_errors=True) as place:
        Path(place).mkdir(exist_ok=True)
        system = Spark(Setup(place, options.state_bytes, backup=False, partitions=1))
        load = FileLoad(system, options.keys, options.rate)
        load.start()
        try:
            give_up = time.monotonic() + DRAINED_S_MAX
            while not system.received and time.monotonic() < give_up:
                time.sleep(0.1)
            time.sleep(options.warm_s)
            steady_ns = monotonic_ns()
            time.sleep(options.steady_s)
            show_progress("spark-repartition: stopping, repartitioning, restarting")
            request_ns = monotonic_ns()
            phases_ms = system.rescale(2)
            end_ns = monotonic_ns()
            time.sleep(options.after_s)
            over_ns = monotonic_ns()
            load.stop()
            give_up = time.monotonic() + DRAINED_S_MAX
            while system.received < len(load.sensor) and time.monotonic() < give_up:
                time.sleep(0.2)
            outputs = system.outputs()
        finally:
            system.close()
    came = set(zip(outputs.sensor.tolist(), outputs.due_ns.tolist(), strict=True))
    sent = set(zip(load.sensor, load.due_ns, strict=True))
    keys = np.unique(outputs.sensor)[:: max(1, options.keys // PROBES)].tolist()
    at = Moments(steady_ns, request_ns, end_ns, over_ns)
    return {
        **judge(outputs, at, keys, keys),
        "gap_ms": _gap(outputs.emitted_ns, request_ns, over_ns),
        "gap_floor_ms": _gap(outputs.emitted_ns, steady_ns, request_ns),
        "bytes_moved": None,
        "phases_ms": phases_ms,
        "request_ns": request_ns,
        "lost": len(sent - came),
        "doubled": len(outputs.sensor) - len(came),
        "reordered": 0,
    }


def _gap(emitted_ns: np.ndarray, begin_ns: int, end_ns: int) -> float:
    from tiercel.bench.rivals.rival import longest_gap_ms

    return longest_gap_ms(emitted_ns / 1e6, begin_ns / 1e6, end_ns / 1e6)
