"""`tiercel bench idle`: what it costs that keys could move, while none does.

Responsible for: interleaved pairs of the full build and one without the move code, the median of ratios.
Not responsible for: that build (bare.py), the load (loader.py).

Both deployments run all the time and take turns, the first of a pair in turn too: drift meets both. Where
the machine's speed itself comes and goes, the CPU that each build used for an event tells more than its rate.
"""

from __future__ import annotations

from collections.abc import Callable

from tiercel.bench.bare import bare_build
from tiercel.bench.deployed import SLOTS, loaded
from tiercel.bench.loader import Loader
from tiercel.bench.report import Line, median, process_cpu_s
from tiercel.spark.live import Live
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
        with (
            loaded(spark, keys) as (full_live, full_loader),
            loaded(spark, keys, build=bare_build) as (bare_live, bare_loader),
        ):
            full, bare = Build("full", full_live, full_loader), Build("bare", bare_live, bare_loader)
            for build in (full, bare):  # caches and first allocations of both
                build.line(seconds)
            for pair in range(1, pairs + 1):
                tell(f"pair {pair} of {pairs}")
                rows.append({"pair": str(pair), **_pair(full, bare, seconds, full_first=pair % 2 == 1)})
    finally:
        spark.stop()
    return [*rows, {"pair": "median", **_medians(rows)}]


class Build:
    """One of the two, and its load."""

    def __init__(self, name: str, live: Live, loader: Loader) -> None:
        self._name, self._loader = name, loader
        self._pids = {process.name: process.pid for process in live.status().processes}

    def line(self, seconds: float) -> Line:
        before = process_cpu_s(self._pids)
        found = self._loader.closed_loop(seconds, WARM_S, UNDER_WAY_MAX)
        used_s = sum(after - before[name] for name, after in process_cpu_s(self._pids).items())
        return {
            f"{self._name}_events_per_s": found["events_per_s"],
            f"{self._name}_cpu_us": round(used_s / found["tuples"] * 1e6, 3),
            "faults": found["fault_count"],
        }


def _pair(full: Build, bare: Build, seconds: float, *, full_first: bool) -> Line:
    order = (full, bare) if full_first else (bare, full)
    lines = {build: build.line(seconds) for build in order}
    both = lines[full] | lines[bare]
    return both | {
        "idle_ratio": round(both["full_events_per_s"] / both["bare_events_per_s"], 4),
        "cpu_ratio": round(both["bare_cpu_us"] / both["full_cpu_us"], 4),
        "faults": lines[full]["faults"] + lines[bare]["faults"],
    }


def _medians(rows: list[Line]) -> Line:
    medians = {name: median([row[name] for row in rows]) for name in rows[0] if name != "pair"}
    return medians | {"faults": sum(row["faults"] for row in rows)}
