"""A replica holds what was acknowledged: whoever loses its disk comes back from it, and the dead stay so."""

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

from small import (
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
from tiercel.core.effects import Send, Write
from tiercel.core.events import Received
from tiercel.core.faults import ProtocolViolation
from tiercel.errors import UserError
from tiercel.runtime import addresses, fetching, keeper, replication
from tiercel.runtime.addresses import machine_here
from tiercel.runtime.client import Producer, Subscriber
from tiercel.runtime.keeper import Keeper
from tiercel.runtime.keeping import Keeping
from tiercel.runtime.lives import Lives
from tiercel.runtime.place import ReplicaPlan
from tiercel.runtime.registry import Address, Registry
from tiercel.runtime.replication import Fenced, Phase, Replication, replica_name
from tiercel.runtime.store import NO_TABLE, Store
from tiercel.runtime.tables import decode_key

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

    def copies(self) -> dict[str, keeper.Copy]:
        machine = self.hosts[REPLICA].host.machine
        assert isinstance(machine, Keeper)
        return machine.copies

    def replication(self, name: str) -> Replication:
        found = self.hosts[name].host._replication
        assert found is not None
        return found

    def until_followed(self, *names: str) -> None:
        for name in names:
            until(lambda name=name: self.replication(name).phase is Phase.FOLLOWING, f"nobody follows {name}")  # type: ignore[misc]

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


def test_each_of_them_is_lost_with_its_disk_and_what_comes_out_is_what_went_in_once(tmp_path: Path) -> None:
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


def test_router_and_instance_are_lost_at_once(tmp_path: Path) -> None:
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


def test_while_no_replica_holds_it_nothing_is_acknowledged_or_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "LOUD_S", 0.2)
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


def test_who_cannot_store_when_its_replica_comes_back_ends_and_does_not_go_on_without_that_batch(
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
            found.phase = Phase.ASKED
            running.host.peer_said(REPLICA, [m.CopyState(SITE, 0, -1)])

        running.call(replica_says_that_it_is_new)
        until(lambda: running.over, "it goes on")
        assert isinstance(running.failure, OSError)
        deployment.hosts.pop(SITE)
        deployment.start(SITE)
        deployment.send(producer)
        deployment.read(subscriber)
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)


def test_a_false_suspicion_is_harmless_the_one_believed_dead_ends_and_nothing_comes_twice(
    tmp_path: Path,
) -> None:
    """Both lives run at once, each on a disk of its own; the later one wins, whoever is asked."""
    with deployed(tmp_path) as (deployment, producer, subscriber):
        for name in (INSTANCE, SITE) * 2:
            deployment.send(producer)
            deployment.read(subscriber)
            older = deployment.hosts.pop(name)
            deployment.executors[name] = str(int(deployment.executors[name]) + 10)
            producer.send(rows(deployment.sent, 50))  # under way while the second life begins
            deployment.sent += 50
            deployment.start(name)
            until(lambda older=older: older.over, "the older life goes on")  # type: ignore[misc]
            assert isinstance(older.failure, Fenced) or older.host.ended_because == "succeeded"
            producer.flush(30)
            deployment.send(producer)
            deployment.read(subscriber)
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)


def test_the_trim_of_a_log_reaches_the_copy(tmp_path: Path) -> None:
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


def test_with_both_copies_gone_it_says_so_and_does_not_begin_anew(
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
        deployment.place.registry.withdraw(REPLICA)
        with pytest.raises(UserError, match=f"{REPLICA} does not answer"):
            router_host(deployment.place, deployment.executors[SITE])


def test_after_the_end_of_everyone_each_finds_what_its_last_life_left_on_another_disk(tmp_path: Path) -> None:
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


def test_a_disk_of_an_earlier_life_is_not_taken_for_the_newest_when_all_else_is_gone(tmp_path: Path) -> None:
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


def test_an_executor_that_comes_back_with_an_old_disk_does_not_bring_the_past_back(tmp_path: Path) -> None:
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
    """A store with its replication and a keeper, and the messages between them as a list."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.registry = Registry(directory / "registry")
        self.lives = Lives(directory / "lives", SITE)
        self.keeper, self.other = (Keeper(lambda process: self.lives.last()) for _ in range(2))
        self.seq = 0
        self.model: dict[int, int] = {}  # what the store holds
        self.history: dict[int, dict[int, int]] = {0: {}}  # the same, by seq
        self.wire: list[m.Message] = []  # to the keeper, not taken yet
        self.replies: list[m.Message] = []
        self.acknowledged: dict[int, int] = {}
        self.store: Store | None = None
        self.fenced_by = 0
        self.disk = 0

    def open(self) -> None:
        place = self.directory / f"disk{self.disk}"
        claim = self.lives.claim(0)
        self.store = store = Store(place, "replica", {"count": int}, lambda _: claim.life)
        self.replication = Replication(SITE, store, self.lives, self.registry, [REPLICA])
        send = self.wire_to_keeper
        self.replication.start(send, lambda peer: None, self._on_safe, self._on_fenced)
        self.replication.peer = REPLICA
        self.base_seq, self.seq = self.seq, 0
        self.begun_with = dict(self.model)

    def wire_to_keeper(self, to: str, said: m.Message) -> None:
        self.wire.append(said)

    def _on_fenced(self, latest: int) -> None:
        self.fenced_by = latest

    def _on_safe(self) -> None:
        self.acknowledged = dict(self.history.get(self.replication.safe, self.acknowledged))

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
        self.keeper, self.other = self.other, self.keeper

    def reopen(self) -> None:
        """A new life on the same disk."""
        assert self.store is not None
        self.disconnect()
        self.store.close()
        self.history = {0: dict(self.model)}
        self.open()

    def deliver(self, count: int) -> None:
        for message in self.wire[:count]:
            for effect in self.keeper.on_event(Received(SITE, message), 0.0):
                assert isinstance(effect, Send)
                self.replies.append(effect.message)
        del self.wire[:count]

    def answer(self, count: int) -> None:
        replies, self.replies = self.replies[:count], self.replies[count:]
        self.replication.take(REPLICA, replies)

    def settle(self) -> None:
        while self.wire or self.replies:
            self.deliver(len(self.wire))
            self.answer(len(self.replies))

    def held(self) -> dict[int, int]:
        """What a process that comes back would find in the copy."""
        copy = self.keeper.copies[SITE]
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
def test_whatever_was_acknowledged_is_in_the_copy(
    steps: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The example is from chaos: a replica got only what came after another one had been followed."""
    both = Pair(tmp_path_factory.mktemp("pair"))
    replication_part, keeper_part = replication.PART_BYTES, keeper.PART_BYTES
    replication.PART_BYTES = replication.BATCH_BYTES = keeper.PART_BYTES = 8  # everything comes in many parts
    try:
        both.open()
        for kind, *arguments in steps:
            if kind == "new replica":
                both.disconnect()
                both.keeper = Keeper(lambda process: both.lives.last())
                both.acknowledged = {}  # it is lost, and what it held is on the disk alone
            else:
                getattr(both, kind)(*arguments)
            if both.replication.phase is Phase.FOLLOWING:
                _check_copy(both)
        both.connect()
        both.turn()
        both.settle()
        assert both.replication.phase is Phase.FOLLOWING
        assert both.held() == both.model
        assert both.replication.safe == both.seq
    finally:
        replication.PART_BYTES, keeper.PART_BYTES = replication_part, keeper_part
        replication.BATCH_BYTES = 8 * 1024 * 1024
        assert both.store is not None
        both.store.close()


def _check_copy(both: Pair) -> None:
    """The copy is a state that the store has had, and not an earlier one than what was acknowledged."""
    held = both.held()
    states = [both.history[seq] for seq in sorted(both.history) if seq >= both.replication.safe]
    assert held in states


def test_a_replica_that_comes_back_on_our_own_executor_is_not_followed(tmp_path: Path) -> None:
    """It was: the executor that was killed next took both copies along."""
    registry, lives = Registry(tmp_path / "registry"), Lives(tmp_path / "lives", SITE)
    store = Store(tmp_path / "disk", "replica", {"count": int})
    replication = Replication(SITE, store, lives, registry, [REPLICA], "0", apart=True)
    for executor, dialled in (("2", [REPLICA]), ("0", []), ("3", [REPLICA])):
        registry.publish(Address(REPLICA, "127.0.0.1", 1, 1, 1, executor=executor))
        replication.choose()
        assert (executor, replication.dials()) == (executor, dialled)
    store.close()


def test_a_replica_on_another_machine_is_followed_where_there_is_one(tmp_path: Path) -> None:
    registry, lives = Registry(tmp_path / "registry"), Lives(tmp_path / "lives", SITE)
    store = Store(tmp_path / "disk", "replica", {"count": int})
    second = replica_name(SITE, 2)
    here = ("0", "our machine")
    replication = Replication(SITE, store, lives, registry, [REPLICA, second], *here, apart=True)
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
        replication.choose()
        assert (name, machine, replication.dials()) == (name, machine, dialled)
    store.close()


def test_a_process_says_on_which_machine_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with deployed(tmp_path) as (deployment, _, _):
        found = [deployment.place.registry.find(name) for name in (SITE, INSTANCE, REPLICA)]
        assert {address.machine for address in found if address is not None} == {machine_here()}
    monkeypatch.setattr(addresses, "BOOT_ID", tmp_path / "no such system")
    assert machine_here() == socket.gethostname()


def test_a_later_life_fences_the_earlier_one_at_every_step(tmp_path: Path) -> None:
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
    assert (both.fenced_by, older.safe) == (2, 1)
    both.keeper = Keeper(lambda process: both.lives.last())  # a new replica knows it too
    (refused,) = both.keeper.on_event(Received(SITE, m.CopyQuery(SITE, 1)), 0.0)
    assert isinstance(refused, Send)
    assert refused.message == m.CopyRefused(SITE, 2)
    store.close()
    newer._store.close()


@pytest.mark.parametrize(
    "message",
    [
        m.CopyBatch(SITE, 1, 1, 1, [], True),
        m.CopyPart(SITE, 1, 0, [], True),
        m.CopyPull(SITE),
        m.Consumed("s", 1),
    ],
)
def test_a_replica_refuses_what_is_out_of_turn(message: m.Message) -> None:
    with pytest.raises(ProtocolViolation):
        Keeper().on_event(Received(SITE, message), 0.0)


def test_a_batch_that_does_not_follow_is_refused() -> None:
    replica = Keeper()
    replica.on_event(Received(SITE, m.CopyQuery(SITE, 1)), 0.0)
    replica.on_event(Received(SITE, m.CopyPart(SITE, 1, 4, [(b"k", b"v")], True)), 0.0)
    with pytest.raises(ProtocolViolation, match="batch 6 of cloud does not follow 4"):
        replica.on_event(Received(SITE, m.CopyBatch(SITE, 1, 6, 6, [], True)), 0.0)


def test_lives_are_claimed_once_and_know_whether_another_place_comes_between(tmp_path: Path) -> None:
    lives = Lives(tmp_path, "count@cloud#1")
    assert lives.claim(0, "a") == (1, False)
    assert lives.claim(1, "a") == (2, False)
    assert lives.claim(1, "a") == (3, False)  # life 2 had not stored anything, but where would have been here
    assert lives.claim(3, "b") == (4, False)
    assert lives.claim(3, "a") == (5, True)
    assert lives.claim(9, "a") == (10, False)
    assert lives.last() == 10


def test_the_replica_that_follows_counts_not_one_with_an_older_copy(tmp_path: Path) -> None:
    lives = Lives(tmp_path, SITE)
    assert lives.holder() == ""
    lives.claim(0)
    lives.note_held(1, "replica 1 of cloud")
    lives.note_held(2, "replica 2 of cloud")
    lives.note_held(1, "replica 1 of cloud")  # believed dead, and wakes up
    assert lives.holder() == "replica 2 of cloud"
    lives.forget_held()
    assert lives.holder() == ""


def test_who_looks_while_another_replica_takes_over_sees_one_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read the note of the old one, and that was gone: a process could not start, chaos ended early."""
    lives = Lives(tmp_path, SITE)
    lives.claim(0)
    lives.note_held(1, "replica 1 of cloud")
    listed = lives._held

    def too_old() -> list[Path]:
        found = listed()
        if found[-1].name.endswith("1"):
            lives.note_held(2, "replica 2 of cloud")
        return found

    monkeypatch.setattr(lives, "_held", too_old)
    assert lives.holder() == "replica 2 of cloud"
    assert lives.held_at() > 0


def test_who_looks_when_it_began_to_hold_sees_that_of_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = Lives(tmp_path, SITE)
    lives.claim(0)
    lives.note_held(1, "replica 1 of cloud")
    stale = iter([[tmp_path / "gone"]])
    listed = lives._held
    monkeypatch.setattr(lives, "_held", lambda: next(stale, None) or listed())
    assert lives.held_at() > 0


def test_local_disks_need_a_backup_or_replicas(tmp_path: Path) -> None:
    assert Keeping.of(None, "/mnt/disk", "replica").local == "/mnt/disk"
    with pytest.raises(UserError, match="or durability 'replica'"):
        Keeping.of(None, "/mnt/disk")
    manifest = make_place(tmp_path, replicas=ReplicaPlan()).manifest()
    with pytest.raises(UserError, match="local = '/mnt/disk', but what there is lies in 'the storage'"):
        Keeping.of(None, "/mnt/disk", "replica").applied(manifest, manifest)
