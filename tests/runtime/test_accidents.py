"""Accidents of stores and backups while they are made, looked at or restored: nothing old comes back."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rocksdict import Options, Rdict

from shipped import DEPLOYMENT, ME, Shipped, content, names
from small import INSTANCE, OPERATOR, SITE, Running, make_place, replica_host
from tiercel.core.effects import Write
from tiercel.core.readers import Reader
from tiercel.core.records import KeyImage
from tiercel.core.taken import Cursor
from tiercel.core.topology import Topology
from tiercel.errors import UserError
from tiercel.runtime import fetching
from tiercel.runtime.backups import ProcessBackup
from tiercel.runtime.copies import (
    MANIFEST,
    SECOND,
    copy_deployment,
    misfitting,
    restore_deployment,
    write_manifest,
)
from tiercel.runtime.lives import Lives
from tiercel.runtime.locations import Location
from tiercel.runtime.moments import history, numbers_as_of, processes_as_of
from tiercel.runtime.opening import open_to_read
from tiercel.runtime.packed import encoder
from tiercel.runtime.place import BackupPlan, Manifest, Place, ReplicaPlan
from tiercel.runtime.replicated import open_replicated
from tiercel.runtime.replication import replica_name
from tiercel.runtime.store import RESTORING, Store, StoreView
from tiercel.runtime.stored_state import stored_keys
from tiercel.runtime.storing import directory_of, open_storage, restore, set_in_place
from tiercel.runtime.tables import encode_key

REPLICA = replica_name(SITE, 1)


@pytest.fixture
def backup(tmp_path: Path) -> ProcessBackup:
    return ProcessBackup(Location((tmp_path / "backup").as_uri()), DEPLOYMENT, ME)


# -- an old disk, a replica that began anew, a backup with a later life --------


def put(store: Store, seq: int, value: int) -> None:
    store.add(Write(seq, {("stream_head", "s"): value}))
    store.commit()


def test_an_old_disk_is_not_taken_where_the_replica_began_anew_and_a_backup_has_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "ANSWER_S_MAX", 1.0)
    plan = BackupPlan((tmp_path / "backup").as_uri(), strict=True)
    place = make_place(tmp_path / "storage", plan, str(tmp_path / "disks" / "{executor}"), ReplicaPlan())
    manifest = place.manifest()
    lives = Lives(place.lives, SITE)
    for value, executor in ((1, "A"), (2, "B")):
        directory = directory_of(place, manifest, SITE, executor)
        if executor == "B":  # it has lost the disk of A for a while; its replica gave everything back
            set_in_place(directory, [contents_of(directory_of(place, manifest, SITE, "A"))], lambda: (1, 1))
        (store, keeping), _ = open_replicated(place, manifest, SITE, directory, executor)
        assert keeping is not None
        put(store, 1, value)
        keeping.shipper._ship()
        lives.note_held(store.life, REPLICA)  # as if a replica had followed
        store.close()
    shutil.rmtree(directory_of(place, manifest, SITE, "B"))  # with its machine, and so is the replica
    replica = Running(replica_host(place))
    try:
        directory = directory_of(place, manifest, SITE, "A")
        (store, _), _ = open_replicated(place, manifest, SITE, directory, "A")
        found = store.items()[("stream_head", "s")]
        store.close()
    finally:
        replica.end()
    assert found == 2, "the past came back"


def contents_of(directory: Path) -> list[Any]:
    with contextlib.closing(StoreView(directory)) as view:
        return list(view.pairs()[1])


def test_who_gets_replicas_at_a_restart_does_not_take_an_old_disk(tmp_path: Path) -> None:
    """With durability `os` it ran on A, then on B; then it is started with durability `replica`."""
    plan = BackupPlan((tmp_path / "backup").as_uri())
    place = make_place(tmp_path / "storage", plan, str(tmp_path / "disks" / "{executor}"))
    manifest = place.manifest()
    for value, executor in ((1, "A"), (2, "B")):
        store, keeping = open_storage(directory_of(place, manifest, SITE, executor), manifest, SITE)
        assert keeping is not None
        put(store, 1, value)
        keeping.shipper._ship()
        store.close()
    manifest = msgspec.structs.replace(manifest, durability="replica", replicas=ReplicaPlan())
    (store, _), _ = open_replicated(place, manifest, SITE, directory_of(place, manifest, SITE, "A"), "A")
    found = store.items()[("stream_head", "s")]
    store.close()
    assert found == 2, "the past came back"


def test_who_gets_replicas_at_a_restart_does_not_wait_for_values_that_nobody_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercel.runtime.store.WHOLE_S_MAX", 0.5)
    plan = BackupPlan((tmp_path / "backup").as_uri())
    place = make_place(tmp_path / "storage", plan, str(tmp_path / "disks" / "{executor}"))
    manifest = place.manifest()
    directory = directory_of(place, manifest, SITE, "A")
    store, keeping = open_storage(directory, manifest, SITE)
    assert keeping is not None
    put(store, 1, 1)
    keeping.shipper._ship()
    store._db.put(RESTORING, b"1")  # killed while its values came
    store.close()
    manifest = msgspec.structs.replace(manifest, durability="replica", replicas=ReplicaPlan())
    (store, _), _ = open_replicated(place, manifest, SITE, directory, "A")
    found = store.items()[("stream_head", "s")]
    store.close()
    assert found == 1


# -- what was set aside --------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_set_aside_is_nobodys_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """An instance was killed while its values came out of its backup, and restored again."""
    monkeypatch.setattr("tiercel.runtime.store.WHOLE_S_MAX", 1.0)
    place = make_place(tmp_path / "storage")
    store = Store(place.process(INSTANCE), "os")
    cursor: dict[Any, Any] = {("cursor",): Cursor(1, 1, 1, 0, -1, [])}
    store.add(Write(1, {**cursor, ("state", 0, b"k", 1): KeyImage(b"k", 1, 1, {})}))
    store.commit()
    if not whole:
        store._db.put(RESTORING, b"1")
    store.close()
    pairs = [(encode_key(key), encoder.encode(value)) for key, value in cursor.items()]
    set_in_place(place.process(INSTANCE), [pairs], lambda: (2, 2))  # the key was deleted meanwhile
    store = Store(place.process(SITE), "os")
    store.add(Write(1, {("head", OPERATOR): (1, 0, 0)}))
    store.commit()
    store.close()
    assert [stored.key for stored in stored_keys(place, OPERATOR)] == [], "a key that was deleted is back"
    copied = copy_deployment(place, Location(str(tmp_path / "copy")))
    assert {one.process for one in copied} == {SITE, INSTANCE}


# -- the manifest of a backup --------------------------------------------------------------------------


def test_killed_between_the_two_manifests_of_a_first_start_the_next_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = Location(str(tmp_path / "backup"))
    manifest = Manifest(DEPLOYMENT, Topology({"cloud": None}, {}, {}), {})
    whole, count = location.put, [0]

    def once(name: str, data: bytes) -> None:
        if count[0] == 1:
            raise KeyboardInterrupt
        count[0] += 1
        whole(name, data)

    with monkeypatch.context() as patch:
        patch.setattr(location, "put", once)
        with pytest.raises(KeyboardInterrupt):
            write_manifest(location, manifest)
    write_manifest(location, manifest)
    assert set(location.names("")) >= {MANIFEST, SECOND}


# -- a head that was written although the location said that it was not --------------------------------


def test_a_head_that_was_written_though_the_location_failed_is_never_wrong(
    tmp_path: Path, backup: ProcessBackup, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Shipped(tmp_path / "db", backup)
    chain.write(a=1).ship().write(a=2)
    whole = backup.location.put

    def too_late(name: str, data: bytes) -> None:
        whole(name, data)
        if "/head." in name:
            raise UserError("timed out")  # it got there all the same

    with monkeypatch.context() as patch:
        patch.setattr(backup.location, "put", too_late)
        with pytest.raises(UserError):
            chain.ship()
    restore(backup, tmp_path / "between")
    chain.write(b=3)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(backup, "put_head", killed)
        with pytest.raises(KeyboardInterrupt):
            chain.ship()
    chain.close()
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again")["a"] == 2


# -- copies by hand ------------------------------------------------------------------------------------


def test_a_copy_by_hand_of_who_went_back_is_what_is_restored(tmp_path: Path) -> None:
    location = Location(str(tmp_path / "copy"))
    place = make_place(tmp_path / "here")

    def life(value: int, where: Place) -> None:
        store = Store(where.process(SITE), "os")
        put(store, 1, value)
        store.close()

    life(1, place)
    copy_deployment(place, location)
    for value in (2, 3, 4):
        life(value, place)
    copy_deployment(place, location)
    restore_deployment(location, tmp_path / "there", {SITE: 1})  # 2 to 4 were a mistake
    there = Place(tmp_path / "there")
    life(5, there)
    copy_deployment(there, location)
    restore_deployment(location, tmp_path / "again")
    with contextlib.closing(StoreView(Place(tmp_path / "again").process(SITE))) as view:
        assert view.get(("stream_head", "s")) == 5


# -- who is believed dead, and retention ---------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2])
def test_who_is_believed_dead_and_ships_bases_deletes_nothing_of_its_successor(
    tmp_path: Path, backup: ProcessBackup, keep: int
) -> None:
    zombie = Shipped(tmp_path / "db", backup, keep=keep)
    zombie.write(a=1).ship()
    restore(backup, tmp_path / "elsewhere")
    successor = Shipped(tmp_path / "elsewhere", backup, keep=keep)
    successor.write(new=1).ship()
    for n in range(keep):
        zombie.shipper._drop_buffer()
        zombie.write(zombie=n).ship()
    successor.write(new=2).ship()
    zombie.close()
    successor.close()
    restore(backup, tmp_path / "again")
    assert content(tmp_path / "again") == {"a": 1, "new": 2}


# -- a base without a head -----------------------------------------------------------------------------


def test_every_state_that_is_listed_can_be_read(
    tmp_path: Path, backup: ProcessBackup, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest(DEPLOYMENT, Topology({"cloud": None}, {}, {}), {})
    write_manifest(backup.location, manifest)
    chain = Shipped(tmp_path / "db", backup)
    chain.write(a=1).ship().write(a=2).ship()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    chain.shipper._drop_buffer()
    chain.write(a=3)
    with monkeypatch.context() as patch:
        patch.setattr(backup, "put_head", killed)
        with pytest.raises(KeyboardInterrupt):
            chain.ship()
    chain.close()
    for state in history(backup.location.url, ME):
        restore(backup, tmp_path / f"as of {state.number}", state.number)
    numbers = numbers_as_of(backup.location, manifest, "count", "latest")
    with processes_as_of(backup.location, DEPLOYMENT, numbers) as processes:
        assert content(processes / ME)["a"] >= 2


# -- --up-to, and a process that was not there yet -----------------------------------------------------


@pytest.mark.parametrize("shipped", [False, True])
def test_going_back_to_before_an_instance_was_there_is_possible(tmp_path: Path, shipped: bool) -> None:
    location = Location(str(tmp_path / "backup"))
    manifest = Manifest(DEPLOYMENT, Topology({"cloud": None}, {}, {}), {})
    write_manifest(location, manifest)
    router = ProcessBackup(location, DEPLOYMENT, "cloud")
    chain = Shipped(tmp_path / "router", router)
    chain.write(a=1).ship()
    time.sleep(0.01)
    later = ProcessBackup(location, DEPLOYMENT, ME)
    other = Shipped(tmp_path / "later", later)  # began after that
    if shipped:
        other.write(b=1).ship()
    time.sleep(0.01)
    chain.write(a=2).ship()
    chain.close()
    other.close()
    restored = restore_deployment(location, tmp_path / "there", {"cloud": 1})
    assert [one.process for one in restored] == ["cloud"]


# -- a look beside a writer ----------------------------------------------------------------------------


def test_a_look_beside_a_writer_sees_no_holes(tmp_path: Path) -> None:
    directory = tmp_path / "db"
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(64 * 1024)
    db = Rdict(str(directory), options)
    stop = threading.Event()
    done = [0]

    def write() -> None:
        n = 0
        while not stop.is_set() and n < 200_000:
            n += 1
            db.put(b"k%09d" % n, b"v" * 200)
            done[0] = n
            if n % 300 == 0:
                time.sleep(0.01)

    writer = threading.Thread(target=write)
    writer.start()
    holes, looks, failures = [], 0, []
    until_s = time.monotonic() + 5
    while time.monotonic() < until_s and not holes and writer.is_alive():
        before = done[0]
        try:
            view = open_to_read(directory)
        except Exception as error:
            failures.append(str(error)[:150])
            continue
        looks += 1
        keys = list(view.keys())
        found, last = len(keys), max(keys, default=b"k0")
        view.close()
        if found != int(last[1:]) or found < before:
            holes.append((found, last, before))
    stop.set()
    writer.join()
    db.close()
    assert looks, failures
    assert not holes, holes


# -- a location where nothing may be deleted -----------------------------------------------------------


def test_where_nothing_may_be_deleted_what_is_shipped_is_safe(
    tmp_path: Path, backup: ProcessBackup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(names: Any) -> None:
        if list(names):
            raise UserError("AccessDenied: s3:DeleteObject")

    monkeypatch.setattr(backup.location, "delete", refuse)
    chain = Shipped(tmp_path / "db", backup, keep=1)
    chain.write(a=1).ship()
    chain.shipper._drop_buffer()
    chain.write(a=2)
    with contextlib.suppress(UserError):
        chain.ship()
    with contextlib.suppress(UserError):
        chain.ship()
    chain.close()
    assert chain.safe == chain.seq
    assert len(names(backup, "base")) == 2, "all of it is shipped again and again"


# -- a checkpoint that is not there --------------------------------------------------------------------


def test_a_process_that_is_there_without_its_checkpoint_does_not_fit(tmp_path: Path) -> None:
    """It was taken back to before its first checkpoint, its router was not: clocks of machines differ."""
    place = make_place(tmp_path / "storage")
    for process, puts in (
        (INSTANCE, {("schema",): {}}),
        (
            SITE,
            {("head", OPERATOR): (9, 0, 0), ("reader", OPERATOR, INSTANCE): Reader(1, 7, {}, stored=True)},
        ),
    ):
        store = Store(place.process(process), "os")
        store.add(Write(1, puts))
        store.close()
    with contextlib.ExitStack() as opened:
        seen = {
            name: opened.enter_context(contextlib.closing(StoreView(place.process(name))))
            for name in (SITE, INSTANCE)
        }
        assert misfitting(seen) != []


# -- a location that does not answer -------------------------------------------------------------------


def test_who_ends_does_not_wait_for_ever_for_a_location_that_does_not_answer(
    tmp_path: Path, backup: ProcessBackup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercel.runtime.shipping.CLOSE_S_MAX", 0.5)
    chain = Shipped(tmp_path / "db", backup)
    chain.write(a=1).ship().write(a=2)
    answers, whole = threading.Event(), backup.location.put

    def put(name: str, data: bytes) -> None:
        answers.wait(30)
        whole(name, data)

    monkeypatch.setattr(backup.location, "put", put)
    chain.shipper.start(lambda seq: None)
    closing = threading.Thread(target=chain.shipper.close, daemon=True)
    closing.start()
    closing.join(5)
    hangs = closing.is_alive()
    answers.set()
    closing.join(5)
    chain.shipper._thread.join(5)
    chain.close()
    assert not hangs
