"""Spark's own `transformWithState`, stopped, repartitioned offline and restarted under the same load.

Responsible for: the load as files, the rescaling, the figures.
Not responsible for: the query (scenarios/recover_apps.py), its process (scenarios/recover_systems.py).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from time import monotonic_ns

from tiercel.bench.metrics import Moments
from tiercel.bench.report import Line
from tiercel.bench.rivals.file_load import FileLoad
from tiercel.bench.rivals.rival import RivalOptions, ShowProgress, figures
from tiercel.bench.scenarios.recover_apps import Setup
from tiercel.bench.scenarios.recover_systems import Spark

DRAINED_S_MAX = 60.0


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
    at = Moments(steady_ns, request_ns, end_ns, over_ns)
    return {"phases_ms": phases_ms} | figures(outputs, at, load.sent_before(over_ns), options.keys)
