"""The running average per sensor: the operator of the first benchmarks, as people write it for PySpark.

Responsible for: one output per tuple that shows what the tuple found: its place in the key's order.
Not responsible for: feeding and judging it (load.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tiercel.core.topology import Operator, Stream, Topology, instance_name
from tiercel.spark.border import (
    Border,
    InputPlan,
    OperatorPlan,
    Row,
    StatefulProcessor,
    StatefulProcessorHandle,
)
from tiercel.spark.schema import Columns

SITE = "cloud"
INPUT, OUTPUT = "readings", "averages"
INPUT_SCHEMA = "sensor bigint, n bigint, due_ns bigint, value double"
OUTPUT_SCHEMA = "sensor bigint, n bigint, count bigint, average double, due_ns bigint"


class RunningAverage(StatefulProcessor):
    """Runs unchanged under Spark's own transformWithState."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._average = handle.getValueState("average", "count long, total double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        count, total = self._average.get() or (0, 0.0)
        for row in rows:
            count += 1
            total += row.value
            yield Row(sensor=key[0], n=row.n, count=count, average=total / count, due_ns=row.due_ns)
        self._average.update((count, total))

    def close(self) -> None:
        """Nothing to let go."""


def plan() -> OperatorPlan:
    readings = Columns(INPUT_SCHEMA, "sensor")
    return OperatorPlan(RunningAverage(), (InputPlan(readings),), readings.schema, Columns(OUTPUT_SCHEMA))


def border() -> Border:
    return Border(plan())


def topology(instances: int) -> Topology:
    names = tuple(instance_name("average", SITE, n) for n in range(1, instances + 1))
    operator = Operator("average", (INPUT,), OUTPUT, names)
    return Topology({SITE: None}, {OUTPUT: Stream(OUTPUT, SITE)}, {"average": operator})
