"""Between the core's rows and PySpark's: an unmodified `StatefulProcessor` behind the core's `Code`.

Responsible for: keys, rows, outputs and times in the form PySpark gives them to user code.
Not responsible for: state and timers (core/keyed.py has PySpark's interface), when calls happen.

A payload is the MessagePack of a row's columns in the order of the schema, made once where the row
arises and read once where it is processed: whoever is in between passes bytes on. A key is the
MessagePack of its columns. Rows are real `Row`s of a class with one descriptor per column: same
behaviour, a tenth of the cost of looking a name up each time.
"""

from __future__ import annotations

from collections import namedtuple
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


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Any, ...]).decode


def encode_key(*columns: Any) -> Key:
    return _encode(columns)


def row_maker(fields: Sequence[str]) -> Callable[[Sequence[Any]], Row]:
    """Makes `Row`s with these columns out of their values.

    The descriptors of a named tuple read the tuple itself; anything else would go through `Row.__getitem__`,
    which is written in Python.
    """
    numbered = namedtuple("numbered", [f"column_{n}" for n in range(len(fields))])  # type: ignore[misc]
    columns = {name: vars(numbered)[f"column_{n}"] for n, name in enumerate(fields) if name not in dir(tuple)}
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

    def user_key(self, key: Key) -> tuple[Any, ...]:
        return _decode(key)

    def user_rows(self, rows: list[CoreRow]) -> Iterator[Row]:
        if len(rows) == 1:  # most calls; three iterators cost more than what they do
            return iter((self._make(_decode(rows[0][2])),))
        return map(self._make, map(_decode, map(_payload, rows)))

    def output_row(self, key: Key, output: Any) -> CoreRow:
        """Columns by name, as Spark takes them: a missing one is null, one too many is left out."""
        fields = output.__fields__
        if fields == self._output_fields:
            return (key, 0, _encode(output))
        values = dict(zip(fields, output, strict=False))
        return (key, 0, _encode([values.get(name) for name in self._output_fields]))

    def timer_values(self, time_ms: int, watermark_ms: int) -> TimerValues:
        return TimerValues(time_ms, watermark_ms)

    def expired_timer(self, expiry_ms: int) -> ExpiredTimerInfo:
        return ExpiredTimerInfo(expiry_ms)


__all__ = ["Border", "Row", "StatefulProcessor", "StatefulProcessorHandle", "encode_key", "row_maker"]
