"""An heir's share of a dead instance's checkpoint: from its directory or its backup, and no more of it."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiercel.core.effects import LoadCheckpoint, StorageKey, Write
from tiercel.core.events import CheckpointLoaded
from tiercel.core.records import Inheritance, KeyFacts, KeyImage, KeySet, TableUpdate
from tiercel.core.taken import Cursor
from tiercel.core.topology import Operator, Topology
from tiercel.errors import UserError
from tiercel.runtime import away, backups, pieces
from tiercel.runtime.away import Away
from tiercel.runtime.inheriting import ShareLoader, _load, _where
from tiercel.runtime.locations import Location
from tiercel.runtime.place import BackupPlan, Manifest, Place
from tiercel.runtime.shipping import Shipper
from tiercel.runtime.store import NO_TABLE, StoreView
from tiercel.runtime.storing import open_storage
from tiercel.runtime.tables import decode_key

DEAD = "op@a#0"
SLOTS = 16
SHARE = Inheritance(DEAD, KeySet(slots=frozenset(range(4, 8)), keys=frozenset()), 9)


def image(n: int, value: int) -> KeyImage:
    return KeyImage(b"k%04d" % n, 1, 1, {"v": bytes(1_000) + b"%d" % value})


def place_of(n: int, generation: int = 1) -> StorageKey:
    return ("state", n % SLOTS, b"k%04d" % n, generation)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    topology = Topology({"a": None}, {}, {"op": Operator("op", ("in",), "out", (DEAD,), slots=SLOTS)})
    return Manifest("d1", topology, {}, backup=BackupPlan((tmp_path / "backup").as_uri(), every_s=0.01))


def store_some(place: Place, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base with many chunks, then increments that change and delete keys."""
    monkeypatch.setattr(backups, "CHUNK_BYTES", 4_000)
    store, backup = open_storage(place.process(DEAD), manifest, DEAD, is_instance=True)
    everything = {place_of(n): image(n, 0) for n in range(200)}
    cursor = Cursor(1, 7, 1, 0, -1, [])
    store.add(Write(1, {**everything, ("cursor",): cursor, ("routes",): TableUpdate({}, {})}))
    store.commit()
    if backup is not None:
        assert isinstance(backup.shipper, Shipper)
        backup.shipper._ship()
    store.add(Write(2, {place_of(n): image(n, 1) for n in range(50)}, tuple(map(place_of, range(50, 60)))))
    store.commit()
    if backup is not None:
        backup.shipper._ship()
    store.close()


def load_share(place: Place, manifest: Manifest, inherited: Inheritance) -> dict[StorageKey, Any]:
    """All of it, as whoever must not take it for its own reads it."""
    return _load(_where(place, manifest, inherited), inherited)


def expected() -> dict[StorageKey, KeyImage]:
    gone = range(50, 60)
    mine = [n for n in range(200) if n % SLOTS in range(4, 8) and n not in gone]
    return {place_of(n): image(n, 1 if n < 50 else 0) for n in mine}


@pytest.mark.parametrize("lost", [False, True], ids=["from the directory", "from the backup"])
def test_an_heir_gets_its_slots_and_the_cursor(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    place = Place(tmp_path / "storage")
    store_some(place, manifest, monkeypatch)
    if lost:
        shutil.rmtree(place.process(DEAD))
    found = load_share(place, manifest, SHARE)
    assert found.pop(("cursor",)).applied == 7
    assert found.pop(("routes",)) == TableUpdate({}, {})
    assert found == expected()


def test_an_heir_reads_only_its_own_sections(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a base, and of each increment."""
    monkeypatch.setattr(pieces, "SECTION_BYTES", 100)
    place = Place(tmp_path / "storage")
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


def test_single_keys_that_lived_with_it_are_found_wherever_their_slot_is(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path / "storage")
    store_some(place, manifest, monkeypatch)
    shutil.rmtree(place.process(DEAD))
    guest = Inheritance(DEAD, KeySet(frozenset({4}), frozenset({b"k0191"})), 9)
    assert place_of(191) in load_share(place, manifest, guest)


def test_nothing_to_read_is_said_and_not_taken_for_an_empty_state(tmp_path: Path, manifest: Manifest) -> None:
    bare = Manifest(manifest.id, manifest.topology, {})
    with pytest.raises(UserError, match="nothing of op@a#0 can be read"):
        load_share(Place(tmp_path / "storage"), bare, SHARE)
    assert load_share(Place(tmp_path / "storage"), manifest, SHARE) == {}  # it had stored nothing that counts


# -- values come while they are in use -------------------------------------------------------------------

HEIR = "op@a#1"


class Paused(Away):
    """Brings nothing before it is told."""

    def bring(self, put: Callable[[list[Any]], object], whole: Callable[[], object]) -> None:
        self.go_on = lambda: self._run(put, whole)


class Heir:
    """Its storage, with something of an older time in it, and how it inherits."""

    def __init__(self, place: Place, manifest: Manifest) -> None:
        self.manifest, self.directory = manifest, place.process(HEIR)
        self.storage = open_storage(self.directory, manifest, HEIR, is_instance=True)
        assert self.storage.backup is not None
        self.shipper = self.storage.backup.shipper
        self.safe: list[int] = []
        self.shipper._on_shipped = self.safe.append
        self.loader = ShareLoader(place, manifest, self.storage, lambda items: items, lazily=True)

    def write(self, seq: int, puts: dict[StorageKey, Any]) -> None:
        self.storage.store.add(Write(seq, puts))
        self.storage.store.commit()

    def inherit(self, *, adopt: bool = True) -> CheckpointLoaded:
        return self.loader.load(LoadCheckpoint(timers=False, inherited=SHARE, number=5, adopt=adopt))()

    def stored(self) -> dict[StorageKey, Any]:
        with contextlib.closing(StoreView(self.directory, whole=False)) as view:
            return {decode_key(k): v for k, v in view.pairs()[1] if not k.startswith(NO_TABLE)}


@pytest.fixture
def heir(tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heir]:
    monkeypatch.setattr("tiercel.runtime.inheriting.Away", Paused)
    monkeypatch.setattr(away, "HEAD_START_S_MAX", 0.0)
    place = Place(tmp_path / "storage")
    store_some(place, manifest, monkeypatch)
    shutil.rmtree(place.process(DEAD))
    heir = Heir(place, manifest)
    yield heir
    heir.storage.store.close()


def test_an_heir_works_before_the_values_of_its_share_are_there(heir: Heir) -> None:
    heir.write(1, {("state", 0, b"older", 1): image(0, 0), ("cursor",): Cursor(9, 99, 1, 0, -1, [])})
    loaded = heir.inherit()
    assert (loaded.adopted, loaded.number) == (True, 5)
    assert loaded.items.pop(("cursor",)).applied == 7
    assert loaded.items.pop(("routes",)) == TableUpdate({}, {})
    assert loaded.items == dict.fromkeys(expected(), KeyFacts())
    assert heir.stored().keys() == {("cursor",), ("routes",)}  # and nothing of an older time
    assert loaded.shelf is not None
    assert {place: loaded.shelf.read(place)[0] for place in expected()} == expected()


def test_nothing_of_an_heir_is_safe_before_all_of_its_share_is_in_its_own_backup(heir: Heir) -> None:
    heir.write(1, {("state", 0, b"older", 1): image(0, 0)})
    heir.shipper._ship()
    heir.inherit()
    changed = next(iter(expected()))
    heir.write(2, {(*changed[:-1], 2): image(4, 5)})
    heir.shipper._ship()
    assert heir.safe == [1]
    pending = heir.storage.store._away
    assert isinstance(pending, Paused)
    pending.go_on()
    heir.shipper._ship()
    assert heir.safe == [1, 2]
    heir.storage.store.close()
    shutil.rmtree(heir.directory)
    restored = open_storage(heir.directory, heir.manifest, HEIR, is_instance=True).store
    found = restored.items()
    restored.close()
    assert {place: found[place] for place in expected()} == expected()
    assert found[*changed[:-1], 2] == image(4, 5)
    assert ("state", 0, b"older", 1) not in found


def test_an_heir_that_dies_before_all_of_its_share_is_there_begins_anew(heir: Heir, tmp_path: Path) -> None:
    heir.inherit()
    heir.storage.store.close()
    again = Heir(Place(tmp_path / "storage"), heir.manifest)
    assert again.storage.store.items() == {}
    assert again.inherit().items.keys() >= expected().keys()
    again.storage.store.close()


def test_an_heir_that_inherits_twice_has_what_it_got_last(heir: Heir) -> None:
    first = heir.inherit().shelf
    before = heir.storage.store._away
    assert isinstance(before, Paused)
    heir.inherit()
    before.go_on()  # too late
    with contextlib.closing(StoreView(heir.directory, whole=False)) as view:
        assert view.restoring
    assert heir.stored().keys() == {("cursor",), ("routes",)}
    assert not heir.storage.store.is_whole
    assert first is not None
    assert first.read(next(iter(expected())))


def test_whoever_must_not_take_a_share_for_its_own_reads_all_of_it_first(heir: Heir) -> None:
    loaded = heir.inherit(adopt=False)
    assert not loaded.adopted
    assert {k: v for k, v in loaded.items.items() if k[0] == "state"} == expected()
    assert heir.stored() == {}
