"""What the rivals have in common: the load that they get, and the figures that all systems have.

Responsible for: options of a rival's run, the longest gap in its outputs, lost and doubled tuples.
Not responsible for: running a rival (spark.py, flink.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiercel.bench.metrics import Moments, Outputs, judge
from tiercel.bench.report import Line

ShowProgress = Callable[[str], None]
Numbers = npt.NDArray[np.int64]

RIVALS = ("spark-repartition", "flink-savepoint", "flink-adaptive")
STEADY_S = 10.0
PROBES = 500
AFTER_S = 20.0  # a rival is back much later than we are


@dataclass(frozen=True)
class RivalOptions:
    """The load of a rival: that of the strategies beside it."""

    keys: int
    state_bytes: int
    rate: int
    warm_s: float = 8.0
    steady_s: float = STEADY_S
    after_s: float = AFTER_S
    flink_python: str = ""


def longest_gap_ms(emitted_ns: Numbers, begin_ns: int, end_ns: int) -> float:
    """The longest time without any output between two moments. It needs nothing but outputs."""
    inside = np.sort(emitted_ns[(emitted_ns >= begin_ns) & (emitted_ns <= end_ns)])
    return round(float(np.diff(np.concatenate(([begin_ns], inside, [end_ns]))).max()) / 1e6, 3)


def figures(outputs: Outputs, at: Moments, sent: set[tuple[int, int]], keys: int) -> Line:
    """The figures that strategies have too; all keys of a rival stop, so some of them stand for all."""
    came = set(zip(outputs.sensor.tolist(), outputs.due_ns.tolist(), strict=True))
    some = np.unique(outputs.sensor)[:: max(1, keys // PROBES)].tolist()
    return {
        **judge(outputs, at, some, some),
        "gap_ms": longest_gap_ms(outputs.emitted_ns, at.request_ns, at.over_ns),
        "gap_floor_ms": longest_gap_ms(outputs.emitted_ns, at.steady_ns, at.request_ns),
        "request_ns": at.request_ns,
        "lost": len(sent - came),
        "doubled": len(outputs.sensor) - len(came),
    }


def row_of(strategy: str, columns: tuple[str, ...], found: Line) -> Line:
    """A row with the columns of the strategies; what a rival has no figure for is None."""
    return {name: None for name in columns} | {"strategy": strategy} | found
