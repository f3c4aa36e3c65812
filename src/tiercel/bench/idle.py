"""`tiercel bench idle`: what it costs that keys could move, while none does.

Responsible for: interleaved pairs of the full build and one without the move code, the median of ratios.
Not responsible for: that build (bare.py), the load (loader.py).

Both deployments run all the time and take turns, the first of a pair in turn too: drift meets both.
"""

from __future__ import annotations

from collections.abc import Callable

from tiercel.bench.bare import bare_build
from tiercel.bench.deployed import SLOTS, loaded
from tiercel.bench.loader import Loader
from tiercel.bench.report import Line, median
from tiercel.spark.session import open_session

Tell = Callable[[str], None]

UNDER_WAY_MAX = 20_000  # tuples; 40 frames of 500
WARM_S = 1.0


def measure(pairs: int, seconds: float, keys: int, tell: Tell) -> list[Line]:
    """A row for each pair, then the medians."""
    spark = open_session("tiercel-bench", slots=SLOTS)
    rows: list[Line] = []
    try:
        tell("starting both builds")
        with loaded(spark, keys) as (_, full), loaded(spark, keys, build=bare_build) as (_, bare):
            for loader in (full, bare):  # caches and first allocations of both
                loader.closed_loop(seconds, WARM_S, UNDER_WAY_MAX)
            for pair in range(1, pairs + 1):
                tell(f"pair {pair} of {pairs}")
                rows.append({"pair": str(pair), **_pair(full, bare, seconds, full_first=pair % 2 == 1)})
    finally:
        spark.stop()
    return [*rows, {"pair": "median", **_medians(rows)}]


def _pair(full: Loader, bare: Loader, seconds: float, *, full_first: bool) -> Line:
    order = (full, bare) if full_first else (bare, full)
    found = {loader: loader.closed_loop(seconds, WARM_S, UNDER_WAY_MAX) for loader in order}
    rates = (found[full]["events_per_s"], found[bare]["events_per_s"])
    return {
        "full_events_per_s": rates[0],
        "bare_events_per_s": rates[1],
        "idle_ratio": round(rates[0] / rates[1], 4),
        "faults": found[full]["fault_count"] + found[bare]["fault_count"],
    }


def _medians(rows: list[Line]) -> Line:
    medians = {name: median([row[name] for row in rows]) for name in rows[0] if name != "pair"}
    return medians | {"faults": sum(row["faults"] for row in rows)}
