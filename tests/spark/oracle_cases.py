"""What the oracle's processors are fed.

Responsible for: draws of each processor's input, at least a hundred examples of it that are not empty.
Not responsible for: the processors (oracle_processors.py), running them (oracle.py).

All examples of a case share one query, told apart by their keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Any

from oracle_processors import (
    FIRST_MS,
    LAST_MS,
    SHORT_MS,
    START,
    Alarms,
    EventTimers,
    Expiring,
    Join,
    Lists,
    Maps,
    Started,
    TimedJoin,
    Values,
    step,
)
from pyspark.sql.streaming import StatefulProcessor

from tiercel.spark.operators.folds import Fold

EXAMPLES = 110  # some have no row at all
EXAMPLES_LEAST = 100  # that have one
BATCHES = 4
MARKER = "marker"
SEED = os.environ.get("TIERCEL_ORACLE_SEED", "")  # other inputs, as test_live_oracle.py says
INPUT = "k string, seq long, op string, n long, text string"
OUTPUT = "k string, seq long, told string"


@dataclass
class Case:
    """A processor and its input, batch by batch; each batch has the rows of each stream."""

    name: str
    processor: StatefulProcessor
    streams: dict[str, str]  # stream -> schema
    batches: list[dict[str, list[tuple[Any, ...]]]]
    time_mode: str = "none"
    event_time: str = ""
    delay_ms: int = 0
    initial: list[tuple[Any, ...]] | None = None
    initial_schema: str = ""
    apart_s: float = 0.0  # the least time between two batches
    outputs: list[int] | None = None  # after each batch, where Spark cannot tell that it is done

    def markers(self, keys: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
        """A stream, and a row for each of these new keys: told at once, not late, moving no watermark."""
        stream, schema = next(iter(self.streams.items()))
        row = {"seq": 0, "op": MARKER, "n": 0, "text": "x", "ts": START + timedelta(seconds=10 * BATCHES)}
        names = [column.split()[0] for column in schema.split(",")]
        return stream, [{name: key if name == "k" else row[name] for name in names} for key in keys]

    @property
    def examples(self) -> int:
        """How many have a row; clocks are none."""
        return len({key.partition("-")[0] for key in self.keys if key[0].isdecimal()})

    @property
    def keys(self) -> list[str]:
        return sorted({row[0] for batch in self.batches for rows in batch.values() for row in rows})


def random_of(text: str) -> Random:
    return Random(SEED + text)


Draw = Callable[[Random, str, int, int], list[tuple[Any, ...]]]


def drawn(seed: str, draw: Draw) -> list[list[tuple[Any, ...]]]:
    """Rows of every example in every batch; one or two keys each, some silent in a batch."""
    batches: list[list[tuple[Any, ...]]] = []
    randoms = [random_of(f"{seed}-{example}") for example in range(EXAMPLES)]
    for batch in range(BATCHES):
        rows: list[tuple[Any, ...]] = []
        for example, random in enumerate(randoms):
            for key in ("a", "b")[: 1 + example % 2]:
                of_key = draw(random, f"{example}-{key}", batch, random.randint(0, 3))
                rows += [(k, batch * 1000 + n, *rest) for n, (k, *rest) in enumerate(of_key)]
        random_of(f"{seed}-{batch}").shuffle(rows)
        batches.append(rows)
    return batches


def instructions(*ops: str) -> Draw:
    def draw(random: Random, key: str, batch: int, count: int) -> list[tuple[Any, ...]]:
        return [
            (key, random.choice(ops), random.randint(-3, 300), random.choice("xyz")) for _ in range(count)
        ]

    return draw


def one_stream(batches: list[list[tuple[Any, ...]]]) -> list[dict[str, list[tuple[Any, ...]]]]:
    return [{"input": rows} for rows in batches]


def plain(name: str, processor: StatefulProcessor, *ops: str) -> Case:
    return Case(name, processor, {"input": INPUT}, one_stream(drawn(name, instructions(*ops))))


def expiring() -> Case:
    ops = [
        f"{op} {incarnation}"
        for op in ("value", "append", "put", "map", "remove", "clear")
        for incarnation in ("short", "long")
    ]
    case = plain("expiring", Expiring(), "look", *ops)
    case.time_mode, case.apart_s = "processingTime", 2 * SHORT_MS / 1000
    case.outputs = running_total(len(batch["input"]) for batch in case.batches)
    return case


def running_total(counts: Any) -> list[int]:
    total, totals = 0, []
    for count in counts:
        total += count
        totals.append(total)
    return totals


CLOCKS = ("clock-1", "clock-2")  # their timers say that a batch's watermark has come to where they are
DELAY_MS = 2_000


def event_timers() -> Case:
    """Batches of 10 s of event time, with rows that are late and timers that are past."""
    start_ms = int(START.timestamp() * 1000)

    def draw(random: Random, key: str, batch: int, count: int) -> list[tuple[Any, ...]]:
        rows = []
        for _ in range(count):
            at = start_ms + batch * 10_000 + random.randint(-12_000, 9_000)
            timer = start_ms + batch * 10_000 + random.randint(-20_000, 30_000) // 50 * 50
            op = random.choice(["register", "register", "register", "delete", "look", "clear"])
            rows.append((key, op, timer, "", START + timedelta(milliseconds=at - start_ms)))
        return rows

    batches = drawn("event timers", draw)
    for batch, rows in enumerate(batches):
        newest = start_ms + batch * 10_000 + 10_000
        for clock in CLOCKS:
            due = newest - DELAY_MS
            rows.append(
                (clock, batch, "register", due + 1, "", START + timedelta(milliseconds=newest + 1 - start_ms))
            )
    return Case(
        "event-timers",
        EventTimers(),
        {"input": f"{INPUT}, ts timestamp"},
        one_stream(batches),
        time_mode="eventTime",
        event_time="ts",
        delay_ms=DELAY_MS,
    )


def alarms() -> Case:
    fires: list[int] = [0] * BATCHES
    never: dict[str, list[str]] = {}

    def draw(random: Random, key: str, batch: int, count: int) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        offsets = random.sample(range(FIRST_MS, LAST_MS), count)
        for n, offset in enumerate(offsets):
            op = random.choice(["in", "in", "twice", "never", "cancel", "look"])
            label = f"{batch}.{n}"
            if op == "never":
                never.setdefault(key, []).append(label)
            elif op == "cancel":
                known = never.get(key, ["none"])
                label = random.choice(known)
            fires[batch] += {"in": 1, "twice": 2}.get(op, 0)
            rows.append((key, op, offset, label))
        return rows

    batches = drawn("alarms", draw)
    counts = [len(rows) + fired for rows, fired in zip(batches, fires, strict=True)]
    return Case(
        "alarms",
        Alarms(),
        {"input": INPUT},
        one_stream(batches),
        time_mode="processingTime",
        outputs=running_total(counts),
    )


def started() -> Case:
    case = plain("started", Started(), "add", "add", "look", "clear")
    random = random_of("initial")
    keys = [key for key in case.keys if random.random() < 0.7] + [f"silent-{n}" for n in range(5)]
    case.initial_schema = "k string, label string, begin long"
    case.initial = [
        (key, label, random.randint(1, 99)) for key in keys for label in "pq"[: random.randint(1, 2)]
    ]
    return case


def join() -> Case:
    """A key has a row of one of the inputs in a batch: both sides then agree on their order."""
    batches: list[dict[str, list[tuple[Any, ...]]]] = []
    random = random_of("join")
    for batch in range(BATCHES):
        rows: dict[str, list[tuple[Any, ...]]] = {"orders": [], "payments": []}
        for example in range(EXAMPLES):
            for key in (f"{example}-a", f"{example}-b"):
                n = random.randint(1, 99)
                match random.choice(["order", "payment", "none"]):
                    case "order":
                        rows["orders"].append((key, batch, "order", n))
                    case "payment":
                        rows["payments"].append((key, batch, "payment", random.choice("xyz"), n))
        batches.append(rows)
    streams = {
        "orders": "k string, seq long, op string, n long",
        "payments": "k string, seq long, op string, text string, amount long",
    }
    return Case("join", Join(), streams, batches)


def timed_join() -> Case:
    """As the join, in event time.

    Both inputs are equally far in every batch: it does not matter which one's rows of a batch come first.
    """
    case = join()
    random = random_of("timed join")
    for batch, rows in enumerate(case.batches):
        for name, of_stream in rows.items():
            drawn_ms = [batch * 10_000 + random.randint(-12_000, 9_000) for _ in of_stream]
            rows[name] = [
                (*row, START + timedelta(milliseconds=at))
                for row, at in zip(of_stream, drawn_ms, strict=True)
            ]
        newest = START + timedelta(milliseconds=batch * 10_000 + 10_000)
        rows["orders"].append(("clock", batch, "order", batch, newest))
        rows["payments"].append(("clock too", batch, "payment", "x", batch, newest))
    case.name, case.processor = "timed-join", TimedJoin()
    case.streams = {name: f"{schema}, ts timestamp" for name, schema in case.streams.items()}
    case.time_mode, case.event_time, case.delay_ms = "eventTime", "ts", DELAY_MS
    return case


def fold() -> Case:
    """A key has at most one row in a batch: a step cannot bring rows into order."""
    batches: list[list[tuple[Any, ...]]] = []
    random = random_of("fold")
    for batch in range(BATCHES):
        ops = {
            f"{n}-a": random.choice(["add", "add", "twice", "silent", "forget", "look"])
            for n in range(EXAMPLES)
        }
        rows = [(key, batch, op, random.randint(1, 99), random.choice("xyz")) for key, op in ops.items()]
        batches.append([row for row in rows if random.random() < 0.8])
    folded = Fold(step, (0, None, []), "n long, last timestamp, texts array<string>", OUTPUT)
    return Case("fold", folded, {"input": INPUT}, one_stream(batches))


CASES: dict[str, Callable[[], Case]] = {
    "value state": lambda: plain("values", Values(), "add", "set", "set null", "clear", "look"),
    "list state": lambda: plain("lists", Lists(), "append", "append list", "put", "clear", "look"),
    "map state": lambda: plain(
        "maps", Maps(), "update", "update", "update", "remove", "remove all", "get", "contains", "clear"
    ),
    "time to live": expiring,
    "event-time timers": event_timers,
    "processing-time timers": alarms,
    "initial state": started,
    "join": join,
    "join in event time": timed_join,
    "fold": fold,
}
