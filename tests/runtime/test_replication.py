"""A replica holds everything acknowledged: a process that loses its disk is restored from it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deployment_in_process import (
    INPUT,
    INSTANCE,
    OUTPUT,
    SITE,
    FullDisk,
    Hosted,
    Running,
    assert_once_and_in_order,
    instance_host,
    make_place,
    payloads,
    replica_host,
    router_host,
    rows,
    until,
)
from tiercel.core import messages as m
from tiercel.core.errors import ProtocolViolation
from tiercel.core.machine.effects import Send, Write
from tiercel.core.machine.events import Received
from tiercel.errors import UserError
from tiercel.runtime.client.producer import Producer
from tiercel.runtime.client.subscriber import Subscriber
from tiercel.runtime.config import DurabilityConfig
from tiercel.runtime.deployment import ReplicaPlan
from tiercel.runtime.net import addresses
from tiercel.runtime.net import replication_messages as r
from tiercel.runtime.net.addresses import machine_here
from tiercel.runtime.net.registry import Address, Registry
from tiercel.runtime.recovery import replica_fetch as fetching
from tiercel.runtime.replication import primary as replication
from tiercel.runtime.replication import replica as replica_machine
from tiercel.runtime.replication.primary import ProcessFenced, Replication, ReplicationPhase, replica_name
from tiercel.runtime.replication.replica import Replica
from tiercel.runtime.storage.codec import decode_key
from tiercel.runtime.storage.incarnations import IncarnationClaims
from tiercel.runtime.storage.store import NO_TABLE, Store

REPLICA = replica_name(SITE, 1)


# -- one router, one instance, one replica, each on an executor of its own ----------------------------


class Deployment(Hosted):
    """One router, one instance, one replica."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        local = str(directory / "disks" / "{executor}")
        self.place = make_place(directory / "storage", None, local, ReplicaPlan(), checkpoint_ms=50)
        self.executors = {SITE: "1", INSTANCE: "2", REPLICA: "3"}

    def start(self, *names: str) -> None:
        makers: dict[str, Any] = {SITE: router_host, INSTANCE: instance_host}
        for name in names:
            made = (
                replica_host(self.place)
                if name == REPLICA
                else makers[name](self.place, self.executors[name])
            )
            self.hosts[name] = Running(made)

    def copies(self) -> dict[str, replica_machine.ReplicatedStore]:
        machine = self.hosts[REPLICA].host.machine
        assert isinstance(machine, Replica)
        return machine.stores

    def replication(self, name: str) -> Replication:
        found = self.hosts[name].host._replication
        assert found is not None
        return found

    def until_followed(self, *names: str) -> None:
        for name in names:
            until(
                lambda name=name: self.replication(name).phase is ReplicationPhase.FOLLOWING,
                f"no replica follows {name}",
            )  # type: ignore[misc]

    def lose(self, name: str) -> None:
        """It dies, its disk with it, and it comes back on another executor."""
        self.hosts.pop(name).end()
        if name != REPLICA:
            self.lose_disk(name)


@contextlib.contextmanager
def deployed(directory: Path) -> Iterator[tuple[Deployment, Producer, Subscriber]]:
    deployment = Deployment(directory)
    deployment.start(REPLICA, SITE, INSTANCE)
    try:
        with (
            Producer(deployment.place, INPUT, name="p") as producer,
            Subscriber(deployment.place, OUTPUT, after=0) as subscriber,
        ):
            yield deployment, producer, subscriber
    finally:
        deployment.end()


def test_output_is_exactly_once_when_each_process_is_lost_with_its_disk(tmp_path: Path) -> None:
    with deployed(tmp_path) as (deployment, producer, subscriber):
        for name in (INSTANCE, SITE, REPLICA) * 2:
            deployment.send(producer)
            deployment.read(subscriber)
            deployment.until_followed(SITE, INSTANCE)
            deployment.lose(name)
            deployment.start(name)
            deployment.send(producer)
            deployment.read(subscriber)
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)
        assert deployment.executors == {SITE: "21", INSTANCE: "22", REPLICA: "3"}


def test_router_and_instance_lost_at_once_are_restored_from_replicas(tmp_path: Path) -> None:
    with deployed(tmp_path) as (deployment, producer, subscriber):
        deployment.send(producer)
        deployment.read(subscriber)
        for _ in range(2):
            deployment.send(producer)
            deployment.lose(SITE)
            deployment.lose(INSTANCE)
            deployment.start(SITE, INSTANCE)
            deployment.read(subscriber)
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)


def test_nothing_is_acknowledged_or_published_without_a_replica(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "WARN_S", 0.2)
    with deployed(tmp_path) as (deployment, producer, subscriber):
        deployment.send(producer)
        deployment.read(subscriber)
        deployment.lose(REPLICA)
        acknowledged = producer.acknowledged
        producer.send(rows(deployment.sent, 50))
        with pytest.raises(UserError):
            producer.flush(1.0)
        assert producer.acknowledged == acknowledged
        assert subscriber.poll(0.1) == []
        assert "cloud acknowledges nothing" in caplog.text
        deployment.sent += 50
        deployment.start(REPLICA)
        producer.flush(30)
        deployment.read(subscriber)
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)


def test_process_ends_if_it_cannot_commit_when_its_replica_returns(
    tmp_path: Path,
) -> None:
    """Found by chaos: only the link ended, and what had been taken back was there again after a restart."""
    with deployed(tmp_path) as (deployment, producer, subscriber):
        deployment.send(producer)
        deployment.read(subscriber)
        running = deployment.hosts[SITE]
        store = running.host._store
        assert store is not None

        def replica_says_that_it_is_new() -> None:
            found = deployment.replication(SITE)
            store._db = FullDisk(store._db)  # type: ignore[assignment]
            store.add(Write(store.queued + 1, {}))
            found.phase = ReplicationPhase.QUERYING
            running.host.peer_sent(REPLICA, [r.ReplicaState(SITE, 0, -1)])

        running.call(replica_says_that_it_is_new)
        until(lambda: running.over, "it goes on")
        assert isinstance(running.failure, OSError)
        deployment.hosts.pop(SITE)
        deployment.start(SITE)
        deployment.send(producer)
        deployment.read(subscriber)
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)


def test_wrongly_suspected_process_is_fenced_and_output_stays_exactly_once(
    tmp_path: Path,
) -> None:
    """Both incarnations run at once, each on a disk of its own; the later one wins."""
    with deployed(tmp_path) as (deployment, producer, subscriber):
        for name in (INSTANCE, SITE) * 2:
            deployment.send(producer)
            deployment.read(subscriber)
            older = deployment.hosts.pop(name)
            deployment.executors[name] = str(int(deployment.executors[name]) + 10)
            producer.send(rows(deployment.sent, 50))  # under way while the second incarnation begins
            deployment.sent += 50
            deployment.start(name)
            until(lambda older=older: older.over, "the older incarnation goes on")  # type: ignore[misc]
            assert isinstance(older.failure, ProcessFenced) or older.host.ended_because == "superseded"
            producer.flush(30)
            deployment.send(producer)
            deployment.read(subscriber)
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)


def test_trimmed_log_entries_leave_the_replica_too(tmp_path: Path) -> None:
    with deployed(tmp_path) as (deployment, producer, subscriber):
        for _ in range(20):
            deployment.send(producer, 500)
            deployment.read(subscriber)
        deployment.until_followed(SITE)

        def entries() -> int:
            held = deployment.hosts[REPLICA].call(lambda: list(deployment.copies()[SITE].pairs))
            return sum(1 for key in held if b"inbox" in key and b"count" in key and b"counts" not in key)

        until(lambda: entries() < 10, "the log in the copy is not trimmed")
        copy = deployment.copies()[SITE]
        assert copy.size == sum(len(key) + len(value) for key, value in copy.pairs.items())


def test_losing_store_and_replica_raises_and_does_not_start_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with deployed(tmp_path) as (deployment, producer, _):
        deployment.send(producer)
        deployment.lose(SITE)
        deployment.lose(REPLICA)
        deployment.start(REPLICA)
        with pytest.raises(UserError, match="both copies of cloud are gone"):
            router_host(deployment.place, deployment.executors[SITE])
        deployment.lose(REPLICA)
        monkeypatch.setattr(fetching, "ANSWER_S_MAX", 0.5)
        deployment.place.registry.deregister(REPLICA)
        with pytest.raises(UserError, match=f"{REPLICA} does not answer"):
            router_host(deployment.place, deployment.executors[SITE])


def test_restarted_application_finds_stores_on_other_disks_of_the_host(tmp_path: Path) -> None:
    """The whole application has died, replicas too; Spark starts each of them on another executor."""
    with deployed(tmp_path) as (deployment, producer, subscriber):
        for _ in range(2):
            deployment.send(producer)
            deployment.read(subscriber)
            deployment.until_followed(SITE, INSTANCE)
            deployment.end()
            deployment.executors |= {name: str(int(on) + 10) for name, on in deployment.executors.items()}
            deployment.start(REPLICA, SITE, INSTANCE)
        deployment.send(producer)
        deployment.read(subscriber)
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)


def test_store_of_an_earlier_incarnation_is_not_used_when_all_else_is_lost(tmp_path: Path) -> None:
    with deployed(tmp_path) as (deployment, producer, subscriber):
        deployment.send(producer)
        deployment.read(subscriber)
        deployment.until_followed(SITE)
        first = deployment.disk(SITE)
        deployment.hosts.pop(SITE).end()
        deployment.executors[SITE] = "11"
        deployment.start(SITE)
        deployment.send(producer)
        deployment.until_followed(SITE)
        deployment.lose(SITE)
        deployment.lose(REPLICA)
        deployment.start(REPLICA)
        assert first.exists()
        with pytest.raises(UserError, match="both copies of cloud are gone"):
            router_host(deployment.place, deployment.executors[SITE])


def test_stale_disk_of_a_returning_executor_is_not_used(tmp_path: Path) -> None:
    with deployed(tmp_path) as (deployment, producer, subscriber):
        deployment.send(producer)
        deployment.read(subscriber)
        deployment.hosts.pop(SITE).end()
        deployment.executors[SITE] = "11"  # its first disk stays as it is
        deployment.start(SITE)
        deployment.send(producer)
        deployment.read(subscriber)
        deployment.hosts.pop(SITE).end()
        deployment.executors[SITE] = "1"
        deployment.start(SITE)
        deployment.send(producer)
        deployment.read(subscriber)
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)


# -- the two ends, message by message ------------------------------------------------------------------


class Pair:
    """A store with its replication and a replica, and the messages between them as a list."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.registry = Registry(directory / "registry")
        self.incarnations = IncarnationClaims(directory / "incarnations", SITE)
        self.replica_machine, self.other = (
            Replica(lambda process: self.incarnations.last()) for _ in range(2)
        )
        self.seq = 0
        self.model: dict[int, int] = {}  # what the store holds
        self.history: dict[int, dict[int, int]] = {0: {}}  # the same, by seq
        self.wire: list[m.Message] = []  # to the replica, not taken yet
        self.replies: list[m.Message] = []
        self.acknowledged: dict[int, int] = {}
        self.store: Store | None = None
        self.fenced_by = 0
        self.disk = 0

    def open(self) -> None:
        place = self.directory / f"disk{self.disk}"
        claim = self.incarnations.claim(0)
        self.store = store = Store(place, "replica", {"count": int}, lambda _: claim.incarnation)
        self.replication = Replication(SITE, store, self.incarnations, self.registry, [REPLICA])
        send = self.send_to_replica
        self.replication.start(send, lambda peer: None, self._on_acknowledged, self._on_fenced)
        self.replication.peer = REPLICA
        self.base_seq, self.seq = self.seq, 0
        self.begun_with = dict(self.model)

    def send_to_replica(self, to: str, sent: m.Message) -> None:
        self.wire.append(sent)

    def _on_fenced(self, latest: int) -> None:
        self.fenced_by = latest

    def _on_acknowledged(self) -> None:
        self.acknowledged = dict(self.history.get(self.replication.acknowledged, self.acknowledged))

    def write(self, key: int, value: int | None) -> None:
        assert self.store is not None
        self.seq += 1
        if value is None:
            self.model.pop(key, None)
            self.store.add(Write(self.seq, {}, (("count", key),)))
        else:
            self.model[key] = value
            self.store.add(Write(self.seq, {("count", key): value}))
        self.history[self.seq] = dict(self.model)

    def turn(self) -> None:
        assert self.store is not None
        self.store.commit()
        self.replication.flush()

    def connect(self) -> None:
        self.wire, self.replies = [], []
        self.replication.connected(REPLICA)

    def disconnect(self) -> None:
        self.wire, self.replies = [], []
        self.replication.disconnected(REPLICA)

    def swap(self) -> None:
        """From here on the other replica is followed; this one keeps what it has."""
        self.disconnect()
        self.replica_machine, self.other = self.other, self.replica_machine

    def reopen(self) -> None:
        """A new incarnation on the same disk."""
        assert self.store is not None
        self.disconnect()
        self.store.close()
        self.history = {0: dict(self.model)}
        self.open()

    def deliver(self, count: int) -> None:
        for message in self.wire[:count]:
            for effect in self.replica_machine.on_event(Received(SITE, message), 0.0):
                assert isinstance(effect, Send)
                self.replies.append(effect.message)
        del self.wire[:count]

    def answer(self, count: int) -> None:
        replies, self.replies = self.replies[:count], self.replies[count:]
        self.replication.on_messages(REPLICA, replies)

    def settle(self) -> None:
        while self.wire or self.replies:
            self.deliver(len(self.wire))
            self.answer(len(self.replies))

    def held(self) -> dict[int, int]:
        """What a process that comes back would find in the copy."""
        copy = self.replica_machine.stores[SITE]
        assert copy.through >= 0
        stored = {key: value for key, value in copy.pairs.items() if not key.startswith(NO_TABLE)}
        return {decode_key(key)[1]: msgspec.msgpack.decode(value) for key, value in stored.items()}


steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 5), st.none() | st.integers(0, 99)),
        st.tuples(st.sampled_from(["turn", "connect", "disconnect", "settle", "new replica"])),
        st.tuples(st.sampled_from(["swap", "reopen"])),
        st.tuples(st.sampled_from(["deliver", "answer"]), st.integers(1, 3)),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(steps=steps)
@example(
    steps=[
        *[
            ("connect",),
            ("settle",),
            ("write", 0, 1),
            ("turn",),
            ("settle",),
            ("reopen",),
        ],  # it is as we open it
        *[
            ("swap",),
            ("connect",),
            ("settle",),
            ("write", 0, None),
            ("turn",),
            ("settle",),
        ],  # we follow another
        *[
            ("swap",),
            ("connect",),
            ("settle",),
            ("write", 1, 1),
            ("turn",),
            ("settle",),
        ],  # and come back to it
    ]
)
def test_replica_holds_everything_acknowledged(
    steps: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The example is from chaos: a replica got only what came after another one had been followed."""
    both = Pair(tmp_path_factory.mktemp("pair"))
    replication_part, replica_part = replication.PART_BYTES, replica_machine.PART_BYTES
    replication.PART_BYTES = replication.BATCH_BYTES = replica_machine.PART_BYTES = (
        8  # everything comes in many parts
    )
    try:
        both.open()
        for kind, *arguments in steps:
            if kind == "new replica":
                both.disconnect()
                both.replica_machine = Replica(lambda process: both.incarnations.last())
                both.acknowledged = {}  # it is lost, and what it held is on the disk alone
            else:
                getattr(both, kind)(*arguments)
            if both.replication.phase is ReplicationPhase.FOLLOWING:
                _check_copy(both)
        both.connect()
        both.turn()
        both.settle()
        assert both.replication.phase is ReplicationPhase.FOLLOWING
        assert both.held() == both.model
        assert both.replication.acknowledged == both.seq
    finally:
        replication.PART_BYTES, replica_machine.PART_BYTES = replication_part, replica_part
        replication.BATCH_BYTES = 8 * 1024 * 1024
        assert both.store is not None
        both.store.close()


def _check_copy(both: Pair) -> None:
    """The copy is a state that the store has had, and not an earlier one than what was acknowledged."""
    held = both.held()
    states = [both.history[seq] for seq in sorted(both.history) if seq >= both.replication.acknowledged]
    assert held in states


def test_replica_on_the_own_executor_is_not_chosen(tmp_path: Path) -> None:
    """It was: the executor that was killed next took both copies along."""
    registry, incarnations = (
        Registry(tmp_path / "registry"),
        IncarnationClaims(tmp_path / "incarnations", SITE),
    )
    store = Store(tmp_path / "disk", "replica", {"count": int})
    replication = Replication(SITE, store, incarnations, registry, [REPLICA], "0", apart=True)
    for executor, dialled in (("2", [REPLICA]), ("0", []), ("3", [REPLICA])):
        registry.publish(Address(REPLICA, "127.0.0.1", 1, 1, 1, executor=executor))
        replication.choose_replica()
        assert (executor, replication.dials()) == (executor, dialled)
    store.close()


def test_replica_on_another_machine_is_preferred(tmp_path: Path) -> None:
    registry, incarnations = (
        Registry(tmp_path / "registry"),
        IncarnationClaims(tmp_path / "incarnations", SITE),
    )
    store = Store(tmp_path / "disk", "replica", {"count": int})
    second = replica_name(SITE, 2)
    here = ("0", "our machine")
    replication = Replication(SITE, store, incarnations, registry, [REPLICA, second], *here, apart=True)
    for name, executor, machine, dialled in (
        (REPLICA, "1", "our machine", [REPLICA]),  # all that there is: another executor of ours
        (second, "2", "our machine", [REPLICA]),  # no better: we stay
        (second, "2", "another", [second]),
        (REPLICA, "1", "a third one", [second]),  # no better
        (second, "0", "our machine", [REPLICA]),  # on our own executor: never
        (REPLICA, "1", "", [REPLICA]),  # nobody knows where
        (second, "2", "another", [second]),
    ):
        registry.publish(Address(name, "127.0.0.1", 1, 1, 1, executor=executor, machine=machine))
        replication.choose_replica()
        assert (name, machine, replication.dials()) == (name, machine, dialled)
    store.close()


def test_process_publishes_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with deployed(tmp_path) as (deployment, _, _):
        found = [deployment.place.registry.find(name) for name in (SITE, INSTANCE, REPLICA)]
        assert {address.machine for address in found if address is not None} == {machine_here()}
    monkeypatch.setattr(addresses, "BOOT_ID", tmp_path / "no such system")
    assert machine_here() == socket.gethostname()


def test_later_incarnation_fences_the_earlier_one_at_every_step(tmp_path: Path) -> None:
    both = Pair(tmp_path)
    both.open()
    both.connect()
    both.write(1, 1)
    both.turn()
    both.settle()
    older, store = both.replication, both.store
    assert store is not None
    both.disk, both.seq = 1, 0
    earlier = both.wire
    both.open()
    both.connect()
    both.deliver(1)  # its question alone
    both.replication, newer = older, both.replication
    both.wire = earlier
    store.add(Write(2, {("count", 1): 2}))
    store.commit()
    older.flush()
    both.replies = []
    both.deliver(1)
    both.answer(1)
    assert (both.fenced_by, older.acknowledged) == (2, 1)
    both.replica_machine = Replica(lambda process: both.incarnations.last())  # a new replica knows it too
    (refused,) = both.replica_machine.on_event(Received(SITE, r.ReplicaQuery(SITE, 1)), 0.0)
    assert isinstance(refused, Send)
    assert refused.message == r.ReplicaFenced(SITE, 2)
    store.close()
    newer._store.close()


@pytest.mark.parametrize(
    "message",
    [
        r.ReplicaBatch(SITE, 1, 1, 1, [], True),
        r.ReplicaSnapshotPart(SITE, 1, 0, [], True),
        r.ReplicaPull(SITE),
        m.Consumed("s", 1),
    ],
)
def test_replica_refuses_messages_out_of_order(message: m.Message) -> None:
    with pytest.raises(ProtocolViolation):
        Replica().on_event(Received(SITE, message), 0.0)


def test_replica_refuses_a_batch_after_a_gap() -> None:
    replica = Replica()
    replica.on_event(Received(SITE, r.ReplicaQuery(SITE, 1)), 0.0)
    replica.on_event(Received(SITE, r.ReplicaSnapshotPart(SITE, 1, 4, [(b"k", b"v")], True)), 0.0)
    with pytest.raises(ProtocolViolation, match="batch 6 of cloud does not follow 4"):
        replica.on_event(Received(SITE, r.ReplicaBatch(SITE, 1, 6, 6, [], True)), 0.0)


def test_incarnations_are_claimed_once_and_know_of_stores_elsewhere(tmp_path: Path) -> None:
    incarnations = IncarnationClaims(tmp_path, "count@cloud#1")
    assert incarnations.claim(0, "a") == (1, False)
    assert incarnations.claim(1, "a") == (2, False)
    assert incarnations.claim(1, "a") == (
        3,
        False,
    )  # incarnation 2 had not stored anything, but where would have been here
    assert incarnations.claim(3, "b") == (4, False)
    assert incarnations.claim(3, "a") == (5, True)
    assert incarnations.claim(9, "a") == (10, False)
    assert incarnations.last() == 10


def test_current_holder_counts_and_not_a_replica_with_an_older_copy(tmp_path: Path) -> None:
    incarnations = IncarnationClaims(tmp_path, SITE)
    assert incarnations.holder() == ""
    incarnations.claim(0)
    incarnations.set_holder(1, "replica 1 of cloud")
    incarnations.set_holder(2, "replica 2 of cloud")
    incarnations.set_holder(1, "replica 1 of cloud")  # given up, and wakes up
    assert incarnations.holder() == "replica 2 of cloud"
    incarnations.clear_holder()
    assert incarnations.holder() == ""


def test_holder_is_readable_while_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It read the note of the old one, and that was gone: a process could not start, chaos ended early."""
    incarnations = IncarnationClaims(tmp_path, SITE)
    incarnations.claim(0)
    incarnations.set_holder(1, "replica 1 of cloud")
    holder_files = incarnations._holder_files

    def too_old() -> list[Path]:
        found = holder_files()
        if found[-1].name.endswith("1"):
            incarnations.set_holder(2, "replica 2 of cloud")
        return found

    monkeypatch.setattr(incarnations, "_holder_files", too_old)
    assert incarnations.holder() == "replica 2 of cloud"
    assert incarnations.holder_since_ns() > 0


def test_holder_time_is_readable_while_the_holder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    incarnations = IncarnationClaims(tmp_path, SITE)
    incarnations.claim(0)
    incarnations.set_holder(1, "replica 1 of cloud")
    stale = iter([[tmp_path / "gone"]])
    holder_files = incarnations._holder_files
    monkeypatch.setattr(incarnations, "_holder_files", lambda: next(stale, None) or holder_files())
    assert incarnations.holder_since_ns() > 0


def test_local_disks_need_a_backup_or_replicas(tmp_path: Path) -> None:
    assert DurabilityConfig.of(None, "/mnt/disk", "replica").local == "/mnt/disk"
    with pytest.raises(UserError, match="or durability 'replica'"):
        DurabilityConfig.of(None, "/mnt/disk")
    manifest = make_place(tmp_path, replicas=ReplicaPlan()).manifest()
    with pytest.raises(UserError, match="local = '/mnt/disk', but its state is in 'the storage'"):
        DurabilityConfig.of(None, "/mnt/disk", "replica").applied(manifest, manifest)
