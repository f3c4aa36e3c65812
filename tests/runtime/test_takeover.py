"""A successor's share of a dead instance's checkpoint, from its directory or its backup, and nothing more."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiercel.core.machine.effects import LoadCheckpoint, StorageKey, Write
from tiercel.core.machine.events import CheckpointLoaded
from tiercel.core.machine.stored import CheckpointHeader
from tiercel.core.model.keys import KeySet, StateImage, StoredKeyInfo
from tiercel.core.model.log import Takeover
from tiercel.core.model.routing import RouteUpdate
from tiercel.core.model.topology import Operator, Topology
from tiercel.errors import UserError
from tiercel.runtime.backup import lazy_restore as lazy_restore_module
from tiercel.runtime.backup import process_backup as backups
from tiercel.runtime.backup import segment_file as segment_file_module
from tiercel.runtime.backup.lazy_restore import LazyRestore
from tiercel.runtime.backup.location import Location
from tiercel.runtime.backup.uploader import BackupUploader
from tiercel.runtime.deployment import BackupPlan, DeploymentDir, Manifest
from tiercel.runtime.recovery.recover import open_storage
from tiercel.runtime.recovery.takeover import ShareLoader, _find_share, _read_share
from tiercel.runtime.storage.codec import decode_key
from tiercel.runtime.storage.store import NO_TABLE, StoreView

DEAD = "op@a#0"
SLOTS = 16
SHARE = Takeover(DEAD, KeySet(slots=frozenset(range(4, 8)), keys=frozenset()), 9)


def image(n: int, value: int) -> StateImage:
    return StateImage(b"k%04d" % n, 1, 1, {"v": bytes(1_000) + b"%d" % value})


def place_of(n: int, generation: int = 1) -> StorageKey:
    return ("state", n % SLOTS, b"k%04d" % n, generation)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    topology = Topology({"a": None}, {}, {"op": Operator("op", ("in",), "out", (DEAD,), slots=SLOTS)})
    return Manifest("d1", topology, {}, backup=BackupPlan((tmp_path / "backup").as_uri(), every_s=0.01))


def store_some(place: DeploymentDir, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base with many chunks, then increments that change and delete keys."""
    monkeypatch.setattr(backups, "CHUNK_BYTES", 4_000)
    store, backup, _ = open_storage(place.process(DEAD), manifest, DEAD, is_instance=True)
    everything = {place_of(n): image(n, 0) for n in range(200)}
    cursor = CheckpointHeader(1, 7, 1, 0, -1, [])
    store.add(Write(1, {**everything, ("checkpoint",): cursor, ("routes", 0): RouteUpdate({}, {})}))
    store.commit()
    if backup is not None:
        assert isinstance(backup.uploader, BackupUploader)
        backup.uploader._upload()
    store.add(Write(2, {place_of(n): image(n, 1) for n in range(50)}, tuple(map(place_of, range(50, 60)))))
    store.commit()
    if backup is not None:
        backup.uploader._upload()
    store.close()


def load_share(place: DeploymentDir, manifest: Manifest, takeover: Takeover) -> dict[StorageKey, Any]:
    """All of it, as a process reads it that cannot restore lazily."""
    return _read_share(_find_share(place, manifest, takeover), takeover)


def expected() -> dict[StorageKey, StateImage]:
    gone = range(50, 60)
    mine = [n for n in range(200) if n % SLOTS in range(4, 8) and n not in gone]
    return {place_of(n): image(n, 1 if n < 50 else 0) for n in mine}


@pytest.mark.parametrize("lost", [False, True], ids=["from the directory", "from the backup"])
def test_successor_gets_its_slots_and_the_cursor(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    place = DeploymentDir(tmp_path / "storage")
    store_some(place, manifest, monkeypatch)
    if lost:
        shutil.rmtree(place.process(DEAD))
    found = load_share(place, manifest, SHARE)
    assert found.pop(("checkpoint",)).applied == 7
    assert found.pop(("routes", 0)) == RouteUpdate({}, {})
    assert found == expected()


def test_successor_reads_only_its_own_sections(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a base, and of each increment."""
    monkeypatch.setattr(segment_file_module, "SECTION_BYTES", 100)
    place = DeploymentDir(tmp_path / "storage")
    store_some(place, manifest, monkeypatch)
    shutil.rmtree(place.process(DEAD))
    read: Counter[str] = Counter()
    get = Location.get

    def counting(self: Location, name: str, start: int | None = None, end: int | None = None) -> bytes:
        found = get(self, name, start, end)
        if start is not None or end is None:  # all but a look at its beginning
            read[Path(name).name.split(".")[0]] += len(found)
        return found

    monkeypatch.setattr(Location, "get", counting)
    assert len(load_share(place, manifest, SHARE)) > 10
    for kind in ("base", "increment"):
        files = [p for p in (tmp_path / "backup").rglob(f"{kind}.*") if p.is_file()]
        assert 0 < read[kind] < sum(p.stat().st_size for p in files) / 2


def test_successor_gets_single_keys_routed_to_the_dead_instance(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = DeploymentDir(tmp_path / "storage")
    store_some(place, manifest, monkeypatch)
    shutil.rmtree(place.process(DEAD))
    guest = Takeover(DEAD, KeySet(frozenset({4}), frozenset({b"k0191"})), 9)
    assert place_of(191) in load_share(place, manifest, guest)


def test_unreadable_share_raises_and_is_not_taken_for_an_empty_state(
    tmp_path: Path, manifest: Manifest
) -> None:
    bare = Manifest(manifest.id, manifest.topology, {})
    with pytest.raises(UserError, match="nothing of op@a#0 can be read"):
        load_share(DeploymentDir(tmp_path / "storage"), bare, SHARE)
    assert (
        load_share(DeploymentDir(tmp_path / "storage"), manifest, SHARE) == {}
    )  # it had stored nothing that counts


# -- values come while they are in use -------------------------------------------------------------------

SUCCESSOR = "op@a#1"


class PausedRestore(LazyRestore):
    """Restores nothing before the test says so."""

    def start_background_restore(
        self, put: Callable[[list[Any]], object], on_complete: Callable[[], object]
    ) -> None:
        self.run_restore = lambda: self._run(put, on_complete)


class Successor:
    """The storage of a successor, with older content, and its takeover."""

    def __init__(self, place: DeploymentDir, manifest: Manifest) -> None:
        self.manifest, self.directory = manifest, place.process(SUCCESSOR)
        self.storage = open_storage(self.directory, manifest, SUCCESSOR, is_instance=True)
        assert self.storage.backup is not None
        self.uploader = self.storage.backup.uploader
        self.safe: list[int] = []
        self.uploader._on_uploaded = self.safe.append
        self.loader = ShareLoader(place, manifest, self.storage, lambda items: items, lazily=True)

    def write(self, seq: int, puts: dict[StorageKey, Any]) -> None:
        self.storage.store.add(Write(seq, puts))
        self.storage.store.commit()

    def take_over(self, *, adopt: bool = True) -> CheckpointLoaded:
        return self.loader.load(LoadCheckpoint(timers=False, takeover=SHARE, number=5, adopt=adopt))()

    def stored(self) -> dict[StorageKey, Any]:
        with contextlib.closing(StoreView(self.directory, complete=False)) as view:
            return {decode_key(k): v for k, v in view.pairs()[1] if not k.startswith(NO_TABLE)}


@pytest.fixture
def successor(tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Successor]:
    monkeypatch.setattr("tiercel.runtime.recovery.takeover.LazyRestore", PausedRestore)
    monkeypatch.setattr(lazy_restore_module, "UNDISTURBED_S_MAX", 0.0)
    place = DeploymentDir(tmp_path / "storage")
    store_some(place, manifest, monkeypatch)
    shutil.rmtree(place.process(DEAD))
    successor = Successor(place, manifest)
    yield successor
    successor.storage.store.close()


def test_successor_works_before_the_values_of_its_share_arrived(successor: Successor) -> None:
    successor.write(
        1, {("state", 0, b"older", 1): image(0, 0), ("checkpoint",): CheckpointHeader(9, 99, 1, 0, -1, [])}
    )
    loaded = successor.take_over()
    assert (loaded.adopted, loaded.number) == (True, 5)
    assert loaded.items.pop(("checkpoint",)).applied == 7
    assert loaded.items.pop(("routes", 0)) == RouteUpdate({}, {})
    assert loaded.items == dict.fromkeys(expected(), StoredKeyInfo())
    assert successor.stored().keys() == {("checkpoint",), ("routes", 0)}  # and nothing of an older time
    read = successor.storage.store.read_all(expected())
    assert {place: image for place, (image, _) in read.items()} == expected()


def test_nothing_of_a_successor_counts_as_uploaded_before_its_whole_share_is(successor: Successor) -> None:
    successor.write(1, {("state", 0, b"older", 1): image(0, 0)})
    successor.uploader._upload()
    successor.take_over()
    changed = next(iter(expected()))
    successor.write(2, {(*changed[:-1], 2): image(4, 5)})
    successor.uploader._upload()
    assert successor.safe == [1]
    pending = successor.storage.store._missing
    assert isinstance(pending, PausedRestore)
    pending.run_restore()
    successor.uploader._upload()
    assert successor.safe == [1, 2]
    successor.storage.store.close()
    shutil.rmtree(successor.directory)
    restored = open_storage(successor.directory, successor.manifest, SUCCESSOR, is_instance=True).store
    found = restored.items()
    restored.close()
    assert {place: found[place] for place in expected()} == expected()
    assert found[*changed[:-1], 2] == image(4, 5)
    assert ("state", 0, b"older", 1) not in found


def test_successor_that_dies_during_its_takeover_starts_over(successor: Successor, tmp_path: Path) -> None:
    successor.take_over()
    successor.storage.store.close()
    again = Successor(DeploymentDir(tmp_path / "storage"), successor.manifest)
    assert again.storage.store.items() == {}
    assert again.take_over().items.keys() >= expected().keys()
    again.storage.store.close()


def test_second_takeover_replaces_the_first(successor: Successor) -> None:
    successor.take_over()
    before = successor.storage.store._missing
    assert isinstance(before, PausedRestore)
    successor.take_over()
    before.run_restore()  # too late
    with contextlib.closing(StoreView(successor.directory, complete=False)) as view:
        assert view.restoring
    assert successor.stored().keys() == {("checkpoint",), ("routes", 0)}
    assert not successor.storage.store.is_fully_restored
    assert successor.storage.store.read(next(iter(expected())))


def test_share_is_read_completely_where_lazy_takeover_is_not_possible(successor: Successor) -> None:
    loaded = successor.take_over(adopt=False)
    assert not loaded.adopted
    assert {k: v for k, v in loaded.items.items() if k[0] == "state"} == expected()
    assert successor.stored() == {}
