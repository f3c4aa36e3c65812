"""Session windows: rows with less than a gap between them are one window, in whatever order they come."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings

from operator_trials import (
    KEYS,
    SPEEDS,
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
from tiercel.operators import count, first, last, plan_windows, session, top_k
from tiercel.testing import check_deterministic

GAP_MS = 4_000
PLAN = plan_windows(
    SPEEDS, ["car"], "at", session("4 seconds"), [count(), first("n"), last("n"), top_k("speed", 2)]
)


def expected(history: list[Happening]) -> tuple[dict[str, list[Any]], int]:
    """Sessions per key in the order of their ends, and how many rows came too late."""
    open_: dict[str, list[list[Sent]]] = {key: [] for key in KEYS}
    made: dict[str, list[Any]] = {key: [] for key in KEYS}
    late = 0
    for one, watermark in watermarks([*history, Watermark(10**9)]):
        if isinstance(one, Sent):
            if one.ms + GAP_MS <= watermark:
                late += 1
                continue
            near = [s for s in open_[one.car] if s[0].ms - GAP_MS <= one.ms <= s[-1].ms + GAP_MS]
            merged = sorted([row for s in near for row in s] + [one], key=lambda row: row.ms)
            open_[one.car] = [s for s in open_[one.car] if s not in near] + [merged]
        for key in KEYS:
            done = [s for s in open_[key] if s[-1].ms + GAP_MS <= watermark]
            for s in sorted(done, key=lambda s: s[-1].ms):
                open_[key].remove(s)
                speeds = sorted((row.speed for row in s if row.speed is not None), reverse=True)
                bounds = (at(s[0].ms), at(s[-1].ms + GAP_MS))
                made[key].append((key, bounds, len(s), s[0].n, s[-1].n, speeds[:2]))
    return made, late


@settings(max_examples=25)
@given(histories())
@example([Sent("a", 1, 1.0, 0), Sent("a", 2, 1.0, 8_000), Move("a"), Sent("a", 3, 1.0, 4_000)])
@example(
    [Sent("a", 1, 1.0, 0), Crash(True), Sent("a", 2, 1.0, 4_001), Watermark(4_000), Sent("a", 3, 0.0, 1)]
)
def test_sessions_are_those_of_the_rows_in_time_order(history: list[Happening]) -> None:
    trial = play(trial_of(PLAN), history)
    made, late = expected(history)
    for key in KEYS:
        assert trial.outputs(key) == made[key]
    assert len(trial.dead_letters()) == late
    assert trial.known_keys() == []


def test_a_session_that_grows_has_one_timer() -> None:
    trial = play(trial_of(PLAN), [Sent("a", n, 1.0, 1_000 * n) for n in range(9)], end=False)
    assert len(trial.timers("a")) == len(trial.state("a")["sessions"]) == 1


def test_the_operator_is_deterministic() -> None:
    sent = [Sent("ab"[n % 3 == 0], n, n / 4, 2_900 * n - 6_000 * (n % 4 == 3) + 9_000) for n in range(20)]
    rows = [one.row for one in sent]
    check_deterministic(
        PLAN.processor,
        rows,
        schema=SPEEDS,
        key="car",
        output=PLAN.schema,
        time_mode="eventTime",
        event_time="at",
    )
