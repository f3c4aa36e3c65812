"""Aggregates of a column, named, typed and null-handled as Spark's: count, sum, mean, min, max and others.

Responsible for: how one aggregate begins, takes a row, is merged with another part, and gives its result.
Not responsible for: which rows it takes (windows), where its buffer is kept.

An aggregate is declared without a schema (`mean("speed")`) and bound to one where an operator is declared.
A bound aggregate is a fold: `empty`, `step(buffer, row, order)`, `merge(earlier, later)`, `result(buffer)`.
A buffer is never changed, and fits `state_type`. `order` is the event time of a row, or its number.
"""

from __future__ import annotations

import dataclasses
import decimal
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql import types as t

from tiercel.errors import UserError
from tiercel.operators import distinct_count
from tiercel.operators.values import (
    ORDERED,
    distinct_names,
    from_stored,
    place_of,
    rank,
    row_of,
    stored_type,
    to_stored,
    type_of,
)

PRECISION_MAX = 38


class BoundAggregate(ABC):
    """An aggregate of rows with a known schema."""

    state_type: t.DataType
    result_type: t.DataType
    empty: Any = None
    merges: bool = True  # whether parts can be merged

    @abstractmethod
    def step(self, buffer: Any, values: Sequence[Any], order: int) -> Any:
        """The buffer with one more row."""

    @abstractmethod
    def merge(self, earlier: Any, later: Any) -> Any:
        """Two parts as one."""

    def result(self, buffer: Any) -> Any:
        return buffer


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """An aggregate as it is declared; `alias` gives its column another name."""

    name: str
    bind: Callable[[t.StructType], BoundAggregate]

    def alias(self, name: str) -> Aggregate:
        return dataclasses.replace(self, name=name)


def bound(
    aggregates: Sequence[Aggregate], schema: t.StructType, what: str
) -> tuple[list[str], list[BoundAggregate]]:
    """Names and aggregates for these rows; UserError for what is no aggregate, or does not fit."""
    if not aggregates:
        raise UserError(f"{what} without an aggregate", expected="at least one, such as count()")
    for each in aggregates:
        if not isinstance(each, Aggregate):
            raise UserError(
                f"{what}: {each!r} ({type(each).__name__}) is no aggregate",
                expected="aggregates of tiercel.operators, such as mean('speed')",
                hint="those of pyspark.sql.functions are expressions of the JVM, and cannot run here",
            )
    names = [each.name for each in aggregates]
    distinct_names(names, what, "give one of them another name: .alias('...')")
    return names, [each.bind(schema) for each in aggregates]


# -- the aggregates as users write them --------------------------------------------------------


def count(column: str = "*") -> Aggregate:
    """The number of rows, or of those in which the column is not null."""
    name = "count(1)" if column in ("*", "1") else f"count({column})"
    return Aggregate(name, lambda schema: _Count(schema, "" if column in ("*", "1") else column))


def sum(column: str) -> Aggregate:
    """The sum of the values that are not null; null if there are none. Of whole numbers it is a bigint."""
    return Aggregate(f"sum({column})", lambda schema: _Sum(schema, column))


def mean(column: str) -> Aggregate:
    """The mean of the values that are not null, a double; null if there are none."""
    return Aggregate(f"avg({column})", lambda schema: _Mean(schema, column))


avg = mean


def min(column: str) -> Aggregate:
    """The smallest value that is not null; NaN is larger than any number."""
    return Aggregate(f"min({column})", lambda schema: _Extreme(schema, column, largest=False))


def max(column: str) -> Aggregate:
    """The largest value that is not null; NaN is larger than any number."""
    return Aggregate(f"max({column})", lambda schema: _Extreme(schema, column, largest=True))


def first(column: str, ignorenulls: bool = False) -> Aggregate:
    """The earliest value: by event time in windows of time, else by arrival."""
    return Aggregate(f"first({column})", lambda schema: _End(schema, column, ignorenulls, last=False))


def last(column: str, ignorenulls: bool = False) -> Aggregate:
    """The latest value: by event time in windows of time, else by arrival."""
    return Aggregate(f"last({column})", lambda schema: _End(schema, column, ignorenulls, last=True))


def approx_count_distinct(column: str, rsd: float = 0.05) -> Aggregate:
    """About how many different values there are, with Spark's hash, registers and standard deviation."""
    precision = distinct_count.precision_of(rsd)
    return Aggregate(
        f"approx_count_distinct({column})", lambda schema: _DistinctCount(schema, column, precision)
    )


def top_k(column: str, k: int) -> Aggregate:
    """The k largest values that are not null, in descending order."""
    check_k(k)
    return Aggregate(f"top_k({column}, {k})", lambda schema: _TopK(schema, column, k))


def fold(
    step: Callable[[Any, Any], Any],
    initial: Sequence[Any],
    schema: t.StructType | str,
    *,
    merge: Callable[[Any, Any], Any] | None = None,
    name: str = "fold",
) -> Aggregate:
    """An aggregate of your own: `step(state, row)` gives the next state, a tuple with these columns.

    The result is the state, a struct. Sliding and session windows keep parts: they need
    `merge(earlier, later)`.
    """
    if not callable(step):
        raise UserError(f"fold({step!r:.80})", expected="a function of a state and a row")
    parsed = schema if isinstance(schema, t.StructType) else _parsed(schema)
    if len(initial) != len(parsed.names):
        what = f"{name}: the initial state {initial!r} has {len(initial)} values"
        raise UserError(what, expected=f"{len(parsed.names)}: {', '.join(parsed.names)}")
    return Aggregate(name, lambda rows: _UserFold(rows, step, tuple(initial), parsed, merge))


def check_k(k: int) -> None:
    if type(k) is not int or k < 1:
        raise UserError(f"top_k of {k!r}", expected="a whole number, 1 or more")


def _parsed(schema: str) -> t.StructType:
    try:
        found = t.StructType.fromDDL(schema)
    except Exception as error:
        what = f"state schema {schema!r}: {str(error).partition(chr(10))[0]}"
        raise UserError(what, expected="a StructType, or text where a session runs") from error
    assert isinstance(found, t.StructType)
    return found


# -- what they do ------------------------------------------------------------------------------


def _numeric(schema: t.StructType, column: str, what: str) -> t.DataType:
    kind = type_of(schema, column, what)
    if not isinstance(kind, t.NumericType):
        numeric = [f.name for f in schema.fields if isinstance(f.dataType, t.NumericType)]
        raise UserError(
            f"{what}({column}): the column is {kind.simpleString()}",
            expected=f"a numeric column; these are: {', '.join(numeric) or 'none'}",
            hint="cast it with map before it is aggregated",
        )
    return kind


class _Count(BoundAggregate):
    """Rows, or values that are not null."""

    empty = 0

    def __init__(self, schema: t.StructType, column: str) -> None:
        self.state_type = self.result_type = t.LongType()
        self._place = place_of(schema, column, "count") if column else None

    def step(self, buffer: Any, values: Sequence[Any], order: int) -> Any:
        return buffer if self._place is not None and values[self._place] is None else buffer + 1

    def merge(self, earlier: Any, later: Any) -> Any:
        return earlier + later


class _Sum(BoundAggregate):
    """A total; None as long as there was no value."""

    def __init__(self, schema: t.StructType, column: str) -> None:
        kind = _numeric(schema, column, "sum")
        self._place = place_of(schema, column, "sum")
        if isinstance(kind, t.DecimalType):
            precision = kind.precision + 10
            self.result_type = t.DecimalType(
                precision if precision < PRECISION_MAX else PRECISION_MAX, kind.scale
            )
        else:
            self.result_type = t.LongType() if isinstance(kind, t.IntegralType) else t.DoubleType()
        self.state_type = self.result_type

    def step(self, buffer: Any, values: Sequence[Any], order: int) -> Any:
        return self.merge(buffer, values[self._place])

    def merge(self, earlier: Any, later: Any) -> Any:
        if earlier is None or later is None:
            return later if earlier is None else earlier
        return earlier + later


class _Mean(BoundAggregate):
    """A total and how many values it is of. Whole numbers are added as doubles, as in Spark."""

    def __init__(self, schema: t.StructType, column: str) -> None:
        kind = _numeric(schema, column, "mean")
        self._place = place_of(schema, column, "mean")
        self._unit: decimal.Decimal | None = None
        total: t.DataType = t.DoubleType()
        self.result_type = t.DoubleType()
        if isinstance(kind, t.DecimalType):
            scale = kind.scale + 4 if kind.scale + 4 < PRECISION_MAX else PRECISION_MAX
            precision = kind.precision + 4 if kind.precision + 4 < PRECISION_MAX else PRECISION_MAX
            wide = kind.precision + 10 if kind.precision + 10 < PRECISION_MAX else PRECISION_MAX
            total, self.result_type = t.DecimalType(wide, kind.scale), t.DecimalType(precision, scale)
            self._unit = decimal.Decimal(1).scaleb(-scale)
        self.state_type = t.StructType().add("total", total).add("count", t.LongType())
        self.empty = (decimal.Decimal(0) if self._unit is not None else 0.0, 0)

    def step(self, buffer: Any, values: Sequence[Any], order: int) -> Any:
        value = values[self._place]
        return buffer if value is None else (buffer[0] + value, buffer[1] + 1)

    def merge(self, earlier: Any, later: Any) -> Any:
        return (earlier[0] + later[0], earlier[1] + later[1])

    def result(self, buffer: Any) -> Any:
        total, number = buffer
        if not number:
            return None
        if self._unit is None:
            return total / number
        context = decimal.Context(prec=PRECISION_MAX * 2, rounding=decimal.ROUND_HALF_UP)
        return context.divide(total, decimal.Decimal(number)).quantize(self._unit, context=context)


class _OfOneValue(BoundAggregate):
    """What is kept is a value of the column, or several."""

    def __init__(self, schema: t.StructType, column: str, what: str, *, ordered: bool = True) -> None:
        kind = type_of(schema, column, what)
        if ordered and not isinstance(kind, ORDERED):
            what = f"{what}({column}): the column is {kind.simpleString()}"
            raise UserError(what, expected="a type whose values have an order: no array, map or struct")
        self._place = place_of(schema, column, what)
        self._store, self._show = to_stored(kind), from_stored(kind)
        self.state_type, self.result_type = stored_type(kind), kind

    def result(self, buffer: Any) -> Any:
        return self._show(buffer)


class _Extreme(_OfOneValue):
    """The smallest or largest value."""

    def __init__(self, schema: t.StructType, column: str, *, largest: bool) -> None:
        super().__init__(schema, column, "max" if largest else "min")
        self._largest = largest

    def step(self, buffer: Any, values: Sequence[Any], order: int) -> Any:
        return self.merge(buffer, self._store(values[self._place]))

    def merge(self, earlier: Any, later: Any) -> Any:
        if earlier is None or later is None:
            return later if earlier is None else earlier
        return later if (rank(later) > rank(earlier)) is self._largest and later != earlier else earlier


class _End(_OfOneValue):
    """The first or last value with its order; of equal orders, the first or last that arrived."""

    def __init__(self, schema: t.StructType, column: str, ignorenulls: bool, *, last: bool) -> None:
        super().__init__(schema, column, "last" if last else "first", ordered=False)
        self._last, self._ignorenulls = last, ignorenulls
        self.state_type = t.StructType().add("order", t.LongType()).add("value", self.state_type)

    def step(self, buffer: Any, values: Sequence[Any], order: int) -> Any:
        value = values[self._place]
        if value is None and self._ignorenulls:
            return buffer
        if buffer is not None and (order < buffer[0] if self._last else order >= buffer[0]):
            return buffer
        return (order, self._store(value))

    def merge(self, earlier: Any, later: Any) -> Any:
        if earlier is None or later is None:
            return later if earlier is None else earlier
        return (
            (later if later[0] >= earlier[0] else earlier)
            if self._last
            else (later if later[0] < earlier[0] else earlier)
        )

    def result(self, buffer: Any) -> Any:
        return None if buffer is None else self._show(buffer[1])


class _DistinctCount(BoundAggregate):
    """Registers of a HyperLogLog; None before the first value."""

    def __init__(self, schema: t.StructType, column: str, precision: int) -> None:
        kind = type_of(schema, column, "approx_count_distinct")
        self._place = place_of(schema, column, "approx_count_distinct")
        self._hash = distinct_count.hash_of(kind, column)
        self._precision = precision
        self.state_type, self.result_type = t.BinaryType(), t.LongType()

    def step(self, buffer: Any, values: Sequence[Any], order: int) -> Any:
        value = values[self._place]
        return buffer if value is None else distinct_count.add(buffer, self._hash(value), self._precision)

    def merge(self, earlier: Any, later: Any) -> Any:
        return distinct_count.merge(earlier, later)

    def result(self, buffer: Any) -> Any:
        return 0 if buffer is None else distinct_count.estimate(bytes(buffer))


class _TopK(_OfOneValue):
    """The largest values, in descending order."""

    def __init__(self, schema: t.StructType, column: str, k: int) -> None:
        super().__init__(schema, column, "top_k")
        self._k = k
        self.state_type = t.ArrayType(self.state_type)
        self.result_type = t.ArrayType(self.result_type)
        self.empty = []

    def step(self, buffer: Any, values: Sequence[Any], order: int) -> Any:
        value = self._store(values[self._place])
        if value is None or (len(buffer) == self._k and rank(value) <= rank(buffer[-1])):
            return buffer
        return self.merge(buffer, [value])

    def merge(self, earlier: Any, later: Any) -> Any:
        return sorted([*earlier, *later], key=rank, reverse=True)[: self._k]

    def result(self, buffer: Any) -> Any:
        return [self._show(value) for value in buffer]


class _UserFold(BoundAggregate):
    """A fold that a user wrote."""

    def __init__(
        self,
        rows: t.StructType,
        step: Callable[[Any, Any], Any],
        initial: tuple[Any, ...],
        schema: t.StructType,
        merge: Callable[[Any, Any], Any] | None,
    ) -> None:
        self._step, self._merge, self._row = step, merge, row_of(rows.names)
        self._store, self._show = to_stored(schema), from_stored(schema)
        self.state_type, self.result_type = stored_type(schema), schema
        self.empty = self._store(initial)
        self.merges = merge is not None

    def step(self, buffer: Any, values: Sequence[Any], order: int) -> Any:
        return self._store(self._step(self._show(buffer), self._row(values)))

    def merge(self, earlier: Any, later: Any) -> Any:
        assert self._merge is not None
        return self._store(self._merge(self._show(earlier), self._show(later)))

    def result(self, buffer: Any) -> Any:
        return self._show(buffer)
