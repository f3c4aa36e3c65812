"""The traffic of the demonstration: half of the cars report through a producer, half through files.

Responsible for: the open-loop load; recording what was sent; the latency of each output.
Not responsible for: phases and figures (run.py), whether outputs are right (speed_monitor.py).

Each position has a due time. Latency counts from the due time, also if the source is late.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

TICK_NS = 5_000_000  # probe cars report at each of these
TICKS_PER_ROUND = 40  # the other cars once in so many
FILE_S = 2.0  # between two files: a micro-batch each, and those are what costs
FILE_POSITIONS = 4  # of each car in one file
POLL_S = 0.2

SCHEMA = pa.schema([("number", pa.int32()), ("seq", pa.int64()), ("kmh", pa.int32()), ("due_ns", pa.int64())])
Position = tuple[int, int, int, int]  # number, seq, km/h, due ns


class Producer(Protocol):
    """The producer of a stream of positions."""

    def send_many(self, rows: list[tuple[str, int, float, int]]) -> None: ...
    def flush(self, timeout_s: float) -> None: ...


class Subscriber(Protocol):
    """A subscriber to the speeds."""

    def poll(self, timeout_s: float) -> Sequence[Any]: ...


def car_name(number: int) -> str:
    return f"car-{number:03}"


def car_number(name: str) -> int:
    return int(name[4:])


def kmh(number: int, seq: int) -> int:
    """Every tenth car is a fast one."""
    return 60 + (number * 7 + seq * 13) % 90 + (40 if number % 10 == 0 else 0)


def write_file(path: Path, positions: Sequence[Position]) -> None:
    """Appears at once and whole: a streaming query watches the directory."""
    columns = list(zip(*positions, strict=True)) or [()] * len(SCHEMA)
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], SCHEMA)
    hidden = path.with_name(f"_{path.name}")
    pq.write_table(table, hidden)
    hidden.rename(path)


class BackgroundTask(threading.Thread, ABC):
    """A thread that ends on request and passes its failure on."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.ending = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.work()
        except BaseException as failure:
            self.failure = failure

    @abstractmethod
    def work(self) -> None:
        """The work of the thread, until `ending` is set."""

    def end(self) -> None:
        """End it, wait, and raise its failure."""
        self.ending.set()
        self.join()
        if self.failure is not None:
            raise self.failure


class PositionProducer(BackgroundTask):
    """Half of the cars: probe cars report at every tick, each of the others once in a round."""

    def __init__(self, producer: Producer, probes: Sequence[int], others: Sequence[int]) -> None:
        super().__init__("demo-producer")
        self._producer = producer
        self._by_tick = [[*probes, *others[tick::TICKS_PER_ROUND]] for tick in range(TICKS_PER_ROUND)]
        self._seq = dict.fromkeys([*probes, *others], 0)
        self.sent: list[Position] = []

    def work(self) -> None:
        due, tick = monotonic_ns(), 0
        while not self.ending.is_set():
            due += TICK_NS
            wait = due - monotonic_ns()
            if wait > 0:
                time.sleep(wait / 1e9)
            positions = [self._next(number, due) for number in self._by_tick[tick % TICKS_PER_ROUND]]
            self._producer.send_many([(car_name(n), seq, float(v), at) for n, seq, v, at in positions])
            self.sent += positions
            tick += 1
        self._producer.flush(30.0)

    def _next(self, number: int, due: int) -> Position:
        seq = self._seq[number]
        self._seq[number] = seq + 1
        return number, seq, kmh(number, seq), due


class FileWriter(BackgroundTask):
    """The other half: one file after the other with some positions of each car."""

    def __init__(self, directory: Path, cars: Sequence[int]) -> None:
        super().__init__("demo-files")
        self._directory, self._cars = directory, cars
        self.files = 0

    @property
    def positions(self) -> int:
        return self.files * FILE_POSITIONS * len(self._cars)

    def work(self) -> None:
        while not self.ending.wait(FILE_S):
            due = monotonic_ns()
            first = self.files * FILE_POSITIONS
            rows = [
                (number, seq, kmh(number, seq), due)
                for seq in range(first, first + FILE_POSITIONS)
                for number in self._cars
            ]
            write_file(self._directory / f"{self.files:06}.parquet", rows)
            self.files += 1


class SpeedSubscriber(BackgroundTask):
    """Reads the speeds as they become durable, and records the latency of the producer's cars."""

    def __init__(self, subscriber: Subscriber, timed: Sequence[int]) -> None:
        super().__init__("demo-subscriber")
        self._subscriber, self._timed = subscriber, frozenset(timed)
        self.outputs = self.alerts = 0
        self.cars, self.due_ns, self.late_ns = array("l"), array("q"), array("q")  # one per timed output

    def work(self) -> None:
        while not self.ending.is_set():
            received = self._subscriber.poll(POLL_S)
            now = monotonic_ns()
            for row in (one.row for one in received):
                number = car_number(row.car)
                self.alerts += row.alert
                if number in self._timed:
                    self.cars.append(number)
                    self.due_ns.append(row.due_ns)
                    self.late_ns.append(now - row.due_ns)
            self.outputs += len(received)
