"""`tiercel bench app`: an application before, during and after changes, and its oracle's verdict.

Responsible for: rows of one run side by side: rate, latency and stoppage of each change; memory per key.
Not responsible for: running (apps/run.py), the definitions of stoppage and floor (metrics.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiercel.apps.changes import Change
from tiercel.apps.figures import Phase
from tiercel.apps.run import Progress, Recording, Result, Run, run_recorded
from tiercel.bench.metrics import Moments, Outputs, judge
from tiercel.bench.report import Line

STEADY_S_MAX = 10.0
FAULTS = ("lost", "doubled", "invented", "wrong", "reordered")
FIGURES = ("rows_per_s", "p50_ms", "p99_ms", "jitter_max")
JUDGED = (
    "stoppage_p50_ms",
    "stoppage_p99_ms",
    "stoppage_max_ms",
    "floor_p99_ms",
    "others_p99_ms",
    "throughput_dip",
    "disruption_ms",
    "stabilise_ms",
)

ShowProgress = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    app: Any
    options: Mapping[str, Any]
    rate: int
    minutes: float
    during: Sequence[str]
    seed: int

    @property
    def run(self) -> Run:
        return Run(
            self.app, self.options, self.seed, self.rate, self.minutes * 60, tuple(self.during), by_key=True
        )


def measure(options: Options, show_progress: ShowProgress, spark: Any = None) -> tuple[list[Line], Line]:
    """A row for each change, one for each output with its verdict; facts of the whole run."""
    steps = [""]

    def show(progress: Progress) -> None:
        if progress.step != steps[-1] and not progress.step.startswith("waiting"):
            steps.append(progress.step)
            show_progress(progress.step)

    result, recording = run_recorded(options.run, show, spark)
    phases = [result.phases[3 * n : 3 * n + 3] for n in range(len(result.changes))]
    rows = [_side_by_side(change, *three) for change, three in zip(result.changes, phases, strict=True)] or [
        {figure: getattr(result.phases[0], figure) for figure in ("seconds", *FIGURES, "max_ms")}
    ]
    rows += [
        {"during": change.kind, "keys": change.keys, **_ratios(*three[:2]), **_judged(change, recording, n)}
        for n, (change, three) in enumerate(zip(result.changes, phases, strict=True))
    ]
    rows += [
        {
            "output": name,
            "expected": found.expected,
            "found": found.found,
            **{fault: getattr(found, fault) for fault in FAULTS},
        }
        for name, found in result.outputs.items()
    ]
    return rows, _facts(result, recording)


def _side_by_side(change: Change, before: Phase, during: Phase, after: Phase) -> Line:
    row: Line = {"during": change.kind, "seconds": round(change.seconds, 3)}
    for figure in FIGURES:
        row |= {f"{phase.name}_{figure}": getattr(phase, figure) for phase in (before, during, after)}
    return row


def _ratios(before: Phase, during: Phase) -> Line:
    """By how much the change misses the aim: the same rate and latency as before."""
    rate = during.rows_per_s / before.rows_per_s if before.rows_per_s else None
    slower = during.p99_ms / before.p99_ms if before.p99_ms and during.p99_ms else None
    return {
        "rate_ratio": None if rate is None else round(rate, 3),
        "p99_ratio": None if slower is None else round(slower, 2),
        "max_ms": during.max_ms,
    }


def _judged(change: Change, recording: Recording, n: int) -> Line:
    """Stoppage of the keys that the change was about; of all keys, if it was about none."""
    arrivals = recording.arrivals
    steady_ns = max(recording.begin_ns, change.begin_ns - int(STEADY_S_MAX * 1e9))
    over_ns = min(recording.end_ns, change.end_ns + int(STEADY_S_MAX * 1e9))
    if not steady_ns < change.begin_ns < over_ns:
        return dict.fromkeys(JUDGED)
    inside = (steady_ns <= arrivals.due_ns) & (arrivals.due_ns < over_ns) & (arrivals.key >= 0)
    outputs = Outputs(arrivals.key[inside], arrivals.due_ns[inside], arrivals.arrived_ns[inside])
    if not len(outputs.sensor):
        return dict.fromkeys(JUDGED)
    members = recording.affected[n] or [int(key) for key in np.unique(outputs.sensor)]
    at = Moments(steady_ns, change.begin_ns, change.end_ns, over_ns)
    figures = judge(outputs, at, members, members)
    return {name: figures[name] for name in JUDGED}


def _facts(result: Result, recording: Recording) -> Line:
    keys = int(recording.arrivals.key.max()) + 1 if len(recording.arrivals.key) else 0
    names = result.instances_mb.keys() & recording.empty_mb.keys()
    grown_mb = sum(result.instances_mb[name] - recording.empty_mb[name] for name in names)
    return {
        "verdict": "every row is what the oracle expects" if result.good else "not what the oracle expects",
        "events": result.events,
        "events_per_s": result.events_per_s,
        "keys": keys,
        "instances_mb": result.instances_mb,
        "bytes_per_key": round(grown_mb * 2**20 / keys) if keys else None,
        "changes": [{"during": change.kind, "about": change.about} for change in result.changes],
    }
