"""An heir's share of a dead instance's checkpoint: from its directory or its backup, and no more of it."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tiercel.core.effects import StorageKey, Write
from tiercel.core.records import Inheritance, KeyImage, KeySet, TableUpdate
from tiercel.core.taken import Cursor
from tiercel.core.topology import Operator, Topology
from tiercel.errors import UserError
from tiercel.runtime import backups, pieces
from tiercel.runtime.inheriting import load_share
from tiercel.runtime.locations import Location
from tiercel.runtime.place import BackupPlan, Manifest, Place
from tiercel.runtime.shipping import Shipper
from tiercel.runtime.storing import open_storage

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
