"""`tiercel bench offload`: demand at one of four edges rises and falls; its keys go there, and come back.

Responsible for: the deployment of a cloud and four edges over emulated links, the demand, the three modes, a
    picture.
Not responsible for: the policy (control/policies/offload.py), the load's threads (timed_load.py).

The answers are read at the first edge, whose demand changes: a row that is processed in the cloud crosses the
link twice. Modes: `cloud` (all keys in the cloud), `edges` (the keys of every edge at that edge, always), and
`offload` (the policy: in the cloud, and at an edge while its demand exceeds the edge's cost).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import tiercel
from tiercel.bench.report import Line
from tiercel.bench.scenarios.elasticity.timed_load import INPUT, OUTPUT, TimedLoad, TimedSum
from tiercel.core.model.topology import site_of
from tiercel.spark.api.deployment import Live
from tiercel.spark.cluster.session import open_session

ShowProgress = Callable[[str], None]

MODES = ("cloud", "edges", "offload")
OPERATOR, CLOUD = "sums", "cloud"
EDGES = ("edge-1", "edge-2", "edge-3", "edge-4")
BUSY = EDGES[0]  # the edge whose demand changes
COLOURS = {"cloud": "#9ca3af", "edges": "#d97706", "offload": "#2563eb"}


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    modes: Sequence[str]
    low: int  # rows per second of a quiet edge
    high: int  # of the busy one at its top
    seconds: float
    cost: float  # rows per second that are worth an instance at an edge
    cars: int  # of each edge
    latency_ms: float  # one way between an edge and the cloud
    service_us: float
    seed: int
    out: Path | None


class Owners(threading.Thread):
    """Where the keys of the edges are, once a second."""

    def __init__(self, live: Live, cars: dict[str, list[str]]) -> None:
        super().__init__(name="offload-owners", daemon=True)
        self._live, self._cars = live, cars
        self.there: list[tuple[float, int]] = []  # time, keys of the busy edge that are there
        self.edges: list[tuple[float, int]] = []  # time, edges that work
        self._ending = threading.Event()

    def run(self) -> None:
        names = [car for cars in self._cars.values() for car in cars]
        while not self._ending.wait(0.5):
            owners = self._live.owners(OPERATOR, names)
            now_s = time.monotonic()
            self.there.append((now_s, sum(site_of(owners[car]) == BUSY for car in self._cars[BUSY])))
            self.edges.append((now_s, len({site_of(owner) for owner in owners.values()} - {CLOUD})))

    def end(self) -> None:
        self._ending.set()
        self.join()


@dataclass(frozen=True)
class ModeResult:
    """What one mode gave: its row, and what the picture needs."""

    line: Line
    offered: list[tuple[float, float]]
    there: list[tuple[float, int]]
    p99: list[tuple[float, float]]


def demand(options: Options) -> list[float]:
    """Rows per second at the busy edge: low, up, high, down, low."""
    seconds = int(options.seconds)
    flat, slope = max(1, seconds // 5), max(1, seconds // 10)
    top = max(1, seconds - 2 * flat - 2 * slope)
    up = [options.low + (options.high - options.low) * n / slope for n in range(1, slope + 1)]
    low, high = float(options.low), float(options.high)
    return [low] * flat + up + [high] * top + up[::-1] + [low] * flat


def measure(options: Options, show_progress: ShowProgress) -> tuple[list[Line], dict[str, Any]]:
    """One row for each mode."""
    spark = open_session("tiercel-bench", slots=2 * (1 + len(EDGES)) + 6)
    results = []
    try:
        for mode in options.modes:
            show_progress(f"{mode}: starting")
            results.append(_one(spark, mode, options, show_progress))
    finally:
        spark.stop()
    if options.out is not None:
        draw(results, options, options.out / f"offload-{time.strftime('%Y%m%d-%H%M%S')}.png")
    return [result.line for result in results], {}


def _one(spark: Any, mode: str, options: Options, show_progress: ShowProgress) -> ModeResult:
    sites: dict[str, str | None] = {CLOUD: None, **dict.fromkeys(EDGES, CLOUD)}
    links = {f"{edge} {CLOUD}": tiercel.Link(latency_ms=options.latency_ms) for edge in EDGES}
    links |= {
        f"{a} {b}": tiercel.Link(latency_ms=2 * options.latency_ms) for a in EDGES for b in EDGES if a < b
    }
    cars = {edge: [f"{edge} car-{n}" for n in range(options.cars)] for edge in EDGES}
    with tiercel.start(spark, sites, links=links) as live:
        stream = live.stream("cars", INPUT, key="car")
        placed = {BUSY: 1, CLOUD: 1}  # the answers are logged, and read, where the first instance is
        sums = stream.transform_with_state(
            TimedSum(options.service_us), OUTPUT, name=OPERATOR, instances=placed
        )
        live.deploy()
        live.move(OPERATOR, source=f"{OPERATOR}@{BUSY}#1", to=f"{OPERATOR}@{CLOUD}#1").wait()
        if mode == "edges":
            for edge, names in cars.items():
                live.move(OPERATOR, keys=names, to=edge).wait()
        if mode == "offload":
            live.offload(OPERATOR, cost=options.cost, edges=EDGES, cool_down_s=2.0, judge_after_s=2.0)
        return _run(live, stream, sums, cars, mode, options, show_progress)


def _run(
    live: Live,
    stream: Any,
    sums: Any,
    cars: dict[str, list[str]],
    mode: str,
    options: Options,
    show_progress: ShowProgress,
) -> ModeResult:
    load = TimedLoad(stream, sums, cars, reads_at=BUSY)
    load.rates.update(dict.fromkeys(EDGES, float(options.low)))
    owners = Owners(live, cars)
    owners.start()
    rates = demand(options)
    begun_s = time.monotonic()
    for second, rate in enumerate(rates):
        load.rates[BUSY] = rate
        show_progress(f"{mode}: second {second} of {len(rates)}, {rate:.0f} rows/s at {BUSY}")
        time.sleep(max(0.0, begun_s + second + 1 - time.monotonic()))
    over_s = time.monotonic()
    verdict = load.end()
    owners.end()
    changes = [] if mode != "offload" else live.policies().changes
    peak = [n for n, rate in enumerate(rates) if rate == options.high]
    settled_s = begun_s + (peak[0] + peak[-1]) / 2  # the second half of the top: the keys have had time
    whole = load.latency_ms(BUSY, begun_s, over_s)
    at_top = load.latency_ms(BUSY, settled_s, begun_s + peak[-1] + 1)
    there = [count for at_s, count in owners.there if settled_s <= at_s < begun_s + peak[-1] + 1]
    edges = [count for at_s, count in owners.edges if begun_s <= at_s <= over_s]
    after = [count for _, count in owners.there[-3:]]
    line: Line = {
        "mode": mode,
        "changes": len(changes),
        "keys_at_edge_at_top": max(there, default=0),
        "keys_at_edge_at_end": after[-1] if after else 0,
        "top_p50_ms": at_top["p50_ms"],
        "top_p99_ms": at_top["p99_ms"],
        "p50_ms": whole["p50_ms"],
        "p99_ms": whole["p99_ms"],
        "edge_seconds": round(sum(edges) / max(1, len(edges)) * len(rates), 1),  # what the edges cost
        "rows": sum(load.sent.values()),
        **verdict,
    }
    offered = [(float(second), rate) for second, rate in enumerate(rates)]
    seen = [(at_s - begun_s, count) for at_s, count in owners.there if at_s <= over_s]
    return ModeResult(line, offered, seen, load.p99_by_second(begun_s, BUSY))


def draw(results: Sequence[ModeResult], options: Options, path: Path) -> None:
    """Demand and where the keys are above, latency below."""
    figure = Figure(figsize=(11, 6.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    above.fill_between(*zip(*results[0].offered, strict=True), color="#e5e7eb", step="post")
    above.axhline(options.cost, color="#dc2626", linewidth=0.8, linestyle="--")
    above.text(0, options.cost * 1.03, "cost of an edge", color="#dc2626", fontsize=8)
    above.set_ylabel(f"rows per second at {BUSY} (grey)")
    counts = above.twinx()
    for result in results:
        mode = result.line["mode"]
        if result.there:
            counts.step(*zip(*result.there, strict=True), where="post", color=COLOURS[mode], label=mode)
        if result.p99:
            below.plot(*zip(*result.p99, strict=True), color=COLOURS[mode], label=mode)
    counts.set_ylabel(f"keys of {BUSY} that are there, of {options.cars}")
    counts.set_ylim(-1, options.cars * 1.15)
    counts.legend(loc="upper left", frameon=False)
    below.set_yscale("log")
    below.set_ylabel(f"p99 latency at {BUSY}, ms")
    below.set_xlabel("seconds")
    above.set_title(
        f"demand at one of four edges, {options.latency_ms:g} ms from the cloud; answers are read there"
    )
    figure.savefig(path)
