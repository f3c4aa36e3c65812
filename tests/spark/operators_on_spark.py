"""Ready-made operators on one deployment, with moves and a kill in the middle, beside Spark's own.

Responsible for: drawn rows in, outputs out, and what happens between.
Not responsible for: what is right; Spark's own operators say that in the tests.
"""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracle import HANG_S, kill, until
from pyspark.sql import DataFrame, SparkSession

import tiercel
from tiercel.spark.api.streams import LiveStream

START = datetime.datetime(2026, 6, 1, 12, tzinfo=datetime.UTC)
CLOCK = "clock"  # the key of a last row, far ahead, which closes all that is open
CARS = 6  # of a course
KEYS = [f"car-{n}" for n in range(12)]
SPEEDS = "car string, id long, n int, speed double, at timestamp"
TOLLS = "car string, id long, toll int, at timestamp"
INSTANCES = {"cloud": 2}


def speeds(seed: str, count: int = 240, late_ms: int = 4_000) -> list[tuple[Any, ...]]:
    """Rows with nulls and duplicates, out of order by less than `late_ms`."""
    draw = random.Random(seed)
    rows = []
    for n in range(count):
        at = START + datetime.timedelta(milliseconds=250 * n + draw.randrange(late_ms))
        value = None if draw.randrange(8) == 0 else draw.randrange(20)
        speed = None if draw.randrange(8) == 0 else draw.randrange(400) / 4
        rows.append((KEYS[draw.randrange(len(KEYS))], draw.randrange(count // 8), value, speed, at))
    return rows


@dataclass(frozen=True)
class Drawn:
    """One course of things: rows, when keys begin to move, and when which instance of which operator dies."""

    rows: list[tuple[int, int, int | None, float | None, int]]  # car, id, n, speed, late by ms
    move_at: float  # share of the rows before
    kill_at: float  # share of the rows behind that
    to: int
    operator: int
    killed: int

    def speeds(self, prefix: str, start: datetime.datetime) -> list[tuple[Any, ...]]:
        times = (start + datetime.timedelta(milliseconds=250 * n + row[4]) for n, row in enumerate(self.rows))
        return [(f"{prefix}{car}", *rest, at) for (car, *rest, _), at in zip(self.rows, times, strict=True)]


def courses() -> st.SearchStrategy[Drawn]:
    row = st.tuples(
        st.integers(0, CARS - 1),
        st.integers(0, 9),
        st.none() | st.integers(0, 19),
        st.none() | st.integers(0, 400).map(lambda n: n / 4),
        st.integers(0, 3_999),
    )
    share, one = st.floats(0.1, 0.9), st.integers(1, 2)
    return st.builds(
        Drawn, st.lists(row, min_size=40, max_size=90), share, share, one, st.integers(0, 9), one
    )


@dataclass(frozen=True)
class Checked:
    """An operator: how it is declared, what Spark's own gives for the same rows, and what is compared."""

    declare: Callable[[LiveStream, LiveStream], LiveStream]
    by_spark: Callable[[DataFrame, DataFrame], DataFrame]
    compared: Callable[[list[tuple[Any, ...]]], list[Any]] = lambda rows: list(rows)  # in order of arrival


class Beside:
    """Several operators in one deployment. Each course has cars and an hour of its own."""

    def __init__(self, live: tiercel.Live, operators: Mapping[str, Checked]) -> None:
        self._live, self._operators = live, operators
        streams = {
            name: live.stream(name, schema, key="car", event_time="at", delay="10 seconds")
            for name, schema in (("speeds", SPEEDS), ("tolls", TOLLS))
        }
        outputs = {name: one.declare(streams["speeds"], streams["tolls"]) for name, one in operators.items()}
        self._names = [name for name in live.graph.operators if not name.endswith("-copy")]
        self._reading = {name: output.subscribe(after=0) for name, output in outputs.items()}
        self._producers = {name: stream.producer(f"producer-{name}") for name, stream in streams.items()}
        self._courses = 0

    def check(self, drawn: Drawn) -> None:
        """Every operator gives what Spark's own gives."""
        self._courses += 1
        prefix, start = f"{self._courses}-", START + datetime.timedelta(hours=2 * self._courses)
        speeds = drawn.speeds(prefix, start)
        tolls = [(car, id_, n, at) for car, id_, n, _, at in speeds[1::2]]
        frames = [
            self._live.spark.createDataFrame(
                [(*row, n) for n, row in enumerate(rows)], f"{schema}, place long"
            )
            for rows, schema in ((speeds, SPEEDS), (tolls, TOLLS))
        ]
        wanted = {
            name: [tuple(row) for row in one.by_spark(*frames).collect()]
            for name, one in self._operators.items()
        }
        self._run(drawn, speeds, tolls, sorted({row[0] for row in speeds}), start)
        found: dict[str, list[tuple[Any, ...]]] = {name: [] for name in self._operators}

        def arrived() -> bool:
            for name, reading in self._reading.items():
                found[name] += [tuple(row) for row in reading.poll_values(0.02) if row[0] != CLOCK]
            return all(len(found[name]) >= len(rows) for name, rows in wanted.items())

        until(arrived, lambda: f"{ {name: (len(found[name]), len(rows)) for name, rows in wanted.items()} }")
        time.sleep(0.3)
        arrived()  # what comes twice comes now
        for name, one in self._operators.items():
            assert alike(one.compared(found[name])) == alike(wanted[name]), name

    def _run(
        self,
        drawn: Drawn,
        speeds: list[tuple[Any, ...]],
        tolls: list[tuple[Any, ...]],
        cars: list[str],
        start: datetime.datetime,
    ) -> None:
        live, count = self._live, len(speeds)
        moves: list[Any] = []
        move_at = int(drawn.move_at * count)
        kill_at = move_at + int(
            drawn.kill_at * (count - move_at)
        )  # nothing moves to an instance that is dead
        for n in range(count):
            if n == move_at:
                self._flush()
                for operator in self._names:
                    to = f"{operator}@cloud#{drawn.to}"
                    moves.append(live.move(operator, keys=cars, to=to, retries=10))
            if n == kill_at:
                self._flush()
                kill(live, f"{self._names[drawn.operator % len(self._names)]}@cloud#{drawn.killed}")
            self._producers["speeds"].send(speeds[n])
            if n % 2:
                self._producers["tolls"].send(tolls[n // 2])
        self._flush()
        for moving in moves:
            moving.wait(HANG_S)
        for operator in self._names:
            assert set(live.owners(operator, cars).values()) == {f"{operator}@cloud#{drawn.to}"}
        at = start + datetime.timedelta(hours=1)
        self._producers["speeds"].send((CLOCK, None, None, None, at))
        self._producers["tolls"].send((CLOCK, None, None, at))
        self._flush()

    def _flush(self) -> None:
        for producer in self._producers.values():
            producer.flush()


def check_beside_spark(
    spark: SparkSession, directory: Path, operators: Mapping[str, Checked], examples: int
) -> None:
    """Drawn courses, one after the other, on one deployment."""
    with tiercel.start(spark, ["cloud"], directory) as live:
        beside = Beside(live, operators)

        @settings(max_examples=examples, derandomize=True, database=None, phases=[Phase.generate])
        @given(courses())
        def check(drawn: Drawn) -> None:
            beside.check(drawn)

        check()


def alike(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Rows in an order and a form that can be compared: times in UTC, lists and structs as tuples."""

    def plain(value: Any) -> Any:
        if isinstance(value, datetime.datetime):
            return value.astimezone(datetime.UTC).replace(tzinfo=None).isoformat()
        if isinstance(value, tuple | list):
            return tuple(plain(each) for each in value)
        return value

    return sorted(repr(plain(tuple(row))) for row in rows)
