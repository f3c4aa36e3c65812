"""Processors that run under Spark and under Tiercel, and what they are fed.

Responsible for: one processor for each part of PySpark's stateful API, and draws of its input.
Not responsible for: running them (oracle.py).

A row is an instruction to the state of its key: the processor carries it out and tells what it saw. So
the draws reach every call of the API in any order. Spark does not promise the order of rows inside a
batch: rows carry a number, and processors sort by it. All examples of a case share one query, told
apart by their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

EXAMPLES = 100
BATCHES = 4
INPUT = "k string, seq long, op string, n long, text string"
OUTPUT = "k string, seq long, told string"
START = datetime(2026, 1, 1, tzinfo=UTC)
HOUR_MS = 3_600_000
SHORT_MS = 300  # a time to live that always ends between two batches
FIRST_MS, LAST_MS = 200, 500  # timers that always fire between two batches
KEPT = "n long, text string, half double, at timestamp, tags array<string>, deep struct<a:int,b:string>"


def told(value: Any) -> str:
    """What user code got, with its types: a Row is told from a tuple, a tuple from a list."""
    if isinstance(value, Row):
        return f"Row({', '.join(f'{n}={told(v)}' for n, v in zip(value.__fields__, value, strict=True))})"
    if isinstance(value, tuple):
        return f"({', '.join(map(told, value))})"
    if isinstance(value, list):
        return f"[{', '.join(map(told, value))}]"
    if isinstance(value, datetime):
        return f"{value.timestamp()}{'' if value.tzinfo is None else '+zone'}"
    return repr(value)


def wide(row: Any) -> tuple[Any, ...]:
    """A value of many types, made of an instruction."""
    return (
        row.n,
        row.text,
        row.n / 2,
        START + timedelta(milliseconds=row.n),
        [row.text, "t"],
        Row(a=row.n % 7, b=row.text),
    )


class Told(StatefulProcessor):
    """Carries instructions out in the order of their numbers."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        self.times = timerValues
        for row in sorted(rows, key=lambda row: row.seq):
            yield Row(k=key[0], seq=row.seq, told=f"{row.op}: {told(self.carry_out(row))}")

    def carry_out(self, row: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Values(Told):
    """Value state: of one column, and of many types."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.count = handle.getValueState("count", "n long")
        self.wide = handle.getValueState("wide", KEPT)

    def carry_out(self, row: Any) -> Any:
        match row.op:
            case "add":
                self.count.update(((self.count.get() or (0,))[0] + row.n,))
            case "set":
                self.wide.update(wide(row))
            case "set null":
                self.wide.update((None,) * 6)
            case "clear":
                self.count.clear()
                self.wide.clear()
        return (self.count.exists(), self.count.get(), self.wide.exists(), self.wide.get())


class Lists(Told):
    """List state."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.list = handle.getListState("list", KEPT)

    def carry_out(self, row: Any) -> Any:
        match row.op:
            case "append":
                self.list.appendValue(wide(row))
            case "append list":
                self.list.appendList([wide(row)] * (1 + row.n % 3))
            case "put":
                self.list.put([wide(row), (None,) * 6])
            case "clear":
                self.list.clear()
        return (self.list.exists(), list(self.list.get()))


class Maps(Told):
    """Map state, with keys of two columns. Its order is nobody's promise: what is told is sorted."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.map = handle.getMapState("map", "text string, odd boolean", KEPT)

    def carry_out(self, row: Any) -> Any:
        at, answer = (row.text, row.n % 2 == 1), None
        match row.op:
            case "update":
                self.map.updateValue(at, wide(row))
            case "remove":
                self.map.removeKey(at)
            case "remove all":
                keys = self.map.keys()
                for key in keys:
                    self.map.removeKey(key)
            case "get":
                answer = self.map.getValue(at)
            case "contains":
                answer = self.map.containsKey(at)
            case "clear":
                self.map.clear()
        items = sorted(map(told, self.map.iterator()))
        return (
            self.map.exists(),
            answer,
            sorted(self.map.keys()),
            sorted(map(told, self.map.values())),
            items,
        )


class Expiring(Told):
    """State of every kind with a time to live: one that always ends between batches, one that never does."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        lives = {"short": SHORT_MS, "long": HOUR_MS}
        self.values = {n: handle.getValueState(f"{n}-value", "n long", ms) for n, ms in lives.items()}
        self.lists = {n: handle.getListState(f"{n}-list", "n long", ms) for n, ms in lives.items()}
        self.maps = {n: handle.getMapState(f"{n}-map", "t string", "n long", ms) for n, ms in lives.items()}

    def carry_out(self, row: Any) -> Any:
        op, _, life = row.op.partition(" ")
        match op:
            case "value":
                self.values[life].update((row.n,))
            case "append":
                self.lists[life].appendValue((row.n,))
            case "put":
                self.lists[life].put([(row.n,), (row.n + 1,)])
            case "map":
                self.maps[life].updateValue((row.text,), (row.n,))
            case "remove":
                self.maps[life].removeKey((row.text,))
            case "clear":
                self.values[life].clear()
        return [
            (
                self.values[n].exists(),
                self.values[n].get(),
                self.lists[n].exists(),
                list(self.lists[n].get()),
                self.maps[n].exists(),
                self.maps[n].containsKey((row.text,)),
                self.maps[n].getValue((row.text,)),
                sorted(self.maps[n].iterator()),
            )
            for n in ("short", "long")
        ]


class EventTimers(Told):
    """Timers in event time. A firing one may register another, and sees itself in the list.

    What it registers is not due yet: such a timer would fire at once here, in order with the others, and
    with Spark's next batch there.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.fired = handle.getValueState("fired", "n long")

    def carry_out(self, row: Any) -> Any:
        match row.op:
            case "register":
                self.handle.registerTimer(row.n)
            case "delete":
                self.handle.deleteTimer(row.n)
            case "clear":
                self.fired.clear()
        seen = (self.times.getCurrentWatermarkInMs(), row.ts)
        return (seen, sorted(self.handle.listTimers()), self.fired.get())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        expiry = expiredTimerInfo.getExpiryTimeInMs()
        fired = (self.fired.get() or (0,))[0] + 1
        self.fired.update((fired,))
        if expiry % 5 == 0:
            self.handle.registerTimer(timerValues.getCurrentWatermarkInMs() + 7_001 + 10 * fired)
        seen = (timerValues.getCurrentWatermarkInMs(), told(key), fired, sorted(self.handle.listTimers()))
        yield Row(k=key[0], seq=expiry, told=f"fired: {told(seen)}")


class Alarms(Told):
    """Timers in processing time, told by their labels and never by their times."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.labels = handle.getMapState("labels", "at long", "label string, again boolean")

    def carry_out(self, row: Any) -> Any:
        now = self.times.getCurrentProcessingTimeInMs()
        match row.op.split():
            case ["in" | "never" | "twice" as when]:
                at = now + (HOUR_MS if when == "never" else 0) + row.n
                self.handle.registerTimer(at)
                self.labels.updateValue((at,), (row.text, when == "twice"))
            case ["cancel"]:
                for (at,), (label, _) in list(self.labels.iterator()):
                    if label == row.text:
                        self.handle.deleteTimer(at)
                        self.labels.removeKey((at,))
        return (self.times.getCurrentWatermarkInMs(), len(list(self.handle.listTimers())))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        label, again = self.labels.getValue((at,))
        self.labels.removeKey((at,))
        if again:
            self.handle.registerTimer(at + LAST_MS)
            self.labels.updateValue((at + LAST_MS,), (label, False))
        left = sorted(label for label, _ in self.labels.values())
        yield Row(k=key[0], seq=0, told=f"{label} fired, left: {told((left, key))}")


class Started(Told):
    """Begins with state of every kind that was given."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.sum = handle.getValueState("sum", "n long")
        self.seen = handle.getListState("seen", "n long")
        self.by_text = handle.getMapState("by_text", "text string", "n long")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.sum.update(((self.sum.get() or (0,))[0] + initialState.begin,))
        self.seen.appendValue((initialState.begin,))
        self.by_text.updateValue((f"{key[0]} {initialState.label}",), (initialState.begin,))

    def carry_out(self, row: Any) -> Any:
        match row.op:
            case "add":
                self.sum.update(((self.sum.get() or (0,))[0] + row.n,))
            case "clear":
                self.sum.clear()
        return (self.sum.get(), sorted(self.seen.get()), sorted(map(told, self.by_text.iterator())))


class Join(Told):
    """Orders with payments, whichever comes first; the columns of the other input are null."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.orders = handle.getListState("orders", "n long")
        self.payments = handle.getMapState("payments", "text string", "n long")

    def carry_out(self, row: Any) -> Any:
        if row.text is None:
            self.orders.appendValue((row.n,))
            return [(row.n, told(paid)) for paid in sorted(map(told, self.payments.iterator()))]
        self.payments.updateValue((row.text,), (row.amount,))
        return [(told(ordered), row.text, row.n) for ordered in self.orders.get()]


# -- what they are fed ------------------------------------------------------------------------


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

    @property
    def keys(self) -> list[str]:
        return sorted({row[0] for batch in self.batches for rows in batch.values() for row in rows})


Draw = Callable[[Random, str, int, int], list[tuple[Any, ...]]]


def drawn(seed: str, draw: Draw) -> list[list[tuple[Any, ...]]]:
    """Rows of every example in every batch; one or two keys each, some silent in a batch."""
    batches: list[list[tuple[Any, ...]]] = []
    randoms = [Random(f"{seed}-{example}") for example in range(EXAMPLES)]
    for batch in range(BATCHES):
        rows: list[tuple[Any, ...]] = []
        for example, random in enumerate(randoms):
            for key in ("a", "b")[: 1 + example % 2]:
                of_key = draw(random, f"{example}-{key}", batch, random.randint(0, 3))
                rows += [(k, batch * 1000 + n, *rest) for n, (k, *rest) in enumerate(of_key)]
        Random(f"{seed}-{batch}").shuffle(rows)
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
        f"{op} {life}"
        for op in ("value", "append", "put", "map", "remove", "clear")
        for life in ("short", "long")
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
    random = Random("initial")
    keys = [key for key in case.keys if random.random() < 0.7] + [f"silent-{n}" for n in range(5)]
    case.initial_schema = "k string, label string, begin long"
    case.initial = [
        (key, label, random.randint(1, 99)) for key in keys for label in "pq"[: random.randint(1, 2)]
    ]
    return case


def join() -> Case:
    """A key has a row of one of the inputs in a batch: both sides then agree on their order."""
    batches: list[dict[str, list[tuple[Any, ...]]]] = []
    random = Random("join")
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
}
