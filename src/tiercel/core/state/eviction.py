"""The memory limit of an instance, which decides how many of its keys are decoded in memory.

Responsible for: the limit, the order in which keys are evicted, the stored versions that the driver has read.
Not responsible for: the keys themselves (table.py), storing them (checkpoint_writer.py), which stored
    versions an event needs (prefetch.py), reading them (the driver).

    in memory --above the limit: clean, least recently used--> evicted: only its stored version is left
     ^                                                            |
     +------- a row, a timer or a digest needs it: StateRead -----+

A key is evicted only if a stored checkpoint holds its current state. Eviction writes nothing: it drops the
decoded value. A key that has changed since stays until the next checkpoint, which is then taken early and
written as fast as keys arrive. So an instance exceeds the limit by the keys that change during a checkpoint.

Every call makes its key dirty, so a checkpoint knows the keys that were used since the last one. Keys are
ordered by the last checkpoint that wrote them. So a key in memory costs no more than without a limit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol

from tiercel.core.errors import CoreBug
from tiercel.core.machine.effects import StorageKey
from tiercel.core.model.keys import Key, StateImage
from tiercel.core.model.routing import slot_of
from tiercel.core.state.copy_on_write import Snapshot
from tiercel.core.state.handle import KeyState

KEY_BYTES = 700  # of a decoded key without its values: objects, entries in dicts and sets


class EvictableTable(Protocol):
    """The interface of a state table for the limit."""

    slots: int
    keys: dict[Key, KeyState]  # in memory
    dirty: dict[Key, None]  # changed since the last checkpoint
    snapshots: list[Snapshot]

    def evict(self, key: Key, generation: int) -> None:
        """Drop the decoded state of a key; its version of this generation is stored."""
        ...


class MemoryLimit:
    """The limit of one state table."""

    def __init__(self, space: EvictableTable, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes  # 0: none
        self.read_ahead: dict[StorageKey, tuple[StateImage, int]] = {}  # by the driver, for the next event
        self.paused = False  # during several entries: a later one may need any key in memory
        self.used_bytes = 0  # of the keys in `_sizes`
        self.reads = 0
        self.checkpoint_asked = False  # an early one, until it is stored
        self._dirty_seen = 0
        self.covered = 0  # generation of the last stored checkpoint
        self._space = space
        self._sizes: OrderedDict[Key, int] = OrderedDict()  # least recently used first

    @property
    def active(self) -> bool:
        return self.limit_bytes > 0

    @property
    def over(self) -> bool:
        return self.used_bytes > self.limit_bytes

    def saw(self, key: Key, size_bytes: int) -> None:
        """Record the use of a key in memory, and its stored size."""
        sizes = self._sizes
        size_bytes += KEY_BYTES
        self.used_bytes += size_bytes - sizes.pop(key, 0)
        sizes[key] = size_bytes

    def read(self, key: Key, generation: int) -> tuple[StateImage, int]:
        """The stored version of an evicted key, and its size; the driver has read it before this event."""
        found = self.read_ahead.get(("state", slot_of(key, self._space.slots), key, generation))
        if found is None:
            raise CoreBug(
                f"key {key!r} is not in memory, and its stored version was not read before the event"
            )
        self.reads += 1
        return found

    def make_room(self, count: int, stored: Mapping[Key, int]) -> bool:
        """Try to evict the next few keys while the limit is exceeded. True: at least one was evicted.

        `stored` has the stored generation of each key. A key that is dirty, or that a running checkpoint has
        not written yet, is newer than that.
        """
        if not self.active or not self.over or self.paused:
            return False
        space, sizes = self._space, self._sizes
        waiting = self.unwritten()
        any_left = False
        for _ in range(min(count, len(sizes))):
            key, size_bytes = sizes.popitem(last=False)
            self.used_bytes -= size_bytes
            if key not in space.keys:
                continue  # it has moved, or has no state now
            generation = stored.get(key, self.covered + 1)
            if self.is_dirty(key) or generation > self.covered or any(key in pending for pending in waiting):
                self.saw(key, size_bytes - KEY_BYTES)
            else:
                space.evict(key, generation)
                any_left = True
            if self.used_bytes <= self.limit_bytes:
                break
        return any_left

    def is_dirty(self, key: Key) -> bool:
        """Whether a key has changed since the last checkpoint, and is newer than its stored version."""
        return key in self._space.dirty

    def unwritten(self) -> list[Mapping[Key, KeyState]]:
        """The keys that a running checkpoint has not written yet: newer than their stored versions."""
        return [snapshot.pending for snapshot in self._space.snapshots if snapshot.pending]

    def newly_dirty(self) -> int:
        """The number of keys that have changed since the last call or checkpoint."""
        now, before = len(self._space.dirty), self._dirty_seen
        self._dirty_seen = now
        return now - before if now >= before else now

    def checkpoint_wanted(self) -> bool:
        """Whether most keys in memory are dirty, so that only an early checkpoint allows eviction."""
        known = len(self._sizes)
        changed = len(self._space.dirty) * (self.used_bytes // known if known else KEY_BYTES)
        return 4 * changed > 3 * self.limit_bytes
