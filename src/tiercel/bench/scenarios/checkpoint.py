"""`tiercel bench checkpoint`: the cost of checkpoints, in throughput and in latency.

Responsible for: interleaved pairs of a deployment with checkpoints and one without, medians of ratios.
Not responsible for: checkpoints (core/instance/), the load (process.py).

Both deployments have the same state and run all the time; they take turns of a few seconds, in alternating
order. The cost of a checkpoint depends on how much of the state has changed since the last one, so it is
measured with tuples for a few keys, and with tuples for all keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiercel.bench.deployments import SLOTS, loaded
from tiercel.bench.loadgen.process import LoadProcess
from tiercel.bench.operators import HeavyAverage
from tiercel.bench.report import Line, median, process_cpu_s
from tiercel.bench.scenarios.idle_overhead import UNDER_WAY_MAX, mean_rate, take_turns, total
from tiercel.core.settings import Settings
from tiercel.spark.api.deployment import Live
from tiercel.spark.cluster.session import open_session

ShowProgress = Callable[[str], None]
Side = tuple[Live, LoadProcess]

MB = 1_000_000
NEVER_MS = 1e9
WARM_S = 1.0
LABELS = ("hot_keys", "pair")


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    size_mb: int
    state_bytes: int  # of each key
    every_s: float
    rate: int  # tuples a second while latency is measured
    hot: Sequence[int]  # keys that get tuples
    pairs: int
    seconds: float  # of each half of a pair, for throughput and for latency

    @property
    def keys(self) -> int:
        return max(1, self.size_mb * MB // self.state_bytes)


def measure(options: Options, show_progress: ShowProgress) -> list[Line]:
    """A row for each pair, then the medians."""
    spark = open_session("tiercel-bench", slots=SLOTS)
    processor = HeavyAverage(options.state_bytes)
    with_them, without = Settings(checkpoint_ms=options.every_s * 1e3), Settings(checkpoint_ms=NEVER_MS)
    rows: list[Line] = []
    try:
        show_progress("starting both deployments")
        with (
            loaded(spark, options.keys, processor=processor, settings=with_them) as ours,
            loaded(spark, options.keys, processor=processor, settings=without) as bare,
        ):
            for _, loader in (ours, bare):  # every key gets its state
                loader.closed_loop(max(options.seconds, options.keys / 10_000), WARM_S, UNDER_WAY_MAX)
            for hot in options.hot:
                for _, loader in (ours, bare):
                    loader.focus(hot)
                rows += _pairs(options, ours, bare, min(hot, options.keys), show_progress)
    finally:
        spark.stop()
    return rows


def _pairs(options: Options, ours: Side, bare: Side, hot: int, show_progress: ShowProgress) -> list[Line]:
    rows = []
    for pair in range(1, options.pairs + 1):
        show_progress(f"{hot:,} keys get tuples, pair {pair} of {options.pairs}")
        rows.append({"hot_keys": hot, "pair": str(pair), **_pair(options, ours, bare, first=pair % 2 == 1)})
    medians = {name: median([row[name] for row in rows]) for name in rows[0] if name not in LABELS}
    last = {"hot_keys": hot, "pair": "median", **medians, "faults": sum(row["faults"] for row in rows)}
    return [*rows, last]


def _pair(options: Options, ours: Side, bare: Side, *, first: bool) -> Line:
    """Full speed in turns, then latency, one after the other."""
    fast = take_turns([_fast(ours), _fast(bare)], options.seconds, swap=not first)
    order = (ours, bare) if first else (bare, ours)
    calm = {id(side): side[1].open_loop(options.rate, options.seconds, WARM_S) for side in order}
    with_them, without = (_line(*found) for found in zip(fast, (calm[id(ours)], calm[id(bare)]), strict=True))
    return {
        "events_per_s": with_them["events_per_s"],
        "without_events_per_s": without["events_per_s"],
        "ratio": round(with_them["events_per_s"] / without["events_per_s"], 4),
        "p50_ms": with_them["p50_ms"],
        "without_p50_ms": without["p50_ms"],
        "p99_ms": with_them["p99_ms"],
        "without_p99_ms": without["p99_ms"],
        "cpu_us": with_them["cpu_us"],
        "without_cpu_us": without["cpu_us"],
        "faults": with_them["faults"] + without["faults"],
    }


def _fast(side: Side) -> Callable[[float], Line]:
    """A slice at full speed, with the CPU that the instances used."""
    live, loader = side
    instances = {p.name: p.pid for p in live.status().processes if p.kind == "instance"}

    def run(seconds: float) -> Line:
        before = sum(process_cpu_s(instances).values())
        found = loader.closed_loop(seconds, WARM_S, UNDER_WAY_MAX)
        return {**found, "cpu_s": sum(process_cpu_s(instances).values()) - before}

    return run


def _line(fast: list[Line], calm: Line) -> Line:
    return {
        "events_per_s": round(mean_rate(fast)),
        "cpu_us": round(total(fast, "cpu_s") / total(fast, "tuples") * 1e6, 3),
        "p50_ms": calm["p50_ms"],
        "p99_ms": calm["p99_ms"],
        "faults": int(total(fast, "fault_count")) + calm["fault_count"],
    }
