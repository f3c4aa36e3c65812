"""What the rivals have in common: the load that they get, and the figures that all systems have.

Responsible for: options of a rival's run, the longest gap in its outputs, lost and doubled tuples.
Not responsible for: running a rival (spark.py, flink.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tiercel.bench.report import Line

ShowProgress = Callable[[str], None]
Numbers = npt.NDArray[np.int64]

RIVALS = ("spark-repartition", "flink-savepoint", "flink-adaptive")
STEADY_S = 10.0
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


def longest_gap_ms(emitted_ms: npt.NDArray[Any], begin_ms: float, end_ms: float) -> float:
    """The longest time without any output between two moments. It needs nothing but outputs."""
    inside = np.sort(emitted_ms[(emitted_ms >= begin_ms) & (emitted_ms <= end_ms)])
    return round(float(np.diff(np.concatenate(([begin_ms], inside, [end_ms]))).max()), 3)


def row_of(strategy: str, columns: tuple[str, ...], found: Line) -> Line:
    """A row with the columns of the strategies; what a rival has no figure for is None."""
    return {name: None for name in columns} | {"strategy": strategy} | found
