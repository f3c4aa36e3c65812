"""Aggregates one by one: nulls, NaN, decimals, and hashes as Spark has them."""

from __future__ import annotations

import datetime
import decimal
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as t

from tiercel.operators import aggregates as a
from tiercel.operators import distinct_count
from tiercel.operators.splitting import branches
from tiercel.spark.rows.ddl import parse_ddl

SCHEMA = parse_ddl("x double, n int, d decimal(10,2), s string, day date")


def result(aggregate: a.Aggregate, values: list[Any], column: str) -> Any:
    bound = aggregate.bind(SCHEMA)
    buffer = bound.empty
    place = SCHEMA.names.index(column)
    for n, value in enumerate(values):
        row = [None] * len(SCHEMA.names)
        row[place] = value
        buffer = bound.step(buffer, row, n)
    return bound.result(buffer)


def test_nan_is_larger_than_any_number() -> None:
    values = [1.0, math.nan, -2.0, math.inf]
    assert math.isnan(result(a.max("x"), values, "x"))
    assert result(a.min("x"), values, "x") == -2.0
    top = result(a.top_k("x", 2), values, "x")
    assert math.isnan(top[0])
    assert top[1] == math.inf


@pytest.mark.parametrize(
    ("aggregate", "empty"),
    [
        (a.count(), 2),
        (a.count("x"), 0),
        (a.sum("x"), None),
        (a.mean("x"), None),
        (a.min("x"), None),
        (a.max("x"), None),
        (a.first("x"), None),
        (a.last("x", ignorenulls=True), None),
        (a.top_k("x", 2), []),
        (a.approx_count_distinct("x"), 0),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_rows_without_a_value_give_what_spark_gives(aggregate: a.Aggregate, empty: Any) -> None:
    assert result(aggregate, [None, None], "x") == empty


def test_first_and_last_take_a_null_unless_told_to_ignore_it() -> None:
    assert result(a.first("n"), [None, 1, 2], "n") is None
    assert result(a.first("n", ignorenulls=True), [None, 1, 2], "n") == 1
    assert result(a.last("n"), [1, 2, None], "n") is None
    assert result(a.last("n", ignorenulls=True), [1, 2, None], "n") == 2


def test_decimals_keep_their_scale() -> None:
    values = [decimal.Decimal("1.10"), None, decimal.Decimal("2.25")]
    assert result(a.sum("d"), values, "d") == decimal.Decimal("3.35")
    assert result(a.mean("d"), [*values, decimal.Decimal("0.01")], "d") == decimal.Decimal("1.120000")
    assert a.sum("d").bind(SCHEMA).result_type == t.DecimalType(20, 2)
    assert a.mean("d").bind(SCHEMA).result_type == t.DecimalType(14, 6)


@settings(max_examples=30)
@given(st.lists(st.none() | st.integers(-9, 9), max_size=12), st.integers(0, 12))
def test_parts_merged_are_the_whole(values: list[int | None], cut: int) -> None:
    everything = [
        a.count(),
        a.count("n"),
        a.sum("n"),
        a.mean("n"),
        a.min("n"),
        a.max("n"),
        a.first("n"),
        a.last("n", ignorenulls=True),
        a.top_k("n", 3),
        a.approx_count_distinct("n"),
    ]
    for aggregate in everything:
        bound = aggregate.bind(SCHEMA)
        parts = [bound.empty, bound.empty]
        for n, value in enumerate(values):
            row = [None, value, None, None, None]
            parts[n >= cut] = bound.step(parts[n >= cut], row, n)
        assert bound.result(bound.merge(*parts)) == result(aggregate, values, "n"), aggregate.name


def test_distinct_values_are_counted_within_the_standard_deviation() -> None:
    for count in (10, 100, 399, 5_000):
        found = result(a.approx_count_distinct("s"), [f"value-{n % count}" for n in range(count)], "s")
        assert abs(found - count) <= 3 * 0.05 * count


def test_hashes_are_those_of_sparks_xxhash64() -> None:
    text = distinct_count.hash_of(t.StringType(), "s")
    assert text("Spark") == -4294468057691064905 % (1 << 64)  # SELECT xxhash64('Spark')
    day = distinct_count.hash_of(t.DateType(), "day")
    assert day(datetime.date(1970, 1, 8)) == distinct_count.hash_of(t.IntegerType(), "n")(7)


def test_a_row_is_in_the_first_branch_whose_function_is_true() -> None:
    chosen = branches({"small": lambda n: n < 3, "even": lambda n: n % 2 == 0})
    found = {name: [n for n in range(6) if belongs(n)] for name, belongs in chosen.items()}
    assert found == {"small": [0, 1, 2], "even": [4], "rest": [3, 5]}
