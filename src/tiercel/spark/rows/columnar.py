"""Rows that come as whole columns, for `send_columns`: lists, NumPy arrays, pandas Series, Arrow columns.

Responsible for: making rows of columns; a cheap check of a whole column.
Not responsible for: columns that fail it, which row_codec.py checks row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from pyspark.sql import types as t

from tiercel.errors import UserError
from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.rows.row_types import BadRow
from tiercel.spark.rows.values import int_limit

ColumnCheck = Callable[[list[Any]], bool]


class WholeColumns:
    """The columns of one stream, for many rows at once."""

    def __init__(self, codec: RowCodec) -> None:
        self._codec = codec
        self._kinds = [field.dataType for field in codec.schema.fields]
        self._checks = [_column_check(kind) for kind in self._kinds]

    def rows(self, given: Any) -> list[tuple[Any, ...]]:
        """Their rows in internal form; BadRow if one does not fit."""
        names = self._codec.names
        found = _names(given)
        if sorted(found) != sorted(names):
            raise BadRow(f"columns: {', '.join(found) or 'none'}", expected=", ".join(names))
        codec = [given[name] for name in names]
        values = [_values(column, name) for column, name in zip(codec, names, strict=True)]
        if len(set(map(len, values))) > 1:
            shown = ", ".join(f"{name} {len(column)}" for name, column in zip(names, values, strict=True))
            raise BadRow(f"columns of different lengths: {shown}", expected="one value for each row")
        rows = zip(*values, strict=True)
        if self._codec.event_time or self._codec.sequence:  # each event time and number is checked
            return self._codec.take(rows)
        for column, of_it, kind, check in zip(codec, values, self._kinds, self._checks, strict=True):
            if not _fits(getattr(column, "dtype", None), kind) and not check(of_it):
                return self._codec.take(rows)
        return list(rows)


def _names(given: Any) -> list[str]:
    try:
        return [str(name) for name in getattr(given, "column_names", given)]  # Arrow's, or like a dict's
    except TypeError:
        what = f"{type(given).__name__} has no columns"
        raise UserError(what, expected="a dict of lists, a pandas DataFrame, or an Arrow table") from None


def _values(column: Any, name: str) -> list[Any]:
    if type(column) is list:
        return column
    for method in ("to_pylist", "tolist"):  # Arrow, pandas and NumPy: with Python's own values
        if hasattr(column, method):
            return list(getattr(column, method)())
    if isinstance(column, Iterable) and not isinstance(column, str | bytes):
        return list(column)
    raise BadRow(
        f"column {name}: {column!r:.80} ({type(column).__name__})", expected="its values, a sequence"
    )


def _fits(dtype: Any, kind: t.DataType) -> bool:
    """Whether every value that such an array can hold is valid."""
    if not isinstance(dtype, np.dtype):
        return False
    if (limit := int_limit(kind)) is not None:
        return dtype.kind == "i" and int(np.iinfo(dtype).max) < limit
    return isinstance(kind, t.DoubleType) and dtype.kind == "f" and dtype.itemsize <= np.dtype(float).itemsize


def _column_check(kind: t.DataType) -> ColumnCheck:
    """A check that is true if every value of a column is in internal form already."""
    if (limit := int_limit(kind)) is not None:
        return lambda values: set(map(type, values)) == {int} and -limit <= min(values) <= max(values) < limit
    match kind:
        case t.DoubleType():
            return lambda values: set(map(type, values)) == {float}
        case t.StringType():
            return lambda values: set(map(type, values)) == {str} and all(map(str.isascii, values))
        case t.BooleanType():
            return lambda values: set(map(type, values)) == {bool}
        case _:
            return lambda values: False
