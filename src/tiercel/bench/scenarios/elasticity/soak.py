"""`tiercel bench soak`: a load that changes all the time, chaos beneath it, and nobody who scales.

Responsible for: the wandering load, kills and stops drawn from a seed, the hold at the end, the verdict.
Not responsible for: the load's threads and the judgement of rows (timed_load.py), faults of other kinds
    (tiercel chaos), policies (control/).

    wander, with faults beneath | high, without faults: several are needed | low: one is needed

At the end of each hold the number of instances must be one that the policy would choose for that load.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import tiercel
from tiercel.bench.report import Line
from tiercel.bench.scenarios.elasticity.timed_load import INPUT, OUTPUT, TimedLoad, TimedSum
from tiercel.chaos.processes import check_ours, kill
from tiercel.control.policies.rate import Rate
from tiercel.control.proposals import Outcome
from tiercel.errors import UserError
from tiercel.spark.api.deployment import Live
from tiercel.spark.cluster.session import open_session

ShowProgress = Callable[[str], None]

OPERATOR, SITE, CARS = "sums", "cloud", 200
LOOK_S = 0.5
STEP_S = (3.0, 15.0)  # between two changes of the load
FAULT_S = (4.0, 10.0)  # between two faults
STOP_S = (1.0, 6.0)
HIGH, LOW = 1.3, 0.2  # demand of the holds, in capacities of one instance
HOLD_S_MAX = 90.0
FAULTS = {"kill instance": 5, "stop instance": 3, "kill router": 2, "stop router": 1}
LIMITS: dict[str, Any] = {
    "cool_down_s": 4.0,
    "judge_after_s": 4.0,
    "scale_in_after_s": 10.0,
    "changes_per_hour_max": 600,
}


@dataclass(frozen=True)
class Options:
    """Options of the run."""

    minutes: float
    high: int  # rows per second at most
    service_us: float
    most: int  # instances
    faults: bool
    seed: int
    out: Path | None


class Chaos(threading.Thread):
    """Kills and stops processes until it is told to end."""

    def __init__(self, live: Live, seed: int, show_progress: ShowProgress) -> None:
        super().__init__(name="soak-chaos", daemon=True)
        self._live, self._random, self._show = live, Random(f"soak/{seed}"), show_progress
        self.counts: Counter[str] = Counter()
        self.at_s: list[float] = []
        self.in_change = 0
        self._ending = threading.Event()

    def run(self) -> None:
        draw = self._random
        kinds = [kind for kind, count in FAULTS.items() for _ in range(count)]
        while not self._ending.wait(draw.uniform(*FAULT_S)):
            kind = draw.choice(kinds)
            wanted = "instance" if "instance" in kind else "router"
            with contextlib.suppress(UserError, ProcessLookupError):  # it restarts, or has just ended
                status = self._live.status()
                found = sorted(p.pid for p in status.processes if p.kind == wanted and p.state == "running")
                if not found:
                    continue
                pid = check_ours(draw.choice(found), [os.getpid()])
                self.in_change += bool(self._live.load().operators[OPERATOR].changing)
                self._hit(kind, pid)
                self.counts[kind] += 1
                self.at_s.append(time.monotonic())

    def _hit(self, kind: str, pid: int) -> None:
        self._show(f"{kind}: process {pid}")
        if kind.startswith("kill"):
            kill(pid)
            return
        os.kill(pid, signal.SIGSTOP)
        try:
            self._ending.wait(self._random.uniform(*STOP_S))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def end(self) -> None:
        self._ending.set()
        self.join()


class Watch(threading.Thread):
    """Instances that own keys, over time."""

    def __init__(self, live: Live) -> None:
        super().__init__(name="soak-watch", daemon=True)
        self._live = live
        self.seen: list[tuple[float, int]] = []
        self._ending = threading.Event()

    def run(self) -> None:
        while not self._ending.wait(LOOK_S):
            with contextlib.suppress(UserError):  # the controller restarts
                self.seen.append((time.monotonic(), len(self._live.load().operators[OPERATOR].instances)))

    def end(self) -> None:
        self._ending.set()
        self.join()


def measure(options: Options, show_progress: ShowProgress) -> tuple[list[Line], dict[str, Any]]:
    """One row: what was done to the deployment, and what became of every row."""
    spark = open_session("tiercel-soak", slots=options.most + 6)
    if options.faults:
        spark.sparkContext.setLogLevel("OFF")  # Spark prints the loss of each worker
    try:
        with tiercel.start(spark, [SITE]) as live:
            cars = live.stream("cars", INPUT, key="car")
            sums = cars.transform_with_state(TimedSum(options.service_us), OUTPUT, name=OPERATOR)
            live.deploy()
            return _soak(live, cars, sums, options, show_progress)
    finally:
        spark.stop()


def _soak(
    live: Live, cars: Any, sums: Any, options: Options, show_progress: ShowProgress
) -> tuple[list[Line], dict[str, Any]]:
    live.autoscale(OPERATOR, policy="rate", max=options.most, spares=1, **LIMITS)
    live.autoscale(OPERATOR, policy="failures")
    load = TimedLoad(cars, sums, {SITE: [f"car-{n}" for n in range(CARS)]})
    watch, chaos = Watch(live), Chaos(live, options.seed, show_progress)
    begun_s = time.monotonic()
    watch.start()
    if options.faults:
        chaos.start()
    offered = _wander(load, options, begun_s, show_progress)
    if options.faults:
        chaos.end()
    holds = [
        _hold(live, load, name, demand, options, begun_s, offered, show_progress)
        for name, demand in (("high", HIGH), ("low", LOW))
    ]
    over_s = time.monotonic()
    verdict = load.end()
    drained_s = time.monotonic() - over_s
    watch.end()
    decisions = live.policies().history
    instances = [(at_s - begun_s, count) for at_s, count in watch.seen]
    p99 = load.p99_by_second(begun_s)
    line: Line = {
        "minutes": round((over_s - begun_s) / 60, 1),
        "rows": sum(load.sent.values()),
        "faults_injected": sum(chaos.counts.values()),
        "during_a_change": chaos.in_change,
        "changes": sum(d.is_change for d in decisions),
        "undone": sum(d.outcome is Outcome.UNDONE for d in decisions),
        "instances_max": max((count for _, count in instances), default=1),
        "high_hold": holds[0]["instances"],
        "high_needed": holds[0]["needed"],
        "low_hold": holds[1]["instances"],
        "low_needed": holds[1]["needed"],
        "seconds_above_5_s": sum(ms > 5_000 for _, ms in p99),
        "drained_s": round(drained_s, 1),
        **verdict,
        "wrong_instances": sum(not hold["right"] for hold in holds),
    }
    if options.out is not None:
        path = options.out / f"soak-{time.strftime('%Y%m%d-%H%M%S')}.png"
        draw(offered, instances, p99, [at_s - begun_s for at_s in chaos.at_s], options, path)
        record = live.deployment.directory / "policy"  # every view and decision, for tiercel policy replay
        shutil.copytree(record, path.with_suffix(""), dirs_exist_ok=True)
    more = {"faults": dict(chaos.counts), "holds": holds, "failures": load.failures}
    return [line], more


def _wander(
    load: TimedLoad, options: Options, begun_s: float, show_progress: ShowProgress
) -> list[tuple[float, float]]:
    """Change the load all the time: jumps, slopes, flash crowds, silence."""
    random = Random(f"wander/{options.seed}")
    offered: list[tuple[float, float]] = []
    until_s, rate = begun_s + options.minutes * 60, options.high / 4
    while time.monotonic() < until_s:
        kind = random.choice(("jump", "jump", "slope", "slope", "flash", "silence"))
        to = {"flash": float(options.high), "silence": 0.0}.get(
            kind, random.uniform(0.05, 0.9) * options.high
        )
        step_s = random.uniform(*STEP_S) / (2 if kind in ("flash", "silence") else 1)
        step_s = min(step_s, max(0.5, until_s - time.monotonic()))
        show_progress(f"{kind} to {to:.0f} rows/s for {step_s:.0f} s")
        begin_s, start = time.monotonic(), rate
        while (passed := time.monotonic() - begin_s) < step_s:
            rate = start + (to - start) * passed / step_s if kind == "slope" else to
            load.rates[SITE] = rate
            offered.append((time.monotonic() - begun_s, rate))
            time.sleep(LOOK_S)
    return offered


def _hold(
    live: Live,
    load: TimedLoad,
    name: str,
    demand: float,
    options: Options,
    begun_s: float,
    offered: list[tuple[float, float]],
    show_progress: ShowProgress,
) -> dict[str, Any]:
    """A steady load until the number of instances is right and stays so for a while, or the time is over."""
    rate = demand * 1e6 / options.service_us
    load.rates[SITE] = rate
    policy = Rate(OPERATOR)
    least, most = math.ceil(demand / policy.upper), max(1, math.floor(demand / policy.lower))
    needed = (least, max(least, most))
    settled_s = LIMITS["scale_in_after_s"] + LIMITS["cool_down_s"] + 6.0
    begin_s = right_since_s = time.monotonic()
    count = 0
    shown: tuple[int, Outcome] | None = None
    while time.monotonic() - begin_s < HOLD_S_MAX and time.monotonic() - right_since_s < settled_s:
        offered.append((time.monotonic() - begun_s, rate))
        operator = live.load().operators[OPERATOR]
        count = len(operator.instances)
        calm = not operator.changing and operator.backlog_s() < 1.0
        if not (needed[0] <= count <= needed[1] and calm):
            right_since_s = time.monotonic()
        last = next(d for d in reversed(live.policies().history) if d.policy.endswith(": rate"))
        text = f"{name}: {rate:.0f} rows/s, {count} instances, needed {needed[0]} to {needed[1]}; {last}"
        if (count, last.outcome) != shown:
            show_progress(text)
            shown = (count, last.outcome)
        time.sleep(LOOK_S)
    return {
        "hold": name,
        "rate": round(rate),
        "instances": count,
        "needed": f"{needed[0]} to {needed[1]}" if needed[0] != needed[1] else f"{needed[0]}",
        "seconds": round(time.monotonic() - begin_s, 1),
        "right": needed[0] <= count <= needed[1],
    }


def draw(
    offered: list[tuple[float, float]],
    instances: list[tuple[float, int]],
    p99: list[tuple[float, float]],
    faults_s: list[float],
    options: Options,
    path: Path,
) -> None:
    """Load, instances and faults above, latency below."""
    figure = Figure(figsize=(11, 6.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    above.fill_between(*zip(*offered, strict=True), color="#e5e7eb", step="post")
    above.set_ylabel("rows per second (grey)")
    counts = above.twinx()
    counts.step(*zip(*instances, strict=True), where="post", color="#2563eb")
    counts.set_ylabel("instances with keys (blue)")
    counts.set_ylim(0, options.most + 0.6)
    for n, at_s in enumerate(faults_s):
        label = f"{len(faults_s)} kills and stops" if n == 0 else None
        counts.axvline(at_s, color="#dc2626", linewidth=0.6, alpha=0.6, label=label)
    if faults_s:
        counts.legend(loc="upper left", frameon=False)
    if p99:
        below.plot(*zip(*p99, strict=True), color="#2563eb", linewidth=0.9)
    below.set_yscale("log")
    below.set_ylabel("p99 latency, ms")
    below.set_xlabel("seconds")
    above.set_title(f"a load that wanders, faults beneath it; a row takes {options.service_us:g} us, waiting")
    figure.savefig(path)
