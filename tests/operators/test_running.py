"""Running aggregates and the k largest rows of a key: after each row the result of all rows so far."""

from __future__ import annotations

from hypothesis import example, given, settings

from operator_trials import KEYS, SPEEDS, Happening, Sent, at, histories, play, trial_of
from tiercel.operators import count, last, max, mean, plan_aggregate, plan_top_k, sum
from tiercel.spark.operators.folds import Fold
from tiercel.testing import check_deterministic

AGGREGATE = plan_aggregate(
    SPEEDS, ["car"], [count(), count("n"), sum("n"), mean("speed"), max("at"), last("n")]
)
TOP = plan_top_k(SPEEDS, ["car"], 3, "speed")


@settings(max_examples=25)
@given(histories(timed=False))
def test_aggregates_are_those_of_all_rows_so_far(history: list[Happening]) -> None:
    trial = play(trial_of(AGGREGATE), history, end=False)
    for key in KEYS:
        rows = [one for one in history if isinstance(one, Sent) and one.car == key]
        made = []
        for n in range(1, len(rows) + 1):
            numbers = [row.n for row in rows[:n] if row.n is not None]
            speeds = [row.speed for row in rows[:n] if row.speed is not None]
            total, speed = 0, 0.0
            for number in numbers:
                total += number
            for each in speeds:
                speed += each
            latest = sorted(row.ms for row in rows[:n])[-1]
            mean_ = speed / len(speeds) if speeds else None
            made.append((key, n, len(numbers), total if numbers else None, mean_, at(latest), rows[n - 1].n))
        assert trial.outputs(key) == made


@settings(max_examples=25)
@given(histories(timed=False))
@example([Sent("a", n, speed, 0) for n, speed in enumerate((1.0, 2.0, 1.0, 1.0, 2.0, 0.5))])
def test_top_rows_are_the_largest_so_far_and_come_when_they_change(history: list[Happening]) -> None:
    trial = play(trial_of(TOP), history, end=False)
    for key in KEYS:
        rows = [one for one in history if isinstance(one, Sent) and one.car == key]
        made, before = [], []
        for n in range(1, len(rows) + 1):
            known = [row for row in rows[:n] if row.speed is not None]
            top = sorted(known, key=lambda row: -row.speed)[:3]  # stable: the earlier of equal ones is first
            if [id(row) for row in top] != before:
                before = [id(row) for row in top]
                made.append((key, [(row.n, row.speed, at(row.ms)) for row in top]))
        assert trial.outputs(key) == made


def test_the_operators_are_deterministic() -> None:
    rows = [Sent("ab"[n % 3 == 0], n, n / 4 % 3, n).row for n in range(20)]
    for plan in (AGGREGATE, TOP):
        step = Fold(plan.step, plan.initial, plan.state_schema, plan.schema)
        check_deterministic(step, rows, schema=SPEEDS, key="car", output=plan.schema)
