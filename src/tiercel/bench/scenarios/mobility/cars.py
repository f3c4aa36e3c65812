"""Cars on routes: each enters its rows at the edge where it is, and numbers them itself.

Responsible for: routes drawn from a seed, the process that sends rows when they are due and notes when their
    outputs come back.
Not responsible for: the deployment (drive.py), judging what came back (figures.py).

The load is open: a row is due at its time, whatever happened to those before it. Latency counts from then.
"""

from __future__ import annotations

import heapq
import multiprocessing
import random
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import numpy as np

from tiercel.errors import UserError
from tiercel.spark.api.clients import RowProducer, RowSubscriber

TICK_S = 0.005
DRAIN_S_MAX = 60.0
STREAM = "positions"


class Car(msgspec.Struct, frozen=True):
    """A car: how often it sends, and from when on it is at which site."""

    name: str
    rate: float  # rows per second
    route: list[tuple[float, str]]  # seconds after the start -> site

    def site_at(self, second: float) -> str:
        site = self.route[0][1]
        for since, there in self.route:
            if since > second:
                break
            site = there
        return site


class Plan(msgspec.Struct, frozen=True):
    """What the process does."""

    storage: str
    output: str
    sites: list[str]
    readers: list[str]  # sites whose outputs are read there; "" is the home of the output
    cars: list[Car]
    seconds: float
    result: str
    seed: int


def draw_cars(
    rng: random.Random, count: int, probes: int, rate: float, probe_rate: float, edges: Sequence[str],
    stay_s: float, seconds: float,
) -> list[Car]:  # fmt: skip
    """Cars on a ring of edges. The first `probes` send often, so that an interruption of them is seen."""
    cars = []
    for n in range(count):
        at, site = 0.0, rng.randrange(len(edges))
        route = [(0.0, edges[site])]
        at = rng.uniform(0.0, stay_s)  # at any time some car crosses
        while at < seconds:
            site = (site + rng.choice((-1, 1))) % len(edges)
            route.append((round(at, 3), edges[site]))
            at += stay_s * rng.uniform(0.6, 1.4)
        cars.append(Car(f"car-{n}", probe_rate if n < probes else rate, route))
    return cars


class CarProcess:
    """The process that drives all cars."""

    def __init__(self, plan: Plan) -> None:
        self._result = Path(plan.result)
        context = multiprocessing.get_context("spawn")
        self._begin = context.Event()
        self._ready = context.Event()
        self._process: BaseProcess = context.Process(
            target=drive, args=(msgspec.msgpack.encode(plan), self._ready, self._begin), daemon=True
        )
        self._process.start()

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        if not self._ready.wait(timeout_s):
            raise UserError("the cars did not connect", hint="see live.status()")

    def begin(self) -> None:
        self._begin.set()

    def finish(self, timeout_s: float) -> dict[str, np.ndarray]:
        """The record, once all outputs have come or waiting is over."""
        self._process.join(timeout_s)
        if self._process.is_alive() or self._process.exitcode != 0:
            self._process.kill()
            raise UserError(f"the cars' process ended with {self._process.exitcode}")
        with np.load(self._result) as found:
            return {name: found[name] for name in found.files}

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()


def drive(encoded: bytes, ready: threading.Event, begin: threading.Event) -> None:
    """The body of the process."""
    plan = msgspec.msgpack.decode(encoded, type=Plan)
    producers = {
        site: RowProducer(plan.storage, STREAM, name=f"gateway-{site}", site=site) for site in plan.sites
    }
    subscribers = [
        RowSubscriber(plan.storage, plan.output, after=0, at=site, site=site) for site in plan.readers
    ]
    for producer in producers.values():
        producer.client.connect()
    got: list[tuple[int, int, int, int, int, int]] = []
    over = threading.Event()

    def listen(reader: int) -> None:
        while not over.is_set():
            rows = subscribers[reader].poll_values(0.2)
            now_ns = time.monotonic_ns()
            got.extend((int(car[4:]), seq, n, due_ns, now_ns, reader) for car, seq, n, due_ns in rows)

    listeners = [threading.Thread(target=listen, args=(n,)) for n in range(len(subscribers))]
    for listener in listeners:
        listener.start()
    ready.set()
    begin.wait()
    began_ns = time.monotonic_ns()
    sent = _send(plan, producers, began_ns)
    for producer in producers.values():
        producer.flush(DRAIN_S_MAX)
    give_up = time.monotonic() + DRAIN_S_MAX
    while len(got) < sum(sent) and time.monotonic() < give_up:
        time.sleep(0.05)
    over.set()
    for listener in listeners:
        listener.join()
    record = np.array(got, dtype=np.int64).reshape(-1, 6)
    np.savez(plan.result, outputs=record, sent=np.array(sent), began_ns=np.array([began_ns]))
    for subscriber in subscribers:
        subscriber.close()
    for producer in producers.values():
        producer.close()


def _send(plan: Plan, producers: Mapping[str, RowProducer], began_ns: int) -> list[int]:
    """Send every row when it is due; returns how many each car has sent."""
    rng = random.Random(plan.seed)
    due = [(rng.uniform(0.0, 1.0 / car.rate), n) for n, car in enumerate(plan.cars)]
    heapq.heapify(due)
    sent, leg = [0] * len(plan.cars), [0] * len(plan.cars)
    while due and due[0][0] < plan.seconds:
        now_s = (time.monotonic_ns() - began_ns) / 1e9
        batches: dict[str, list[tuple[str, int, int]]] = {}
        while due and due[0][0] <= min(now_s, plan.seconds):
            at_s, n = due[0]
            car = plan.cars[n]
            heapq.heapreplace(due, (at_s + 1.0 / car.rate, n))
            while leg[n] + 1 < len(car.route) and car.route[leg[n] + 1][0] <= at_s:
                leg[n] += 1
            sent[n] += 1
            row = (car.name, sent[n], began_ns + int(at_s * 1e9))
            batches.setdefault(car.route[leg[n]][1], []).append(row)
        for site, rows in batches.items():
            producers[site].send_many(rows)
        time.sleep(TICK_S)
    return sent
