"""Tumbling and sliding windows: each row counts in each of its windows once, whatever moves or dies."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from operator_trials import (
    KEYS,
    SPEEDS,
    START_MS,
    Crash,
    Happening,
    Move,
    Sent,
    Watermark,
    at,
    histories,
    play,
    trial_of,
    watermarks,
)
from tiercel.operators import (
    TimeWindow,
    approx_count_distinct,
    count,
    first,
    fold,
    last,
    max,
    mean,
    min,
    plan_windows,
    sliding,
    sum,
    top_k,
    tumbling,
)
from tiercel.spark.rows.ddl import parse_ddl
from tiercel.testing import check_deterministic

AGGREGATES = (
    count(),
    count("n"),
    sum("n"),
    mean("n"),
    min("speed"),
    max("speed"),
    first("n"),
    last("speed", ignorenulls=True),
    top_k("n", 2),
    approx_count_distinct("n"),
    max("at"),
)
WINDOWS = {
    "tumbling": tumbling("10 seconds"),
    "tumbling with an offset": tumbling("10 seconds", offset="3 seconds"),
    "sliding": sliding("15 seconds", "5 seconds"),
    "sliding by what does not divide the size": sliding("15 seconds", "6 seconds"),
}


def results(rows: list[Sent]) -> tuple[Any, ...]:
    """What the aggregates are of these rows, in the order of their arrival."""
    numbers = [row.n for row in rows if row.n is not None]
    speeds = [row.speed for row in rows if row.speed is not None]
    by_time = sorted(rows, key=lambda row: row.ms)  # stable: of equal times the one that came first
    known = [row for row in by_time if row.speed is not None]
    whole = [n for n in numbers]
    return (
        len(rows),
        len(numbers),
        _sum(whole),
        _sum(whole) / len(whole) if whole else None,
        sorted(speeds)[0] if speeds else None,
        sorted(speeds)[-1] if speeds else None,
        by_time[0].n,
        known[-1].speed if known else None,
        sorted(numbers, reverse=True)[:2],
        len(set(numbers)),
        at(by_time[-1].ms),
    )


def _sum(numbers: list[int]) -> int | None:
    total = None
    for n in numbers:
        total = n if total is None else total + n
    return total


def windows_of(window: TimeWindow, ms: int) -> list[int]:
    """The ends of the windows that hold a time, in ms after START."""
    size, slide = window.size // 1000, window.slide // 1000
    start_ms = window.offset // 1000 - START_MS
    starts = range(start_ms + (ms - size - start_ms) // slide * slide, ms + 1, slide)
    return [start + size for start in starts if start <= ms < start + size]


def expected(window: TimeWindow, lateness: int, history: list[Happening]) -> tuple[dict[str, Any], int]:
    """Outputs per key, in their order, and how many rows were too late."""
    kept: dict[tuple[str, int], list[Sent]] = defaultdict(list)
    made: dict[str, list[tuple[Any, ...]]] = {key: [] for key in KEYS}
    emitted, late = -(10**12), 0

    def emit(key: str, end: int) -> None:
        bounds = (at(end - window.size // 1000), at(end))
        made[key].append((key, bounds, *results(kept[key, end])))

    for one, watermark in watermarks([*history, Watermark(10**9)]):
        if isinstance(one, Sent):
            ends = [end for end in windows_of(window, one.ms) if end + lateness > watermark]
            late += not ends
            for end in ends:
                kept[one.car, end].append(one)
                if end <= watermark:
                    emit(one.car, end)
        for key, end in sorted(kept):
            if emitted < end <= watermark and isinstance(one, Watermark):
                emit(key, end)
        emitted = watermark
    return made, late


@settings(max_examples=25)
@given(st.sampled_from(sorted(WINDOWS)), st.sampled_from([0, 4_000]), histories())
@example("sliding", 0, [Sent("a", 1, 1.0, 14_000), Watermark(11_000), Sent("a", 2, 2.0, 9_000)])
@example("sliding", 0, [Sent("a", 1, 1.0, 14_000), Watermark(16_000)])
@example("sliding", 0, [Watermark(11_000), Sent("a", 2, 2.0, 9_000)])
@example("tumbling", 4_000, [Watermark(11_000), Sent("a", 2, 2.0, 9_000), Sent("a", 3, 2.0, 9_000)])
@example("tumbling", 0, [Sent("a", 1, 1.0, 1_000), Move("a"), Sent("a", 2, 2.0, 0), Crash(False)])
def test_results_are_those_of_the_rows_in_each_window(
    name: str, lateness: int, history: list[Happening]
) -> None:
    window = WINDOWS[name]
    plan = plan_windows(SPEEDS, ["car"], "at", window, AGGREGATES, lateness=f"{lateness} milliseconds")
    trial = play(trial_of(plan), history)
    made, late = expected(window, lateness, history)
    for key in KEYS:
        assert trial.outputs(key) == made[key]
    assert len(trial.dead_letters()) == late
    assert trial.known_keys() == []  # nothing is kept of windows that are closed


def test_rows_that_arrive_together_count_as_if_they_came_one_by_one() -> None:
    sent = [Sent("a", n, n / 4, 900 * n) for n in range(12)]
    plan = plan_windows(SPEEDS, ["car"], "at", WINDOWS["sliding"], AGGREGATES)
    together = trial_of(plan)
    together.send(*[one.row for one in sent])
    together.watermark(START_MS + 10**9)
    assert together.outputs("a") == expected(WINDOWS["sliding"], 0, list(sent))[0]["a"]


def test_columns_are_named_and_typed_as_spark_names_and_types_them() -> None:
    plan = plan_windows(SPEEDS, ["car"], "at", WINDOWS["sliding"], [*AGGREGATES, mean("speed").alias("v")])
    assert plan.schema.simpleString() == (
        "struct<car:string,window:struct<start:timestamp,end:timestamp>,count(1):bigint,count(n):bigint,"
        "sum(n):bigint,avg(n):double,min(speed):double,max(speed):double,first(n):int,last(speed):double,"
        "top_k(n, 2):array<int>,approx_count_distinct(n):bigint,max(at):timestamp,v:double>"
    )


def test_window_time_is_the_last_microsecond_of_the_window() -> None:
    plan = plan_windows(SPEEDS, ["car"], "at", tumbling("1 second"), [count()], window_time="at")
    trial = play(trial_of(plan), [Sent("a", 1, 1.0, 500)])
    [row] = trial.outputs()
    assert (row.window.end - row["at"]).total_seconds() == 0.000001
    assert plan.event_time == "at"


def test_a_late_row_is_a_dead_letter_that_names_its_time_and_the_watermark() -> None:
    plan = plan_windows(SPEEDS, ["car"], "at", tumbling("10 seconds"), [count()])
    trial = play(trial_of(plan), [Watermark(10_000), Sent("a", 1, 1.0, 9_999)])
    [(reason, row)] = trial.dead_letters()
    assert reason == (
        "LateRow: event time 2026-06-01T12:00:09.999000+00:00: its last window closed at "
        "2026-06-01T12:00:10+00:00, and the watermark is 2026-06-01T12:00:10+00:00"
    )
    assert row[1] == 1


def test_a_row_behind_the_watermark_counts_while_its_window_is_open() -> None:
    plan = plan_windows(SPEEDS, ["car"], "at", tumbling("10 seconds"), [count()])
    trial = play(trial_of(plan), [Watermark(9_000), Sent("a", 1, 1.0, 1_000)])
    assert [row["count(1)"] for row in trial.outputs()] == [1]


def test_a_fold_of_the_user_is_merged_over_panes() -> None:
    longest = fold(
        lambda state, row: (row.speed if state[0] is None or row.speed > state[0] else state[0],),
        (None,),
        parse_ddl("top double"),
        merge=lambda one, other: one if one[0] >= other[0] else other,
        name="longest",
    )
    plan = plan_windows(SPEEDS, ["car"], "at", sliding("10 seconds", "5 seconds"), [longest])
    trial = play(trial_of(plan), [Sent("a", 1, 1.0, 1_000), Move("a"), Sent("a", 1, 3.0, 6_000)])
    assert [row.longest.top for row in trial.outputs()] == [1.0, 3.0, 3.0]


def test_a_sliding_window_keeps_one_pane_per_slide_and_not_a_copy_per_window() -> None:
    plan = plan_windows(SPEEDS, ["car"], "at", sliding("60 seconds", "1 second"), [count()])
    trial = play(trial_of(plan), [Sent("a", 1, 1.0, 100 * n) for n in range(30)], end=False)
    assert len(trial.state("a")["panes"]) == 3
    assert len(trial.timers("a")) == 3  # the next end for each pane, not all sixty


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_the_operator_is_deterministic(window: TimeWindow) -> None:
    plan = plan_windows(SPEEDS, ["car"], "at", window, AGGREGATES, lateness="2 seconds")
    sent = [Sent("ab"[n % 3 == 0], n % 7, n / 4, 1_700 * n - 4_000 * (n % 4 == 3) + 9_000) for n in range(24)]
    check_deterministic(
        plan.processor,
        [one.row for one in sent],
        schema=SPEEDS,
        key="car",
        output=plan.schema,
        time_mode="eventTime",
        event_time="at",
    )
