"""Ready-made operators without a JVM: drawn rows, watermarks, moves and crashes, played on a `Trial`.

Responsible for: what happens to an operator in a test, and its outputs per key.
Not responsible for: what is right; each test has its own oracle in plain Python.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st
from pyspark.sql import types as t

from tiercel.operators import FoldPlan, Plan
from tiercel.spark.operators.folds import Fold
from tiercel.spark.rows.ddl import parse_ddl
from tiercel.testing import Trial

START = datetime.datetime(2026, 6, 1, 12, tzinfo=datetime.UTC)
START_MS = int(START.timestamp() * 1000)
SPEEDS = parse_ddl("car string, n int, speed double, at timestamp")
KEYS = ("a", "b")
VALUES = 12  # so few that none of them share a register of a HyperLogLog


class Sent(NamedTuple):
    """One row: its key, two values that may be null, and its time in ms after START."""

    car: str
    n: int | None
    speed: float | None
    ms: int

    @property
    def row(self) -> tuple[Any, ...]:
        return (self.car, self.n, self.speed, at(self.ms))


class Watermark(NamedTuple):
    """The watermark moves ahead by so much."""

    by_ms: int


class Move(NamedTuple):
    """A key goes to the other instance; the next row meets it on its way."""

    key: str


class Crash(NamedTuple):
    """All processes die, right after a checkpoint or later."""

    after_checkpoint: bool


Happening = Sent | Watermark | Move | Crash


def at(ms: int) -> datetime.datetime:
    return START + datetime.timedelta(milliseconds=ms)


def rows(last_ms: int = 60_000) -> st.SearchStrategy[Sent]:
    numbers = st.none() | st.integers(0, VALUES - 1)
    quarters = st.none() | st.integers(-40, 40).map(lambda n: n / 4)  # sums of these are exact
    return st.builds(Sent, st.sampled_from(KEYS), numbers, quarters, st.integers(0, last_ms))


def troubles() -> st.SearchStrategy[Happening]:
    return st.builds(Move, st.sampled_from(KEYS)) | st.builds(Crash, st.booleans())


def histories(*, last_ms: int = 60_000, timed: bool = True) -> st.SearchStrategy[list[Happening]]:
    """Rows, often more than one between two other things."""
    several: list[st.SearchStrategy[Any]] = [rows(last_ms)] * 4 + [troubles()]
    if timed:
        several.append(st.builds(Watermark, st.integers(1, last_ms // 3)))
    return st.lists(st.one_of(several), min_size=3, max_size=25)


def trial_of(plan: Plan | FoldPlan, schema: t.StructType = SPEEDS, event_time: str = "at") -> Trial:
    if isinstance(plan, FoldPlan):
        fold = Fold(plan.step, plan.initial, plan.state_schema, plan.schema)
        return Trial(fold, schema=schema, key="car", output=plan.schema)
    timed = event_time if plan.time_mode == "eventTime" else ""
    return Trial(
        plan.processor,
        schema=schema,
        key="car",
        output=plan.schema,
        time_mode=plan.time_mode,
        event_time=timed,
    )


def play(trial: Trial, history: Sequence[Happening], *, end: bool = True) -> Trial:
    """All of it, in its order. In event time a watermark far ahead ends it."""
    watermark, moving = 0, False
    for one in history:
        match one:
            case Sent():
                trial.send(one.row)
                if moving:
                    trial.finish_moves()
                    moving = False
            case Watermark():
                watermark += one.by_ms
                trial.watermark(START_MS + watermark)
            case Move():
                trial.finish_moves()
                trial.begin_move(one.key)
                moving = True
            case Crash():
                trial.crash(after_checkpoint=one.after_checkpoint)
                moving = False
    trial.finish_moves()
    if end:
        trial.watermark(START_MS + 10**9)
    return trial


def watermarks(history: Sequence[Happening]) -> list[tuple[Happening, int]]:
    """Each thing that happens with the watermark that holds then, in ms after START; none yet: far below."""
    found: list[tuple[Happening, int]] = []
    watermark, known = 0, False
    for one in history:
        if isinstance(one, Watermark):
            watermark, known = watermark + one.by_ms, True
        found.append((one, watermark if known else -(10**12)))
    return found
