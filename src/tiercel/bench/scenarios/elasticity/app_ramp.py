"""`tiercel bench elastic --app`: an application under the ramp, scaled by a policy or by nobody.

Responsible for: the ramp of an application's events, the modes side by side, the verdict on every row.
Not responsible for: the applications (apps/), the ramp, its figures and its picture (ramp.py).

`low` and `high` are rows per second of the operator that is scaled: one sentence is twelve words of the word
count. The events keep their order and their event time; the ramp says how fast they come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import tiercel
from tiercel.apps.app import Built
from tiercel.apps.catalogue import find_app
from tiercel.apps.run import SLOTS, Run, run_recorded
from tiercel.apps.verdict import HEAP
from tiercel.apps.wordcount import WORDS_PER_SENTENCE
from tiercel.bench.report import Line
from tiercel.bench.scenarios.elasticity.ramp import (
    InstanceLog,
    ModeResult,
    Options,
    by_second,
    draw,
    ramp,
    scaling,
    start_policy,
    summary,
)
from tiercel.control.proposals import Decision
from tiercel.spark.api.deployment import Live

ShowProgress = Callable[[str], None]

ROWS_PER_EVENT = {"wordcount": WORDS_PER_SENTENCE, "toll": 1}
APPS = tuple(ROWS_PER_EVENT)
SET: dict[str, dict[str, Any]] = {"wordcount": {"words": 1_000, "window_s": 1}, "toll": {}}


class Beside:
    """The policy of a mode, and what it did, while the load of an application runs."""

    def __init__(self, mode: str, options: Options) -> None:
        self._mode, self._options = mode, options
        self.changes: list[Decision] = []
        self.log: InstanceLog | None = None
        self.begun_s = self.over_s = 0.0

    @contextmanager
    def __call__(self, live: Live, built: Built) -> Iterator[None]:
        start_policy(live, built.operator, self._mode, self._options)
        self.log = InstanceLog(live, built.operator)
        self.begun_s = time.monotonic()
        try:
            yield
        finally:
            self.over_s = time.monotonic()
            self.log.end()
            self.changes = live.policies().changes


def measure(app: str, options: Options, show_progress: ShowProgress) -> tuple[list[Line], dict[str, Any]]:
    """One row for each mode, and each scaling."""
    spark = tiercel.session("tiercel-bench", slots=SLOTS, config=HEAP)
    results = []
    try:
        for mode in options.modes:
            show_progress(f"{mode}: {app}")
            results.append(_one(app, mode, options, spark, show_progress))
    finally:
        spark.stop()
    if options.out is not None:
        draw(results, options, options.out / f"elastic-{app}-{time.strftime('%Y%m%d-%H%M%S')}.png", app)
    return [r.line for r in results], {"scalings": [s for r in results for s in r.scalings]}


def _one(app: str, mode: str, options: Options, spark: Any, show_progress: ShowProgress) -> ModeResult:
    rows = ramp(options)
    rates = tuple(max(1, rate // ROWS_PER_EVENT[app]) for rate in rows)
    wanted = Run(
        find_app(app),
        {**SET[app], "service_us": round(options.service_us)},
        options.seed,
        max(1, sum(rates) // len(rates)),
        float(len(rates)),
        rates=rates,
        instances=1,
    )
    shown = [""]

    def show(progress: Any) -> None:
        if progress.step != shown[0]:
            shown[0] = progress.step
            show_progress(f"{mode}: {progress.step}")

    beside = Beside(mode, options)
    result, recording = run_recorded(wanted, show, spark, beside)
    assert beside.log is not None
    arrivals, begun_s = recording.arrivals, beside.begun_s
    latency_ms = (arrivals.arrived_ns - arrivals.due_ns) / 1e6
    emitted_s = np.sort(arrivals.arrived_ns) / 1e9
    scalings = [scaling(mode, change, beside.log, emitted_s, begun_s) for change in beside.changes]
    p99 = by_second(arrivals.due_ns, latency_ms, begun_s)
    instances = [(at_s - begun_s, count) for at_s, count in beside.log.seen if at_s <= beside.over_s]
    counted = {"expected": 0, "lost": 0, "doubled": 0, "invented": 0, "wrong": 0, "reordered": 0}
    for one in result.outputs.values():
        counted = {name: count + getattr(one, name) for name, count in counted.items()}
    line: Line = {
        "mode": mode,
        **summary(beside.changes, instances, len(rates), np.sort(latency_ms), p99, scalings),
        "events": result.events,
        **counted,
    }
    offered = [(float(second), rate) for second, rate in enumerate(rows)]
    return ModeResult(line, scalings, offered, instances, p99)
