"""Joins: each pair of rows that match comes out once; a row without a match comes when none can follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql import types as t

from operator_trials import (
    KEYS,
    START_MS,
    Crash,
    Happening,
    Move,
    Sent,
    Watermark,
    at,
    histories,
    watermarks,
)
from tiercel.operators import Side, plan_join, tumbling
from tiercel.operators.joins import JoinPlan
from tiercel.spark.rows.ddl import parse_ddl
from tiercel.testing import Trial, check_deterministic

LEFT = Side(parse_ddl("car string, speed double, at timestamp"), ("car",), "at")
RIGHT = Side(parse_ddl("car string, toll int, at timestamp"), ("car",), "at")
SIDES = ("inner", "left", "right", "full")


def with_time(made: JoinPlan) -> t.StructType:
    """The rows that the processor reads, and the event time, which a deployment has from both streams."""
    return t.StructType([*made.schema.fields, t.StructField("at", t.TimestampType())])


def row_of(one: Sent) -> tuple[Any, ...]:
    """A row with a number comes from the right side, the others from the left."""
    left = (one.car, one.speed, at(one.ms)) if one.n is None else None
    right = (one.car, one.n, at(one.ms)) if one.n is not None else None
    return (one.car, left, right, at(one.ms))


def trial_of(made: JoinPlan) -> Trial:
    plan = made.plan
    schema = with_time(made)
    return Trial(
        plan.processor, schema=schema, key="car", output=plan.schema, time_mode="eventTime", event_time="at"
    )


def play(trial: Trial, history: list[Happening]) -> Trial:
    watermark = 0
    for one in history:
        match one:
            case Sent():
                trial.send(row_of(one))
            case Watermark():
                watermark += one.by_ms
                trial.watermark(START_MS + watermark)
            case Move():
                trial.finish_moves()
                trial.begin_move(one.key)
            case Crash():
                trial.crash(after_checkpoint=one.after_checkpoint)
    trial.finish_moves()
    trial.watermark(START_MS + 10**9)
    return trial


def expected(
    history: list[Happening], matches: Callable[[Sent, Sent], bool], how: str
) -> tuple[dict[str, list[Any]], int]:
    """All pairs of rows that came in time, and rows of outer sides without one; in no order."""
    taken = [one for one, mark in watermarks(history) if isinstance(one, Sent) and one.ms > mark]
    late = len([one for one in history if isinstance(one, Sent)]) - len(taken)
    made: dict[str, list[Any]] = {key: [] for key in KEYS}
    for key in KEYS:
        lefts = [one for one in taken if one.car == key and one.n is None]
        rights = [one for one in taken if one.car == key and one.n is not None]
        pairs = [(one, other) for one in lefts for other in rights if matches(one, other)]
        made[key] += [(key, one.speed, at(one.ms), other.n, at(other.ms)) for one, other in pairs]
        if how in ("left", "full"):
            alone = [one for one in lefts if not any(one is pair[0] for pair in pairs)]
            made[key] += [(key, one.speed, at(one.ms), None, None) for one in alone]
        if how in ("right", "full"):
            alone = [one for one in rights if not any(one is pair[1] for pair in pairs)]
            made[key] += [(key, None, None, one.n, at(one.ms)) for one in alone]
    return made, late


def compare(trial: Trial, made: dict[str, list[Any]], late: int) -> None:
    for key in KEYS:
        assert sorted(map(repr, map(tuple, trial.outputs(key)))) == sorted(map(repr, made[key]))
    assert len(trial.dead_letters()) == late
    assert trial.known_keys() == []


@settings(max_examples=25)
@given(
    st.sampled_from(SIDES),
    st.sampled_from([(-3_000, 3_000), (0, 5_000), (-5_000, -1_000), (2_000, 4_000)]),
    histories(last_ms=20_000),
)
@example("full", (0, 5_000), [Sent("a", None, 1.0, 0), Move("a"), Sent("a", 1, 0.0, 5_000), Crash(False)])
@example("inner", (-5_000, -1_000), [Sent("a", 1, 0.0, 1_000), Watermark(2_000), Sent("a", None, 1.0, 3_500)])
@example("left", (-5_000, -1_000), [Watermark(9_000), Sent("a", None, 1.0, 9_500), Sent("a", 1, 0.0, 9_001)])
def test_rows_match_whose_times_are_within_the_interval(
    how: str, interval: tuple[int, int], history: list[Happening]
) -> None:
    lower, upper = interval
    within = (f"{lower} milliseconds", f"{upper} milliseconds")
    made = plan_join(LEFT, RIGHT, within=within, how=how)
    found = expected(history, lambda one, other: lower <= other.ms - one.ms <= upper, how)
    compare(play(trial_of(made), history), *found)


@settings(max_examples=25)
@given(st.sampled_from(SIDES), histories(last_ms=30_000))
def test_rows_match_that_are_in_one_window(how: str, history: list[Happening]) -> None:
    made = plan_join(LEFT, RIGHT, window=tumbling("10 seconds"), how=how)
    trial = play(trial_of(made), history)
    rows, late = expected(history, lambda one, other: one.ms // 10_000 == other.ms // 10_000, how)
    for key in KEYS:
        rows[key] = [
            (key, (at(ms), at(ms + 10_000)), *row[1:])
            for row in rows[key]
            for ms in [int(((row[2] or row[4]) - at(0)).total_seconds() * 1000) // 10_000 * 10_000]
        ]
        found = [(row[0], tuple(row[1]), *row[2:]) for row in trial.outputs(key)]
        assert sorted(map(repr, found)) == sorted(map(repr, rows[key]))
    assert len(trial.dead_letters()) == late


def test_columns_of_the_other_stream_get_a_suffix_where_the_name_is_taken() -> None:
    made = plan_join(LEFT, RIGHT, within="1 minute")
    assert made.plan.schema.names == ["car", "speed", "at", "toll", "at_right"]
    assert plan_join(LEFT, RIGHT, within="1 minute", suffix="_2").plan.schema.names[-1] == "at_2"


@pytest.mark.parametrize("how", SIDES)
def test_the_operator_is_deterministic(how: str) -> None:
    made = plan_join(LEFT, RIGHT, within="2 seconds", how=how)
    sent = [Sent("ab"[n % 3 == 0], n if n % 2 else None, n / 4, 700 * n + 9_000) for n in range(20)]
    check_deterministic(
        made.plan.processor,
        [row_of(one) for one in sent],
        schema=with_time(made),
        key="car",
        output=made.plan.schema,
        time_mode="eventTime",
        event_time="at",
    )
