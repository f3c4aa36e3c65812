"""`tiercel bench idle`: the overhead of migration support, or of standbys, while no migration runs.

Responsible for: interleaved pairs of the full build and one without the move code, or with and without
    standbys; the median of ratios.
Not responsible for: that build (without_moves.py), the load (process.py).

Both deployments run all the time and take turns of a few seconds, in alternating order, so that a machine of
varying speed affects both. The rows also show the CPU that each build used per event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiercel.bench.baselines.without_moves import build_without_moves
from tiercel.bench.deployments import INSTANCES, OPERATOR, SLOTS, loaded
from tiercel.bench.loadgen.process import LoadProcess
from tiercel.bench.operators import SITE
from tiercel.bench.report import Line, median, process_cpu_s
from tiercel.core.model.topology import instance_name
from tiercel.spark.api.deployment import Live
from tiercel.spark.cluster.session import open_session

ShowProgress = Callable[[str], None]

UNDER_WAY_MAX = 20_000  # tuples; 40 frames of 500
SLICE_S = 2.0
WARM_S = 0.5  # of each slice


def measure(
    pairs: int, seconds: float, keys: int, show_progress: ShowProgress, standby: bool = False
) -> list[Line]:
    """A row for each pair, then the medians. With `standby`, both are full builds, and one has standbys."""
    spark = open_session("tiercel-bench", slots=SLOTS)
    rows: list[Line] = []
    try:
        show_progress("starting both builds")
        with (
            loaded(spark, keys) as (full_live, full_loader),
            loaded(spark, keys, build=None if standby else build_without_moves) as (bare_live, bare_loader),
        ):
            if standby:
                ends = [instance_name(OPERATOR, SITE, n) for n in range(1, INSTANCES + 1)]
                for instance, other in zip(ends, ends[::-1], strict=True):
                    full_live.set_standby(instance, other)
            full, bare = Build("full", full_live, full_loader), Build("bare", bare_live, bare_loader)
            for build in (full, bare):  # caches and first allocations of both
                build.slice(seconds)
            for pair in range(1, pairs + 1):
                show_progress(f"pair {pair} of {pairs}")
                rows.append({"pair": str(pair), **_pair(full, bare, seconds, full_first=pair % 2 == 1)})
    finally:
        spark.stop()
    return [*rows, {"pair": "median", **_medians(rows)}]


class Build:
    """One of the two, and its load."""

    def __init__(self, name: str, live: Live, loader: LoadProcess) -> None:
        self._name, self._loader = name, loader
        self._pids = {process.name: process.pid for process in live.status().processes}

    def slice(self, seconds: float) -> Line:
        before = process_cpu_s(self._pids)
        found = self._loader.closed_loop(seconds, WARM_S, UNDER_WAY_MAX)
        used_s = sum(after - before[name] for name, after in process_cpu_s(self._pids).items())
        return {**found, "cpu_s": used_s}

    def line(self, slices: Sequence[Line]) -> Line:
        return {
            f"{self._name}_events_per_s": round(mean_rate(slices)),
            f"{self._name}_cpu_us": round(total(slices, "cpu_s") / total(slices, "tuples") * 1e6, 3),
        }


def take_turns(halves: Sequence[Callable[[float], Line]], seconds: float, *, swap: bool) -> list[list[Line]]:
    """Give each build this many seconds in slices, in alternating order: A B, B A, A B, ..."""
    count = max(1, round(seconds / SLICE_S))
    taken: list[list[Line]] = [[] for _ in halves]
    for n in range(count):
        order = list(range(len(halves)))
        for half in reversed(order) if swap != (n % 2 == 1) else order:
            taken[half].append(halves[half](seconds / count))
    return taken


def mean_rate(slices: Sequence[Line]) -> float:
    return total(slices, "events_per_s") / len(slices)


def total(slices: Sequence[Line], name: str) -> float:
    return float(sum(part[name] for part in slices))


def _pair(full: Build, bare: Build, seconds: float, *, full_first: bool) -> Line:
    of_full, of_bare = take_turns([full.slice, bare.slice], seconds, swap=not full_first)
    both = full.line(of_full) | bare.line(of_bare)
    return both | {
        "idle_ratio": round(both["full_events_per_s"] / both["bare_events_per_s"], 4),
        "cpu_ratio": round(both["bare_cpu_us"] / both["full_cpu_us"], 4),
        "faults": int(total([*of_full, *of_bare], "fault_count")),
    }


def _medians(rows: list[Line]) -> Line:
    medians = {name: median([row[name] for row in rows]) for name in rows[0] if name != "pair"}
    return medians | {"faults": sum(row["faults"] for row in rows)}
