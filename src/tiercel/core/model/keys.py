"""Key sets, and the state of one key in the form that is sent and stored.

Responsible for: naming keys by slot or one by one, and the image of a key.
Not responsible for: log entries (log.py), owners of keys (routing.py).
"""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

_encode = msgspec.msgpack.Encoder().encode


Key = bytes


ABSENT_WATERMARK = -1  # no row seen yet: nothing is late, no event-time timer is due


def slot_of(key: Key, slots: int) -> int:
    """The slot of a key: the same in all processes and versions, because stored state is laid out by slot."""
    return xxhash.xxh3_64_intdigest(key) % slots


class KeySet(msgspec.Struct, frozen=True):
    """The keys of a move: whole slots or single keys, never both."""

    slots: frozenset[int] = frozenset()
    keys: frozenset[Key] = frozenset()

    def has(self, key: Key, slot: int) -> bool:
        return slot in self.slots or key in self.keys


class StateImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The state of one key as it is sent and stored: encoded values, timers and its offset."""

    key: Key
    epoch: int
    at: int  # offset of the last entry applied to it
    values: dict[str, Any] | None  # None: the key has no state (deleted, or it never had any)
    timers: tuple[int, ...] = ()
    time_ms: int = 0
    watermark_ms: int = ABSENT_WATERMARK

    @property
    def size_bytes(self) -> int:
        return 64 + (len(_encode(self.values)) if self.values else 0)


class StoredKeyInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Facts that an instance needs about a key before it reads the key's state (lazy restore)."""

    timers: tuple[int, ...] = ()
