"""`tiercel bench gauges`: what the gauges of every process cost, as shares of its time.

Responsible for: a deployment under load, the share that each process reports for its lines, and the cost of
    sampling rows at the router, measured beside it.
Not responsible for: the gauges (runtime/process/gauges.py, core/router/load_sample.py).

`reported` is CPU time for building, writing, sending and passing on lines, measured by each process itself.
`sampling` is the time of `LoadSample.count` for the rows of the run, timed alone on rows like them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiercel.bench.deployments import OPERATOR, loaded
from tiercel.bench.operators import NumberedAverage
from tiercel.bench.report import Line
from tiercel.core.model.log import Row
from tiercel.core.router.load_sample import LoadSample
from tiercel.runtime.process.metrics import read_lines
from tiercel.spark.cluster.session import open_session
from tiercel.spark.operators.processor_adapter import encode_key

ShowProgress = Callable[[str], None]

WARM_S = 3.0
FRAME_ROWS = 20  # that the router takes in one call, about as under this load
FRAMES = 20_000


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    rate: int
    seconds: float
    keys: int
    seed: int


def measure(options: Options, show_progress: ShowProgress) -> tuple[list[Line], dict[str, Any]]:
    """One row for each process."""
    spark = open_session("tiercel-bench", slots=10)
    try:
        with loaded(spark, options.keys, processor=NumberedAverage()) as (live, loader):
            live.autoscale(OPERATOR, policy="rate", dry_run=True)  # the driver makes views too
            show_progress(f"{options.rate} rows/s for {options.seconds:g} s")
            begun_s = int(time.time() + WARM_S)
            answer = loader.open_loop(options.rate, options.seconds, WARM_S)
            lines = read_lines(live.deployment.metrics, begun_s, begun_s + int(options.seconds))
    finally:
        spark.stop()
    sampling = sampling_s(options.keys) * options.rate
    rows: list[Line] = []
    for process in sorted({line.process for line in lines}):
        mine = [line for line in lines if line.process == process and line.gauges is not None]
        shares = sorted(line.gauges for line in mine if line.gauges is not None)
        if not shares:
            continue
        is_router = mine[0].kind == "router"
        mean = sum(shares) / len(shares)
        rows.append(
            {
                "process": process,
                "kind": mine[0].kind,
                "seconds": len(shares),
                "rows_per_s": round(sum(line.rate for line in mine) / len(mine)),
                "busy": round(sum(line.busy for line in mine) / len(mine), 3),
                "reported_percent": round(mean * 100, 3),
                "reported_percent_max": round(shares[-1] * 100, 3),
                "sampling_percent": round(sampling * 100, 3) if is_router else 0.0,
                "cost_percent": round((mean + (sampling if is_router else 0.0)) * 100, 3),
                "faults": answer["fault_count"] if is_router else 0,
            }
        )
    return rows, {"p99_ms": answer["p99_ms"]}


def sampling_s(keys: int) -> float:
    """Seconds that counting and sampling takes for one row that enters."""
    sample = LoadSample(4096)
    row_of = [encode_key(n) for n in range(min(keys, 1_000))]
    rows: list[Row] = [(row_of[n % len(row_of)], 0, b"x" * 40) for n in range(FRAME_ROWS)]
    begun_s = time.perf_counter()
    for n in range(FRAMES):
        sample.count(rows, FRAME_ROWS)
        if n % 500 == 499:
            sample.each_second()
    return (time.perf_counter() - begun_s) / (FRAMES * FRAME_ROWS)
