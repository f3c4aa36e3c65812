"""Columns of an operator's input: their types and places, times in microseconds, values in state.

Responsible for: what an operator must know of a schema to read rows and to keep some of their values.
Not responsible for: what an operator does with them.

State holds timestamps as microseconds since 1970: PySpark shows those in state without a zone, in that of the
process, and an output wants them with one.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import Row
from pyspark.sql import types as t

from tiercel.errors import UserError

Convert = Callable[[Any], Any]

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_EPOCH_NAIVE = datetime.datetime(1970, 1, 1)  # noqa: DTZ001  timestamp_ntz has no zone
_SECONDS_PER_DAY = 86_400
_US = 1_000_000

ORDERED = (
    t.NumericType,
    t.StringType,
    t.BinaryType,
    t.BooleanType,
    t.DateType,
    t.TimestampType,
    t.TimestampNTZType,
)


class LateRow(Exception):
    """A row whose windows are closed: the watermark has passed them, and any lateness that was allowed."""


# -- columns -----------------------------------------------------------------------------------


def place_of(schema: t.StructType, column: str, what: str) -> int:
    """Where a column is in a row."""
    if column not in schema.names:
        raise UserError(f"{what}: unknown column {column!r}", expected=f"one of: {', '.join(schema.names)}")
    return schema.names.index(column)


def type_of(schema: t.StructType, column: str, what: str) -> t.DataType:
    return schema.fields[place_of(schema, column, what)].dataType


def key_fields(schema: t.StructType, key: Sequence[str], what: str) -> list[t.StructField]:
    """The columns that rows are grouped by."""
    if not key:
        raise UserError(f"{what}: the stream has no key", expected="a stream that is keyed by some column")
    return [schema.fields[place_of(schema, name, what)] for name in key]


def event_time_of(schema: t.StructType, event_time: str, what: str) -> int:
    """Where the event time is in a row."""
    if not event_time:
        raise UserError(
            f"{what} works in event time, and the stream declares none",
            expected="a stream with an event time",
            hint="declare it: live.stream(..., event_time='column', delay='10 seconds')",
        )
    place = place_of(schema, event_time, what)
    kind = schema.fields[place].dataType
    if not isinstance(kind, t.TimestampType | t.TimestampNTZType):
        what = f"{what}: event time {event_time!r} is {kind.simpleString()}"
        raise UserError(what, expected="timestamp or timestamp_ntz")
    return place


def distinct_names(names: Sequence[str], what: str, hint: str) -> None:
    """Refuse an output in which one name means two columns."""
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise UserError(f"{what}: two columns named {name!r}", expected="different names", hint=hint)
        seen.add(name.lower())


def row_of(names: Sequence[str]) -> Callable[[Sequence[Any]], Row]:
    """Makes Rows with these columns."""
    fields = list(names)

    def make(values: Sequence[Any]) -> Row:
        row = Row(*values)
        row.__fields__ = fields
        return row

    return make


# -- times -------------------------------------------------------------------------------------


def to_micros(kind: t.DataType) -> Callable[[datetime.datetime], int]:
    """From a value of an event time column to microseconds since 1970."""
    epoch = _EPOCH_NAIVE if isinstance(kind, t.TimestampNTZType) else _EPOCH

    def micros(time: datetime.datetime) -> int:
        if time is None:
            raise ValueError("the event time is null")
        if epoch is _EPOCH and time.tzinfo is None:
            time = time.astimezone(datetime.UTC)
        since = time - epoch
        return (since.days * _SECONDS_PER_DAY + since.seconds) * _US + since.microseconds

    return micros


def from_micros(kind: t.DataType) -> Callable[[int], datetime.datetime]:
    epoch = _EPOCH_NAIVE if isinstance(kind, t.TimestampNTZType) else _EPOCH
    return lambda us: epoch + datetime.timedelta(microseconds=us)


def timer_ms(us: int) -> int:
    """The first watermark, in milliseconds, that has reached this time."""
    return -(-us // 1_000)


# -- values that are kept in state -------------------------------------------------------------


def stored_type(kind: t.DataType) -> t.DataType:
    """The type that a column has in state."""
    match kind:
        case t.TimestampType():
            return t.LongType()
        case t.StructType():
            return t.StructType([t.StructField(f.name, stored_type(f.dataType), True) for f in kind.fields])
        case t.ArrayType():
            return t.ArrayType(stored_type(kind.elementType), True)
        case t.MapType():
            return t.MapType(stored_type(kind.keyType), stored_type(kind.valueType), True)
        case _:
            return kind


def to_stored(kind: t.DataType) -> Convert:
    """From what a row has to what is kept in state. Rows hold structs as dicts, and maps as pairs."""
    convert = _storing(kind)
    return lambda value: None if value is None else convert(value)


def _storing(kind: t.DataType) -> Convert:
    match kind:
        case t.TimestampType():
            return to_micros(kind)
        case t.StructType():
            fields = [(f.name, to_stored(f.dataType)) for f in kind.fields]

            def struct(value: Any) -> tuple[Any, ...]:
                if isinstance(value, Mapping):
                    return tuple([convert(value.get(name)) for name, convert in fields])
                return tuple([convert(v) for (_, convert), v in zip(fields, value, strict=True)])

            return struct
        case t.ArrayType():
            element = to_stored(kind.elementType)
            return lambda value: [element(v) for v in value]
        case t.MapType():
            key, content = to_stored(kind.keyType), to_stored(kind.valueType)
            return lambda value: {
                key(k): content(v) for k, v in (value.items() if isinstance(value, Mapping) else value)
            }
        case _:
            return _same


def from_stored(kind: t.DataType) -> Convert:
    """From what is kept in state to what an output has."""
    convert = _showing(kind)
    return lambda value: None if value is None else convert(value)


def _showing(kind: t.DataType) -> Convert:
    match kind:
        case t.TimestampType():
            return from_micros(kind)
        case t.StructType():
            make, fields = row_of(kind.names), [from_stored(f.dataType) for f in kind.fields]
            return lambda value: make([show(v) for show, v in zip(fields, value, strict=True)])
        case t.ArrayType():
            element = from_stored(kind.elementType)
            return lambda value: [element(v) for v in value]
        case t.MapType():
            key, content = from_stored(kind.keyType), from_stored(kind.valueType)
            return lambda value: {key(k): content(v) for k, v in value.items()}
        case _:
            return _same


def _same(value: Any) -> Any:
    return value


def rank(value: Any) -> tuple[bool, Any]:
    """How Spark orders values: NaN is larger than any number."""
    return (value != value, value)
