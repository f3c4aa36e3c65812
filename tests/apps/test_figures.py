"""Figures of a run: rows count where their event was due, and rates where rows arrived."""

from __future__ import annotations

import numpy as np

from tiercel.apps.changes import Change
from tiercel.apps.figures import Arrivals, phases

S = 1_000_000_000
MS = 1_000_000


def arrivals(*pairs: tuple[float, float]) -> Arrivals:
    """(due in seconds, latency in ms) of each row."""
    due = np.array([int(at * S) for at, _ in pairs])
    late = np.array([int(ms * MS) for _, ms in pairs])
    return Arrivals(due, due + late, np.zeros(len(pairs), dtype=np.int64))


def test_a_row_that_a_change_delays_counts_in_the_change() -> None:
    rows = arrivals((1, 1), (2, 2), (5.5, 2_000), (8, 3))
    before, during, after = phases(rows, [Change("kill", 5 * S, 6 * S, "")], 0, 10 * S)
    assert [(p.name, p.rows, p.max_ms) for p in (before, during, after)] == [
        ("before", 2, 2.0),
        ("during", 1, 2_000.0),
        ("after", 1, 3.0),
    ]
    assert during.rows_per_s == 0.0  # it came after the change
    assert after.rows_per_s == 0.5


def test_a_phase_without_rows_has_no_latency() -> None:
    (whole,) = phases(arrivals(), [], 0, S)
    assert (whole.rows, whole.p50_ms, whole.p99_ms, whole.max_ms) == (0, None, None, None)


def test_the_phase_before_a_change_begins_where_the_last_one_ended() -> None:
    rows = arrivals(*((n / 10, 1) for n in range(100)))
    changes = [Change("move", 2 * S, 3 * S, ""), Change("scale", 6 * S, 7 * S, "")]
    found = phases(rows, changes, S, 10 * S)
    assert [(p.change, p.name, p.seconds, p.rows) for p in found] == [
        ("move", "before", 1.0, 10),
        ("move", "during", 1.0, 10),
        ("move", "after", 3.0, 30),
        ("scale", "before", 3.0, 30),
        ("scale", "during", 1.0, 10),
        ("scale", "after", 3.0, 30),
    ]
