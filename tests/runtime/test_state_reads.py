"""A host whose machine needs evicted state: the state is read first, and a slow read stops nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tiercel.bench.operators import topology
from tiercel.core import messages as m
from tiercel.core.machine.effects import Effect, Send, StorageKey, Write
from tiercel.core.machine.events import Connected, Durable, Event, Received, StateRead, TimerFired
from tiercel.core.model.keys import StateImage
from tiercel.core.settings import Settings
from tiercel.runtime.backup.lazy_restore import LazyRestore, ValueLocation
from tiercel.runtime.backup.segment_file import ValueRef
from tiercel.runtime.deployment import DeploymentDir, Manifest
from tiercel.runtime.net.lazy_outputs import encoder
from tiercel.runtime.process.durability_gate import Storage
from tiercel.runtime.process.host import LOCAL_READS_MAX, Host, HostConfig
from tiercel.runtime.storage.codec import encode_key
from tiercel.runtime.storage.store import Store
from waiting import until_in_loop as until

HERE: StorageKey = ("state", 1, b"here", 1)
IN_BACKUP: StorageKey = ("state", 2, b"there", 1)


def image(place: StorageKey) -> StateImage:
    return StateImage(place[2], 1, 9, {"n": ["value", [1]]})


class BlockedRestore(LazyRestore):
    """A backup that answers only when the test lets it."""

    def __init__(self) -> None:
        name = encode_key(IN_BACKUP)
        super().__init__(None, {name: ValueLocation("file", 0, ValueRef(name, 0, 0, 0))})  # type: ignore[arg-type]
        self.asked, self.answers = threading.Event(), threading.Event()
        self.failure: Exception | None = None

    def start_background_restore(
        self, put: Callable[[list[Any]], object], on_complete: Callable[[], object]
    ) -> None:
        """Nothing comes by itself."""

    def read(self, name: bytes) -> bytes | None:
        self.asked.set()
        assert self.answers.wait(30)
        if self.failure is not None:
            raise self.failure
        return encoder.encode(image(IN_BACKUP))


class NeedsState:
    """Needs evicted state for a timer named after it; writes one batch and notes every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def missing_state(self, event: Event) -> tuple[StorageKey, ...]:
        places = {"here": [HERE], "backup": [HERE, IN_BACKUP], "much": [HERE] * (LOCAL_READS_MAX + 1)}
        return tuple(places.get(event.name, ())) if isinstance(event, TimerFired) else ()

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        self.events.append(event)
        return [Write(1, {("schema",): {}})] if event == TimerFired("write") else []


class Echo:
    """Sends every message back, and notes it."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        self.events.append(event)
        return [Send(event.sender, event.message)] if isinstance(event, Received) else []


class Play:
    """One host whose store has one version here and one in a backup; others run beside it in one loop."""

    def __init__(self, directory: Path) -> None:
        self.place = DeploymentDir(directory)
        self.place.write(Manifest("test", topology(2), {}, Settings(), "os"))
        self.restore, self.machine = BlockedRestore(), NeedsState()
        before = Store(directory / "db", "os")
        before.add(Write(1, {HERE: image(HERE)}))
        before.close()
        self.store = Store(directory / "db", "os", missing=self.restore)
        self.host = self.make("needs", self.machine, storage=Storage(self.store))

    def make(self, name: str, machine: Any, **options: Any) -> Host:
        return Host(name, machine, HostConfig.of(self.place, **options))

    @contextlib.asynccontextmanager
    async def running(self, *hosts: Host) -> AsyncIterator[list[asyncio.Task[str]]]:
        tasks = [asyncio.create_task(host.run()) for host in hosts]
        try:
            await asyncio.sleep(0)
            yield tasks
        finally:
            self.restore.answers.set()
            for host in hosts:
                host.end("over")
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def kinds(self) -> list[str]:
        return [getattr(event, "name", type(event).__name__) for event in self.machine.events]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(tmp_path)


def read_of(*places: StorageKey) -> StateRead:
    return StateRead({place: (image(place), len(encoder.encode(image(place)))) for place in places})


def test_state_in_the_local_store_is_delivered_just_before_the_event_that_needs_it(play: Play) -> None:
    async def scenario() -> None:
        async with play.running(play.host):
            for name in ("first", "here", "last"):
                play.host.deliver(TimerFired(name))
            await until(lambda: len(play.machine.events) == 4, "not all events are handled")

    asyncio.run(scenario())
    assert play.kinds == ["first", "StateRead", "here", "last"]
    assert play.machine.events[1] == read_of(HERE)
    assert not play.restore.asked.is_set()


def test_events_of_a_machine_wait_in_order_while_its_state_is_read_from_a_backup(play: Play) -> None:
    async def scenario() -> None:
        async with play.running(play.host):
            for name in ("write", "backup", "last"):
                play.host.deliver(TimerFired(name))
            await until(play.restore.asked.is_set, "nobody reads")
            await until(lambda: play.store.written == 1, "what was written before the read is not committed")
            turns = play.host.turns
            await asyncio.sleep(0.05)
            assert play.kinds == ["write"]
            assert play.host.turns <= turns + 1, "the loop spins while it waits"
            play.restore.answers.set()
            await until(lambda: len(play.machine.events) == 5, "not all events are handled")

    asyncio.run(scenario())
    assert play.kinds == ["write", "StateRead", "backup", "last", "Durable"]
    assert play.machine.events[1] == read_of(HERE, IN_BACKUP)
    assert play.machine.events[4] == Durable(1)


def test_other_connections_are_served_while_state_is_read_from_a_slow_backup(play: Play) -> None:
    client, neighbour = Echo(), Echo()
    note = m.Forget("m1")

    async def scenario() -> None:
        beside = play.make("beside", neighbour)
        async with play.running(play.host, beside):
            play.host.deliver(TimerFired("backup"))
            await until(play.restore.asked.is_set, "nobody reads")
            caller = play.make("caller", client, dials=["needs", "beside"], listens=False)
            calling = asyncio.create_task(caller.run())
            await until(lambda: len(client.events) == 2, "no connection while a read is under way")
            for name in ("needs", "beside"):
                caller.perform([Send(name, note)])
            await until(lambda: Received("caller", note) in neighbour.events, "a neighbour gets nothing")
            await until(lambda: Received("beside", note) in client.events, "a neighbour's answer is late")
            assert play.machine.events == []
            play.restore.answers.set()
            await until(lambda: len(play.machine.events) == 4, "not all events are handled")
            caller.end("over")
            await calling

    asyncio.run(scenario())
    assert set(client.events[:2]) == {Connected("needs"), Connected("beside")}
    assert play.kinds[:2] == ["StateRead", "backup"]
    assert play.machine.events[2:4] == [Connected("caller"), Received("caller", note)]


def test_a_message_that_a_machine_sends_before_it_knows_of_a_reconnect_is_lost_with_the_old_connection(
    play: Play,
) -> None:
    """On the new connection the peer would take it for an answer to what it says there first."""
    peer, old, new = Echo(), m.Forget("old"), m.Forget("new")
    heard = play.machine.on_event

    def speaks(event: Event, now_ms: float) -> list[Effect]:
        heard(event, now_ms)
        if event == TimerFired("backup"):
            return [Send("peer", old)]
        return [Send("peer", new)] if event == Connected("peer") and len(play.machine.events) > 1 else []

    play.machine.on_event = speaks  # type: ignore[method-assign]

    async def scenario() -> None:
        async with play.running(play.host, play.make("peer", peer, dials=["needs"])):
            await until(lambda: play.machine.events == [Connected("peer")], "no connection")
            play.host.deliver(TimerFired("backup"))
            await until(play.restore.asked.is_set, "nobody reads")
            play.host.drop("peer")
            await until(lambda: peer.events.count(Connected("needs")) == 2, "the peer does not come back")
            play.restore.answers.set()
            await until(lambda: Received("needs", new) in peer.events, "nothing comes on the new connection")

    asyncio.run(scenario())
    assert play.kinds[1:5] == ["StateRead", "backup", "Disconnected", "Connected"]
    assert Received("needs", old) not in peer.events


def test_more_state_than_one_turn_may_read_is_read_by_a_thread(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    original = play.store.read_all
    monkeypatch.setattr(
        play.store,
        "read_all",
        lambda places: (threads.append(threading.current_thread().name), original(places))[1],
    )

    async def scenario() -> None:
        async with play.running(play.host):
            play.host.deliver(TimerFired("much"))
            await until(lambda: len(play.machine.events) == 2, "the event is never handled")

    asyncio.run(scenario())
    assert play.kinds == ["StateRead", "much"]
    assert threads
    assert threading.main_thread().name not in threads


def test_a_backup_that_cannot_be_read_ends_the_process(play: Play) -> None:
    play.restore.failure = OSError("the bucket is gone")
    play.restore.answers.set()

    async def scenario() -> None:
        async with play.running(play.host) as (serving,):
            play.host.deliver(TimerFired("backup"))
            with pytest.raises(OSError, match="the bucket is gone"):
                await serving

    asyncio.run(scenario())
    assert play.machine.events == []
