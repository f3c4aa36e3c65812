"""Opening storage uses the newest copy of a process, and nothing older comes back."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from deployment_in_process import INSTANCE, OPERATOR, SITE, Running, make_place, replica_host
from tiercel.core.machine.effects import Write
from tiercel.core.machine.stored import CheckpointHeader
from tiercel.core.model.keys import StateImage
from tiercel.runtime.backup.deployment_backup import (
    backup_deployment,
)
from tiercel.runtime.deployment import BackupPlan, ReplicaPlan
from tiercel.runtime.net.lazy_outputs import encoder
from tiercel.runtime.recovery import replica_fetch as fetching
from tiercel.runtime.recovery.read_only import stored_keys
from tiercel.runtime.recovery.recover import Age, Source, choose_source, open_replicated_storage, open_storage
from tiercel.runtime.replication.primary import replica_name
from tiercel.runtime.storage.codec import encode_key
from tiercel.runtime.storage.directory import directory_of, replace_store
from tiercel.runtime.storage.incarnations import IncarnationClaims
from tiercel.runtime.storage.store import RESTORING, Store, StoreView

REPLICA = replica_name(SITE, 1)


# -- the decision table ----------------------------------------------------------------------


class KnownCopies(NamedTuple):
    """Copies as a test states them; by default there is no copy at all."""

    is_replicated: bool = False
    local: Age | None = None
    local_is_partial: bool = False
    is_later_elsewhere: bool = False
    holder: str = ""
    replica: Age | None = None
    same_host: Age | None = None
    has_backup: bool = False
    backup_is_newer: bool = False
    is_backed_up: bool = False


OLD, NEW = Age(3, 10), Age(4, 2)
REPLICATED = KnownCopies(is_replicated=True)
HELD = REPLICATED._replace(is_later_elsewhere=True, holder=REPLICA)


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        (KnownCopies(), Source.LOCAL),
        (KnownCopies(local=OLD), Source.LOCAL),
        (KnownCopies(local=OLD, is_backed_up=True, has_backup=True), Source.LOCAL),
        (KnownCopies(local=OLD, is_backed_up=True, has_backup=True, backup_is_newer=True), Source.BACKUP),
        (KnownCopies(is_backed_up=True, has_backup=True, backup_is_newer=True), Source.BACKUP),
        (KnownCopies(local_is_partial=True, is_backed_up=True), Source.EMPTY),
        (KnownCopies(local_is_partial=True), Source.LOCAL),
        (REPLICATED, Source.LOCAL),
        (REPLICATED._replace(local=NEW, holder=REPLICA, replica=OLD), Source.LOCAL),
        (HELD._replace(local=OLD, replica=NEW), Source.REPLICA),
        (HELD._replace(replica=OLD), Source.REPLICA),
        (HELD._replace(local=NEW, replica=OLD), Source.LOCAL),
        (HELD._replace(local=OLD, same_host=NEW, has_backup=True), Source.SAME_HOST),
        (HELD._replace(local=OLD, has_backup=True), Source.BACKUP),
        (HELD._replace(local=OLD), Source.LOST),
        (HELD, Source.LOST),
        (REPLICATED._replace(has_backup=True, backup_is_newer=True), Source.BACKUP),
    ],
)
def test_newest_copy_is_chosen(copies: KnownCopies, expected: Source) -> None:
    assert choose_source(copies) is expected


# -- stale disks, restarted replicas, backups of later incarnations --------------------------


def put(store: Store, seq: int, value: int) -> None:
    store.add(Write(seq, {("stream_head", "s"): value}))
    store.commit()


def test_stale_disk_is_not_used_when_replica_restarted_and_backup_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "ANSWER_S_MAX", 1.0)
    plan = BackupPlan((tmp_path / "backup").as_uri(), strict=True)
    place = make_place(tmp_path / "storage", plan, str(tmp_path / "disks" / "{executor}"), ReplicaPlan())
    manifest = place.manifest()
    incarnations = IncarnationClaims(place.incarnations, SITE)
    for value, executor in ((1, "A"), (2, "B")):
        directory = directory_of(place, manifest, SITE, executor)
        if executor == "B":  # it has lost the disk of A for a while; its replica gave everything back
            replace_store(directory, [contents_of(directory_of(place, manifest, SITE, "A"))], lambda: (1, 1))
        store, gate, _ = open_replicated_storage(place, manifest, SITE, directory, executor)
        assert gate is not None
        put(store, 1, value)
        gate.uploader._upload()
        incarnations.set_holder(store.incarnation, REPLICA)  # as if a replica had followed
        store.close()
    shutil.rmtree(directory_of(place, manifest, SITE, "B"))  # with its machine, and so is the replica
    replica = Running(replica_host(place))
    try:
        directory = directory_of(place, manifest, SITE, "A")
        store, _, _ = open_replicated_storage(place, manifest, SITE, directory, "A")
        found = store.items()[("stream_head", "s")]
        store.close()
    finally:
        replica.end()
    assert found == 2, "the past came back"


def contents_of(directory: Path) -> list[Any]:
    with contextlib.closing(StoreView(directory)) as view:
        return list(view.pairs()[1])


def test_process_that_gets_replicas_at_restart_does_not_use_a_stale_disk(tmp_path: Path) -> None:
    """With durability `os` it ran on A, then on B; then it is started with durability `replica`."""
    plan = BackupPlan((tmp_path / "backup").as_uri())
    place = make_place(tmp_path / "storage", plan, str(tmp_path / "disks" / "{executor}"))
    manifest = place.manifest()
    for value, executor in ((1, "A"), (2, "B")):
        store, gate, _ = open_storage(directory_of(place, manifest, SITE, executor), manifest, SITE)
        assert gate is not None
        put(store, 1, value)
        gate.uploader._upload()
        store.close()
    manifest = msgspec.structs.replace(manifest, durability="replica", replicas=ReplicaPlan())
    store, _, _ = open_replicated_storage(
        place, manifest, SITE, directory_of(place, manifest, SITE, "A"), "A"
    )
    found = store.items()[("stream_head", "s")]
    store.close()
    assert found == 2, "the past came back"


def test_process_that_gets_replicas_at_restart_completes_an_interrupted_lazy_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercel.runtime.storage.store.RESTORED_S_MAX", 0.5)
    plan = BackupPlan((tmp_path / "backup").as_uri())
    place = make_place(tmp_path / "storage", plan, str(tmp_path / "disks" / "{executor}"))
    manifest = place.manifest()
    directory = directory_of(place, manifest, SITE, "A")
    store, gate, _ = open_storage(directory, manifest, SITE)
    assert gate is not None
    put(store, 1, 1)
    gate.uploader._upload()
    store._db.put(RESTORING, b"1")  # killed while its values came
    store.close()
    manifest = msgspec.structs.replace(manifest, durability="replica", replicas=ReplicaPlan())
    store, _, _ = open_replicated_storage(place, manifest, SITE, directory, "A")
    found = store.items()[("stream_head", "s")]
    store.close()
    assert found == 1


# -- stores that were set aside --------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_store_that_was_set_aside_is_ignored_by_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """An instance was killed while its values came out of its backup, and restored again."""
    monkeypatch.setattr("tiercel.runtime.storage.store.RESTORED_S_MAX", 1.0)
    place = make_place(tmp_path / "storage")
    store = Store(place.process(INSTANCE), "os")
    cursor: dict[Any, Any] = {("checkpoint",): CheckpointHeader(1, 1, 1, 0, -1, [])}
    store.add(Write(1, {**cursor, ("state", 0, b"k", 1): StateImage(b"k", 1, 1, {})}))
    store.commit()
    if not whole:
        store._db.put(RESTORING, b"1")
    store.close()
    pairs = [(encode_key(key), encoder.encode(value)) for key, value in cursor.items()]
    replace_store(place.process(INSTANCE), [pairs], lambda: (2, 2))  # the key was deleted meanwhile
    store = Store(place.process(SITE), "os")
    store.add(Write(1, {("head", OPERATOR): (1, 0, 0)}))
    store.commit()
    store.close()
    assert [stored.key for stored in stored_keys(place, OPERATOR)] == [], "a key that was deleted is back"
    copied = backup_deployment(place.directory, str(tmp_path / "copy"))
    assert {one.process for one in copied} == {SITE, INSTANCE}
