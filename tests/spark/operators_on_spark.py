"""A ready-made operator on a deployment, with a move and a kill in the middle, and what it gave.

Responsible for: rows in, outputs out, and what happens between.
Not responsible for: what is right; Spark's own operators say that in the tests.
"""

from __future__ import annotations

import contextlib
import datetime
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oracle import HANG_S, kill, until
from pyspark.sql import SparkSession

import tiercel
from tiercel.spark.api.streams import LiveStream

START = datetime.datetime(2026, 6, 1, 12, tzinfo=datetime.UTC)
END = START + datetime.timedelta(hours=1)  # the event time of a last row, which closes all that is open
CLOCK = "clock"  # its key
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


def tolls(seed: str, count: int = 240) -> list[tuple[Any, ...]]:
    return [(car, id_, n, at) for car, id_, n, _, at in speeds(seed, count)]


Declare = Callable[[Mapping[str, LiveStream]], LiveStream]


def run(
    spark: SparkSession,
    directory: Path,
    streams: Mapping[str, tuple[str, Sequence[tuple[Any, ...]]]],
    declare: Declare,
    wanted: int,
    *,
    killed: bool = False,
) -> list[tuple[Any, ...]]:
    """What the operator gives for these rows, half of which come before a move of half of the keys."""
    with tiercel.start(spark, ["cloud"], directory) as live:
        declared = {
            name: live.stream(name, schema, key="car", event_time="at", delay="10 seconds")
            for name, (schema, _) in streams.items()
        }
        output = declare(declared)
        operator = output.name.removesuffix(".out")
        found: list[tuple[Any, ...]] = []
        with contextlib.ExitStack() as ends:
            subscriber = ends.enter_context(output.subscribe(after=0))
            refused = ends.enter_context(output.dead_letters.subscribe(after=0))
            producers = {n: ends.enter_context(s.producer(f"producer-{n}")) for n, s in declared.items()}

            def send(part: slice) -> None:
                for name, (_, rows) in streams.items():
                    producers[name].send_many(rows[part])
                    producers[name].flush()

            def arrived() -> bool:
                found.extend(tuple(received.row) for received in subscriber.poll(0.05))
                if letters := [received.row.reason for received in refused.poll(0)]:
                    raise AssertionError(f"refused: {letters[:3]}")
                return len(found) >= wanted

            half = len(next(iter(streams.values()))[1]) // 2
            send(slice(0, half))
            owners = live.owners(operator, KEYS)
            leaving = [key for key, owner in owners.items() if owner.endswith("#1")]
            moving = live.move(operator, keys=leaving, to=f"{operator}@cloud#2", retries=10)
            send(slice(half, half + half // 2))
            if killed:
                kill(live, f"{operator}@cloud#2")
            send(slice(half + half // 2, None))
            moving.wait(HANG_S)
            assert {live.owners(operator, KEYS)[key] for key in leaving} == {f"{operator}@cloud#2"}
            for name, (schema, _) in streams.items():
                row = {column.split()[0]: None for column in schema.split(", ")}
                producers[name].send({**row, "car": CLOCK, "at": END})
                producers[name].flush()
            until(arrived, lambda: f"{len(found)} outputs of {wanted}")
            found.extend(
                tuple(received.row) for received in subscriber.poll(0.3)
            )  # what comes twice comes now
    return [row for row in found if row[0] != CLOCK]


def alike(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Rows in an order and a form that can be compared: times in UTC, lists and structs as tuples."""

    def plain(value: Any) -> Any:
        if isinstance(value, datetime.datetime):
            return value.astimezone(datetime.UTC).replace(tzinfo=None).isoformat()
        if isinstance(value, tuple | list):
            return tuple(plain(each) for each in value)
        return value

    return sorted(repr(plain(tuple(row))) for row in rows)
