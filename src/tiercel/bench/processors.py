"""The operators that are measured, as people write them for PySpark: each runs unchanged in Spark itself.

Responsible for: one output per tuple that shows what the tuple found: its place in the key's order.
Not responsible for: feeding and judging them (throughput.py, load.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tiercel.spark.border import Row, StatefulProcessor, StatefulProcessorHandle
from tiercel.spark.folds import Fold

READING = "sensor bigint, value double"
COUNTED = "sensor bigint, count bigint"
AVERAGED = "sensor bigint, count bigint, average double"


class KeyCount(StatefulProcessor):
    """How many tuples its key has had so far, for each of them."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "count long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        (count,) = self._count.get() or (0,)
        for _ in rows:
            count += 1
            yield Row(sensor=key[0], count=count)
        self._count.update((count,))

    def close(self) -> None:
        """Nothing to let go."""


class RunningAverage(StatefulProcessor):
    """The average of its key's values so far, for each of them."""

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
        """Nothing to let go."""


def key_count() -> Fold:
    """What `KeyCount` does, as a fold."""

    def step(state: tuple[int], row: Any) -> tuple[tuple[int], tuple[int, int]]:
        count = state[0] + 1
        return (count,), (row.sensor, count)

    return Fold(step, (0,), "count long", COUNTED)


def running_average() -> Fold:
    """What `RunningAverage` does, as a fold."""

    def step(state: tuple[int, float], row: Any) -> tuple[tuple[int, float], tuple[int, int, float]]:
        count, total = state
        count += 1
        total += row.value
        return (count, total), (row.sensor, count, total / count)

    return Fold(step, (0, 0.0), "count long, total double", AVERAGED)


class HeavyAverage(StatefulProcessor):
    """A running average whose state is as large as asked for; outputs carry number and due time on."""

    def __init__(self, state_bytes: int) -> None:
        self._load = bytes(n % 251 for n in range(state_bytes))

    def first_load(self) -> bytes:
        """All keys share one object until they are read from storage."""
        return self._load

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._average = handle.getValueState("average", "count long, total double, load binary")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        count, total, load = self._average.get() or (0, 0.0, self.first_load())
        for row in rows:
            count += 1
            total += row.value
            yield Row(sensor=key[0], n=row.n, count=count, average=total / count, due_ns=row.due_ns)
        self._average.update((count, total, load))

    def close(self) -> None:
        """Nothing to let go."""


class LargeAverage(HeavyAverage):
    """The same, and each key really has so much in memory."""

    def first_load(self) -> bytes:
        return bytes(bytearray(self._load))
