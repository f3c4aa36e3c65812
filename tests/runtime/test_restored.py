"""Processes that lose their disk come back from their backup, and what comes out is what went in, once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from small import (
    INPUT,
    INSTANCE,
    OPERATOR,
    OUTPUT,
    SITE,
    Hosted,
    Running,
    assert_once_and_in_order,
    instance_host,
    make_place,
    payloads,
    router_host,
    rows,
    run_rows,
    until,
)
from tiercel.core.effects import Write
from tiercel.core.records import Era, Route, TableUpdate
from tiercel.core.taken import Cursor
from tiercel.core.topology import Operator
from tiercel.errors import UserError
from tiercel.runtime import shipping, storing
from tiercel.runtime.backups import ProcessBackup
from tiercel.runtime.client import Producer, Subscriber
from tiercel.runtime.copies import misfitting, write_manifest
from tiercel.runtime.keeping import Keeping, parse_backup
from tiercel.runtime.locations import Location
from tiercel.runtime.place import BackupPlan, Place
from tiercel.runtime.shipping import Shipper
from tiercel.runtime.store import Store, StoreView
from tiercel.state import backup, merge, restore, show, split

EVERY_S = 0.02


class Deployment(Hosted):
    """One router and one instance, with a backup."""

    def __init__(self, directory: Path, **plan: Any) -> None:
        super().__init__()
        location = (directory / "backup").as_uri()
        local = str(directory / "disks" / "{executor}")
        plan = {"every_s": EVERY_S} | plan
        self.place = make_place(directory / "storage", BackupPlan(location, **plan), local, checkpoint_ms=50)
        self.executors = {SITE: "1", INSTANCE: "2"}

    def start(self, *names: str) -> None:
        for name in names:
            make = router_host if name == SITE else instance_host
            self.hosts[name] = Running(make(self.place, self.executors[name]))

    def backup_of(self, name: str) -> ProcessBackup:
        manifest = self.place.manifest()
        assert manifest.backup is not None
        return ProcessBackup(Location(manifest.backup.location), manifest.id, name)

    def shipper(self, name: str) -> Shipper:
        found = self.hosts[name].host._backup
        assert found is not None
        return found.shipper

    def stop_shipping(self, name: str) -> None:
        def fail() -> None:
            raise UserError("the location is gone")

        self.shipper(name)._ship = fail  # type: ignore[method-assign]

    def resume_shipping(self, name: str) -> None:
        del self.shipper(name)._ship

    def lose(self, name: str) -> None:
        """The machine dies with its disk: nothing more is shipped, and it comes back on another executor."""
        self.stop_shipping(name)
        self.hosts.pop(name).end()
        self.lose_disk(name)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "CLOSE_S_MAX", 0.0)


@contextlib.contextmanager
def deployed(directory: Path, **plan: Any) -> Iterator[Deployment]:
    deployment = Deployment(directory, **plan)
    deployment.start(SITE, INSTANCE)
    try:
        yield deployment
    finally:
        deployment.end()


def cursor_of(directory: Path) -> Cursor | None:
    with contextlib.closing(StoreView(directory)) as view:
        found: Cursor | None = view.get(("cursor",))
        return found


def test_an_instance_that_loses_its_disk_comes_back_on_another_executor(tmp_path: Path) -> None:
    with deployed(tmp_path) as deployment:
        with (
            Producer(deployment.place, INPUT, name="p") as producer,
            Subscriber(deployment.place, OUTPUT, after=0) as subscriber,
        ):
            for _ in range(3):
                deployment.send(producer)
                deployment.read(subscriber)
                until(lambda: deployment.backup_of(INSTANCE).head() is not None, "nothing is shipped")
                deployment.send(producer)
                deployment.lose(INSTANCE)
                deployment.send(producer)
                deployment.start(INSTANCE)
                deployment.read(subscriber)
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)


def test_a_checkpoint_is_told_to_the_router_only_when_the_backup_has_it(tmp_path: Path) -> None:
    with deployed(tmp_path) as deployment, Producer(deployment.place, INPUT, name="p") as producer:
        readers = deployment.hosts[SITE].host.machine.inboxes[OPERATOR].readers  # type: ignore[attr-defined]

        def told() -> int:
            return readers[INSTANCE].applied if INSTANCE in readers else 0

        def stored() -> int:
            found = cursor_of(deployment.disk(INSTANCE))
            return found.applied if found is not None else 0

        deployment.stop_shipping(INSTANCE)
        deployment.send(producer)
        until(lambda: stored() > 0, "no checkpoint without the backup")
        until(lambda: deployment.shipper(INSTANCE)._failing, "it ships on")
        assert told() == 0
        deployment.resume_shipping(INSTANCE)
        until(lambda: told() > 0, "no checkpoint is told")
        known = told()
        storing.restore(deployment.backup_of(INSTANCE), tmp_path / "copy")
        copied = cursor_of(tmp_path / "copy")
        assert copied is not None
        assert copied.applied >= known


def waits_for_its_log(instance: Any) -> bool:
    """It has taken a checkpoint, and may not store it before its log is safe."""
    taken = instance.checkpointer.taken
    return taken is not None and taken.complete and taken.rests_on > instance.durable


def test_a_router_that_loses_its_disk_is_never_behind_a_checkpoint_and_instances_fall_back(
    tmp_path: Path,
) -> None:
    """A reader whose stored checkpoint is ahead of its log would skip what comes next at these offsets."""
    with deployed(tmp_path) as deployment:
        with (
            Producer(deployment.place, INPUT, name="p") as producer,
            Subscriber(deployment.place, OUTPUT, after=0) as subscriber,
        ):
            deployment.send(producer)
            deployment.read(subscriber)
        kept = deployment.sent
        head = deployment.backup_of(SITE)
        batches = deployment.shipper(SITE)._store.batches
        until(lambda: (found := head.head()) is not None and found.through >= batches, "not shipped")
        deployment.stop_shipping(SITE)
        forgotten = pytest.raises(UserError, match=r"lost the last .* frames that it had acknowledged")
        with forgotten, Producer(deployment.place, INPUT, name="p2") as producer:
            deployment.send(producer)
            instance = deployment.hosts[INSTANCE].host.machine
            until(lambda: instance.rows >= deployment.sent, "not processed")  # type: ignore[attr-defined]
            until(lambda: waits_for_its_log(instance), "a checkpoint is stored, and its log is not safe")
            storing.restore(deployment.backup_of(SITE), tmp_path / "copy")
            with (
                contextlib.closing(StoreView(tmp_path / "copy")) as log,
                contextlib.closing(StoreView(deployment.disk(INSTANCE))) as state,
            ):
                assert misfitting({SITE: log, INSTANCE: state}) == []
            deployment.lose(SITE)
            deployment.start(SITE)
            producer.send(rows(0, 1))
            producer.flush(30)
        deployment.sent = kept  # what was not shipped is lost, and nothing else
        deployment.entries.clear()
        with (
            Producer(deployment.place, INPUT, name="p3") as producer,
            Subscriber(deployment.place, OUTPUT, after=0) as subscriber,
        ):
            deployment.send(producer)
            deployment.read(subscriber)
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)


def test_with_a_strict_backup_nothing_that_was_acknowledged_is_lost_with_all_disks(tmp_path: Path) -> None:
    with deployed(tmp_path, strict=True) as deployment:
        with (
            Producer(deployment.place, INPUT, name="p") as producer,
            Subscriber(deployment.place, OUTPUT, after=0) as subscriber,
        ):
            for lost in ([SITE], [INSTANCE], [SITE, INSTANCE]):
                deployment.send(producer)
                producer.send(rows(deployment.sent, 50))  # not waited for
                deployment.sent += 50
                for name in lost:
                    deployment.lose(name)
                deployment.start(*lost)
                deployment.read(subscriber)
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)


def test_a_process_that_comes_back_to_a_disk_it_had_left_does_not_take_the_old_copy(tmp_path: Path) -> None:
    with deployed(tmp_path) as deployment:
        with (
            Producer(deployment.place, INPUT, name="p") as producer,
            Subscriber(deployment.place, OUTPUT, after=0) as subscriber,
        ):
            for executor in ("2", "3", "2", "3"):
                deployment.hosts.pop(INSTANCE).end()
                deployment.executors[INSTANCE] = executor
                deployment.start(INSTANCE)
                deployment.send(producer)
                deployment.read(subscriber)
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)
        assert (tmp_path / "disks" / "2" / "small" / ".older" / INSTANCE).exists()


# -- a whole deployment by hand --------------------------------------------------------------------


def test_a_copy_by_hand_while_it_runs_is_a_deployment_on_another_machine(tmp_path: Path) -> None:
    place = make_place(tmp_path / "here", checkpoint_ms=50)
    place.want([INSTANCE])
    hosts = [Running(router_host(place)), Running(instance_host(place))]
    try:
        with Producer(place, INPUT, name="p") as producer:
            producer.send(rows(0, 70))
            producer.flush(30)
            copied = backup(place.directory, (tmp_path / "copy").as_uri())
    finally:
        for host in reversed(hosts):
            host.end()
    assert {one.process for one in copied} == {SITE, INSTANCE}
    restore((tmp_path / "copy").as_uri(), tmp_path / "there")
    found = run_rows(Place(tmp_path / "there"), 70, 35, "q")
    assert_once_and_in_order(found, 105)
    with pytest.raises(UserError, match="is not empty"):
        restore((tmp_path / "copy").as_uri(), tmp_path / "there")


def test_a_restored_deployment_knows_nothing_of_the_secret_and_everything_else(tmp_path: Path) -> None:
    place = make_place(tmp_path / "here", checkpoint_ms=50)
    place.want([INSTANCE])
    assert_once_and_in_order(run_rows(place, 0, 21), 21)
    backup(place.directory, str(tmp_path / "copy"))
    backup(place.directory, str(tmp_path / "copy"))  # again: a newer base
    assert not list((tmp_path / "copy").rglob("secret"))
    restore(str(tmp_path / "copy"), tmp_path / "there")
    there = Place(tmp_path / "there")
    assert there.secret != place.secret
    assert there.wanted() == [INSTANCE]
    assert there.manifest().topology == place.manifest().topology
    assert_once_and_in_order(run_rows(there, 21, 21), 42)


def test_a_damaged_process_takes_all_others_back_to_the_same_moment(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    manifest = deployment.place.manifest()
    assert manifest.backup is not None
    location = Location(manifest.backup.location)
    write_manifest(location, manifest)
    deployment.start(SITE, INSTANCE)
    try:
        with Producer(deployment.place, INPUT, name="p") as producer:
            for _ in range(6):
                deployment.send(producer, 14)
                until(lambda: cursor_of(deployment.disk(INSTANCE)) is not None, "no checkpoint")
                shipped = deployment.backup_of(INSTANCE).last_number()
                until(lambda n=shipped: deployment.backup_of(INSTANCE).last_number() > n + 2, "no increment")  # type: ignore[misc]
    finally:
        deployment.end()
    damaged = deployment.backup_of(INSTANCE)
    head = damaged.head()
    assert head is not None
    name = next(n for n in location.names(damaged.folder) if n.startswith(f"increment.{head.number:012d}"))
    location.put(f"{damaged.folder}/{name}", b"")
    with pytest.raises(UserError, match=name) as refused:
        restore(location.url, tmp_path / "there")
    assert refused.value.hint == (f"the last whole state before it: --up-to '{INSTANCE}={head.number - 1}'")
    assert not (tmp_path / "there").exists()
    restore(location.url, tmp_path / "there", {INSTANCE: head.number - 1})
    found = run_rows(Place(tmp_path / "there"), 0, 0)
    assert found == [(n, n // 7 + 1) for n, _ in found], "a prefix of what was, each once"


def test_a_location_that_holds_another_deployment_is_refused(tmp_path: Path) -> None:
    place = make_place(tmp_path / "here")
    other = make_place(tmp_path / "there")
    write_manifest(Location(str(tmp_path / "copy")), place.manifest())
    other.write(msgspec.structs.replace(other.manifest(), id="another"))
    with pytest.raises(UserError, match="holds the backup of another deployment"):
        backup(other.directory, str(tmp_path / "copy"))
    with pytest.raises(UserError, match="holds no backup of a deployment"):
        restore(str(tmp_path / "nothing"), tmp_path / "new")


def test_what_is_kept_is_shown_by_kind_with_the_position_and_the_backup(tmp_path: Path) -> None:
    with (
        deployed(tmp_path) as deployment,
        Producer(deployment.place, INPUT, name="p") as producer,
        Subscriber(deployment.place, OUTPUT, after=0) as subscriber,
    ):
        deployment.send(producer, 70)
        deployment.read(subscriber)
        place = deployment.place.directory
        until(lambda: any(line.kind == "processing" and line.keys == 7 for line in show(place)))
    kept = {(line.process, line.kind): line for line in show(deployment.place.directory)}
    assert set(kept) == {(SITE, "routing"), (SITE, "buffer"), (INSTANCE, "processing")}
    processing = kept[INSTANCE, "processing"]
    assert processing.keys == 7
    assert kept[SITE, "buffer"].position.startswith(f"{OPERATOR} ")
    for line in kept.values():
        assert line.backup_number is not None
        assert line.backup_behind == 0


# -- dividing --------------------------------------------------------------------------------------


def operator_of_place(place: Place) -> Operator:
    return place.manifest().topology.operators[OPERATOR]


def test_split_and_merge_divide_the_keys_of_a_stopped_deployment(tmp_path: Path) -> None:
    place = make_place(tmp_path / "here", checkpoint_ms=50)
    place.want([INSTANCE])
    assert_once_and_in_order(run_rows(place, 0, 70), 70)
    divided = split(place.directory, INSTANCE)
    second = divided.destination
    assert second == f"{OPERATOR}@{SITE}#2"
    assert divided.slots == operator_of_place(place).slots // 2
    assert place.wanted() == [INSTANCE, second]
    assert_once_and_in_order(run_rows(place, 70, 70), 140)
    keys = {line.process: line.keys for line in show(place.directory) if line.kind == "processing"}
    assert sum(keys.values()) == 7
    assert keys[second] == divided.keys > 0
    united = merge(place.directory, INSTANCE, second)
    assert united.keys == keys[INSTANCE]
    assert place.wanted() == [second]
    assert_once_and_in_order(run_rows(place, 140, 70), 210)


def test_what_is_split_off_from_a_former_heir_has_the_epochs_that_its_new_owner_has(tmp_path: Path) -> None:
    """Its own versions are few and new: none of them is of the time before its inheritance."""
    place = make_place(tmp_path / "here", checkpoint_ms=50)
    place.want([INSTANCE])
    run_rows(place, 0, 70)
    store = Store(place.process(INSTANCE), "os")
    cursor = store.items()["cursor",]
    era = Era(cursor.generation, TableUpdate({slot: Route(INSTANCE, 1) for slot in range(4096)}, {}))
    store.add(Write(1, {("cursor",): msgspec.structs.replace(cursor, era=era)}))
    store.close()
    second = split(place.directory, INSTANCE).destination
    for instance, expected in ((INSTANCE, era), (second, None)):
        with contextlib.closing(StoreView(place.process(instance))) as view:
            assert view.get(("cursor",)).era == expected
    assert_once_and_in_order(run_rows(place, 70, 70), 140)


def test_what_has_not_come_to_rest_is_not_divided(tmp_path: Path) -> None:
    place = make_place(tmp_path / "here", checkpoint_ms=1e6)
    place.want([INSTANCE])
    router = Running(router_host(place))
    with Producer(place, INPUT, name="p") as producer:
        producer.send(rows(0, 14))
        producer.flush(30)
    router.end()
    with pytest.raises(UserError, match=r"14 rows in the log of count@cloud#1 are not in its checkpoint"):
        split(place.directory, INSTANCE)


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (lambda d: split(d, "count@cloud#9"), "no instance"),
        (lambda d: split(d, INSTANCE, [999_999]), "slots to split off"),
        (lambda d: split(d, INSTANCE, range(4096)), "slots to split off"),
        (lambda d: split(d, INSTANCE, into="other@cloud#1"), "a new instance"),
        (lambda d: merge(d, INSTANCE, INSTANCE), "merging"),
        (lambda d: merge(d, INSTANCE, "count@cloud#2"), "no instance"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused(tmp_path: Path, wish: Any, reason: str) -> None:
    place = make_place(tmp_path / "here", checkpoint_ms=50)
    place.want([INSTANCE])
    run_rows(place, 0, 7)
    with pytest.raises(UserError, match=reason):
        wish(place.directory)


# -- what users say --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ("", "the location is empty"),
        ({"every_s": 1}, "location"),
        ({"location": "/b", "every": 1}, "unknown 'every'"),
        ({"location": "/b", "every_s": 0}, "every_s = 0"),
        ({"location": "/b", "keep": 0}, "keep = 0"),
        ({"location": 7}, "location"),
        ("nowhere://x", "backup location"),
        ("s3://bucket/app", "Install s3fs(.|\n)*hint: pip install s3fs, for the driver and every executor"),
        ({"location": "gs://bucket/app"}, "hint: pip install gcsfs"),
        ("abfs://container/app", "hint: pip install adlfs"),
        ("sftp://host/app", "hint: pip install paramiko"),
    ],
)
def test_a_backup_that_cannot_work_is_refused(wish: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        parse_backup(wish)


def test_a_local_disk_needs_a_backup_and_an_absolute_path() -> None:
    assert Keeping.of(None, None) == Keeping()
    with pytest.raises(UserError, match="local= without backup="):
        Keeping.of(None, "/mnt/disk")
    with pytest.raises(UserError, match="absolute"):
        Keeping.of("/backup", "disk")
    assert Keeping.of("/backup", "/mnt/{executor}").local == "/mnt/{executor}"


def test_where_processes_store_changes_only_where_they_find_their_state_again(tmp_path: Path) -> None:
    shared = make_place(tmp_path / "a").manifest()
    safe = Keeping.of("/backup", None).applied(shared, shared)
    on_disks = Keeping.of("/backup", "/mnt/disk")
    assert on_disks.applied(shared, safe).local == "/mnt/disk"
    for found, wish in [
        (shared, on_disks),
        (on_disks.applied(shared, safe), Keeping.of("/other", "/mnt/disk")),
    ]:
        with pytest.raises(UserError, match="has its backup in"):
            wish.applied(shared, found)


def test_killed_between_an_increment_and_its_head_the_next_life_leaves_no_gap(tmp_path: Path) -> None:
    """It went on behind the head, under a number behind the increment: the two did not follow each other."""
    backup = ProcessBackup(Location(str(tmp_path / "backup")), "small", SITE)
    tail, _ = backup.put_base(1, 1, 0, [])
    backup.put_head(1, 1, 1, 0, tail)
    backup.put_increment(1, 2, 1, tail, [(b"k", b"v")])  # and killed
    head = backup.head()
    storing.restore(backup, tmp_path / "store")
    store = Store(tmp_path / "store", "os", None, backup.claim)
    shipper = Shipper(store, backup, BackupPlan(str(tmp_path / "backup")), head)
    store.add(Write(1, {("count", "a"): 1}))
    store.commit()
    shipper._ship()
    store.close()
    assert [piece.header.kind for piece in backup.pieces()] == ["base"]
