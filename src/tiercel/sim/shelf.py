"""What a simulated life gets of a checkpoint, and what it reads of it later.

Responsible for: answers to `LoadCheckpoint` without values, and the values when they are needed.
Not responsible for: what is stored (disk.py), when it is read (process.py).
"""

from __future__ import annotations

from typing import Any, Protocol

from tiercel.core.effects import LoadCheckpoint, StorageKey
from tiercel.core.records import KeyFacts, KeyImage
from tiercel.sim.disk import Disk


class Stores(Protocol):
    """A life, with the disk that it writes to now."""

    disk: Disk


def facts(items: dict[StorageKey, Any], effect: LoadCheckpoint) -> dict[StorageKey, Any]:
    """Without the values of keys; told that there are no timers, a driver does not look for them."""
    return {
        k: KeyFacts(v.timers if effect.timers else ()) if k[0] == "state" else v for k, v in items.items()
    }


class LifeShelf:
    """What a life reads back: from its own disk, also when it has become a zombie."""

    def __init__(self, life: Stores) -> None:
        self._life = life

    def read(self, place: StorageKey) -> tuple[KeyImage, int]:
        image: KeyImage = self._life.disk.read(place)
        return image, image.size_bytes

    def __repr__(self) -> str:
        return f"LifeShelf({self._life})"
