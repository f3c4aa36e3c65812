"""Definitions of the figures: the effect of a reconfiguration on latency and rate, from recorded outputs.

Responsible for: excess, stoppage, gap, peak, jitter, disruption, stabilisation, throughput dip; queries
    that count lost, doubled and reordered tuples in a recording.
Not responsible for: writing the recording (process.py).

Latency is emission minus due time. Steady is the time before the request. All windows except those of the
rate are by due time: a delayed tuple counts where it should have come out.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from tiercel.bench.report import Line, percentile

Numbers = npt.NDArray[np.int64]

DISRUPTION_WINDOW_NS = 50_000_000
WINDOW_NS = 250_000_000
STABLE_WINDOWS = 20  # 5 s
DISRUPTED = 2.0  # times the steady p99
STABLE_LATENCY = 1.1  # times the steady p99, at most
STABLE_RATE = 0.95  # of the steady rate, at least
SETTLED_NS = 1_000_000_000  # after the end of a move, until its after-effects are over


@dataclass(frozen=True)
class Outputs:
    """One number per output and column."""

    sensor: Numbers
    due_ns: Numbers
    emitted_ns: Numbers

    @property
    def latency_ms(self) -> npt.NDArray[np.float64]:
        return (self.emitted_ns - self.due_ns) / 1e6


@dataclass(frozen=True)
class Moments:
    """The moments of one reconfiguration, by one monotonic clock."""

    steady_ns: int  # from here to the request
    request_ns: int
    end_ns: int  # of the move
    over_ns: int  # of the load


@dataclass(frozen=True)
class Reference:
    """A time without a move: its figures, and the worst that happened in it by itself."""

    median_ms: float
    p99_ms: float
    rate: float  # outputs per second
    window_ms: float  # the highest p99 of its 250 ms windows
    short_ms: float  # the highest p99 of its 50 ms windows
    slowest: float  # the lowest rate of its 250 ms windows
    shift_ms: float = 0.0  # how much longer the way is after the move, between sites

    @property
    def stable_ms(self) -> float:
        """The p99 of a window up to which it counts as stable."""
        return max(STABLE_LATENCY * self.p99_ms, self.window_ms) + self.shift_ms

    @property
    def disrupted_ms(self) -> float:
        """The p99 of a short window above which it counts as disrupted."""
        return max(DISRUPTED * self.p99_ms, self.short_ms) + self.shift_ms

    @property
    def stable_rate(self) -> float:
        return min(STABLE_RATE * self.rate, self.slowest)


def reference(outputs: Outputs, begin_ns: int, end_ns: int, shift_ms: float = 0.0) -> Reference:
    """The figures of a time without a move."""
    due, emitted = outputs.due_ns, outputs.emitted_ns
    latency = np.sort(outputs.latency_ms[(begin_ns <= due) & (due < end_ns)])
    rate = float(((begin_ns <= emitted) & (emitted < end_ns)).sum()) / ((end_ns - begin_ns) / 1e9)
    windows = window_p99(outputs, begin_ns, end_ns, WINDOW_NS)
    short = window_p99(outputs, begin_ns, end_ns, DISRUPTION_WINDOW_NS)
    rates = window_rates(outputs, begin_ns, end_ns, WINDOW_NS)
    return Reference(
        percentile(latency, 0.5),
        percentile(latency, 0.99),
        rate,
        max((p99 for p99 in windows if p99 is not None), default=0.0),
        max((p99 for p99 in short if p99 is not None), default=0.0),
        float(rates.min()) if len(rates) else 0.0,
        shift_ms,
    )


def judge(
    outputs: Outputs,
    at: Moments,
    probes: Collection[int],
    moved: Collection[int],
    *,
    between_sites: bool = False,
    stays: Collection[int] = (),
) -> Line:
    """Every figure of one reconfiguration.

    `between_sites`: the way of a tuple may be longer after the move; the larger of the medians before and
    after is then the reference. `stays` are keys of the source that do not move: they have the same backlog.
    """
    shift_ms = median_shift_ms(outputs, at, moved) if between_sites else 0.0
    steady = reference(outputs, at.steady_ns, at.request_ns, shift_ms)
    median = steady.median_ms + shift_ms
    due, latency = outputs.due_ns, outputs.latency_ms
    stable_ns = stabilised_ns(outputs, at.request_ns, at.over_ns, steady)
    until_ns = at.over_ns if stable_ns is None else max(stable_ns, at.end_ns)
    after = latency[(at.request_ns <= due) & (due <= until_ns)]
    peak = float(after.max()) if len(after) else float("nan")
    others = set(map(int, np.unique(outputs.sensor))) - set(moved)
    disrupted_until_ns = at.over_ns if stable_ns is None else stable_ns
    return {
        **{f"stoppage_{k}": v for k, v in spread(stoppages(outputs, at, probes, median)).items()},
        **{f"moved_{k}": v for k, v in spread(stoppages(outputs, at, moved, median)).items()},
        "others_p99_ms": spread(stoppages(outputs, at, others, median))["p99_ms"],
        "floor_p99_ms": floor_ms(outputs, at, probes, steady.median_ms),
        "gap_ms": gap_ms(outputs, at.request_ns, until_ns, moved),
        "gap_floor_ms": gap_ms(outputs, at.steady_ns, at.request_ns, moved),
        "beyond_backlog_ms": beyond_backlog_ms(outputs, at, moved, stays),
        "peak_ms": round(peak, 3),
        "jitter_ms": round(peak - steady.p99_ms, 3),
        "disruption_ms": disruption_ms(outputs, at.request_ns, disrupted_until_ns, steady),
        "throughput_dip": round(dip(outputs, at, until_ns, steady.rate), 4),
        "steady_p50_ms": round(steady.median_ms, 3),
        "steady_p99_ms": round(steady.p99_ms, 3),
        "stabilise_ms": None if stable_ns is None else round((stable_ns - at.request_ns) / 1e6, 1),
        **steady_floors(outputs, at),
        "duration_ms": round((at.end_ns - at.request_ns) / 1e6, 3),
    }


def median_shift_ms(outputs: Outputs, at: Moments, moved: Collection[int]) -> float:
    """How much higher the median of the moved keys is after the move than before it; 0 if it is not."""
    mine = np.isin(outputs.sensor, list(moved))
    due, latency = outputs.due_ns[mine], outputs.latency_ms[mine]
    before = np.sort(latency[(at.steady_ns <= due) & (due < at.request_ns)])
    after = np.sort(latency[(due > at.end_ns + SETTLED_NS) & (due < at.over_ns)])
    return max(0.0, percentile(after, 0.5) - percentile(before, 0.5)) if len(after) and len(before) else 0.0


def steady_floors(outputs: Outputs, at: Moments) -> Line:
    """`stabilise` and `disruption` where nothing moved: the second half of the steady time by its first."""
    half_ns = (at.steady_ns + at.request_ns) // 2
    first = reference(outputs, at.steady_ns, half_ns)
    stable_ns = stabilised_ns(outputs, half_ns, at.request_ns, first, (at.request_ns - half_ns) // WINDOW_NS)
    until_ns = at.request_ns if stable_ns is None else stable_ns
    stabilise = None if stable_ns is None else round((stable_ns - half_ns) / 1e6, 1)
    return {
        "stabilise_floor_ms": stabilise,
        "disruption_floor_ms": disruption_ms(outputs, half_ns, until_ns, first),
    }


def gap_ms(outputs: Outputs, begin_ns: int, end_ns: int, members: Collection[int]) -> float | None:
    """The longest time without any output of these keys, by emission. It needs nothing but outputs."""
    emitted = outputs.emitted_ns[np.isin(outputs.sensor, list(members))]
    inside = np.sort(emitted[(begin_ns <= emitted) & (emitted <= end_ns)])
    if not len(emitted):
        return None
    return round(float(np.diff(np.concatenate(([begin_ns], inside, [end_ns]))).max()) / 1e6, 3)


def beyond_backlog_ms(
    outputs: Outputs, at: Moments, moved: Collection[int], stays: Collection[int]
) -> float | None:
    """The most that a moved tuple was later than tuples due at the same time that stay at the source.

    Both wait behind the same backlog, so the difference is what the move itself costs. None without tuples.
    """
    width_ns = 2 * DISRUPTION_WINDOW_NS
    due, latency = outputs.due_ns, outputs.latency_ms
    # tuples that were due earlier may still be in the backlog when the move begins
    counted = (due >= at.steady_ns) & (due <= at.end_ns) & (outputs.emitted_ns >= at.request_ns)
    place = (due - at.steady_ns) // width_ns
    mine = counted & np.isin(outputs.sensor, list(moved))
    theirs = counted & np.isin(outputs.sensor, list(stays))
    worst: float | None = None
    for window in np.intersect1d(place[mine], place[theirs]):
        stay_ms = float(np.median(latency[theirs & (place == window)]))
        late_ms = float(latency[mine & (place == window)].max()) - stay_ms
        worst = late_ms if worst is None else max(worst, late_ms)
    return None if worst is None else round(worst, 3)


def spread(values: list[float]) -> dict[str, float | None]:
    """Percentiles of the values; None without values."""
    ordered = sorted(values)
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    return {k: round(percentile(ordered, s), 3) if ordered else None for k, s in shares.items()}


def stoppages(outputs: Outputs, at: Moments, members: Collection[int], median_ms: float) -> list[float]:
    """For each key the largest excess of its tuples due between request and end of the move."""
    due, sensor = outputs.due_ns, outputs.sensor
    counted = (at.request_ns <= due) & (due <= at.end_ns) & np.isin(sensor, list(members))
    worst = np.full(int(sensor.max()) + 1 if len(sensor) else 0, -np.inf)
    np.maximum.at(worst, sensor[counted], outputs.latency_ms[counted] - median_ms)
    return [float(w) for w in worst if w > -np.inf]


def floor_ms(outputs: Outputs, at: Moments, probes: Collection[int], median_ms: float) -> float | None:
    """The same measure over a time of the same length without a move: the share of the machine.

    The median over all such times before the request that do not overlap; None if none fits.
    """
    length = at.end_ns - at.request_ns
    found = []
    for begin_ns in range(at.steady_ns, at.request_ns - length, max(1, length)):
        still = replace(at, request_ns=begin_ns, end_ns=begin_ns + length)
        found.append(spread(stoppages(outputs, still, probes, median_ms))["p99_ms"])
    known = [p99 for p99 in found if p99 is not None]
    return round(float(np.median(known)), 3) if known else None


def window_p99(outputs: Outputs, begin_ns: int, end_ns: int, width_ns: int) -> list[float | None]:
    """The p99 of each whole window; None where nothing was due."""
    count = max(0, (end_ns - begin_ns) // width_ns)
    place = (outputs.due_ns - begin_ns) // width_ns
    inside = (place >= 0) & (place < count)
    place, latency = place[inside], outputs.latency_ms[inside]
    order = np.lexsort((latency, place))
    bounds = np.searchsorted(place[order], np.arange(count + 1))
    ordered = latency[order]
    return [percentile(ordered[a:b], 0.99) if b > a else None for a, b in itertools.pairwise(bounds)]


def window_rates(outputs: Outputs, begin_ns: int, end_ns: int, width_ns: int) -> Any:
    """Outputs per second in each whole window, by emission."""
    count = max(0, (end_ns - begin_ns) // width_ns)
    place = (outputs.emitted_ns - begin_ns) // width_ns
    inside = place[(place >= 0) & (place < count)]
    return np.bincount(inside, minlength=count) / (width_ns / 1e9)


def disruption_ms(outputs: Outputs, begin_ns: int, end_ns: int, steady: Reference) -> float:
    """Total time in which the p99 is above twice the steady one, and above the worst of the steady time."""
    windows = window_p99(outputs, begin_ns, end_ns, DISRUPTION_WINDOW_NS)
    bad = sum(p99 is not None and p99 > steady.disrupted_ms for p99 in windows)
    return bad * DISRUPTION_WINDOW_NS / 1e6


def stabilised_ns(
    outputs: Outputs, begin_ns: int, end_ns: int, steady: Reference, windows: int = STABLE_WINDOWS
) -> int | None:
    """The start of the first good time of so many windows, 5 s by default; None if there is none.

    A window is good if its p99 is at most 1.1 of the steady p99, or of the worst of the steady time; the same
    for its rate.
    """
    latencies = window_p99(outputs, begin_ns, end_ns, WINDOW_NS)
    rates = window_rates(outputs, begin_ns, end_ns, WINDOW_NS)
    good_in_a_row = 0
    for n, (p99, now) in enumerate(zip(latencies, rates, strict=True)):
        good = p99 is not None and p99 <= steady.stable_ms and now >= steady.stable_rate
        good_in_a_row = good_in_a_row + 1 if good else 0
        if good_in_a_row == min(windows, STABLE_WINDOWS):
            return begin_ns + (n + 1 - good_in_a_row) * WINDOW_NS
    return None


def dip(outputs: Outputs, at: Moments, until_ns: int, rate: float) -> float:
    """The largest drop of the rate below the steady rate, in any window until it was stable."""
    windows = -(-(until_ns - at.request_ns) // WINDOW_NS)
    end_ns = min(at.over_ns, at.request_ns + max(1, windows) * WINDOW_NS)
    rates = window_rates(outputs, at.request_ns, end_ns, WINDOW_NS)
    return max(0.0, 1.0 - float(rates.min()) / rate) if len(rates) and rate else 0.0


LOST = """
    SELECT count(*) AS lost FROM inputs i
    LEFT ANTI JOIN outputs o ON i.sensor = o.sensor AND i.n = o.n
"""


DOUBLED = "SELECT count(*) - count(DISTINCT sensor, n) AS doubled FROM outputs"


REORDERED = """
    SELECT count(*) AS reordered FROM (
        SELECT n, max(n) OVER (
            PARTITION BY sensor ORDER BY at ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS highest FROM outputs
    ) WHERE n < highest
"""


def count_faults(spark: Any, inputs: Path, outputs: Path) -> dict[str, int]:
    """Count faults by SQL queries, which share no code with what they check."""
    spark.read.parquet(str(inputs)).createOrReplaceTempView("inputs")
    spark.read.parquet(str(outputs)).createOrReplaceTempView("outputs")
    found: dict[str, int] = {}
    for query in (LOST, DOUBLED, REORDERED):
        found |= spark.sql(query).collect()[0].asDict()
    return found


def read_outputs(path: Path) -> Outputs:
    table = pq.read_table(path)
    return Outputs(*(table[name].to_numpy() for name in ("sensor", "due_ns", "emitted_ns")))
