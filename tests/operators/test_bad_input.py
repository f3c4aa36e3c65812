"""What cannot be is refused where it is declared: with what was given, what is expected, and a hint."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import functions

from operator_trials import SPEEDS
from tiercel.errors import UserError
from tiercel.operators import (
    Side,
    approx_count_distinct,
    count,
    fold,
    mean,
    plan_aggregate,
    plan_deduplicate,
    plan_enrich,
    plan_join,
    plan_rate,
    plan_top_k,
    plan_windows,
    session,
    sliding,
    sliding_count,
    sum,
    top_k,
    tumbling,
    tumbling_count,
)
from tiercel.operators.durations import milliseconds
from tiercel.operators.splitting import branches
from tiercel.spark.rows.ddl import parse_ddl

KEY = ["car"]
TEXT = parse_ddl("car string, name string, tags array<string>, at timestamp")
ONE = Side(SPEEDS, ("car",), "at")


def windowed(*aggregates: Any, window: Any = None, schema: Any = SPEEDS, at: str = "at", **more: Any) -> Any:
    return plan_windows(schema, KEY, at, window or tumbling("1 minute"), aggregates, **more)


REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "size zero": (lambda: tumbling("0 seconds"), "window size '0 seconds'", "more than 0"),
    "negative size": (lambda: sliding("-5 minutes", "1 minute"), "window size '-5 minutes'", "more than 0"),
    "slide larger than size": (
        lambda: sliding("1 minute", "5 minutes"),
        "is longer than the window",
        "at most",
    ),
    "slide zero": (lambda: sliding("1 minute", "0 seconds"), "slide '0 seconds'", "more than 0"),
    "offset": (lambda: tumbling("1 minute", offset="2 minutes"), "offset '2 minutes'", "less than the slide"),
    "gap": (lambda: session("-1 second"), "session gap '-1 second'", "more than 0"),
    "no length": (lambda: tumbling("soon"), "window size 'soon'", "5 minutes"),
    "months": (lambda: tumbling("1 month"), "window size '1 month'", "5 minutes"),
    "microseconds": (lambda: tumbling("0.5 milliseconds"), "window size", "whole milliseconds"),
    "a number": (lambda: tumbling(5), "window size 5 (int)", "5 minutes"),  # type: ignore[arg-type]
    "no rows": (lambda: tumbling_count(0), "window size 0", "1 or more"),
    "slide of rows": (lambda: sliding_count(2, 3), "slide 3 is more than the window", "at most"),
    "no window": (
        lambda: plan_windows(SPEEDS, KEY, "at", "1 minute", [count()]),
        "window('1 minute')",
        "tumbl",
    ),  # type: ignore[arg-type]
    "no event time": (lambda: windowed(count(), at=""), "the stream declares none", "event time"),
    "no aggregate": (lambda: windowed(), "without an aggregate", "count()"),
    "an aggregate of spark": (lambda: windowed(functions.lit), "is no aggregate", "tiercel.operators"),
    "unknown column": (lambda: windowed(mean("spede")), "unknown column 'spede'", "car, n, speed, at"),
    "sum of text": (lambda: windowed(sum("name"), schema=TEXT), "sum(name): the column is string", "numeric"),
    "mean of text": (lambda: windowed(mean("name"), schema=TEXT), "mean(name)", "numeric"),
    "top of arrays": (lambda: windowed(top_k("tags", 1), schema=TEXT), "array<string>", "order"),
    "distinct arrays": (
        lambda: windowed(approx_count_distinct("tags"), schema=TEXT),
        "array<string>",
        "simple type",
    ),
    "one name twice": (lambda: windowed(count(), count()), "two columns named 'count(1)'", "different"),
    "the name of the key": (lambda: windowed(count().alias("car")), "two columns named 'car'", "different"),
    "negative lateness": (
        lambda: windowed(count(), lateness="-1 second"),
        "lateness '-1 second'",
        "0 or more",
    ),
    "lateness of a session": (
        lambda: windowed(count(), window=session("1 minute"), lateness="1 second"),
        "lateness with SessionWindow",
        "tumbling or sliding",
    ),
    "k": (lambda: top_k("n", 0), "top_k of 0", "1 or more"),
    "standard deviation": (lambda: approx_count_distinct("n", 2.0), "rsd 2.0", "0 to 0.39"),
    "a fold without merge": (
        lambda: windowed(
            fold(lambda s, r: s, (0,), parse_ddl("n int")), window=sliding("10 seconds", "5 seconds")
        ),
        "cannot be merged",
        "merge=",
    ),
    "an initial state that does not fit": (
        lambda: fold(lambda s, r: s, (0, 1), parse_ddl("n int")),
        "has 2 values",
        "1: n",
    ),
    "aggregate without a key": (lambda: plan_aggregate(SPEEDS, [], [count()]), "has no key", "keyed"),
    "top of an unknown column": (
        lambda: plan_top_k(SPEEDS, KEY, 3, "toll"),
        "unknown column 'toll'",
        "speed",
    ),
    "a rate over nothing": (lambda: plan_rate(SPEEDS, KEY, "at", "0 seconds"), "window size", "more than 0"),
    "duplicates of an unknown column": (
        lambda: plan_deduplicate(SPEEDS, KEY, "at", ["id"]),
        "unknown column 'id'",
        "one of",
    ),
    "duplicates without event time": (
        lambda: plan_deduplicate(SPEEDS, KEY, "", ["n"], "1 minute"),
        "deduplicate works in event time",
        "event time",
    ),
    "a join without event time": (
        lambda: plan_join(ONE, Side(SPEEDS, ("car",), ""), within="1 minute"),
        "join works in event time",
        "event time",
    ),
    "a join without an end": (lambda: plan_join(ONE, ONE), "without an end", "within="),
    "a join of other keys": (
        lambda: plan_join(ONE, Side(SPEEDS, ("n",), "at"), within="1 minute"),
        "keyed by car with one keyed by n",
        "the same key",
    ),
    "a join in sliding windows": (
        lambda: plan_join(ONE, ONE, window=sliding("10 seconds", "5 seconds")),
        "join in TimeWindow",
        "do not overlap",
    ),
    "an interval that ends before it begins": (
        lambda: plan_join(ONE, ONE, within=("5 seconds", "-5 seconds")),
        "within",
        "at most the second",
    ),
    "how": (lambda: plan_join(ONE, ONE, within="1 minute", how="cross"), "how='cross'", "inner, left"),
    "a table without the key": (
        lambda: plan_enrich(SPEEDS, KEY, "", parse_ddl("id string, x int")),
        "no column 'car'",
        "the key of the stream",
    ),
    "a key of another type": (
        lambda: plan_enrich(SPEEDS, KEY, "", parse_ddl("car int, x int")),
        "string and int",
        "one type",
    ),
    "no branch": (lambda: branches({}), "split without a branch", "split("),
    "a branch that is no function": (lambda: branches({"fast": True}), "split(fast=True)", "a function"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_where_it_is_declared(name: str) -> None:
    declare, what, expected = REFUSED[name]
    with pytest.raises(UserError) as raised:
        declare()
    assert what in raised.value.what
    assert expected in (raised.value.expected or "")


@pytest.mark.parametrize(
    ("given", "ms"),
    [
        ("5 minutes", 300_000),
        ("1 hour 30 minutes", 5_400_000),
        ("interval 2 days", 172_800_000),
        ("1.5 seconds", 1_500),
        ("-250 milliseconds", -250),
        (datetime.timedelta(weeks=1), 604_800_000),
    ],
)
def test_lengths_are_read_as_spark_reads_intervals(given: Any, ms: int) -> None:
    assert milliseconds(given, "length") == ms
