"""Router, instances and a load over real sockets and real storage, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from time import monotonic_ns

import msgspec
import pytest
import uvloop

from tiercel.bench.averages import SITE, plan, topology
from tiercel.bench.load import PRODUCER, TICK_NS, Load
from tiercel.bench.ticks import Ticks
from tiercel.core.effects import Effect, ReadLog, Write
from tiercel.core.events import Durable, Event, TimerFired
from tiercel.core.messages import MoveRequest
from tiercel.core.records import KeySet
from tiercel.core.routing import RoutingTable
from tiercel.core.settings import Settings
from tiercel.runtime.host import Host
from tiercel.runtime.place import Durability, Manifest, Place
from tiercel.runtime.store import Store
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
    ticks = Ticks(monotonic_ns(), TICK_NS, lambda: client.take(TimerFired("tick")))
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
                load.request(MoveRequest("mv", "average", keys, source, destination, "live", 60_000.0))
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


class WritesAndReads:
    """Asks for a write and for a read of the log in one breath, as a router does when an instance resumes."""

    def __init__(self) -> None:
        self.durable = 0

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        match event:
            case TimerFired(name="go"):
                return [Write(1, {("head", "op"): (1, 1, -1)}), ReadLog("op", 0, 10, "op@cloud#1")]
            case Durable(seq=seq):
                self.durable = seq
            case _:
                pass
        return []


@pytest.mark.parametrize("durability", ["os", "disk"])
def test_a_write_is_told_to_be_durable_also_when_a_read_has_committed_it(
    tmp_path: Path, durability: Durability
) -> None:
    async def scenario() -> None:
        machine = WritesAndReads()
        place = deployment_in(tmp_path, durability)
        host = Host("cloud", machine, place.registry, place.secret, store=Store(tmp_path / "db", durability))
        async with running(host):
            host.take(TimerFired("go"))
            await until(lambda: machine.durable == 1, "the machine is never told")

    run(scenario())


class Failing:
    """A machine that cannot work."""

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        raise RuntimeError("it cannot")


def test_who_ends_well_leaves_the_registry_and_who_fails_does_not(tmp_path: Path) -> None:
    """Else nobody could tell an executor that was left in time from one that took somebody along."""

    async def scenario() -> None:
        place = deployment_in(tmp_path, "os")
        registry = place.registry
        well = Host("well", WritesAndReads(), registry, place.secret, store=Store(tmp_path / "a", "os"))
        async with running(well):
            await until(lambda: registry.find("well") is not None, "it does not start")
            registry.dismiss("well")
            await until(lambda: registry.find("well") is None, "it is still there")
        failing = Host("failing", Failing(), registry, place.secret)
        serving = asyncio.create_task(failing.run())
        await until(lambda: registry.find("failing") is not None, "it does not start")
        failing.take(TimerFired("go"))
        with pytest.raises(RuntimeError, match="it cannot"):
            await serving
        assert registry.find("failing") is not None

    run(scenario())


@pytest.mark.parametrize("successor", ["listens", "has left again"])
def test_who_is_succeeded_by_a_later_life_ends_and_leaves_its_address_alone(
    tmp_path: Path, successor: str
) -> None:
    """Else the task that Spark knows would stay for ever, and nobody would hear it."""

    async def scenario() -> None:
        place = deployment_in(tmp_path, "os")
        registry = place.registry
        host = Host("older", WritesAndReads(), registry, place.secret, store=Store(tmp_path / "db", "os"))
        serving = asyncio.create_task(host.run())
        await until(lambda: registry.find("older") is not None, "it does not start")
        found = registry.find("older")
        assert found is not None
        registry.publish(msgspec.structs.replace(found, life=found.life + 1))
        if successor == "has left again":
            registry.leave("older", found.life + 1)
        assert await serving == "succeeded"
        assert (registry.find("older") is not None) is (successor == "listens")

    run(scenario())


ORPHAN = """
import asyncio, os, sys
from pathlib import Path
from time import monotonic_ns
from tiercel.runtime.host import Host
from tiercel.runtime.registry import Registry

class Idle:
    def on_event(self, event, now_ms):
        return []

if os.fork() == 0:
    host = Host("orphan", Idle(), Registry(Path(sys.argv[1])), b"secret", parent=os.getppid())
    reason = asyncio.run(host.run())
    Path(sys.argv[1], "ended").write_text(reason)
    os._exit(0)
while True:
    os.wait()
"""


def test_a_worker_whose_parent_is_killed_ends(tmp_path: Path) -> None:
    """Spark starts its task again elsewhere, and knows nothing of it any more."""
    with subprocess.Popen([sys.executable, "-c", ORPHAN, str(tmp_path)]) as parent:
        while not (tmp_path / "orphan.address").exists():
            assert parent.poll() is None
            time.sleep(0.01)
        parent.kill()
    run(until(lambda: (tmp_path / "ended").exists(), "it lives on"))
    run(until(lambda: (tmp_path / "ended").read_text(encoding="utf-8") == "orphaned", "another reason"))
