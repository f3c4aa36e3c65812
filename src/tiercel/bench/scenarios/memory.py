"""`tiercel bench memory`: state larger than the memory limit, next to the same without a limit.

Responsible for: both deployments under the same load: their throughput, latency and memory.
Not responsible for: the load and whether outputs are right (process.py, load.py).

Two loads. `even`: all keys are equally frequent, so most tuples find their key evicted, which is the worst
case. `skewed`: nine of ten tuples belong to a tenth of the keys. Each deployment is started, filled, measured
and stopped before the other one starts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from tiercel.bench.deployments import INSTANCES, SLOTS, loaded
from tiercel.bench.loadgen.process import LoadProcess
from tiercel.bench.operators import LargeAverage
from tiercel.bench.report import Line, median_line, process_cpu_s
from tiercel.core.settings import Settings
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.process.metrics import MetricsLine
from tiercel.spark.api.deployment import Live
from tiercel.spark.cluster.session import open_session

ShowProgress = Callable[[str], None]

LOADS = ("even", "skewed")
WARM_S = 2.0
SETTLE_S = 3.0  # the instances checkpoint the filled keys and evict them
UNDER_WAY = 2_000  # tuples, where the rate is what the deployment can carry
MB = 1_000_000


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    state_mb: int
    times: float
    state_bytes: int
    rate: int
    seconds: float
    repeats: int

    @property
    def keys(self) -> int:
        return self.state_mb * MB // self.state_bytes

    @property
    def limit_bytes(self) -> int:
        """The memory limit of each instance."""
        return int(self.state_mb * MB / self.times / INSTANCES)


def measure(options: Options, show_progress: ShowProgress) -> tuple[list[Line], list[Line]]:
    """A row for each limit and load, by the median; and every repeat."""
    limits = (0, options.limit_bytes)
    every: list[Line] = []
    for repeat in range(1, options.repeats + 1):
        for limit in limits:
            named = f"limit {limit * INSTANCES // MB} MB" if limit else "no limit"
            show_progress(f"{named}, repeat {repeat} of {options.repeats}: filling {options.keys:,} keys")
            every += [{"repeat": repeat, **line} for line in _one(options, limit, named, show_progress)]
    rows = []
    for limit, load in product(limits, LOADS):
        wanted = (limit * INSTANCES // MB, load)
        mine = [line for line in every if (line["limit_mb"], line["load"]) == wanted]
        faults = {name: sum(line[name] for line in mine) for name in ("lost", "doubled", "wrong_state")}
        medians = {name: value for name, value in median_line(mine).items() if name != "repeat"}
        rows.append(medians | {"limit_mb": wanted[0]} | faults)
    return rows, every


def _one(options: Options, limit: int, named: str, show_progress: ShowProgress) -> list[Line]:
    """In a session of its own: Spark's workers serve again, and keep the memory of what they did before."""
    spark = open_session("tiercel-bench", slots=SLOTS)
    settings, processor = Settings(memory_bytes_max=limit), LargeAverage(options.state_bytes)
    try:
        with loaded(spark, options.keys, processor=processor, settings=settings) as (live, loader):
            return _measured(options, live, loader, limit, lambda what: show_progress(f"{named}: {what}"))
    finally:
        spark.stop()


def _measured(
    options: Options, live: Live, loader: LoadProcess, limit: int, show_progress: ShowProgress
) -> list[Line]:
    pids = {p.name: p.pid for p in live.status().processes if "@" in p.name}
    empty_mb = resident_mb(pids)
    filled = loader.fill(UNDER_WAY)
    time.sleep(SETTLE_S)
    lines = []
    for load in LOADS:
        loader.favour(options.keys // 10 if load == "skewed" else 0)
        show_progress(f"{load}, {options.rate:,}/s")
        latency = loader.open_loop(options.rate, options.seconds, WARM_S)
        show_progress(f"{load}, as fast as it goes")
        used_s = sum(process_cpu_s(pids).values())
        speed = loader.closed_loop(options.seconds, WARM_S, UNDER_WAY)
        cpu_us = (sum(process_cpu_s(pids).values()) - used_s) / max(1, speed["tuples"]) * 1e6
        metrics = last_metrics(live.deployment, pids)
        faults = [answer["faults"] for answer in (filled, latency, speed)]
        filled = {"faults": dict.fromkeys(filled["faults"], 0)}  # counted once
        lines.append(
            {
                "limit_mb": limit * INSTANCES // MB,
                "load": load,
                "state_mb": options.state_mb,
                "events_per_s": speed["events_per_s"],
                "cpu_us": round(cpu_us, 1),
                "p50_ms": latency["p50_ms"],
                "p99_ms": latency["p99_ms"],
                "resident_mb": round(resident_mb(pids), 1),
                "empty_mb": round(empty_mb, 1),
                "hot_share": round(_share(metrics), 3),
                "read_back_per_s": round(sum(line.read_back or 0 for line in metrics)),
                "lost": sum(found["lost"] for found in faults),
                "doubled": sum(found["doubled_or_reordered"] for found in faults),
                "wrong_state": sum(found["wrong_state"] for found in faults),
            }
        )
    return lines


def _share(metrics: list[MetricsLine]) -> float:
    return sum(line.hot_keys or 0 for line in metrics) / max(1, sum(line.state_keys or 0 for line in metrics))


def resident_mb(pids: Mapping[str, int]) -> float:
    """Resident memory of these processes together."""
    page = os.sysconf("SC_PAGE_SIZE")
    pages = [Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1] for pid in pids.values()]
    return sum(map(int, pages)) * page / MB


def last_metrics(place: DeploymentDir, names: Mapping[str, Any]) -> list[MetricsLine]:
    """The busiest of the last few seconds of each: while it went as fast as it goes."""
    found = []
    for name in names:
        lines = (place.metrics / f"{name}.jsonl").read_bytes().splitlines()[-5:]
        decoded = [msgspec.json.decode(line, type=MetricsLine) for line in lines]
        found.append(max(decoded, key=lambda line: line.rate))
    return found
