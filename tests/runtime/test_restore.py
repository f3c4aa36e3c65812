"""Processes that lose their disk are restored from their backup, and outputs stay exactly once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deployment_in_process import (
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
from tiercel.admin import backup, merge, restore, show, split
from tiercel.core.machine.effects import Write
from tiercel.core.machine.stored import CheckpointHeader
from tiercel.core.model.log import EpochOverride
from tiercel.core.model.routing import Route, RouteUpdate
from tiercel.core.model.topology import Operator
from tiercel.errors import UserError
from tiercel.runtime.backup import uploader as uploader_module
from tiercel.runtime.backup.deployment_backup import inconsistencies, write_manifest
from tiercel.runtime.backup.location import Location
from tiercel.runtime.backup.process_backup import ProcessBackup
from tiercel.runtime.backup.uploader import BackupUploader
from tiercel.runtime.client.producer import Producer
from tiercel.runtime.client.subscriber import Subscriber
from tiercel.runtime.config import DurabilityConfig, parse_backup
from tiercel.runtime.deployment import BackupPlan, DeploymentDir
from tiercel.runtime.recovery import recover as storing
from tiercel.runtime.storage.store import Store, StoreView

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

    def uploader(self, name: str) -> BackupUploader:
        storage = self.hosts[name].host._config.storage
        found = None if storage is None else storage.backup
        assert found is not None
        return found.uploader

    def stop_uploads(self, name: str) -> None:
        def fail() -> None:
            raise UserError("the location is gone")

        self.uploader(name)._upload = fail  # type: ignore[method-assign]

    def resume_shipping(self, name: str) -> None:
        del self.uploader(name)._upload

    def lose(self, name: str) -> None:
        """The machine dies with its disk: nothing more is uploaded, and it comes back on another executor."""
        self.stop_uploads(name)
        self.hosts.pop(name).end()
        self.lose_disk(name)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader_module, "CLOSE_S_MAX", 0.0)


@contextlib.contextmanager
def deployed(directory: Path, **plan: Any) -> Iterator[Deployment]:
    deployment = Deployment(directory, **plan)
    deployment.start(SITE, INSTANCE)
    try:
        yield deployment
    finally:
        deployment.end()


def cursor_of(directory: Path) -> CheckpointHeader | None:
    with contextlib.closing(StoreView(directory)) as view:
        found: CheckpointHeader | None = view.get(("checkpoint",))
        return found


def test_instance_that_lost_its_disk_is_restored_on_another_executor(tmp_path: Path) -> None:
    with deployed(tmp_path) as deployment:
        with (
            Producer(deployment.place, INPUT, name="p") as producer,
            Subscriber(deployment.place, OUTPUT, after=0) as subscriber,
        ):
            for _ in range(3):
                deployment.send(producer)
                deployment.read(subscriber)
                until(lambda: deployment.backup_of(INSTANCE).head() is not None, "nothing is uploaded")
                deployment.send(producer)
                deployment.lose(INSTANCE)
                deployment.send(producer)
                deployment.start(INSTANCE)
                deployment.read(subscriber)
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)


def test_checkpoint_is_reported_to_the_router_only_when_the_backup_has_it(tmp_path: Path) -> None:
    with deployed(tmp_path) as deployment, Producer(deployment.place, INPUT, name="p") as producer:
        readers = deployment.hosts[SITE].host.machine.inboxes[OPERATOR].readers  # type: ignore[attr-defined]

        def reported() -> int:
            return readers[INSTANCE].applied if INSTANCE in readers else 0

        def stored() -> int:
            found = cursor_of(deployment.disk(INSTANCE))
            return found.applied if found is not None else 0

        deployment.stop_uploads(INSTANCE)
        deployment.send(producer)
        until(lambda: stored() > 0, "no checkpoint without the backup")
        until(lambda: deployment.uploader(INSTANCE)._failing, "it uploads on")
        assert reported() == 0
        deployment.resume_shipping(INSTANCE)
        until(lambda: reported() > 0, "no checkpoint is reported")
        known = reported()
        storing.restore(deployment.backup_of(INSTANCE), tmp_path / "copy")
        copied = cursor_of(tmp_path / "copy")
        assert copied is not None
        assert copied.applied >= known


def test_router_restored_from_a_backup_numbers_rows_and_frames_under_a_new_name(tmp_path: Path) -> None:
    """Rows that it numbered behind the backup may have arrived: others must not have the same numbers."""
    with deployed(tmp_path) as deployment:
        names = [deployment.hosts[SITE].host.machine.state.origin]  # type: ignore[attr-defined]
        for loses in (False, True):
            until(lambda: deployment.backup_of(SITE).head() is not None, "nothing is uploaded")
            if loses:
                deployment.lose(SITE)
            else:
                deployment.hosts.pop(SITE).end()
            deployment.start(SITE)
            names.append(deployment.hosts[SITE].host.machine.state.origin)  # type: ignore[attr-defined]
    assert names[0] == names[1] != names[2]


def waits_for_its_log(instance: Any) -> bool:
    """It has taken a checkpoint, and may not store it before its log is safe."""
    taken = instance.checkpointer.taken
    return taken is not None and taken.complete and taken.rests_on > instance.durable


def test_router_that_lost_its_disk_is_never_behind_a_checkpoint(
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
        stored = deployment.sent
        head = deployment.backup_of(SITE)
        batches = deployment.uploader(SITE)._store.batches
        until(lambda: (found := head.head()) is not None and found.through >= batches, "not uploaded")
        deployment.stop_uploads(SITE)
        forgotten = pytest.raises(UserError, match=r"lost the last .* frames that it had acknowledged")
        with forgotten, Producer(deployment.place, INPUT, name="p2") as producer:
            deployment.send(producer)
            instance = deployment.hosts[INSTANCE].host.machine
            until(lambda: instance.processing.rows >= deployment.sent, "not processed")  # type: ignore[attr-defined]
            until(lambda: waits_for_its_log(instance), "a checkpoint is stored, and its log is not safe")
            storing.restore(deployment.backup_of(SITE), tmp_path / "copy")
            with (
                contextlib.closing(StoreView(tmp_path / "copy")) as log,
                contextlib.closing(StoreView(deployment.disk(INSTANCE))) as state,
            ):
                assert inconsistencies({SITE: log, INSTANCE: state}) == []
            deployment.lose(SITE)
            deployment.start(SITE)
            producer.send(rows(0, 1))
            producer.flush(30)
        deployment.sent = stored  # what was not uploaded is lost, and nothing else
        deployment.entries.clear()
        with (
            Producer(deployment.place, INPUT, name="p3") as producer,
            Subscriber(deployment.place, OUTPUT, after=0) as subscriber,
        ):
            deployment.send(producer)
            deployment.read(subscriber)
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)


def test_strict_backup_loses_nothing_acknowledged_when_all_disks_are_lost(tmp_path: Path) -> None:
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


def test_process_that_returns_to_an_old_disk_does_not_use_the_stale_store(tmp_path: Path) -> None:
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


def test_manual_backup_of_a_running_deployment_starts_on_another_machine(tmp_path: Path) -> None:
    place = make_place(tmp_path / "here", checkpoint_ms=50)
    place.set_desired_instances([INSTANCE])
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
    found = run_rows(DeploymentDir(tmp_path / "there"), 70, 35, "q")
    assert_once_and_in_order(found, 105)
    with pytest.raises(UserError, match="is not empty"):
        restore((tmp_path / "copy").as_uri(), tmp_path / "there")


def test_restored_deployment_has_a_new_secret_and_everything_else(tmp_path: Path) -> None:
    place = make_place(tmp_path / "here", checkpoint_ms=50)
    place.set_desired_instances([INSTANCE])
    assert_once_and_in_order(run_rows(place, 0, 21), 21)
    backup(place.directory, str(tmp_path / "copy"))
    backup(place.directory, str(tmp_path / "copy"))  # again: a newer base
    assert not list((tmp_path / "copy").rglob("secret"))
    restore(str(tmp_path / "copy"), tmp_path / "there")
    there = DeploymentDir(tmp_path / "there")
    assert there.secret != place.secret
    assert there.desired_instances() == [INSTANCE]
    assert there.manifest().topology == place.manifest().topology
    assert_once_and_in_order(run_rows(there, 21, 21), 42)


def test_all_processes_are_restored_to_the_moment_of_the_damaged_one(tmp_path: Path) -> None:
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
                uploaded = deployment.backup_of(INSTANCE).last_number()
                until(lambda n=uploaded: deployment.backup_of(INSTANCE).last_number() > n + 2, "no increment")  # type: ignore[misc]
    finally:
        deployment.end()
    damaged = deployment.backup_of(INSTANCE)
    head = damaged.head()
    assert head is not None
    name = next(n for n in location.names(damaged.folder) if n.startswith(f"increment.{head.number:012d}"))
    location.put(f"{damaged.folder}/{name}", b"")
    with pytest.raises(UserError, match=name) as refused:
        restore(location.url, tmp_path / "there")
    assert refused.value.hint == (
        f"the last complete state before it: --up-to '{INSTANCE}={head.number - 1}'"
    )
    assert not (tmp_path / "there").exists()
    restore(location.url, tmp_path / "there", {INSTANCE: head.number - 1})
    found = run_rows(DeploymentDir(tmp_path / "there"), 0, 0)
    assert found == [(n, n // 7 + 1) for n, _ in found], "a prefix of what was, each once"


def test_location_of_another_deployment_is_refused(tmp_path: Path) -> None:
    place = make_place(tmp_path / "here")
    other = make_place(tmp_path / "there")
    write_manifest(Location(str(tmp_path / "copy")), place.manifest())
    other.write(msgspec.structs.replace(other.manifest(), id="another"))
    with pytest.raises(UserError, match="holds the backup of another deployment"):
        backup(other.directory, str(tmp_path / "copy"))
    with pytest.raises(UserError, match="holds no backup of a deployment"):
        restore(str(tmp_path / "nothing"), tmp_path / "new")


def test_show_lists_state_by_kind_with_position_and_backup(tmp_path: Path) -> None:
    with (
        deployed(tmp_path) as deployment,
        Producer(deployment.place, INPUT, name="p") as producer,
        Subscriber(deployment.place, OUTPUT, after=0) as subscriber,
    ):
        deployment.send(producer, 70)
        deployment.read(subscriber)
        place = deployment.place.directory
        until(lambda: any(line.kind == "processing" and line.keys == 7 for line in show(place)))
    stored = {(line.process, line.kind): line for line in show(deployment.place.directory)}
    assert set(stored) == {(SITE, "routing"), (SITE, "buffer"), (INSTANCE, "processing")}
    processing = stored[INSTANCE, "processing"]
    assert processing.keys == 7
    assert stored[SITE, "buffer"].position.startswith(f"{OPERATOR} ")
    for line in stored.values():
        assert line.backup_number is not None
        assert line.backup_behind == 0


# -- dividing --------------------------------------------------------------------------------------


def operator_of_place(place: DeploymentDir) -> Operator:
    return place.manifest().topology.operators[OPERATOR]


def test_split_and_merge_move_keys_of_a_stopped_deployment(tmp_path: Path) -> None:
    place = make_place(tmp_path / "here", checkpoint_ms=50)
    place.set_desired_instances([INSTANCE])
    assert_once_and_in_order(run_rows(place, 0, 70), 70)
    divided = split(place.directory, INSTANCE)
    second = divided.destination
    assert second == f"{OPERATOR}@{SITE}#2"
    assert divided.slots == operator_of_place(place).slots // 2
    assert place.desired_instances() == [INSTANCE, second]
    assert_once_and_in_order(run_rows(place, 70, 70), 140)
    keys = {line.process: line.keys for line in show(place.directory) if line.kind == "processing"}
    assert sum(keys.values()) == 7
    assert keys[second] == divided.keys > 0
    united = merge(place.directory, INSTANCE, second)
    assert united.keys == keys[INSTANCE]
    assert place.desired_instances() == [second]
    assert_once_and_in_order(run_rows(place, 140, 70), 210)


def test_keys_split_off_from_a_successor_get_the_epochs_of_their_new_owner(tmp_path: Path) -> None:
    """Its own versions are few and new: none of them is of the time before its inheritance."""
    place = make_place(tmp_path / "here", checkpoint_ms=50)
    place.set_desired_instances([INSTANCE])
    run_rows(place, 0, 70)
    store = Store(place.process(INSTANCE), "os")
    cursor = store.items()["checkpoint",]
    era = EpochOverride(
        cursor.generation, RouteUpdate({slot: Route(INSTANCE, 1) for slot in range(4096)}, {})
    )
    store.add(Write(1, {("checkpoint",): msgspec.structs.replace(cursor, era=era)}))
    store.close()
    second = split(place.directory, INSTANCE).destination
    for instance, expected in ((INSTANCE, era), (second, None)):
        with contextlib.closing(StoreView(place.process(instance))) as view:
            assert view.get(("checkpoint",)).era == expected
    assert_once_and_in_order(run_rows(place, 70, 70), 140)


def test_split_is_refused_while_rows_or_moves_are_unfinished(tmp_path: Path) -> None:
    place = make_place(tmp_path / "here", checkpoint_ms=1e6)
    place.set_desired_instances([INSTANCE])
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
def test_invalid_split_or_merge_is_refused(tmp_path: Path, wish: Any, reason: str) -> None:
    place = make_place(tmp_path / "here", checkpoint_ms=50)
    place.set_desired_instances([INSTANCE])
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
def test_invalid_backup_configuration_is_refused(wish: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        parse_backup(wish)


def test_a_local_disk_needs_a_backup_and_an_absolute_path() -> None:
    assert DurabilityConfig.of(None, None) == DurabilityConfig()
    with pytest.raises(UserError, match="local= without backup="):
        DurabilityConfig.of(None, "/mnt/disk")
    with pytest.raises(UserError, match="absolute"):
        DurabilityConfig.of("/backup", "disk")
    assert DurabilityConfig.of("/backup", "/mnt/{executor}").local == "/mnt/{executor}"


def test_local_directory_can_change_only_where_a_backup_has_the_state(tmp_path: Path) -> None:
    shared = make_place(tmp_path / "a").manifest()
    safe = DurabilityConfig.of("/backup", None).applied(shared, shared)
    on_disks = DurabilityConfig.of("/backup", "/mnt/disk")
    assert on_disks.applied(shared, safe).local == "/mnt/disk"
    for found, wish in [
        (shared, on_disks),
        (on_disks.applied(shared, safe), DurabilityConfig.of("/other", "/mnt/disk")),
    ]:
        with pytest.raises(UserError, match="has its backup in"):
            wish.applied(shared, found)


def test_next_incarnation_leaves_no_gap_after_kill_between_increment_and_head(tmp_path: Path) -> None:
    """It went on behind the head, under a number behind the increment: the two did not follow each other."""
    backup = ProcessBackup(Location(str(tmp_path / "backup")), "small", SITE)
    tail, _ = backup.put_base(1, 1, 0, [])
    backup.put_head(1, 1, 1, 0, tail)
    backup.put_increment(1, 2, 1, tail, [(b"k", b"v")])  # and killed
    head = backup.head()
    storing.restore(backup, tmp_path / "store")
    store = Store(tmp_path / "store", "os", None, backup.claim)
    uploader = BackupUploader(store, backup, BackupPlan(str(tmp_path / "backup")), head)
    store.add(Write(1, {("count", "a"): 1}))
    store.commit()
    uploader._upload()
    store.close()
    assert [piece.header.kind for piece in backup.segments()] == ["base"]
