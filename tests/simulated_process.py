"""A simulated process under a test's control, and a peer that records events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiercel.core.machine.effects import (
    Write,
)
from tiercel.core.machine.events import (
    Event,
    Received,
)
from tiercel.core.model.log import Entry
from tiercel.sim.engine.network import Endpoint, Network
from tiercel.sim.engine.scheduler import Scheduler

LATENCY_MS = 1.0


class RecordingEndpoint:
    """An endpoint that only records its events."""

    def __init__(self, scheduler: Scheduler, network: Network, name: str) -> None:
        self.scheduler, self.network, self.name = scheduler, network, name
        self.events: list[tuple[float, Event]] = []
        self.endpoint: Endpoint = network.attach(name, self._record)

    def _record(self, event: Event) -> None:
        self.events.append((self.scheduler.now_ms, event))

    def die(self) -> None:
        self.network.detach(self.endpoint)

    @property
    def messages(self) -> list[Any]:
        return [event.message for _, event in self.events if isinstance(event, Received)]

    @property
    def connection_events(self) -> list[Event]:
        return [event for _, event in self.events if not isinstance(event, Received)]


def pair(seed: int = 1, **link: Any) -> tuple[Scheduler, Network, RecordingEndpoint, RecordingEndpoint]:
    scheduler = Scheduler(seed)
    network = Network(scheduler)
    network.declare("a", "b", LATENCY_MS, **link)
    endpoints = RecordingEndpoint(scheduler, network, "a"), RecordingEndpoint(scheduler, network, "b")
    scheduler.run(until_ms=50)
    assert network.connected("a", "b")
    return scheduler, network, *endpoints


def batch(seq: int, **puts: Any) -> Write:
    return Write(seq, {("t", name): value for name, value in puts.items()})


def log_batch(seq: int, *offsets: int, trim: Sequence[int] = ()) -> Write:
    return Write(
        seq,
        {("inbox", "i", offset): entry(offset) for offset in offsets},
        tuple(("inbox", "i", offset) for offset in trim),
    )


def entry(offset: int) -> Entry:
    return Entry(offset=offset, time_ms=0, parts={})
