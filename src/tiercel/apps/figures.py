"""Figures of a run: rate and latency before, during and after each change.

Responsible for: which output rows belong to which phase, and percentiles.
Not responsible for: recording (load.py), carrying changes out (changes.py).

A row counts where its event was due, so rows that a change delays count in the change. Its rate counts where
it arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tiercel.apps.changes import Change

JITTER_NS = 1_000_000_000

Numbers = npt.NDArray[np.int64]


class Phase(msgspec.Struct, frozen=True):
    """Output rows of one phase of a run. Without rows, latencies are None."""

    name: str  # before | during | after
    change: str
    seconds: float
    rows: int
    rows_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    jitter_max: float | None = None  # of the seconds of the phase


@dataclass(frozen=True)
class Arrivals:
    """One number per output row: when its event was due, when it arrived, the code of its key."""

    due_ns: Numbers
    arrived_ns: Numbers
    key: Numbers

    def between(self, name: str, change: str, begin_ns: int, end_ns: int) -> Phase:
        due = (begin_ns <= self.due_ns) & (self.due_ns < end_ns)
        latency = np.sort((self.arrived_ns - self.due_ns)[due]) / 1e6
        came = int(((begin_ns <= self.arrived_ns) & (self.arrived_ns < end_ns)).sum())
        seconds = max(end_ns - begin_ns, 1) / 1e9
        p50, p99, most = (_nearest_rank(latency, share) for share in (0.5, 0.99, 1.0))
        return Phase(
            name,
            change,
            round(seconds, 3),
            len(latency),
            round(came / seconds, 1),
            p50,
            p99,
            most,
            self.jitter_max(begin_ns, end_ns),
        )

    def jitter_max(self, begin_ns: int, end_ns: int) -> float | None:
        """RIoTBench's jitter, the largest one: by which share of the usual rate a second was off.

        Of an interval: rows that arrived less rows that were due, over the rows that are usually due.
        """
        if not len(self.due_ns):
            return None
        usual = len(self.due_ns) / max((int(self.due_ns.max()) - int(self.due_ns.min())) / JITTER_NS, 1.0)
        edges = np.arange(begin_ns, max(end_ns, begin_ns + JITTER_NS) + 1, JITTER_NS)
        came, due = np.histogram(self.arrived_ns, edges)[0], np.histogram(self.due_ns, edges)[0]
        return round(float(np.abs(came - due).max()) / usual, 3)


def _nearest_rank(ordered: npt.NDArray[np.float64], share: float) -> float | None:
    if not len(ordered):
        return None
    return round(float(ordered[min(len(ordered) - 1, int(share * len(ordered)))]), 3)


def phases(arrivals: Arrivals, changes: Sequence[Change], begin_ns: int, end_ns: int) -> list[Phase]:
    """Before, during and after each change; without a change, the whole run."""
    if not changes:
        return [arrivals.between("whole run", "", begin_ns, end_ns)]
    found = []
    for n, change in enumerate(changes):
        since = changes[n - 1].end_ns if n else begin_ns
        until = changes[n + 1].begin_ns if n + 1 < len(changes) else end_ns
        found += [
            arrivals.between("before", change.kind, since, change.begin_ns),
            arrivals.between("during", change.kind, change.begin_ns, change.end_ns),
            arrivals.between("after", change.kind, change.end_ns, max(until, change.end_ns)),
        ]
    return found
