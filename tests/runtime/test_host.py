"""Router, instances and a load over real sockets and real storage, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvloop

from tiercel.bench.averages import SITE, plan, topology
from tiercel.bench.load import PRODUCER, TICK_NS, Load
from tiercel.bench.ticks import Ticks
from tiercel.core.events import TimerFired
from tiercel.core.messages import MoveRequest
from tiercel.core.records import KeySet
from tiercel.core.routing import RoutingTable
from tiercel.core.settings import Settings
from tiercel.runtime.host import Host
from tiercel.runtime.place import Durability, Manifest, Place
from tiercel.spark.hosting import build_host
from waiting import until

TOPOLOGY = topology(2)
OPERATOR = TOPOLOGY.operators["average"]


def deployment_in(directory: Path, durability: Durability = "os") -> Place:
    place = Place(directory)
    place.write(Manifest("test", TOPOLOGY, {}, Settings(), durability))
    return place


@contextlib.asynccontextmanager
async def running(*hosts: Host) -> AsyncIterator[list[asyncio.Task[str]]]:
    tasks = [asyncio.create_task(host.run()) for host in hosts]
    try:
        await asyncio.sleep(0)
        yield tasks
    finally:
        for host in hosts:
            host.end("over")
        await asyncio.gather(*tasks)
        await asyncio.sleep(0.05)  # sockets close


@contextlib.contextmanager
def pacing(client: Host) -> Iterator[None]:
    ticks = Ticks(TICK_NS, lambda: client.take(TimerFired("tick")))
    try:
        yield
    finally:
        ticks.close()


def run(coroutine: object) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(coroutine)  # type: ignore[arg-type]


@pytest.mark.parametrize("durability", ["os", "disk"])
def test_tuples_come_through_once_and_in_order_while_keys_move(
    tmp_path: Path, durability: Durability
) -> None:
    deployment = deployment_in(tmp_path, durability)

    async def scenario() -> None:
        load = Load(100)
        parts = [build_host(deployment, name, plan()) for name in OPERATOR.instances]
        router = build_host(deployment, SITE, None)
        client = Host(PRODUCER, load, deployment.registry, deployment.secret, dials=[SITE])
        async with running(router, *parts, client):
            await until(lambda: load.connected, "no connection")
            with pacing(client):
                load.start_open_loop(2_000)
                await asyncio.sleep(0.5)
                source, destination = OPERATOR.instances
                table = RoutingTable.initial(OPERATOR)
                keys = KeySet(keys=frozenset(k for k in load.keys if table.route(k).instance == source))
                load.request(MoveRequest("mv", "average", keys, source, destination, "live", 5_000.0))
                await until(lambda: load.move_ended, f"the move does not end: {load.statuses[-3:]}")
                assert load.statuses[-1][1].phase == "done", load.statuses[-1][1].reason
                await asyncio.sleep(0.3)
                load.stop()
                await until(lambda: load.quiet, "outputs are missing long after the last input")
        assert load.received == load.produced > 1_000
        assert load.faults.total == 0, load.faults

    run(scenario())


def test_who_does_not_know_the_secret_is_not_let_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    deployment = deployment_in(tmp_path)

    async def scenario() -> None:
        load = Load(10)
        router = build_host(deployment, SITE, None)
        stranger = Host(PRODUCER, load, deployment.registry, b"guessed", dials=[SITE])
        async with running(router, stranger):
            await asyncio.sleep(0.3)
            assert not load.connected

    run(scenario())
    assert "does not know this deployment's secret" in caplog.text
