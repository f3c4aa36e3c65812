"""The cost of an operator's own code: the same calls, without a deployment around them.

Responsible for: CPU per tuple of a processor or a fold whose rows and state are there already.
Not responsible for: what a deployment adds to it (throughput.py).

No system that runs the operator in Python can be cheaper, Spark included.
"""

from __future__ import annotations

import time
from typing import Any

from tiercel.spark.operators.folds import Fold
from tiercel.spark.operators.processor_adapter import StatefulProcessor
from tiercel.spark.rows.row_types import row_maker

ROWS = 20  # of a key in one call
LEAST_S = 1.0  # of CPU


class InMemoryHandle:
    """A state variable without anything behind it; and the handle that gives it out."""

    value: Any = None

    def get(self) -> Any:
        return self.value

    def update(self, value: Any) -> None:
        self.value = value

    def getValueState(self, name: str, schema: str) -> InMemoryHandle:
        return self


def own_code_us(operator: StatefulProcessor | Fold) -> float:
    """CPU for each tuple."""
    make = row_maker(["sensor", "value"])
    rows = [make((1, float(n))) for n in range(ROWS)]
    call = _fold(operator, rows) if isinstance(operator, Fold) else _processor(operator, rows)
    tuples, began_s = 0, time.process_time()
    while (spent_s := time.process_time() - began_s) < LEAST_S:
        for _ in range(1_000):
            call()
        tuples += 1_000 * ROWS
    return spent_s / tuples * 1e6


def _processor(processor: StatefulProcessor, rows: list[Any]) -> Any:
    processor.init(InMemoryHandle())  # type: ignore[arg-type]
    return lambda: list(processor.handleInputRows((1,), iter(rows), None))  # type: ignore[arg-type]


def _fold(fold: Fold, rows: list[Any]) -> Any:
    step, initial = fold.step, fold.initial

    def call() -> None:
        state, outputs = initial, []
        for row in rows:
            state, output = step(state, row)
            outputs.append(output)

    return call
