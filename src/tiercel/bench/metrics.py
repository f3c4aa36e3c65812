"""Definitions of the figures: the effect of a reconfiguration on latency and rate, from recorded outputs.

Responsible for: excess, stoppage, peak, jitter, disruption, stabilisation, throughput dip; queries
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


def judge(outputs: Outputs, at: Moments, probes: Collection[int], moved: Collection[int]) -> Line:
    """Every figure of one reconfiguration."""
    due, latency = outputs.due_ns, outputs.latency_ms
    steady = np.sort(latency[(at.steady_ns <= due) & (due < at.request_ns)])
    median, p99 = percentile(steady, 0.5), percentile(steady, 0.99)
    rate = float(((at.steady_ns <= outputs.emitted_ns) & (outputs.emitted_ns < at.request_ns)).sum())
    rate /= (at.request_ns - at.steady_ns) / 1e9
    stable_ns = stabilised_ns(outputs, at, p99, rate)
    until_ns = at.over_ns if stable_ns is None else max(stable_ns, at.end_ns)
    after = latency[(at.request_ns <= due) & (due <= until_ns)]
    peak = float(after.max()) if len(after) else float("nan")
    others = set(map(int, np.unique(outputs.sensor))) - set(moved)
    return {
        **{f"stoppage_{k}": v for k, v in spread(stoppages(outputs, at, probes, median)).items()},
        **{f"moved_{k}": v for k, v in spread(stoppages(outputs, at, moved, median)).items()},
        "others_p99_ms": spread(stoppages(outputs, at, others, median))["p99_ms"],
        "floor_p99_ms": floor_ms(outputs, at, probes, median),
        "peak_ms": round(peak, 3),
        "jitter_ms": round(peak - p99, 3),
        "disruption_ms": disruption_ms(outputs, at, p99),
        "throughput_dip": round(dip(outputs, at, until_ns, rate), 4),
        "steady_p50_ms": round(median, 3),
        "steady_p99_ms": round(p99, 3),
        "stabilise_ms": None if stable_ns is None else round((stable_ns - at.request_ns) / 1e6, 1),
        "duration_ms": round((at.end_ns - at.request_ns) / 1e6, 3),
    }


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


def disruption_ms(outputs: Outputs, at: Moments, steady_p99_ms: float) -> float:
    """Total time in which the p99 is above twice the steady one, from the request on."""
    windows = window_p99(outputs, at.request_ns, at.over_ns, DISRUPTION_WINDOW_NS)
    bad = sum(p99 is not None and p99 > DISRUPTED * steady_p99_ms for p99 in windows)
    return bad * DISRUPTION_WINDOW_NS / 1e6


def stabilised_ns(outputs: Outputs, at: Moments, steady_p99_ms: float, rate: float) -> int | None:
    """The start of the first five good seconds; None if there are none before the load ends."""
    latencies = window_p99(outputs, at.request_ns, at.over_ns, WINDOW_NS)
    rates = window_rates(outputs, at.request_ns, at.over_ns, WINDOW_NS)
    good_in_a_row = 0
    for n, (p99, now) in enumerate(zip(latencies, rates, strict=True)):
        good = p99 is not None and p99 <= STABLE_LATENCY * steady_p99_ms and now > STABLE_RATE * rate
        good_in_a_row = good_in_a_row + 1 if good else 0
        if good_in_a_row == STABLE_WINDOWS:
            return at.request_ns + (n + 1 - STABLE_WINDOWS) * WINDOW_NS
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
