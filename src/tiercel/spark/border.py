"""Between the core's rows and PySpark's: an unmodified `StatefulProcessor` behind the core's `Code`.

Responsible for: keys, rows, outputs and times in the form PySpark gives them to user code.
Not responsible for: state and timers (core/keyed.py has PySpark's interface), when calls happen.

A payload is a list of a row's columns in the order of the schema. A key is the MessagePack of its
columns. Rows are real `Row`s of a class with one property per column: same behaviour, a fraction of
the cost of looking a name up each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import msgspec
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

from tiercel.core.records import Key
from tiercel.core.records import Row as CoreRow

_payload = itemgetter(2)


def encode_key(*columns: Any) -> Key:
    return msgspec.msgpack.encode(columns)


def row_maker(fields: Sequence[str]) -> Callable[[Sequence[Any]], Row]:
    """Makes `Row`s with these columns out of their values."""
    columns = {name: property(itemgetter(n)) for n, name in enumerate(fields) if name not in dir(tuple)}
    kind = type("Row", (Row,), {"__fields__": list(fields), **columns})
    return partial(tuple.__new__, kind)


class Border:
    """One processor with the columns of its input and output."""

    def __init__(
        self, processor: StatefulProcessor, input_fields: Sequence[str], output_fields: Sequence[str]
    ) -> None:
        self.processor = processor
        self._make = row_maker(input_fields)
        self._output_fields = list(output_fields)
        self._times: tuple[int, int] = (-1, -1)
        self._timer_values = TimerValues(-1, -1)

    def user_key(self, key: Key) -> tuple[Any, ...]:
        return msgspec.msgpack.decode(key, type=tuple[Any, ...])

    def user_rows(self, rows: list[CoreRow]) -> Iterator[Row]:
        return map(self._make, map(_payload, rows))

    def output_row(self, key: Key, output: Any) -> CoreRow:
        """Columns by name, as Spark takes them: a missing one is null, one too many is left out."""
        fields = output.__fields__
        if fields == self._output_fields:
            return (key, 0, tuple(output))
        values = dict(zip(fields, output, strict=False))
        return (key, 0, tuple([values.get(name) for name in self._output_fields]))

    def timer_values(self, time_ms: int, watermark_ms: int) -> TimerValues:
        if self._times != (time_ms, watermark_ms):
            self._times = (time_ms, watermark_ms)
            self._timer_values = TimerValues(time_ms, watermark_ms)
        return self._timer_values

    def expired_timer(self, expiry_ms: int) -> ExpiredTimerInfo:
        return ExpiredTimerInfo(expiry_ms)


__all__ = ["Border", "Row", "StatefulProcessor", "StatefulProcessorHandle", "encode_key", "row_maker"]
