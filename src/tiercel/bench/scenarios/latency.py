"""`tiercel bench latency`: the time of a tuple from due to received, next to an echo over the same hops.

Responsible for: rates, durabilities, repeats, medians.
Not responsible for: the load (process.py), the echo (echo.py).

Echo and deployment take turns within each repeat, so that other load on the machine affects both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from tiercel.bench.baselines.echo import Echo, echoing
from tiercel.bench.deployments import PROCESSES, loaded
from tiercel.bench.loadgen.process import LoadProcess
from tiercel.bench.report import Line, median_line
from tiercel.runtime.deployment import Durability
from tiercel.spark.cluster.session import open_session

ShowProgress = Callable[[str], None]

RATES = (1_000, 10_000, 50_000)
SAFER_RATE = 10_000  # of the durabilities other than `os`
WARM_S = 1.0


def measure(
    rates: Sequence[int],
    seconds: float,
    repeats: int,
    keys: int,
    show_progress: ShowProgress,
    durabilities: Sequence[Durability] = ("os", "disk"),
) -> tuple[list[Line], list[Line]]:
    """Rows by the median, and every repeat."""
    spark = open_session("tiercel-bench", slots=len(durabilities) * (PROCESSES + 1) + 2)
    every: list[Line] = []
    cases: list[tuple[int, Durability]] = [(rate, "os") for rate in rates if "os" in durabilities]
    cases += [(SAFER_RATE, durability) for durability in durabilities if durability != "os"]
    try:
        with contextlib.ExitStack() as stack:
            show_progress("starting the deployments")
            loaders = {d: stack.enter_context(loaded(spark, keys, durability=d))[1] for d in durabilities}
            echo = stack.enter_context(echoing())
            for repeat in range(1, repeats + 1):
                for rate, durability in cases:
                    show_progress(f"{rate:,}/s, {durability}, repeat {repeat} of {repeats}")
                    line = _one(echo, loaders[durability], rate, durability, seconds)
                    every.append({"repeat": repeat, **line})
    finally:
        spark.stop()
    rows = []
    for rate, durability in cases:
        mine = [r for r in every if (r["rate"], r["durability"]) == (rate, durability)]
        medians = median_line(mine) | {"faults": sum(line["faults"] for line in mine)}
        rows.append({"rate": rate} | {k: v for k, v in medians.items() if k not in ("repeat", "rate")})
    return rows, every


def _one(echo: Echo, loader: LoadProcess, rate: int, durability: str, seconds: float) -> Line:
    bare: dict[str, Any] = echo.open_loop(rate, seconds, WARM_S)
    real = loader.open_loop(rate, seconds, WARM_S)
    percentiles = ("p50_ms", "p99_ms", "p999_ms", "max_ms")
    return {
        "rate": rate,
        "durability": durability,
        **{name: real[name] for name in percentiles},
        **{f"echo_{name}": bare[name] for name in percentiles},
        "faults": real["fault_count"],
    }
