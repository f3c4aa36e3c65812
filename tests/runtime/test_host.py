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

from tiercel.bench.loadgen.load import PRODUCER, TICK_NS, Load
from tiercel.bench.loadgen.timer import TickTimer
from tiercel.bench.operators import SITE, plan, topology
from tiercel.core.machine.effects import Effect, ReadLog, Write
from tiercel.core.machine.events import Durable, Event, TimerFired
from tiercel.core.messages import MoveRequest
from tiercel.core.model.keys import KeySet
from tiercel.core.model.routing import RoutingTable
from tiercel.core.settings import Settings
from tiercel.runtime.deployment import DeploymentDir, Durability, Manifest
from tiercel.runtime.process.durability_gate import Storage
from tiercel.runtime.process.host import Host, HostConfig
from tiercel.runtime.storage.store import Store
from tiercel.spark.cluster.task import build_host
from waiting import until_in_loop as until

TOPOLOGY = topology(2)
OPERATOR = TOPOLOGY.operators["average"]


def deployment_in(directory: Path, durability: Durability = "os") -> DeploymentDir:
    place = DeploymentDir(directory)
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
    ticks = TickTimer(monotonic_ns(), TICK_NS, lambda: client.deliver(TimerFired("tick")))
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
        client = Host(PRODUCER, load, HostConfig.of(deployment, dials=[SITE]))
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


def test_client_with_another_secret_is_not_connected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = deployment_in(tmp_path)

    async def scenario() -> None:
        load = Load(10)
        router = build_host(deployment, SITE, None)
        unproven = Host(
            PRODUCER, load, HostConfig(registry=deployment.registry, secret=b"guessed", dials=[SITE])
        )
        async with running(router, unproven):
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
def test_machine_learns_that_a_write_is_durable_even_if_a_log_read_committed_it(
    tmp_path: Path, durability: Durability
) -> None:
    async def scenario() -> None:
        machine = WritesAndReads()
        place = deployment_in(tmp_path, durability)
        host = Host(
            "cloud", machine, HostConfig.of(place, storage=Storage(Store(tmp_path / "db", durability)))
        )
        async with running(host):
            host.deliver(TimerFired("go"))
            await until(lambda: machine.durable == 1, "the machine never learns it")

    run(scenario())


class Failing:
    """A machine that cannot work."""

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        raise RuntimeError("it cannot")


def test_process_deregisters_at_a_regular_end_and_not_after_a_failure(tmp_path: Path) -> None:
    """Otherwise a drained executor looks the same as a lost one."""

    async def scenario() -> None:
        place = deployment_in(tmp_path, "os")
        registry = place.registry
        well = Host(
            "well",
            WritesAndReads(),
            HostConfig(registry=registry, secret=place.secret, storage=Storage(Store(tmp_path / "a", "os"))),
        )
        async with running(well):
            await until(lambda: registry.find("well") is not None, "it does not start")
            registry.request_stop("well")
            await until(lambda: registry.find("well") is None, "it is still there")
        failing = Host("failing", Failing(), HostConfig(registry=registry, secret=place.secret))
        serving = asyncio.create_task(failing.run())
        await until(lambda: registry.find("failing") is not None, "it does not start")
        failing.deliver(TimerFired("go"))
        with pytest.raises(RuntimeError, match="it cannot"):
            await serving
        assert registry.find("failing") is not None

    run(scenario())


@pytest.mark.parametrize("successor", ["listens", "has left again"])
def test_superseded_incarnation_ends_without_touching_the_new_address(tmp_path: Path, successor: str) -> None:
    """Otherwise its Spark task would stay for ever."""

    async def scenario() -> None:
        place = deployment_in(tmp_path, "os")
        registry = place.registry
        host = Host(
            "older",
            WritesAndReads(),
            HostConfig(registry=registry, secret=place.secret, storage=Storage(Store(tmp_path / "db", "os"))),
        )
        serving = asyncio.create_task(host.run())
        await until(lambda: registry.find("older") is not None, "it does not start")
        found = registry.find("older")
        assert found is not None
        registry.publish(msgspec.structs.replace(found, incarnation=found.incarnation + 1))
        if successor == "has left again":
            registry.deregister_if_current("older", found.incarnation + 1)
        assert await serving == "superseded"
        assert (registry.find("older") is not None) is (successor == "listens")

    run(scenario())


ORPHAN = """
import asyncio, os, sys
from pathlib import Path
from time import monotonic_ns
from tiercel.runtime.process.host import Host, HostConfig
from tiercel.runtime.net.registry import Registry

class Idle:
    def on_event(self, event, now_ms):
        return []

if os.fork() == 0:
    config = HostConfig(registry=Registry(Path(sys.argv[1])), secret=b"secret", parent=os.getppid())
    host = Host("orphan", Idle(), config)
    reason = asyncio.run(host.run())
    Path(sys.argv[1], "ended").write_text(reason)
    os._exit(0)
while True:
    os.wait()
"""


def test_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """Spark starts its task again elsewhere, and knows nothing of it any more."""
    with subprocess.Popen([sys.executable, "-c", ORPHAN, str(tmp_path)]) as parent:
        while not (tmp_path / "orphan.address").exists():
            assert parent.poll() is None
            time.sleep(0.01)
        parent.kill()
    run(until(lambda: (tmp_path / "ended").exists(), "it still runs"))
    run(until(lambda: (tmp_path / "ended").read_text(encoding="utf-8") == "orphaned", "another reason"))
