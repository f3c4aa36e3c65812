"""`tiercel bench largest-load`: the highest rate of an application at which every answer comes in time.

Responsible for: the search, and what each rate did: the latest answer, and the oracle's verdict.
Not responsible for: running (apps/run.py), the load that a rate means (`App.load_facts`).

    the rate doubles while it holds | then halves the distance between the highest that held and the lowest
    that did not, a few times

A rate holds if the latest answer came within the limit, the sender kept up, and every row is right. Linear
Road asks for the largest load factor with every answer within 5 s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tiercel
from tiercel.apps.run import SLOTS, Result, Run, run
from tiercel.apps.verdict import HEAP
from tiercel.bench.report import Line

KEPT_UP = 0.98  # of the rate: below it the load was not what it says

ShowProgress = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    app: Any
    options: Mapping[str, Any]
    rate: int  # the first one
    rate_max: int
    steps: int  # that halve the distance
    limit_s: float
    seconds: float
    during: Sequence[str]
    seed: int

    def run_at(self, rate: int) -> Run:
        return Run(self.app, self.options, self.seed, rate, self.seconds, tuple(self.during))


def search(holds: Callable[[int], bool], first: int, most: int, steps: int) -> int:
    """The highest rate that held, 0 if none did: by doubling, then by halving the distance."""
    held, failed, rate = 0, 0, first
    while not failed and rate <= most:
        if holds(rate):
            held, rate = rate, rate * 2
        else:
            failed = rate
    for _ in range(steps if held and failed else 0):
        middle = (held + failed) // 2
        if holds(middle):
            held = middle
        else:
            failed = middle
    return held


def measure(options: Options, show_progress: ShowProgress) -> list[Line]:
    """A row for each rate that was tried; the last one repeats the largest that held."""
    spark = tiercel.session("tiercel-bench", slots=SLOTS, config=HEAP)
    rows: dict[int, Line] = {}
    chosen = options.run_at(options.rate).check()

    def holds(rate: int) -> bool:
        show_progress(f"{rate:,} events a second")
        row = judge(run(options.run_at(rate), spark=spark), options.limit_s)
        rows[rate] = {"rate": rate, **options.app.load_facts(chosen, rate), **row}
        show_progress(", ".join(f"{name} {value}" for name, value in rows[rate].items()))
        return bool(row["holds"])

    try:
        largest = search(holds, options.rate, options.rate_max, options.steps)
    finally:
        spark.stop()
    return [*rows.values(), *([rows[largest]] if largest else [])]


def judge(result: Result, limit_s: float) -> Line:
    """Whether a rate held, and what says so."""
    latest = [phase.max_ms for phase in result.phases if phase.max_ms is not None]
    middle = [phase.p99_ms for phase in result.phases if phase.p99_ms is not None]
    late_ms = max(latest, default=None)
    kept_up = result.events_per_s >= KEPT_UP * result.rate
    in_time = late_ms is not None and late_ms <= limit_s * 1e3
    return {
        "events_per_s": result.events_per_s,
        "p99_ms": max(middle, default=None),
        "max_ms": late_ms,
        "faults": result.faults,
        "holds": bool(result.good and kept_up and in_time),
    }
