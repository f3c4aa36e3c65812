"""The state table: a set of keys with their state, ordered timers, and dirty marks.

Responsible for: finding keys, due timers, dirty keys. An instance has one for its own keys and one
    for each set of arriving keys.
Not responsible for: calling user code, storing and reading, the choice of keys to evict (eviction.py).

A key is in `keys`, or in `evicted` if only its stored version is left. `find` restores an evicted key from
the versions that the driver has read for this event. A key is never in `dirty` and `evicted` at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Set
from itertools import chain, islice

from tiercel.core.machine.effects import StorageKey
from tiercel.core.model.keys import Key, StateImage
from tiercel.core.model.log import EpochOverride
from tiercel.core.model.routing import slot_of
from tiercel.core.state.copy_on_write import Snapshot
from tiercel.core.state.eviction import MemoryLimit
from tiercel.core.state.handle import KeyState

AT_ONCE = 0  # a timer that the clock of its key has reached is due with the next tick


def no_epoch(key: Key) -> int:
    """The epoch of a key in a table that is no longer used."""
    return 0


def not_reached(key: Key, time_ms: int) -> bool:
    """The clock of every key is that of the log."""
    return False


class StateTable:
    """Keys and their state."""

    def __init__(
        self,
        slots: int,
        epoch_of: Callable[[Key], int],
        user_key: Callable[[Key], object],
        deleted: Set[str] = frozenset(),
        memory_bytes_max: int = 0,
    ) -> None:
        self.slots = slots
        self.keys: dict[Key, KeyState] = {}
        self.evicted: dict[Key, int] = {}  # not in memory -> its stored generation
        self.era: EpochOverride | None = None  # epochs for stored versions of a previous owner
        self.memory_limit = MemoryLimit(self, memory_bytes_max)
        self.by_slot: dict[int, set[Key]] = {}
        self.dirty: dict[Key, None] = {}  # in order, so that a run is a function of its seed
        self.epoch_of = epoch_of
        self._user_key = user_key
        self._deleted = deleted  # state variables to delete when a key is loaded
        self.has_reached: Callable[[Key, int], bool] = not_reached  # by a clock that is ahead of the log
        self._heap: list[tuple[int, Key]] = []  # when a timer is due, by the time of the log
        self.snapshots: list[Snapshot] = []  # notified before one of their keys changes
        self._sampled: list[int] = []  # the last result of `sample_bytes`

    def state(self, key: Key) -> KeyState:
        """The state of a key; created if it has none."""
        state = self.find(key)
        if state is None:
            slot = slot_of(key, self.slots)
            state = self.keys[key] = KeyState(self.epoch_of(key), self._user_key(key), slot)
            self.by_slot.setdefault(slot, set()).add(key)
        return state

    def find(self, key: Key) -> KeyState | None:
        """The state of a key, or None if it has none. An evicted key is restored to memory."""
        state = self.keys.get(key)
        if state is None and key in self.evicted:
            generation = self.evicted.pop(key)
            image, size_bytes = self.memory_limit.read(key, generation)
            state = self.keys[key] = self.restored(image, generation)
            if self.memory_limit.active:
                self.memory_limit.saw(key, size_bytes)
            if state.empty:  # it only had variables that the user's code has deleted
                self.discard(key)
                return None
        return state

    def peek(self, key: Key) -> KeyState | None:
        """The state of a key without restoring it: an evicted key stays evicted."""
        state = self.keys.get(key)
        if state is None and key in self.evicted:
            generation = self.evicted[key]
            state = self.restored(self.memory_limit.read(key, generation)[0], generation)
            return None if state.empty else state
        return state

    def stored_at(self, key: Key) -> StorageKey:
        """The storage key of an evicted key's only version."""
        return ("state", slot_of(key, self.slots), key, self.evicted[key])

    def is_readable(self, key: Key) -> bool:
        """Whether the key is in memory, or the driver has read its stored version for this event."""
        return key not in self.evicted or self.stored_at(key) in self.memory_limit.read_ahead

    def restored(self, image: StateImage, generation: int) -> KeyState:
        slot = slot_of(image.key, self.slots)
        epoch = self.era.epoch(image, generation, slot) if self.era is not None else image.epoch
        state = KeyState(epoch, self._user_key(image.key), slot)
        state.restore(image, self._deleted)
        return state

    def has(self, key: Key) -> bool:
        return key in self.keys or key in self.evicted

    def all_keys(self) -> Iterator[Key]:
        """The keys with state, in memory or evicted."""
        return chain(self.keys, self.evicted)

    @property
    def count(self) -> int:
        """The number of keys with state, in memory or evicted."""
        return len(self.keys) + len(self.evicted)

    def evict(self, key: Key, generation: int) -> None:
        """Drop the decoded state of a key, which equals its stored version."""
        del self.keys[key]
        self.evicted[key] = generation

    def install_evicted(self, key: Key, generation: int, timers: Iterable[int]) -> None:
        """Install a key that stays in storage until it is needed, with its timers (lazy restore)."""
        self.evicted[key] = generation
        self.by_slot.setdefault(slot_of(key, self.slots), set()).add(key)
        self._queue_timers(key, timers)

    def before_change(self, keys: Iterable[Key]) -> None:
        """Let snapshots capture these keys before user code changes them."""
        self.snapshots = [snapshot for snapshot in self.snapshots if snapshot.pending]
        for snapshot in self.snapshots:
            for key in keys:
                snapshot.before_change(key)

    def watch(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def touched(self, key: Key, state: KeyState, new_timers: list[int]) -> None:
        """Mark a key dirty after a call, and remove it if it has no state."""
        self.dirty[key] = None
        if new_timers:
            self._queue_timers(key, new_timers)
            new_timers.clear()
        if not state.values and not state.timers:
            self.discard(key)

    def discard(self, key: Key) -> None:
        self._remove(key)
        self.dirty[key] = None

    def _remove(self, key: Key) -> KeyState | None:
        state = self.keys.pop(key, None)
        if state is not None or self.evicted.pop(key, None) is not None:
            slot = state.slot if state is not None else slot_of(key, self.slots)
            members = self.by_slot[slot]
            members.discard(key)
            if not members:
                del self.by_slot[slot]
        return state

    def install(self, image: StateImage, epoch: int) -> None:
        """Install a received or loaded image, which replaces the state of the key."""
        self.discard(image.key)
        if image.values is None and not image.timers:
            return
        state = self.state(image.key)
        state.epoch = epoch
        state.restore(image, self._deleted)
        if state.empty:
            self.discard(image.key)
        self._queue_timers(image.key, state.timers)

    def absorb(self, other: StateTable) -> None:
        """Move all keys of another table into this one."""
        for key, state in other.keys.items():
            self.discard(key)
            self.keys[key] = state
            self.by_slot.setdefault(state.slot, set()).add(key)
            self._queue_timers(key, state.timers)
        self.dirty.update(dict.fromkeys(other.keys))
        self.dirty.update(other.dirty)
        self.snapshots += other.snapshots

    def detach(self, keys: Iterable[Key]) -> dict[Key, KeyState | None]:
        """Remove these keys from processing and return their state: their timers do not fire here.

        None: the key is not in memory, and equals its stored version.
        """
        return {key: self._remove(key) for key in keys if self.has(key)}

    def due(self, until_ms: int) -> list[Key]:
        """Keys with a timer up to `until_ms`, in order of their first due timer."""
        heap = self._heap
        found: dict[Key, None] = {}
        while heap and heap[0][0] <= until_ms:
            expiry, key = heapq.heappop(heap)
            state = self.find(key)
            if state is None:
                continue
            if expiry in state.timers or (
                expiry == AT_ONCE and any(self.has_reached(key, timer) for timer in state.timers)
            ):
                found[key] = None
        return list(found)

    def timers_until(self, until_ms: int) -> Iterator[Key]:
        """Keys that may have a timer up to `until_ms`; the timers stay where they are."""
        heap, branches = self._heap, [0]
        while branches:
            at = branches.pop()
            if at < len(heap) and heap[at][0] <= until_ms:
                yield heap[at][1]
                branches += (2 * at + 1, 2 * at + 2)

    def requeue_timers(self, key: Key) -> None:
        """Put the timers of this key back, because it was too early to fire them."""
        self._queue_timers(key, self.keys[key].timers)

    def _queue_timers(self, key: Key, timers: Iterable[int]) -> None:
        for expiry in timers:
            heapq.heappush(self._heap, (AT_ONCE if self.has_reached(key, expiry) else expiry, key))

    def sample_bytes(self, count: int = 8) -> list[int]:
        """The sizes of the oldest and the newest keys in memory, as a cheap sample of all keys.

        With no key in memory it returns the last sample, and reads nothing.
        """
        some = list(chain(islice(self.keys.items(), count), islice(reversed(self.keys.items()), count)))
        if some or not self.evicted:
            self._sampled = [state.image(key, 0, 0, 0).size_bytes for key, state in some]
        return self._sampled

    @property
    def has_timers(self) -> bool:
        return bool(self._heap)

    def members(self, slots: Iterable[int], keys: Iterable[Key]) -> list[Key]:
        """The keys of these slots, and these keys, that have state, in encoded order."""
        found = [k for k in keys if self.has(k)]
        for slot in slots:
            found += self.by_slot.get(slot, ())
        return sorted(found)
