"""Backups of whole deployments: the manifest, manual backups, restoring to a moment, consistency."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from backup_fixtures import DEPLOYMENT, ME, BackedUpStore
from deployment_in_process import INSTANCE, OPERATOR, SITE, make_place
from tiercel.core.logs.retention import LogReader
from tiercel.core.machine.effects import Write
from tiercel.core.model.topology import Topology
from tiercel.runtime.backup.deployment_backup import (
    MANIFEST,
    SECOND,
    backup_deployment,
    inconsistencies,
    restore_deployment,
    write_manifest,
)
from tiercel.runtime.backup.location import Location
from tiercel.runtime.backup.process_backup import ProcessBackup
from tiercel.runtime.deployment import DeploymentDir, Manifest
from tiercel.runtime.storage.store import Store, StoreView


def put(store: Store, seq: int, value: int) -> None:
    store.add(Write(seq, {("stream_head", "s"): value}))
    store.commit()


def test_start_succeeds_after_kill_between_the_two_backup_manifests(
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


def test_manual_backup_of_a_restored_deployment_is_the_newest_state(tmp_path: Path) -> None:
    location = Location(str(tmp_path / "copy"))
    place = make_place(tmp_path / "here")

    def incarnation(value: int, where: DeploymentDir) -> None:
        store = Store(where.process(SITE), "os")
        put(store, 1, value)
        store.close()

    incarnation(1, place)
    backup_deployment(place.directory, location.url)
    for value in (2, 3, 4):
        incarnation(value, place)
    backup_deployment(place.directory, location.url)
    restore_deployment(location.url, tmp_path / "there", {SITE: 1})  # 2 to 4 were a mistake
    there = DeploymentDir(tmp_path / "there")
    incarnation(5, there)
    backup_deployment(there.directory, location.url)
    restore_deployment(location.url, tmp_path / "again")
    with contextlib.closing(StoreView(DeploymentDir(tmp_path / "again").process(SITE))) as view:
        assert view.get(("stream_head", "s")) == 5


@pytest.mark.parametrize("uploaded", [False, True])
def test_restore_to_a_moment_before_an_instance_existed_leaves_it_out(tmp_path: Path, uploaded: bool) -> None:
    location = Location(str(tmp_path / "backup"))
    manifest = Manifest(DEPLOYMENT, Topology({"cloud": None}, {}, {}), {})
    write_manifest(location, manifest)
    router = ProcessBackup(location, DEPLOYMENT, "cloud")
    chain = BackedUpStore(tmp_path / "router", router)
    chain.write(a=1).upload()
    time.sleep(0.01)
    later = ProcessBackup(location, DEPLOYMENT, ME)
    other = BackedUpStore(tmp_path / "later", later)  # began after that
    if uploaded:
        other.write(b=1).upload()
    time.sleep(0.01)
    chain.write(a=2).upload()
    chain.close()
    other.close()
    restored = restore_deployment(location.url, tmp_path / "there", {"cloud": 1})
    assert [one.process for one in restored] == ["cloud"]


def test_instance_without_its_checkpoint_is_reported_as_inconsistent(tmp_path: Path) -> None:
    """It was taken back to before its first checkpoint, its router was not: clocks of machines differ."""
    place = make_place(tmp_path / "storage")
    for process, puts in (
        (INSTANCE, {("schema",): {}}),
        (
            SITE,
            {("head", OPERATOR): (9, 0, 0), ("reader", OPERATOR, INSTANCE): LogReader(1, 7, {}, stored=True)},
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
        assert inconsistencies(seen) != []
