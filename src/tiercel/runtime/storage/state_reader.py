"""The state of an operator, read from the last checkpoints of its instances beside the running processes.

Responsible for: which version of a key counts. During a move two instances may hold one.
Not responsible for: bytes (store.py), the meaning of values (spark/).

A checkpoint is ordered by slots, so the checkpoints of all instances are merged in one pass, and memory does
not grow with the state:

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

from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.stored import CheckpointHeader
from tiercel.core.model.keys import Key, StateImage
from tiercel.core.model.routing import slot_of
from tiercel.core.model.topology import operator_of
from tiercel.runtime.storage.directory import exists
from tiercel.runtime.storage.store import StoreView


class StoredKey(msgspec.Struct, frozen=True):
    """The state of one key, and the instance that stores it."""

    slot: int
    key: Key
    instance: str
    image: StateImage


def keys_in(
    processes: Path, operator: str, slots: int, keys: Collection[Key] | None = None
) -> Iterator[StoredKey]:
    """The state of keys in a directory with the storage of every instance; with `keys`, only theirs."""
    keys_only = None if keys is None else sorted({(slot_of(key, slots), key) for key in keys})
    with contextlib.ExitStack() as opened:
        images = []
        for directory in _directories(processes, operator):
            view = opened.enter_context(contextlib.closing(StoreView(directory)))
            images.append(_images(view, directory.name, slots, keys_only))
        for _, of_key in groupby(heapq.merge(*images, key=_slot_and_key), key=_slot_and_key):
            newest = max(of_key, key=lambda stored: (stored.image.epoch, stored.image.at))
            if newest.image.values is not None:
                yield newest


def _directories(processes: Path, operator: str) -> list[Path]:
    if not processes.is_dir():
        return []
    return sorted(d for d in processes.iterdir() if operator_of(d.name) == operator and exists(d))


def _slot_and_key(stored: StoredKey) -> tuple[int, Key]:
    return stored.slot, stored.key


def _images(
    view: StoreView, instance: str, slots: int, keys_only: list[tuple[int, Key]] | None
) -> Iterator[StoredKey]:
    """The last complete checkpoint of one instance, in order: its own keys, and those it has adopted."""
    cursor: CheckpointHeader | None = view.get(("checkpoint",))
    if cursor is None:
        return iter(())
    adopted = [a.move for a in cursor.incoming_moves if a.adopt is not None]
    if keys_only is not None:
        return (
            StoredKey(slot, key, instance, image)
            for slot, key in keys_only
            for prefix in [("state", slot, key), *(("move", move, key) for move in adopted)]
            for image in _versions(view, prefix, cursor.generation)
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
    return heapq.merge(own, sorted(arrived, key=_slot_and_key), key=_slot_and_key)


def _versions(view: StoreView, prefix: StorageKey, generation: int) -> Iterator[StateImage]:
    """The newest version of each key that the checkpoint covers."""
    for _, versions in groupby(view.scan(prefix), key=lambda item: item[0][:-1]):
        covered = [image for stored, image in versions if int(stored[-1]) <= generation]
        if covered:
            yield covered[-1]
