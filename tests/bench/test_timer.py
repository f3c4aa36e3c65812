"""The clock of a load: in phase with what is due, and silent when nothing is."""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from typing import Any

import uvloop

from tiercel.bench.loadgen.load import TICK_NS, Load
from tiercel.bench.loadgen.process import LoadServer
from tiercel.bench.loadgen.timer import TickTimer
from tiercel.core.machine.events import Event

MS = 1_000_000


def test_no_tick_comes_early() -> None:
    """With another phase than that of what is due, all of it would leave too early, or somewhat late."""
    called: list[int] = []

    async def run() -> int:
        first_ns = monotonic_ns() + 70 * MS
        enough = asyncio.Event()

        def call() -> None:
            called.append(monotonic_ns())
            if len(called) == 4:
                enough.set()

        ticks = TickTimer(first_ns, 50 * MS, call)
        await enough.wait()
        ticks.close()
        return first_ns

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        first_ns = runner.run(run())
    assert all(at_ns >= first_ns + n * 50 * MS for n, at_ns in enumerate(called[:4]))


def test_idle_load_has_no_timer() -> None:
    """Others are measured beside it: a tick each millisecond would be a part of what they cost."""

    class Noting:
        def __init__(self) -> None:
            self.events: list[Event] = []

        def deliver(self, event: Event) -> None:
            self.events.append(event)

    async def run() -> None:
        host: Any = Noting()
        load = Load(10)
        serving = LoadServer(load, host)
        await asyncio.sleep(TICK_NS * 20 / 1e9)
        assert not host.events
        await serving.handle({"do": "open", "rate": 1_000, "seconds": 0.1, "warm_s": 0.0})
        assert host.events
        host.events.clear()
        await asyncio.sleep(TICK_NS * 20 / 1e9)
        assert not host.events

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
