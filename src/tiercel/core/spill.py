"""Which keys of an instance are decoded in memory, when not all of them may be.

Responsible for: the limit, who leaves memory next, reading back what has left.
Not responsible for: the keys themselves (keyspace.py), storing them (checkpoints.py).

    hot: in memory --clean, not used for longest, too much in memory--> cold: its stored version is all
     ^                                                                         |
     +----------------- a row, a timer or a digest needs it -------------------+

Only what a stored checkpoint holds leaves memory, and dropping it is all there is to do: nothing is written
for it. What has changed since stays until the next checkpoint, which then comes early and is written as fast
as keys come. So the limit is passed by what changes while one checkpoint is written, and no more.

Every call makes its key dirty, so a checkpoint knows who was used since the last one: keys are ordered by
the last checkpoint that wrote them, and a key that is in memory costs nothing more than without a limit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from tiercel.core.effects import StorageKey
from tiercel.core.faults import CoreBug
from tiercel.core.records import Key, KeyImage
from tiercel.core.routing import slot_of

if TYPE_CHECKING:
    from tiercel.core.keyspace import KeySpace

KEY_BYTES = 700  # of a decoded key beside its values: objects, the dicts and sets it is in


class Shelf(Protocol):
    """Stored versions, read while the machine runs. The driver gives it, as it gives the time.

    A version is written once and never changed, and read only while it is stored: so what is read is a
    function of what was written, and the machine stays one of its events.
    """

    def read(self, place: StorageKey) -> tuple[KeyImage, int]:
        """The image, and how many bytes it has there."""
        ...


class Spill:
    """The limit of one key space."""

    def __init__(self, space: KeySpace, limit_bytes: int, mutant: str = "") -> None:
        self.limit_bytes = limit_bytes  # 0: none
        self.shelf: Shelf | None = None  # without one nothing leaves memory
        self.used_bytes = 0  # of the keys in `_sizes`
        self.reads = 0
        self.checkpoint_asked = False  # early, until it is stored
        self._dirty_seen = 0
        self.covered = 0  # generation of the last checkpoint that is stored
        self._space = space
        self._sizes: OrderedDict[Key, int] = OrderedDict()  # those not used for longest first
        self._mutant = mutant

    @property
    def active(self) -> bool:
        return self.limit_bytes > 0 and self.shelf is not None

    @property
    def over(self) -> bool:
        return self.used_bytes > self.limit_bytes

    def saw(self, key: Key, size_bytes: int) -> None:
        """The key is in memory, was used just now, and has so many bytes when it is stored."""
        sizes = self._sizes
        size_bytes += KEY_BYTES
        self.used_bytes += size_bytes - sizes.pop(key, 0)
        sizes[key] = size_bytes

    def read(self, key: Key, generation: int) -> tuple[KeyImage, int]:
        """The only copy of a cold key."""
        if self.shelf is None:
            raise CoreBug(f"key {key!r} is not in memory, and nobody can read it")
        self.reads += 1
        return self.shelf.read(("state", slot_of(key, self._space.slots), key, generation))

    def make_room(self, count: int, stored: Mapping[Key, int]) -> bool:
        """Look at the next few keys, while there is too much; whether one of them has left.

        `stored` says under which generation each key is stored. A key that is dirty, or that a checkpoint
        under way has not written yet, is newer than that.
        """
        if not self.active or not self.over:
            return False
        space, sizes, mutant = self._space, self._sizes, self._mutant
        waiting = [snapshot.pending for snapshot in space.snapshots if snapshot.pending]
        if mutant == "spills-older-version":
            waiting = []
        any_left = False
        for _ in range(min(count, len(sizes))):
            key, size_bytes = sizes.popitem(last=False)
            self.used_bytes -= size_bytes
            if key not in space.keys:
                continue  # it has moved, or has no state any more
            generation = stored.get(key, self.covered + 1)
            newer = key in space.dirty and mutant != "spills-dirty-keys"
            if newer or generation > self.covered or any(key in pending for pending in waiting):
                self.saw(key, size_bytes - KEY_BYTES)
            else:
                space.chill(key, generation)
                any_left = True
            if self.used_bytes <= self.limit_bytes:
                break
        return any_left

    def newly_dirty(self) -> int:
        """How many keys have changed since the last look or checkpoint."""
        now, before = len(self._space.dirty), self._dirty_seen
        self._dirty_seen = now
        return now - before if now >= before else now

    def checkpoint_wanted(self) -> bool:
        """Most of what may be in memory has changed: an early checkpoint lets it go."""
        known = len(self._sizes)
        changed = len(self._space.dirty) * (self.used_bytes // known if known else KEY_BYTES)
        return 4 * changed > 3 * self.limit_bytes
