"""Rows that come as Arrow columns, as Spark gives them to a task: to internal form column by column.

Responsible for: one conversion for each column of a batch, instead of one for each value.
Not responsible for: columns that may hold values that do not fit, which row_codec.py checks row by row.

Spark has checked the type of every value. What is left to check is a null in a column that has none, and that
no event time is before 1970.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as t

from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.rows.row_types import BadRow

if TYPE_CHECKING:
    import pyarrow

Column = Callable[[Any], list[Any]]
_AS_THEY_ARE = (
    t.StringType,
    t.BinaryType,
    t.BooleanType,
    t.ByteType,
    t.ShortType,
    t.IntegerType,
    t.LongType,
    t.FloatType,
    t.DoubleType,
)


class ArrowRows:
    """The columns of one stream, for Arrow batches whose columns have the same names."""

    def __init__(self, codec: RowCodec, *, exact: bool = True) -> None:
        """`exact`: the columns have the types of the stream; otherwise each value is checked."""
        self._codec = codec
        self._columns = [_column(field.dataType) for field in codec.schema.fields]
        must_have = {codec.event_time, codec.sequence}
        self._nullable = [field.nullable and field.name not in must_have for field in codec.schema.fields]
        self._time_at = codec.names.index(codec.event_time) if codec.event_time else None
        self._by_column = exact and all(self._columns)

    def rows(
        self, batch: pyarrow.RecordBatch
    ) -> tuple[list[tuple[Any, ...]], list[tuple[int, dict[str, Any], BadRow]]]:
        """Rows that fit in internal form, and rows that do not, each with its index and the reason."""
        if self._by_column and not self._has_forbidden_null(batch):
            columns = [
                convert(column)
                for convert, column in zip(self._columns, batch.columns, strict=True)
                if convert is not None
            ]
            if self._time_at is None or min(columns[self._time_at], default=0) >= 0:
                return list(zip(*columns, strict=True)), []
        return self._one_by_one(batch.to_pylist(maps_as_pydicts="strict"))

    def _has_forbidden_null(self, batch: pyarrow.RecordBatch) -> bool:
        return any(
            not nullable and column.null_count
            for nullable, column in zip(self._nullable, batch.columns, strict=True)
        )

    def _one_by_one(
        self, rows: list[dict[str, Any]]
    ) -> tuple[list[tuple[Any, ...]], list[tuple[int, dict[str, Any], BadRow]]]:
        fit: list[tuple[Any, ...]] = []
        refused: list[tuple[int, dict[str, Any], BadRow]] = []
        try:
            return self._codec.take(rows), []
        except BadRow:  # some rows do not fit: look for them
            for n, row in enumerate(rows):
                try:
                    fit += self._codec.take([row])
                except BadRow as reason:
                    refused.append((n, row, reason))
        return fit, refused


def _column(kind: t.DataType) -> Column | None:
    """A function from an Arrow column to the internal forms of its values; None: row by row."""
    if isinstance(kind, t.StringType) and kind.collation not in (None, "UTF8_BINARY"):
        return None
    if type(kind) in _AS_THEY_ARE:
        return _to_list
    if isinstance(kind, t.TimestampType | t.TimestampNTZType):
        return _microseconds
    if isinstance(kind, t.DateType):
        return _days
    if isinstance(kind, t.DecimalType):
        return _texts
    return None


def _to_list(column: Any) -> list[Any]:
    return column.to_pylist()  # type: ignore[no-any-return]


def _microseconds(column: Any) -> list[Any]:
    import pyarrow

    unit = pyarrow.timestamp("us", column.type.tz)
    return column.cast(unit).cast(pyarrow.int64()).to_pylist()  # type: ignore[no-any-return]


def _days(column: Any) -> list[Any]:
    import pyarrow

    return column.cast(pyarrow.int32()).to_pylist()  # type: ignore[no-any-return]


def _texts(column: Any) -> list[Any]:
    return [None if value is None else _text(value) for value in column.to_pylist()]


def _text(value: decimal.Decimal) -> str:
    return f"{value:f}" if value else f"{abs(value):f}"  # Spark's decimals know no negative zero
