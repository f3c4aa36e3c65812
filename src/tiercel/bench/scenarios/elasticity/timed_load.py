"""A load whose rate changes at any time, at several sites, that survives kills; every output is judged.

Responsible for: the operator `TimedSum`, producers with a rate of their own at each site, one reader, faults
    by kind, latencies by the second in which rows were due.
Not responsible for: deployments and policies (offload.py, soak.py), loads without a loss of processes, which
    the leaner process of loadgen/ drives.

The rows of a car have the numbers 1, 2, 3, ... The operator adds them up, so the right output of each row is
known: its number and the sum of all numbers up to it, once and in order.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic_ns
from typing import Any

import numpy as np

from tiercel.apps.service import Service
from tiercel.bench.report import percentile
from tiercel.bench.scenarios.elasticity.ramp import by_second
from tiercel.spark.api.streams import LiveStream
from tiercel.spark.operators.processor_adapter import Row, StatefulProcessor, StatefulProcessorHandle

INPUT = "car string, n long, due_ns long"
OUTPUT = "car string, n long, total long, due_ns long"
TICK_S = 0.01
POLL_S = 0.1
FLUSH_S_MAX = 180.0
QUIET_S_MAX = 180.0  # without any new output at the end, what is missing is lost


class TimedSum(StatefulProcessor):
    """Adds up the numbers of a car; each row takes `service_us`, in which it waits."""

    def __init__(self, service_us: float) -> None:
        self._service = Service(service_us)

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._total = handle.getValueState("total", "total long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        (total,) = self._total.get() or (0,)
        for row in rows:
            self._service.spend()
            total += row.n
            yield Row(car=key[0], n=row.n, total=total, due_ns=row.due_ns)
        self._total.update((total,))

    def close(self) -> None:
        """Holds no resources."""


class Judge:
    """Compares each output with the only right one, as it comes; its memory does not grow with the rows."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}  # car -> its highest number
        self.missing: dict[str, set[int]] = {}  # below it, not seen
        self.counts: Counter[str] = Counter()

    def take(self, car: str, n: int, total: int) -> None:
        highest = self.seen.get(car, 0)
        if n == highest + 1:
            self.seen[car] = n
        elif n > highest:
            self.missing.setdefault(car, set()).update(range(highest + 1, n))
            self.seen[car] = n
        elif n in self.missing.get(car, ()):
            self.missing[car].remove(n)
            self.counts["reordered"] += 1
        else:
            self.counts["doubled"] += 1
        if total != n * (n + 1) // 2:
            self.counts["wrong"] += 1

    def verdict(self, sent: Mapping[str, int]) -> dict[str, int]:
        """Faults by kind, for cars whose numbers ended here."""
        lost = sum(map(len, self.missing.values()))
        lost += sum(max(0, last - self.seen.get(car, 0)) for car, last in sent.items())
        return {"lost": lost, **{kind: self.counts[kind] for kind in ("doubled", "reordered", "wrong")}}


class TimedLoad:
    """Producers at sites, and one reader, in threads of the driver."""

    def __init__(
        self, stream: LiveStream, output: LiveStream, cars: Mapping[str, Sequence[str]], reads_at: str = ""
    ) -> None:
        self.rates = dict.fromkeys(cars, 0.0)  # site -> rows per second; change it at any time
        self.sent: dict[str, int] = {}  # car -> its last number
        self.rows = Counter[str]()  # site -> rows sent
        self.judge = Judge()
        self.due_ns, self.arrived_ns, self.place = array("q"), array("q"), array("q")  # of outputs
        self.failures: list[str] = []
        self._site_of = {car: n for n, (_, names) in enumerate(cars.items()) for car in names}
        self.sites = list(cars)
        self._stop, self._ended = threading.Event(), threading.Event()
        subscriber = output.subscribe(after=0, **({"at": reads_at} if reads_at else {}))
        self._reader = threading.Thread(target=self._guard, args=(self._read, subscriber), daemon=True)
        self._producers = [
            threading.Thread(target=self._guard, args=(self._produce, stream, site, names), daemon=True)
            for site, names in cars.items()
        ]
        for thread in (self._reader, *self._producers):
            thread.start()

    def _guard(self, work: Any, *args: Any) -> None:
        try:
            work(*args)
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    def _produce(self, stream: LiveStream, site: str, cars: Sequence[str]) -> None:
        with stream.producer(f"gateway of {site}", site=site) as producer:
            numbers, at, due = dict.fromkeys(cars, 0), 0, 0.0
            last_s = time.monotonic()
            while not self._stop.wait(TICK_S):
                now_s = time.monotonic()
                due += self.rates[site] * (now_s - last_s)
                last_s = now_s
                count, due_ns = int(due), monotonic_ns()
                due -= count
                rows = []
                for _ in range(count):
                    car = cars[at % len(cars)]
                    at += 1
                    numbers[car] += 1
                    rows.append((car, numbers[car], due_ns))
                if rows:
                    producer.send_many(rows)  # waits while the deployment is behind, or a router is away
                    self.rows[site] += len(rows)
            producer.flush(FLUSH_S_MAX)
            self.sent.update(numbers)

    def _read(self, subscriber: Any) -> None:
        take = self.judge.take
        with subscriber:
            while not self._ended.is_set():
                rows = subscriber.poll_values(POLL_S)
                now = monotonic_ns()
                for car, n, total, due_ns in rows:
                    take(car, n, total)
                    self.due_ns.append(due_ns)
                    self.arrived_ns.append(now)
                    self.place.append(self._site_of[car])

    def end(self) -> dict[str, int]:
        """Stop sending, wait for the last outputs; returns the verdict."""
        self._stop.set()
        for thread in self._producers:
            thread.join()
        wanted, last, since = sum(self.sent.values()), -1, time.monotonic()
        while len(self.due_ns) < wanted and time.monotonic() - since < QUIET_S_MAX:
            if len(self.due_ns) != last:
                last, since = len(self.due_ns), time.monotonic()
            time.sleep(0.1)
        time.sleep(1.0)  # a doubled one would come now
        self._ended.set()
        self._reader.join()
        return self.judge.verdict(self.sent)

    def p99_by_second(self, begun_s: float, site: str = "") -> list[tuple[float, float]]:
        """The p99 of latency in ms of each second in which rows were due, of one site or all."""
        due, arrived = np.asarray(self.due_ns), np.asarray(self.arrived_ns)
        if site:
            mine = np.asarray(self.place) == self.sites.index(site)
            due, arrived = due[mine], arrived[mine]
        return by_second(due, (arrived - due) / 1e6, begun_s)

    def latency_ms(self, site: str, first_s: float, last_s: float) -> dict[str, float | None]:
        """Median and p99 of the rows that were due at a site between two moments of the monotonic clock."""
        due, arrived = np.asarray(self.due_ns) / 1e9, np.asarray(self.arrived_ns) / 1e9
        chosen = (due >= first_s) & (due < last_s) & (np.asarray(self.place) == self.sites.index(site))
        latency = np.sort((arrived - due)[chosen]) * 1e3
        if not len(latency):
            return {"p50_ms": None, "p99_ms": None}
        return {"p50_ms": round(percentile(latency, 0.5), 1), "p99_ms": round(percentile(latency, 0.99), 1)}
