"""`tiercel bench elastic`: an operator under a load that rises and falls, scaled by a policy or by nobody.

Responsible for: the ramp, the modes side by side, instances over time, latency, each scaling, a picture.
Not responsible for: policies (control/), the load's process (loadgen/), counting faults (metrics.py).

A row takes `service_us`, in which the operator waits, as for a service: so a second instance helps although
the cores are few. Modes: `fixed` (one instance), `rate` (the policy of that name), `spares` (the same with a
spare instance), `restart` (the same, and each scaling stops the operator and restarts its instances).
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tiercel.bench.deployments import OPERATOR, loaded
from tiercel.bench.loadgen.process import LoadProcess
from tiercel.bench.metrics import count_faults, read_outputs
from tiercel.bench.operators import SITE, HeavyAverage
from tiercel.bench.report import Line, percentile
from tiercel.control.proposals import Decision, Resize
from tiercel.spark.api.deployment import Live
from tiercel.spark.cluster.session import open_session

ShowProgress = Callable[[str], None]

MODES = ("fixed", "rate", "spares", "restart")
LOOK_S = 0.1  # between two looks at the instances
LIMIT_MS = 5_000.0  # of Linear Road
SETTLED_S = 1.0  # after a scaling: its effect is over
FIRSTS = ("until_first_keys_s", "until_first_output_s")
COLOURS = {"fixed": "#9ca3af", "rate": "#2563eb", "spares": "#059669", "restart": "#d97706"}


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    modes: Sequence[str]
    low: int
    high: int
    seconds: float
    service_us: float
    keys: int
    state_bytes: int
    most: int
    seed: int
    out: Path | None


class InstanceLog:
    """Which instances own keys, over time."""

    def __init__(self, live: Live, operator: str) -> None:
        self._live, self._operator = live, operator
        self.seen: list[tuple[float, int]] = []  # monotonic time, instances with keys
        self.first_s: dict[str, float] = {}  # instance -> when it first owned keys
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stopped.wait(LOOK_S):
            owned = self._live.status().operators[self._operator]
            now_s = time.monotonic()
            working = [name for name, slots in owned.items() if slots]
            self.seen.append((now_s, len(working)))
            for name in working:
                self.first_s.setdefault(name, now_s)

    def end(self) -> None:
        self._stopped.set()
        self._thread.join()


@dataclass(frozen=True)
class ModeResult:
    """What one mode gave: its row, and what the picture needs."""

    line: Line
    scalings: list[Line]
    offered: list[tuple[float, int]]  # seconds, rows per second
    instances: list[tuple[float, int]]
    p99: list[tuple[float, float]]  # by the second in which rows were due


def ramp(options: Options) -> list[int]:
    """Rows per second in each second: low, up, high, down, low."""
    seconds = int(options.seconds)
    flat, slope = max(1, seconds // 10), max(1, int(seconds * 0.3))
    high = max(1, seconds - 3 * flat - 2 * slope + flat)
    step = (options.high - options.low) / slope
    up = [int(options.low + step * n) for n in range(1, slope + 1)]
    return [options.low] * flat + up + [options.high] * high + up[::-1] + [options.low] * flat


def measure(options: Options, show_progress: ShowProgress) -> tuple[list[Line], dict[str, Any]]:
    """One row for each mode, and each scaling."""
    spark = open_session("tiercel-bench", slots=options.most + 5)
    results = []
    try:
        for mode in options.modes:
            show_progress(f"{mode}: starting")
            with loaded(
                spark,
                options.keys,
                processor=HeavyAverage(options.state_bytes, options.service_us),
                instances={SITE: 1},
            ) as (live, loader):
                results.append(_one(live, loader, mode, options, show_progress))
    finally:
        spark.stop()
    if options.out is not None:
        draw(results, options, options.out / f"elastic-{time.strftime('%Y%m%d-%H%M%S')}.png")
    return [r.line for r in results], {"scalings": [s for r in results for s in r.scalings]}


def start_policy(live: Live, operator: str, mode: str, options: Options) -> None:
    """A fixed deployment has the policy too, in a dry run: its cost is in all modes."""
    live.autoscale(
        operator,
        policy="rate",
        max=options.most,
        spares=1 if mode == "spares" else 0,
        strategy="restart" if mode == "restart" else "live",
        dry_run=mode == "fixed",
        cool_down_s=4.0,
        judge_after_s=4.0,
        scale_in_after_s=8.0,
    )
    if mode == "spares":
        _await_spare(live, operator)


def _one(
    live: Live, loader: LoadProcess, mode: str, options: Options, show_progress: ShowProgress
) -> ModeResult:
    start_policy(live, OPERATOR, mode, options)
    rates = ramp(options)
    loader.start(rates[0], [])
    begun_s = time.monotonic()
    log = InstanceLog(live, OPERATOR)
    offered = []
    for second, rate in enumerate(rates):
        loader.change_rate(rate)
        offered.append((float(second), rate))
        show_progress(f"{mode}: second {second} of {len(rates)}, {rate} rows/s")
        time.sleep(max(0.0, begun_s + second + 1 - time.monotonic()))
    over_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tiercel-records-") as place:
        inputs, outputs = Path(place) / "inputs.parquet", Path(place) / "outputs.parquet"
        loader.stop(inputs, outputs)
        drained_s = time.monotonic() - over_s
        log.end()
        found = read_outputs(outputs)
        faults = count_faults(live.spark, inputs, outputs)
    changes = live.policies().changes
    emitted_s = np.sort(found.emitted_ns) / 1e9
    scalings = [scaling(mode, change, log, emitted_s, begun_s) for change in changes]
    latency = np.sort(found.latency_ms)
    p99 = by_second(found.due_ns, found.latency_ms, begun_s)
    instances = [(at_s - begun_s, count) for at_s, count in log.seen if at_s <= over_s]
    line = {
        "mode": mode,
        **summary(changes, instances, len(rates), latency, p99, scalings),
        "drained_s": round(drained_s, 1),
        "tuples": len(latency),
        **faults,
    }
    return ModeResult(line, scalings, offered, instances, p99)


def _await_spare(live: Live, operator: str) -> None:
    give_up = time.monotonic() + 60
    while len(live.status().operators[operator]) < 2 and time.monotonic() < give_up:
        time.sleep(0.1)
    while any(p.state != "running" for p in live.status().processes) and time.monotonic() < give_up:
        time.sleep(0.1)


def summary(
    changes: Sequence[Decision],
    instances: Sequence[tuple[float, int]],
    seconds: int,
    latency: Any,
    p99: Sequence[tuple[float, float]],
    scalings: Sequence[Line],
) -> Line:
    """The figures of a mode that do not depend on what the load is. `latency` is sorted."""
    firsts = {name: [s[name] for s in scalings if s[name] is not None] for name in FIRSTS}
    counts = [count for _, count in instances] or [1]
    return {
        "changes": len(changes),
        "instances_max": max(counts),
        "instance_seconds": round(sum(counts) / len(counts) * seconds, 1),
        "p50_ms": round(percentile(latency, 0.5), 1),
        "p99_ms": round(percentile(latency, 0.99), 1),
        "max_ms": round(float(latency[-1]), 1),
        "seconds_above_5_s": sum(1 for _, ms in p99 if ms > LIMIT_MS),
        **{name: round(min(found), 2) if found else None for name, found in firsts.items()},
        "gap_ms": max((s["gap_ms"] for s in scalings), default=None),
        "gap_floor_ms": max((s["gap_floor_ms"] for s in scalings), default=None),
    }


def scaling(mode: str, change: Decision, log: InstanceLog, emitted_s: Any, begun_s: float) -> Line:
    """One scaling: when its first new instance had keys, and the longest time without any output.

    `emitted_s` is sorted. The first output of a new instance is the first one after it was seen with keys,
    of all instances: with thousands a second that is within a few milliseconds.
    """
    at_s = change.at_s + time.monotonic() - time.time()
    before = next((count for seen_s, count in reversed(log.seen) if seen_s <= at_s), 1)
    settled = [seen_s for seen_s, count in log.seen if seen_s > at_s and count != before]
    end_s = (settled[0] if settled else at_s) + SETTLED_S
    proposal = change.proposal
    grows = isinstance(proposal, Resize) and proposal.instances > before
    new = [first_s for first_s in log.first_s.values() if first_s > at_s] if grows else []
    keys_s = min(new, default=None)
    after = emitted_s[np.searchsorted(emitted_s, keys_s) :] if keys_s is not None else []
    return {
        "mode": mode,
        "at_s": round(at_s - begun_s, 1),
        "change": str(proposal),
        "reason": change.reason,
        "until_first_keys_s": round(keys_s - at_s, 2) if keys_s is not None else None,
        "until_first_output_s": round(float(after[0]) - at_s, 2) if len(after) else None,
        "gap_ms": _gap_ms(emitted_s, at_s, end_s),
        "gap_floor_ms": _gap_ms(emitted_s, at_s - (end_s - at_s), at_s),
    }


def _gap_ms(emitted_s: Any, first_s: float, last_s: float) -> float:
    """The longest time without any output."""
    inside = emitted_s[(emitted_s >= first_s) & (emitted_s < last_s)]
    return round(float(np.max(np.diff([first_s, *inside, last_s]))) * 1e3, 1)


def by_second(due_ns: Any, latency_ms: Any, begun_s: float) -> list[tuple[float, float]]:
    """The p99 of each second in which rows were due."""
    second = (due_ns / 1e9 - begun_s).astype(np.int64)
    order = np.lexsort((latency_ms, second))
    second, latency = second[order], latency_ms[order]
    found, first = np.unique(second, return_index=True)
    ends = [*first[1:], len(second)]
    return [
        (float(s), percentile(latency[a:b], 0.99))
        for s, a, b in zip(found, first, ends, strict=True)
        if s >= 0
    ]


def draw(results: Sequence[ModeResult], options: Options, path: Path, what: str = "") -> None:
    """Load and instances above, latency below."""
    figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    if results:
        above.fill_between(*zip(*results[0].offered, strict=True), color="#e5e7eb", step="post")
        above.set_ylabel("rows per second (grey)")
    counts = above.twinx()
    for place, result in enumerate(results):
        mode = result.line["mode"]
        if result.instances:
            at_s, count = zip(*result.instances, strict=True)
            shifted = [c + 0.04 * place for c in count]  # lines of modes with the same number stay visible
            counts.step(at_s, shifted, where="post", color=COLOURS[mode], label=mode)
        if result.p99:
            below.plot(*zip(*result.p99, strict=True), color=COLOURS[mode], label=mode)
    counts.set_ylabel("instances with keys")
    counts.set_ylim(0, options.most + 0.6)
    counts.legend(loc="upper left", frameon=False)
    below.axhline(LIMIT_MS, color="#dc2626", linewidth=0.8, linestyle="--")
    below.text(0, LIMIT_MS * 1.1, "5 s, the limit of Linear Road", color="#dc2626", fontsize=8)
    below.set_yscale("log")
    below.set_ylabel("p99 latency, ms")
    below.set_xlabel("seconds")
    above.set_title(
        f"{what or 'running average'}: {options.low} to {options.high} rows/s and back; "
        f"a row takes {options.service_us:g} us, waiting"
    )
    figure.savefig(path)
