"""The measured operators, written as for PySpark: each also runs unchanged in Spark's transformWithState.

Responsible for: one output per tuple, which shows the place of the tuple in its key's order.
Not responsible for: feeding and judging them (throughput.py, load.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tiercel.apps.service import Service
from tiercel.core.model.topology import Operator, Stream, Topology, instance_name
from tiercel.spark.operators.folds import Fold
from tiercel.spark.operators.processor_adapter import (
    InputPlan,
    OperatorPlan,
    ProcessorAdapter,
    Row,
    StatefulProcessor,
    StatefulProcessorHandle,
)
from tiercel.spark.rows.row_codec import RowCodec

SITE, EDGE = "cloud", "edge"
INPUT, OUTPUT = "readings", "averages"
INPUT_SCHEMA = "sensor bigint, n bigint, due_ns bigint, value double"
OUTPUT_SCHEMA = "sensor bigint, n bigint, count bigint, average double, due_ns bigint"
READING = "sensor bigint, value double"
COUNTED = "sensor bigint, count bigint"
AVERAGED = "sensor bigint, count bigint, average double"


class KeyCount(StatefulProcessor):
    """Emits for each tuple how many tuples its key has had so far."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "count long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        (count,) = self._count.get() or (0,)
        for _ in rows:
            count += 1
            yield Row(sensor=key[0], count=count)
        self._count.update((count,))

    def close(self) -> None:
        """Holds no resources."""


class RunningAverage(StatefulProcessor):
    """Emits for each tuple the average of its key's values so far."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._average = handle.getValueState("average", "count long, total double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        count, total = self._average.get() or (0, 0.0)
        for row in rows:
            count += 1
            total += row.value
            yield Row(sensor=key[0], count=count, average=total / count)
        self._average.update((count, total))

    def close(self) -> None:
        """Holds no resources."""


def key_count() -> Fold:
    """`KeyCount` as a fold."""

    def step(state: tuple[int], row: Any) -> tuple[tuple[int], tuple[int, int]]:
        count = state[0] + 1
        return (count,), (row.sensor, count)

    return Fold(step, (0,), "count long", COUNTED)


def running_average() -> Fold:
    """`RunningAverage` as a fold."""

    def step(state: tuple[int, float], row: Any) -> tuple[tuple[int, float], tuple[int, int, float]]:
        count, total = state
        count += 1
        total += row.value
        return (count, total), (row.sensor, count, total / count)

    return Fold(step, (0, 0.0), "count long, total double", AVERAGED)


class HeavyAverage(StatefulProcessor):
    """A `NumberedAverage` with `state_bytes` more state for each key; each row takes `service_us`."""

    def __init__(self, state_bytes: int, service_us: float = 0.0) -> None:
        self._load = bytes(n % 251 for n in range(state_bytes))
        self._service = Service(service_us)

    def first_load(self) -> bytes:
        """All keys share one object until they are read from storage."""
        return self._load

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._average = handle.getValueState("average", "count long, total double, load binary")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        count, total, load = self._average.get() or (0, 0.0, self.first_load())
        for row in rows:
            self._service.spend()
            count += 1
            total += row.value
            yield Row(sensor=key[0], n=row.n, count=count, average=total / count, due_ns=row.due_ns)
        self._average.update((count, total, load))

    def close(self) -> None:
        """Holds no resources."""


class HeavyCount(StatefulProcessor):
    """A key count with `state_bytes` more state for each key; each row takes `service_us`.

    The load sends 1, 2, 3, ... for each key, so the count tells the average that the load checks.
    """

    def __init__(self, state_bytes: int, service_us: float = 0.0) -> None:
        self._load = bytes(n % 251 for n in range(state_bytes))
        self._service = Service(service_us)

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "count long, load binary")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        count, load = self._count.get() or (0, self._load)
        for row in rows:
            self._service.spend()
            count += 1
            yield Row(sensor=key[0], n=row.n, count=count, average=(count + 1) / 2, due_ns=row.due_ns)
        self._count.update((count, load))

    def close(self) -> None:
        """Holds no resources."""


class LargeAverage(HeavyAverage):
    """A `HeavyAverage` whose keys do not share their bytes in memory."""

    def first_load(self) -> bytes:
        return bytes(bytearray(self._load))


class NumberedAverage(StatefulProcessor):
    """A running average whose outputs also carry the number and the due time of their tuple."""

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
        """Holds no resources."""


def plan() -> OperatorPlan:
    readings = RowCodec(INPUT_SCHEMA, "sensor")
    return OperatorPlan(NumberedAverage(), (InputPlan(readings),), readings.schema, RowCodec(OUTPUT_SCHEMA))


def adapter() -> ProcessorAdapter:
    return ProcessorAdapter(plan())


def topology(instances: int) -> Topology:
    names = tuple(instance_name("average", SITE, n) for n in range(1, instances + 1))
    operator = Operator("average", (INPUT,), OUTPUT, names)
    return Topology({SITE: None}, {OUTPUT: Stream(OUTPUT, SITE)}, {"average": operator})
