"""Rows that come as whole columns: lists, NumPy arrays, Series, what Arrow has.

Responsible for: making rows of them; a look at a column that is as it should be, for little.
Not responsible for: values that need a closer look (schema.py has that, row by row).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from pyspark.sql import types as t

from tiercel.errors import UserError
from tiercel.spark.conversion import int_limit
from tiercel.spark.rows import BadRow
from tiercel.spark.schema import Columns

Look = Callable[[list[Any]], bool]


class WholeColumns:
    """The columns of one stream, for many rows at once."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._kinds = [field.dataType for field in columns.schema.fields]
        self._looks = [_look(kind) for kind in self._kinds]

    def rows(self, given: Any) -> list[tuple[Any, ...]]:
        """Their rows in internal form; BadRow if one does not fit."""
        names = self._columns.names
        found = _names(given)
        if sorted(found) != sorted(names):
            raise BadRow(f"columns: {', '.join(found) or 'none'}", expected=", ".join(names))
        columns = [given[name] for name in names]
        values = [_values(column, name) for column, name in zip(columns, names, strict=True)]
        if len(set(map(len, values))) > 1:
            shown = ", ".join(f"{name} {len(column)}" for name, column in zip(names, values, strict=True))
            raise BadRow(f"columns of different lengths: {shown}", expected="one value for each row")
        rows = zip(*values, strict=True)
        if self._columns.event_time:  # each is looked at
            return self._columns.take(rows)
        for column, of_it, kind, look in zip(columns, values, self._kinds, self._looks, strict=True):
            if not _fits(getattr(column, "dtype", None), kind) and not look(of_it):
                return self._columns.take(rows)
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
    """Whether nothing that such an array can hold needs a look."""
    if not isinstance(dtype, np.dtype):
        return False
    if (limit := int_limit(kind)) is not None:
        return dtype.kind == "i" and int(np.iinfo(dtype).max) < limit
    return isinstance(kind, t.DoubleType) and dtype.kind == "f" and dtype.itemsize <= np.dtype(float).itemsize


def _look(kind: t.DataType) -> Look:
    """True for a column of which every value travels as it is; the others are looked at one by one."""
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
