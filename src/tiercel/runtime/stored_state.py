"""The state of an operator as its instances' last checkpoints have it, read beside the running instances.

Responsible for: which copy of a key counts. During a move two instances may hold one.
Not responsible for: bytes (store.py), what a value means (spark/).

A checkpoint lies slot by slot, so the checkpoints of all instances are merged in one pass, and the
memory this needs does not grow with the state:

    average@cloud#1   slot 1 a b | slot 7 c   --+
    average@cloud#2   slot 7 c d | slot 9 e   --+--> a, b, c (the newer one), d, e
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Collection, Iterator
from itertools import groupby
from pathlib import Path

import msgspec

from tiercel.core.effects import StorageKey
from tiercel.core.records import Key, KeyImage
from tiercel.core.routing import slot_of
from tiercel.core.taken import Cursor
from tiercel.core.topology import operator_of
from tiercel.runtime.place import Place
from tiercel.runtime.store import StoreView
from tiercel.runtime.storing import exists, readable


class StoredKey(msgspec.Struct, frozen=True):
    """One key's state, where it lies, and up to where it is."""

    slot: int
    key: Key
    instance: str
    image: KeyImage


def stored_keys(place: Place, operator: str, key: Key | None = None) -> Iterator[StoredKey]:
    """The state of every key of an operator, or of one key; slot by slot."""
    slots = place.manifest().topology.operator(operator).slots
    with readable(place) as processes:
        yield from keys_in(processes, operator, slots, None if key is None else [key])


def keys_in(
    processes: Path, operator: str, slots: int, keys: Collection[Key] | None = None
) -> Iterator[StoredKey]:
    """The same out of a directory with the storage of every instance; with `keys`, nothing else is read."""
    wanted = None if keys is None else sorted({(slot_of(key, slots), key) for key in keys})
    with contextlib.ExitStack() as opened:
        copies = []
        for directory in _directories(processes, operator):
            view = opened.enter_context(contextlib.closing(StoreView(directory)))
            copies.append(_copies(view, directory.name, slots, wanted))
        for _, of_key in groupby(heapq.merge(*copies, key=_place_of), key=_place_of):
            newest = max(of_key, key=lambda stored: (stored.image.epoch, stored.image.at))
            if newest.image.values is not None:
                yield newest


def _directories(processes: Path, operator: str) -> list[Path]:
    if not processes.is_dir():
        return []
    return sorted(d for d in processes.iterdir() if operator_of(d.name) == operator and exists(d))


def _place_of(stored: StoredKey) -> tuple[int, Key]:
    return stored.slot, stored.key


def _copies(
    view: StoreView, instance: str, slots: int, wanted: list[tuple[int, Key]] | None
) -> Iterator[StoredKey]:
    """What one instance's last whole checkpoint holds, in order: its own keys, and those it has adopted."""
    cursor: Cursor | None = view.get(("cursor",))
    if cursor is None:
        return iter(())
    adopted = [a.move for a in cursor.arrivals if a.adopt is not None]
    if wanted is not None:
        return (
            StoredKey(slot, key, instance, image)
            for slot, key in wanted
            for place in [("state", slot, key), *(("move", move, key) for move in adopted)]
            for image in _versions(view, place, cursor.generation)
        )
    own = (
        StoredKey(slot_of(image.key, slots), image.key, instance, image)
        for image in _versions(view, ("state",), cursor.generation)
    )
    arrived = [
        StoredKey(slot_of(image.key, slots), image.key, instance, image)
        for move in adopted
        for image in _versions(view, ("move", move), cursor.generation)
    ]
    return heapq.merge(own, sorted(arrived, key=_place_of), key=_place_of)


def _versions(view: StoreView, prefix: StorageKey, generation: int) -> Iterator[KeyImage]:
    """Of each key its newest version that the checkpoint covers."""
    for _, versions in groupby(view.scan(prefix), key=lambda item: item[0][:-1]):
        covered = [image for place, image in versions if int(place[-1]) <= generation]
        if covered:
            yield covered[-1]
