"""State is read beside running instances, and the newer of two versions of a key counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercel.core.machine.effects import StorageKey, Write
from tiercel.core.machine.stored import CheckpointHeader, StoredIncomingMove
from tiercel.core.model.keys import KeySet, StateImage
from tiercel.core.model.log import OWN, SHADOW, Adopt
from tiercel.core.model.routing import RouteUpdate, slot_of
from tiercel.core.model.topology import Operator, Topology
from tiercel.runtime.deployment import DeploymentDir, Manifest
from tiercel.runtime.recovery.read_only import stored_keys
from tiercel.runtime.storage.state_reader import StoredKey
from tiercel.runtime.storage.store import Store

A, B = "count@cloud#1", "count@cloud#2"
SLOTS = 16
NOWHERE = RouteUpdate({}, {})
KEYS = [b"a", b"b", b"c", b"d", b"e"]


@pytest.fixture
def place(tmp_path: Path) -> DeploymentDir:
    place = DeploymentDir(tmp_path)
    operator = Operator("count", ("in",), "out", (A, B), slots=SLOTS)
    place.write(Manifest("test", Topology({"cloud": None}, {}, {"count": operator}), {}))
    return place


def image(key: bytes, count: int, epoch: int = 1, at: int = 1) -> StateImage:
    return StateImage(key, epoch, at, {"count": ("value", (count,))})


def own(*images: StateImage, generation: int = 1) -> dict[StorageKey, object]:
    """A whole checkpoint with these keys."""
    return versions(*images, generation=generation) | {
        ("checkpoint",): CheckpointHeader(generation, 5, 1, 0, 0, [])
    }


def versions(*images: StateImage, generation: int) -> dict[StorageKey, object]:
    return {("state", slot_of(i.key, SLOTS), i.key, generation): i for i in images}


def arrival(move: str, *, adopted: bool) -> CheckpointHeader:
    adopt = Adopt(move, KeySet(), A, "live", NOWHERE, 0, 0, 0, NOWHERE, 0) if adopted else None
    position = (OWN if adopted else SHADOW, 5)
    arriving = StoredIncomingMove(
        move, KeySet(), A, "live", NOWHERE, position, adopt, 5, 0, 0, {}, {}, [], []
    )
    return CheckpointHeader(1, 5, 1, 0, 0, [arriving])


def write(place: DeploymentDir, instance: str, puts: dict[StorageKey, object]) -> Store:
    store = Store(place.process(instance), "os")
    store.add(Write(1, puts, []))
    store.commit()
    return store


def counts(found: list[StoredKey]) -> dict[bytes, int]:
    return {s.key: s.image.values["count"][1][0] for s in found if s.image.values is not None}


def test_keys_of_all_instances_are_read_while_they_run(place: DeploymentDir) -> None:
    running = [
        write(place, A, own(*(image(k, n) for n, k in enumerate(KEYS[:3])))),
        write(place, B, own(*(image(k, n + 3) for n, k in enumerate(KEYS[3:])))),
        write(place, "other@cloud#1", own(image(b"other", 1))),
    ]
    found = list(stored_keys(place, "count"))
    assert counts(found) == {key: n for n, key in enumerate(KEYS)}
    assert [s.slot for s in found] == sorted(slot_of(key, SLOTS) for key in KEYS)
    running[0].add(Write(2, own(image(b"a", 7), generation=2), []))
    running[0].commit()
    assert counts(list(stored_keys(place, "count", b"a"))) == {b"a": 7}
    for store in running:
        store.close()


def test_newer_epoch_then_later_offset_decides_between_two_versions(place: DeploymentDir) -> None:
    write(place, A, own(image(b"a", 1, epoch=1, at=90), image(b"b", 2, epoch=2, at=7))).close()
    write(place, B, own(image(b"a", 3, epoch=2, at=8), image(b"b", 4, epoch=2, at=6))).close()
    assert counts(list(stored_keys(place, "count"))) == {b"a": 3, b"b": 2}


def test_moving_key_is_read_where_it_was_adopted_and_not_from_its_shadow(
    place: DeploymentDir,
) -> None:
    write(place, A, own(image(b"a", 1, epoch=1, at=3), image(b"b", 2, epoch=1, at=3))).close()
    moving: dict[StorageKey, object] = {("move", "mv", b"a", 1): image(b"a", 5, epoch=2, at=5)}
    write(place, B, moving | {("checkpoint",): arrival("mv", adopted=False)}).close()
    assert counts(list(stored_keys(place, "count"))) == {b"a": 1, b"b": 2}
    store = Store(place.process(B), "os")
    store.add(Write(1, {("checkpoint",): arrival("mv", adopted=True)}, []))
    store.close()
    found = list(stored_keys(place, "count"))
    assert counts(found) == {b"a": 5, b"b": 2}
    assert {s.key: s.instance for s in found} == {b"a": B, b"b": A}
    assert counts(list(stored_keys(place, "count", b"a"))) == {b"a": 5}


def test_incomplete_checkpoint_is_not_read(place: DeploymentDir) -> None:
    store = write(place, A, own(image(b"a", 1), image(b"b", 2)))
    store.add(Write(2, versions(image(b"a", 7), generation=2), []))
    store.commit()
    assert counts(list(stored_keys(place, "count"))) == {b"a": 1, b"b": 2}
    store.add(Write(3, own(image(b"b", 8), generation=2), []))
    store.commit()
    assert counts(list(stored_keys(place, "count"))) == {b"a": 7, b"b": 8}
    assert counts(list(stored_keys(place, "count", b"a"))) == {b"a": 7}
    store.close()


def test_key_whose_newest_image_is_empty_is_not_returned(place: DeploymentDir) -> None:
    write(place, A, own(image(b"a", 1, epoch=1))).close()
    write(place, B, own(StateImage(b"a", 2, 9, None))).close()
    assert list(stored_keys(place, "count")) == []


def test_an_operator_that_never_ran_has_no_state(place: DeploymentDir) -> None:
    assert list(stored_keys(place, "count")) == []
