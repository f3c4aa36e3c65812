"""`tiercel bench transfer`: the memory that a move of much state takes, beyond the state itself.

Responsible for: filling one instance, moving all of its keys away, sampling the resident memory of both
    instances while they move.
Not responsible for: the load (loadgen/), the effect on latency (reconfigure.py).

The state of the keys is in the memory of the source before the move, and in that of the destination after it.
What a side takes beyond that is the most that it had in between:

    source:       highest - before the move
    destination:  highest - after the move, once the keys are its own
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tiercel.bench.deployments import OPERATOR, PROCESSES, loaded
from tiercel.bench.operators import SITE, LargeAverage
from tiercel.bench.report import Line, median_line
from tiercel.bench.scenarios.memory import resident_mb
from tiercel.core.model.routing import RoutingTable
from tiercel.core.model.topology import instance_name
from tiercel.spark.cluster.session import open_session
from tiercel.spark.operators.processor_adapter import encode_key

ShowProgress = Callable[[str], None]

MB = 1_000_000
UNDER_WAY = 500  # tuples while the keys are filled
SAMPLE_S = 0.02
SETTLE_S = 3.0  # both sides take a checkpoint
MOVE_S_MAX = 600.0


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    state_mb: int
    state_bytes: int
    strategies: tuple[str, ...]
    repeats: int

    @property
    def keys(self) -> int:
        """About half of the keys are of the instance that gives them away."""
        return 2 * self.state_mb * MB // self.state_bytes


class Highest(threading.Thread):
    """The highest resident memory of one process, sampled until `stop`."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pids = {"": pid}
        self._over = threading.Event()
        self.mb = resident_mb(self._pids)
        self.start()

    def run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.mb = max(self.mb, resident_mb(self._pids))

    def stop(self) -> float:
        self._over.set()
        self.join()
        return self.mb


def measure(options: Options, show_progress: ShowProgress) -> tuple[list[Line], list[Line]]:
    """A row for each strategy by the median, and every repeat; each in a deployment of its own."""
    every = []
    for repeat in range(1, options.repeats + 1):
        for strategy in options.strategies:
            show_progress(f"{strategy}, repeat {repeat} of {options.repeats}: filling {options.keys:,} keys")
            every.append({"strategy": strategy, "repeat": repeat, **_one(options, strategy, show_progress)})
    rows = []
    for strategy in options.strategies:
        mine = [line for line in every if line["strategy"] == strategy]
        rows.append({name: value for name, value in median_line(mine).items() if name != "repeat"})
    return rows, every


def _one(options: Options, strategy: str, show_progress: ShowProgress) -> Line:
    source, destination = instance_name(OPERATOR, SITE, 1), instance_name(OPERATOR, SITE, 2)
    spark = open_session("tiercel-bench", slots=PROCESSES + 3)
    try:
        with loaded(spark, options.keys, processor=LargeAverage(options.state_bytes)) as (live, loader):
            pids = {p.name: p.pid for p in live.status().processes}
            filled = loader.fill(UNDER_WAY)
            time.sleep(SETTLE_S)
            table = RoutingTable.initial(live.deployment.manifest().topology.operators[OPERATOR])
            moved = [n for n in range(options.keys) if table.route(encode_key(n)).instance == source]
            show_progress(f"{strategy}: moving {len(moved):,} keys")
            ends = {"source": {"": pids[source]}, "destination": {"": pids[destination]}}
            before = {end: resident_mb(pid) for end, pid in ends.items()}
            highest = {end: Highest(pid[""]) for end, pid in ends.items()}
            began_s = time.monotonic()
            reports = live.move(OPERATOR, keys=moved, to=destination, strategy=strategy).wait(MOVE_S_MAX)
            took_s = time.monotonic() - began_s
            time.sleep(SETTLE_S)
            after = {end: resident_mb(pid) for end, pid in ends.items()}
            top = {end: sampler.stop() for end, sampler in highest.items()}
    finally:
        spark.stop()
    faults = filled["faults"]
    return {
        "state_mb": round(sum(report.bytes_moved for report in reports) / MB, 1),
        "keys": len(moved),
        "source_beyond_mb": round(top["source"] - before["source"], 1),
        "destination_beyond_mb": round(top["destination"] - after["destination"], 1),
        "source_before_mb": round(before["source"], 1),
        "destination_before_mb": round(before["destination"], 1),
        "destination_after_mb": round(after["destination"], 1),
        "took_s": round(took_s, 2),
        "faults": sum(faults.values()),
    }
