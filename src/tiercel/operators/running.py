"""Running results of a key that each row takes a step further: aggregates, and the k largest rows.

Responsible for: step functions for folds, with their schemas.
Not responsible for: running a fold; `stream.fold(...)` declares it, `tiercel.Fold` runs it in Spark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pyspark.sql import types as t

from tiercel.errors import UserError
from tiercel.operators.aggregates import Aggregate, BoundAggregate, bound, check_k
from tiercel.operators.values import (
    ORDERED,
    Convert,
    distinct_names,
    from_stored,
    key_fields,
    place_of,
    rank,
    stored_type,
    to_stored,
    type_of,
)


class FoldPlan(NamedTuple):
    """`tiercel.Fold(plan.step, plan.initial, plan.state_schema, plan.schema)`."""

    name: str
    step: Any
    initial: tuple[Any, ...]
    state_schema: t.StructType
    schema: t.StructType


def plan_aggregate(schema: t.StructType, key: Sequence[str], aggregates: Sequence[Aggregate]) -> FoldPlan:
    """Aggregates of all rows of a key so far, emitted after each row."""
    what = "aggregate"
    names, made = bound(aggregates, schema, what)
    output = t.StructType(key_fields(schema, key, what))
    state = t.StructType().add("rows", t.LongType())
    for n, (name, aggregate) in enumerate(zip(names, made, strict=True)):
        output.add(name, aggregate.result_type)
        state.add(f"aggregate_{n}", aggregate.state_type)
    distinct_names(output.names, what, "give an aggregate another name: .alias('...')")
    step = RunningAggregates([place_of(schema, name, what) for name in key], made)
    return FoldPlan("aggregate", step, (0, *[each.empty for each in made]), state, output)


class RunningAggregates:
    """The step of `aggregate`. State: the number of rows, then a buffer for each aggregate."""

    def __init__(self, key: Sequence[int], aggregates: Sequence[BoundAggregate]) -> None:
        self._key, self._aggregates = list(key), list(aggregates)

    def __call__(self, state: Sequence[Any], row: Any) -> tuple[Any, Any]:
        rows, *buffers = state
        values = tuple(row)
        made = [each.step(b, values, rows) for each, b in zip(self._aggregates, buffers, strict=True)]
        results = [each.result(b) for each, b in zip(self._aggregates, made, strict=True)]
        return (rows + 1, *made), (*[values[n] for n in self._key], *results)


def plan_top_k(schema: t.StructType, key: Sequence[str], k: int, by: str) -> FoldPlan:
    """The k rows of a key with the largest values of a column, emitted whenever they change."""
    check_k(k)
    what = "top_k"
    kind = type_of(schema, by, what)
    if not isinstance(kind, ORDERED):
        what = f"top_k by {by}: the column is {kind.simpleString()}"
        raise UserError(what, expected="a type whose values have an order: no array, map or struct")
    fields = key_fields(schema, key, what)
    rest = t.StructType([field for field in schema.fields if field.name not in key])
    if not rest.fields:
        raise UserError(f"{what}: every column is part of the key", expected="another column to rank rows by")
    output = t.StructType(fields).add("top", t.ArrayType(rest))
    distinct_names(output.names, what, "rename the column with map")
    stored = stored_type(rest)
    state = t.StructType().add(
        "top", t.ArrayType(t.StructType().add("rank", stored_type(kind)).add("row", stored))
    )
    step = TopRows(
        k,
        place_of(schema, by, what),
        [place_of(schema, name, what) for name in key],
        [place_of(schema, name, what) for name in rest.names],
        (to_stored(kind), to_stored(rest), from_stored(rest)),
    )
    return FoldPlan("top", step, ([],), state, output)


class TopRows:
    """The step of `top_k`. State: the rows in descending order; of equal ones the earlier is first."""

    def __init__(
        self,
        k: int,
        by: int,
        key: Sequence[int],
        rest: Sequence[int],
        convert: tuple[Convert, Convert, Convert],
    ) -> None:
        self._k, self._by, self._key, self._rest = k, by, list(key), list(rest)
        self._store_rank, self._store, self._show = convert

    def __call__(self, state: Sequence[Any], row: Any) -> tuple[Any, Any]:
        (top,) = state
        values = tuple(row)
        value = self._store_rank(values[self._by])
        if value is None or (len(top) == self._k and rank(value) <= rank(top[-1][0])):
            return (top,), None
        at = sum(rank(value) <= rank(other) for other, _ in top)
        one = (value, self._store([values[n] for n in self._rest]))
        top = [*top[:at], one, *top[at:]][: self._k]
        return (top,), (*[values[n] for n in self._key], [self._show(kept) for _, kept in top])
