"""Reads of a simulated storage: what a checkpoint says about keys, and stored versions, which come late.

Responsible for: answers to `LoadCheckpoint` without values, stored versions, how long a read takes.
Not responsible for: what is stored (disk.py), when it is read (process.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from tiercel.core.machine.effects import LoadCheckpoint, StorageKey
from tiercel.core.model.keys import StateImage, StoredKeyInfo
from tiercel.sim.engine.disk import Disk

LOCAL_MS, BACKUP_MS = 0.1, 20.0  # at most: a read of the local store, and one of a backup
FROM_BACKUP = 0.15  # how often it is one of a backup


def without_values(items: dict[StorageKey, Any], effect: LoadCheckpoint) -> dict[StorageKey, Any]:
    """Without the values of keys; told that there are no timers, a driver does not look for them."""
    return {
        k: StoredKeyInfo(v.timers if effect.timers else ()) if k[0] == "state" else v
        for k, v in items.items()
    }


def read_versions(disk: Disk, places: Iterable[StorageKey]) -> dict[StorageKey, tuple[StateImage, int]]:
    """Stored versions, each with its size."""
    found: dict[StorageKey, StateImage] = {place: disk.read(place) for place in places}
    return {place: (image, image.size_bytes) for place, image in found.items()}


class ReadDelays:
    """How long the reads of one process take, drawn from a random stream of their own."""

    def __init__(self, name: str, seed: int) -> None:
        self._rng = random.Random(f"reads of {name} {seed}")

    def draw_ms(self) -> float:
        longest_ms = BACKUP_MS if self._rng.random() < FROM_BACKUP else LOCAL_MS
        return self._rng.random() * longest_ms
