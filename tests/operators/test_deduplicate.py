"""Duplicates: the first of equal rows comes out, and again one after the time in which they are the same."""

from __future__ import annotations

from hypothesis import example, given, settings

from operator_trials import KEYS, SPEEDS, Happening, Sent, Watermark, histories, play, trial_of, watermarks
from tiercel.operators import plan_deduplicate
from tiercel.testing import check_deterministic

WITHIN_MS = 5_000
WITHIN = plan_deduplicate(SPEEDS, ["car"], "at", ["n"], "5 seconds")


@settings(max_examples=25)
@given(histories())
@example([Sent("a", 1, 1.0, 10_000), Watermark(15_000), Sent("a", 1, 2.0, 15_001)])
def test_a_row_comes_out_unless_an_equal_one_is_remembered(history: list[Happening]) -> None:
    trial = play(trial_of(WITHIN), history)
    seen: dict[tuple[str, int | None], int] = {}
    made: dict[str, list[object]] = {key: [] for key in KEYS}
    late = 0
    for one, watermark in watermarks(history):
        if isinstance(one, Watermark):
            seen = {identity: until for identity, until in seen.items() if until > watermark}
        elif isinstance(one, Sent) and one.ms <= watermark:
            late += 1
        elif isinstance(one, Sent) and (one.car, one.n) not in seen:
            seen[one.car, one.n] = one.ms + WITHIN_MS
            made[one.car].append(one.row)
    for key in KEYS:
        assert trial.outputs(key) == made[key]
    assert len(trial.dead_letters()) == late
    assert trial.known_keys() == []


@settings(max_examples=25)
@given(histories(timed=False))
def test_without_a_limit_each_value_comes_out_once(history: list[Happening]) -> None:
    trial = play(trial_of(plan_deduplicate(SPEEDS, ["car"], "at", ["n"])), history, end=False)
    for key in KEYS:
        rows = [one for one in history if isinstance(one, Sent) and one.car == key]
        firsts = {row.n: row for row in reversed(rows)}
        assert sorted(trial.outputs(key), key=repr) == sorted((r.row for r in firsts.values()), key=repr)


def test_without_columns_the_key_alone_makes_rows_equal() -> None:
    plan = plan_deduplicate(SPEEDS, ["car"], "at", (), "5 seconds")
    trial = play(trial_of(plan), [Sent("a", 1, 1.0, 0), Sent("a", 2, 2.0, 1), Sent("b", 3, 3.0, 2)])
    assert sorted(row.n for row in trial.outputs()) == [1, 3]
    assert plan.schema == SPEEDS


def test_the_operator_is_deterministic() -> None:
    rows = [Sent("ab"[n % 3 == 0], n % 4, n / 4, 900 * n + 9_000).row for n in range(20)]
    check_deterministic(
        WITHIN.processor,
        rows,
        schema=SPEEDS,
        key="car",
        output=SPEEDS,
        time_mode="eventTime",
        event_time="at",
    )
