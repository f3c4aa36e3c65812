"""Windows of a number of rows: the last ones of a key, after every slide, in the order of arrival."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from operator_trials import KEYS, SPEEDS, Happening, Sent, histories, play, trial_of
from tiercel.operators import count, first, last, plan_windows, sliding_count, sum, tumbling_count
from tiercel.testing import check_deterministic

AGGREGATES = [count(), first("n"), last("n"), sum("speed")]


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(1, 5), histories(timed=False))
@example(3, 2, [Sent("a", n, 1.0, 0) for n in range(8)])
def test_windows_hold_the_last_rows_of_a_key(size: int, slide: int, history: list[Happening]) -> None:
    slide = slide if slide < size else size
    plan = plan_windows(SPEEDS, ["car"], "", sliding_count(size, slide), AGGREGATES)
    trial = play(trial_of(plan), history, end=False)
    for key in KEYS:
        rows = [one for one in history if isinstance(one, Sent) and one.car == key]
        made = []
        for start in range(0, len(rows) - size + 1, slide):
            held = rows[start : start + size]
            total = None
            for speed in (row.speed for row in held):
                total = speed if total is None else total + (speed or 0.0)
            made.append((key, (start, start + size), size, held[0].n, held[-1].n, total))
        assert trial.outputs(key) == made
        assert len(trial.state(key).get("panes", ())) <= size


def test_tumbling_windows_do_not_overlap() -> None:
    plan = plan_windows(SPEEDS, ["car"], "", tumbling_count(2), [sum("n")])
    trial = play(trial_of(plan), [Sent("a", n, 1.0, 0) for n in range(5)], end=False)
    assert [row["sum(n)"] for row in trial.outputs()] == [1, 5]
    assert plan.time_mode == "none"


def test_the_operator_is_deterministic() -> None:
    plan = plan_windows(SPEEDS, ["car"], "", sliding_count(4, 2), AGGREGATES)
    rows = [Sent("ab"[n % 3 == 0], n, n / 4, n).row for n in range(20)]
    check_deterministic(plan.processor, rows, schema=SPEEDS, key="car", output=plan.schema)
