"""Processors that run under Spark and under Tiercel.

Responsible for: one processor for each part of PySpark's stateful API.
Not responsible for: what they are fed (oracle_cases.py), running them (oracle.py).

A row is an instruction to the state of its key: the processor carries it out and tells what it saw. So
the draws reach every call of the API in any order. Spark does not promise the order of rows inside a
batch: rows carry a number, and processors sort by it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

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

    @abstractmethod
    def carry_out(self, row: Any) -> Any: ...

    def close(self) -> None:
        pass


def step(state: tuple[Any, ...], row: Any) -> tuple[Any, Any]:
    """A fold: what the row says to a count, the time of the last row, and all texts."""
    count, last, texts = state
    seen = f"{row.op}: {told((count, last, list(texts), row.n, row['text'], row[1]))}"
    at = START + timedelta(milliseconds=row.n)
    match row.op:
        case "add":
            return (count + row.n, at, [*texts, row.text]), (row.k, row.seq, seen)
        case "twice":
            return (count, None, []), [{"k": row.k, "seq": row.seq, "told": f"{seen} {n}"} for n in "12"]
        case "silent":
            return (count + 1, last, texts), None
        case "forget":
            return None, Row(told=seen, k=row.k, seq=row.seq)
        case _:
            return state, (row.k, row.seq, seen)


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
        incarnations = {"short": SHORT_MS, "long": HOUR_MS}
        self.values = {n: handle.getValueState(f"{n}-value", "n long", ms) for n, ms in incarnations.items()}
        self.lists = {n: handle.getListState(f"{n}-list", "n long", ms) for n, ms in incarnations.items()}
        self.maps = {
            n: handle.getMapState(f"{n}-map", "t string", "n long", ms) for n, ms in incarnations.items()
        }

    def carry_out(self, row: Any) -> Any:
        op, _, incarnation = row.op.partition(" ")
        match op:
            case "value":
                self.values[incarnation].update((row.n,))
            case "append":
                self.lists[incarnation].appendValue((row.n,))
            case "put":
                self.lists[incarnation].put([(row.n,), (row.n + 1,)])
            case "map":
                self.maps[incarnation].updateValue((row.text,), (row.n,))
            case "remove":
                self.maps[incarnation].removeKey((row.text,))
            case "clear":
                self.values[incarnation].clear()
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

    One that is due already when it is registered by a firing one fires later: in Spark with the next batch,
    here with the key's next row or watermark. So such a timer does not tell the watermark it sees.
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
        elif expiry % 5 == 2:
            self.handle.registerTimer(expiry - 3)
        now = timerValues.getCurrentWatermarkInMs() if expiry % 5 != 4 else "later"
        seen = (now, told(key), fired, sorted(self.handle.listTimers()))
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


class TimedJoin(Join):
    """Orders that were not paid in time, by a watermark that is the slower one of the two inputs."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.handle = handle

    def carry_out(self, row: Any) -> Any:
        if row.text is None:
            self.handle.registerTimer(int(row.ts.timestamp() * 1000) + 4_000)
        return (self.times.getCurrentWatermarkInMs(), super().carry_out(row))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        left = (sorted(self.orders.get()), sorted(map(told, self.payments.iterator())))
        now = timerValues.getCurrentWatermarkInMs()
        yield Row(k=key[0], seq=expiredTimerInfo.getExpiryTimeInMs(), told=f"unpaid: {told((now, left))}")


class Adopted(Told):
    """State of every kind and timers in event time: what a query that ran under Spark leaves to another."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n long")
        self.wide = handle.getValueState("wide", KEPT)
        self.list = handle.getListState("list", KEPT)
        self.map = handle.getMapState("map", "text string, odd boolean", KEPT)

    def carry_out(self, row: Any) -> Any:
        self.count.update(((self.count.get() or (0,))[0] + row.n,))
        match row.op:
            case "set":
                self.wide.update(wide(row))
            case "append":
                self.list.appendValue(wide(row))
            case "update":
                self.map.updateValue((row.text, row.n % 2 == 1), wide(row))
            case "register":
                self.handle.registerTimer(row.n * 1000)
        seen = (self.count.get(), self.wide.get(), list(self.list.get()))
        return (*seen, sorted(map(told, self.map.iterator())), sorted(self.handle.listTimers()))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        expiry = expiredTimerInfo.getExpiryTimeInMs()
        yield Row(k=key[0], seq=expiry, told=f"fired: {told((self.count.get(), list(self.list.get())))}")


class Lasting(Told):
    """Times to live and timers in processing time that outlast the query."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "n long", HOUR_MS)
        self.list = handle.getListState("list", "n long", HOUR_MS)
        self.map = handle.getMapState("map", "text string", "n long", HOUR_MS)

    def carry_out(self, row: Any) -> Any:
        seen = (self.value.get(), list(self.list.get()), sorted(map(told, self.map.iterator())))
        if row.op == "begin":
            self.value.update((row.n,))
            self.list.appendValue((row.n,))
            self.map.updateValue((row.text,), (row.n,))
            self.handle.registerTimer(self.times.getCurrentProcessingTimeInMs() + HOUR_MS + row.n)
        return (*seen, sorted(self.handle.listTimers()))
