"""A small deployment that really runs: one router, one instance that counts, each in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from tiercel.admin import checkpoint
from tiercel.core.instance.instance import Instance
from tiercel.core.model.log import Row, StreamEntry
from tiercel.core.model.topology import Operator, Stream, Topology, instance_name, site_of
from tiercel.core.router.router import Router
from tiercel.core.settings import Settings
from tiercel.runtime.client.producer import Producer
from tiercel.runtime.client.subscriber import Subscriber
from tiercel.runtime.deployment import BackupPlan, DeploymentDir, Manifest, ReplicaPlan, StreamFacts
from tiercel.runtime.process.host import Host, HostConfig
from tiercel.runtime.recovery.recover import open_replicated_storage
from tiercel.runtime.replication.primary import ProcessFenced, replica_name
from tiercel.runtime.replication.replica import Replica
from tiercel.runtime.storage.directory import directory_of
from tiercel.runtime.storage.incarnations import IncarnationClaims
from tiercel.sim.workload import PlainCode
from waiting import WAIT_S_MAX, until

SITE, INPUT, OUTPUT, OPERATOR = "cloud", "readings", "counts", "count"
INSTANCE = instance_name(OPERATOR, SITE, 1)


class Counting:
    """Emits each row's payload with its place among the rows of its key."""

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[tuple[int, Any]], timerValues: Any) -> Iterator[Row]:
        (n,) = self.count.get() or (0,)
        for event_time, payload in rows:
            n += 1
            yield (key[0], event_time, (payload, n))
        self.count.update((n,))

    def close(self) -> None: ...


def make_place(
    directory: Path,
    backup: BackupPlan | None = None,
    local: str = "",
    replicas: ReplicaPlan | None = None,
    **settings: Any,
) -> DeploymentDir:
    operator = Operator(OPERATOR, (INPUT,), OUTPUT, (INSTANCE,))
    topology = Topology({SITE: None}, {OUTPUT: Stream(OUTPUT, SITE)}, {OPERATOR: operator})
    streams = {INPUT: StreamFacts("{}", ("key",)), OUTPUT: StreamFacts("{}", (), written_by=OPERATOR)}
    place = DeploymentDir(directory)
    made = Manifest("small", topology, streams, Settings(**settings), backup=backup, local=local)
    if replicas is not None:
        made = msgspec.structs.replace(made, durability="replica", replicas=replicas)
    place.write(made)
    return place


def router_host(place: DeploymentDir, executor: str = "", site: str = SITE, **options: Any) -> Host:
    manifest = place.manifest()
    directory = directory_of(place, manifest, site, executor)
    storage = open_replicated_storage(place, manifest, site, directory, executor)
    router = Router(
        site, manifest.topology, manifest.settings, storage.store.incarnation, storage.store.items()
    )
    dials = [other for other in manifest.topology.sites if other > site]
    return Host(site, router, HostConfig.of(place, dials=dials, storage=storage, site=site, **options))


def instance_host(place: DeploymentDir, executor: str = "", name: str = INSTANCE, **options: Any) -> Host:
    manifest = place.manifest()
    directory = directory_of(place, manifest, name, executor)
    storage = open_replicated_storage(place, manifest, name, directory, executor, is_instance=True)
    operator = manifest.topology.operators[OPERATOR]
    instance = Instance(name, operator, PlainCode(Counting()), manifest.settings, storage.store.incarnation)
    return Host(
        name, instance, HostConfig.of(place, **{"dials": [site_of(name)], "storage": storage, **options})
    )


def replica_host(place: DeploymentDir, number: int = 1, site: str = SITE, **options: Any) -> Host:
    name = replica_name(site, number)
    replica = Replica(lambda process: IncarnationClaims(place.incarnations, process).last())
    incarnation = IncarnationClaims(place.incarnations, name).claim(0).incarnation
    return Host(name, replica, HostConfig.of(place, incarnation=incarnation, **options))


class Running:
    """A host in a thread with an event loop of its own."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.failure: BaseException | None = None  # the error that ended it
        self._loop = uvloop.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._started.wait()
        until(lambda: self.over or host.is_registered(), "it does not listen")

    def _run(self) -> None:
        async def serve() -> None:
            serving = asyncio.create_task(self.host.run())
            self._started.set()
            await serving

        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(serve())
        except (ProcessFenced, OSError) as failure:
            self.failure = failure

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def call(self, what: Callable[[], Any]) -> Any:
        """In the host's thread."""

        async def called() -> Any:
            return what()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(WAIT_S_MAX)

    def end(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.host.end, "over")
            self._thread.join()


class Hosted:
    """Processes of one deployment, each in a thread and on an executor of its own; what went in and came out.

    A disk is a directory that can be taken away.
    """

    place: DeploymentDir
    executors: dict[str, str]

    def __init__(self) -> None:
        self.hosts: dict[str, Running] = {}
        self.sent = 0
        self.entries: list[StreamEntry] = []

    def disk(self, name: str) -> Path:
        return directory_of(self.place, self.place.manifest(), name, self.executors[name])

    def lose_disk(self, name: str) -> None:
        """It is gone, and its process comes back on another executor."""
        shutil.rmtree(self.disk(name))
        self.executors[name] = str(int(self.executors[name]) + 10)

    def send(self, producer: Producer, count: int = 50) -> None:
        producer.send(rows(self.sent, count))
        producer.flush(30)
        self.sent += count

    def read(self, subscriber: Subscriber) -> None:
        until(lambda: self._polled(subscriber) >= self.sent, "outputs are missing")

    def _polled(self, subscriber: Subscriber) -> int:
        self.entries += subscriber.poll(0.05)
        return sum(len(entry.outputs) for entry in self.entries)

    def end(self) -> None:
        for name in list(self.hosts):
            self.hosts.pop(name).end()


@contextlib.contextmanager
def running(*hosts: Host) -> Iterator[list[Running]]:
    """Started in this order, ended the other way round."""
    started: list[Running] = []
    try:
        for host in hosts:
            started.append(Running(host))
        yield started
    finally:
        for one in reversed(started):
            one.end()


def rows(first: int, count: int, keys: int = 7) -> list[Row]:
    """Rows whose payloads are numbered over all."""
    return [(b"key %d" % (n % keys), 0, n) for n in range(first, first + count)]


def payloads(entries: list[StreamEntry]) -> list[tuple[int, int]]:
    """(payload, place among its key's rows) of every output, in order."""
    return [(o.row[2][0], o.row[2][1]) for entry in entries for o in entry.outputs]


def assert_once_and_in_order(found: list[tuple[int, int]], count: int, keys: int = 7) -> None:
    """Each row came out once, and found its key as all rows before it had left it."""
    assert sorted(found) == [(n, n // keys + 1) for n in range(count)]
    for key in range(keys):
        of_key = [payload for payload, _ in found if payload % keys == key]
        assert of_key == sorted(of_key)


def run_rows(place: DeploymentDir, first: int, count: int, name: str = "p") -> list[tuple[int, int]]:
    """Start what the place wants, send rows, read all outputs from the first on, stop."""
    hosts = [Running(router_host(place))]
    hosts += [
        Running(instance_host(place, name=instance)) for instance in place.desired_instances() or [INSTANCE]
    ]
    entries: list[StreamEntry] = []
    try:
        with Producer(place, INPUT, name=name) as producer, Subscriber(place, OUTPUT, after=0) as subscriber:
            if count:
                producer.send(rows(first, count))
                producer.flush(30)

            def all_read() -> bool:
                entries.extend(subscriber.poll(0.05))
                return sum(len(entry.outputs) for entry in entries) >= first + count

            until(all_read, "outputs are missing")
        checkpoint(place.directory)
    finally:
        for host in reversed(hosts):
            host.end()
    return payloads(entries)


class FullDisk:
    """A database whose writes fail; all else works, as it does when a disk is full."""

    def __init__(self, database: Any) -> None:
        self._database = database

    def write(self, batch: object) -> None:
        raise OSError(28, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)
