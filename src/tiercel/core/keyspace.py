"""A set of keys with their state, their timers in order, and what changed since the last checkpoint.

Responsible for: finding keys, due timers, dirty keys. An instance has one for its own keys and one
    for each set of keys that is arriving.
Not responsible for: calling user code, or storing, or who leaves memory (spill.py).

A key is in `keys`, or in `cold` if only its stored version is left: `find` brings it back. It is never in
`dirty` and `cold` at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Set
from itertools import chain, islice

from tiercel.core.keyed import KeyState
from tiercel.core.records import Era, Key, KeyImage
from tiercel.core.routing import slot_of
from tiercel.core.snapshots import Snapshot
from tiercel.core.spill import Spill


def nobody(key: Key) -> int:
    """The epoch of a key in a space that is no longer used."""
    return 0


class KeySpace:
    """Keys and their state."""

    def __init__(
        self,
        slots: int,
        epoch_of: Callable[[Key], int],
        user_key: Callable[[Key], object],
        deleted: Set[str] = frozenset(),
        memory_bytes_max: int = 0,
        mutant: str = "",
    ) -> None:
        self.slots = slots
        self.keys: dict[Key, KeyState] = {}
        self.cold: dict[Key, int] = {}  # not in memory: the generation under which it is stored
        self.era: Era | None = None  # of stored versions that are of an owner before us
        self.spill = Spill(self, memory_bytes_max, mutant)
        self.by_slot: dict[int, set[Key]] = {}
        self.dirty: dict[Key, None] = {}  # in order, so that a run is a function of its seed
        self.epoch_of = epoch_of
        self._user_key = user_key
        self._deleted = deleted  # state variables that keys lose when they come
        self._heap: list[tuple[int, Key]] = []
        self.snapshots: list[Snapshot] = []  # told before a key of theirs changes

    def state(self, key: Key) -> KeyState:
        """The state of a key; made on first sight."""
        state = self.find(key)
        if state is None:
            slot = slot_of(key, self.slots)
            state = self.keys[key] = KeyState(self.epoch_of(key), self._user_key(key), slot)
            self.by_slot.setdefault(slot, set()).add(key)
        return state

    def find(self, key: Key) -> KeyState | None:
        """The state of a key that has some; from now on it is in memory."""
        state = self.keys.get(key)
        if state is None and key in self.cold:
            generation = self.cold.pop(key)
            image, size_bytes = self.spill.read(key, generation)
            state = self.keys[key] = self._restored(image, generation)
            if self.spill.active:
                self.spill.saw(key, size_bytes)
            if state.empty:  # of variables that the user's code has deleted
                self.discard(key)
                return None
        return state

    def peek(self, key: Key) -> KeyState | None:
        """The state of a key that has some, for a look: if it is not in memory it stays so."""
        state = self.keys.get(key)
        if state is None and key in self.cold:
            generation = self.cold[key]
            state = self._restored(self.spill.read(key, generation)[0], generation)
            return None if state.empty else state
        return state

    def _restored(self, image: KeyImage, generation: int) -> KeyState:
        slot = slot_of(image.key, self.slots)
        epoch = self.era.epoch(image, generation, slot) if self.era is not None else image.epoch
        state = KeyState(epoch, self._user_key(image.key), slot)
        state.restore(image, self._deleted)
        return state

    def has(self, key: Key) -> bool:
        return key in self.keys or key in self.cold

    @property
    def count(self) -> int:
        """Keys with state, wherever it is."""
        return len(self.keys) + len(self.cold)

    def chill(self, key: Key, generation: int) -> None:
        """This key leaves memory: it is as it is stored."""
        del self.keys[key]
        self.cold[key] = generation

    def install_cold(self, key: Key, generation: int, timers: Iterable[int]) -> None:
        """A key that is stored and stays there until it is needed; its timers are known."""
        self.cold[key] = generation
        self.by_slot.setdefault(slot_of(key, self.slots), set()).add(key)
        for expiry in timers:
            heapq.heappush(self._heap, (expiry, key))

    def about_to_change(self, keys: Iterable[Key]) -> None:
        """Before user code gets these keys: who still wants their state as it is now, takes it."""
        self.snapshots = [snapshot for snapshot in self.snapshots if snapshot.pending]
        for snapshot in self.snapshots:
            for key in keys:
                snapshot.before_change(key)

    def watch(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def touched(self, key: Key, state: KeyState, new_timers: list[int]) -> None:
        """After a call: remember that it changed; a key without state is no key."""
        self.dirty[key] = None
        if new_timers:
            for expiry in new_timers:
                heapq.heappush(self._heap, (expiry, key))
            new_timers.clear()
        if not state.values and not state.timers:
            self.discard(key)

    def discard(self, key: Key) -> None:
        self._remove(key)
        self.dirty[key] = None

    def _remove(self, key: Key) -> KeyState | None:
        state = self.keys.pop(key, None)
        if state is not None or self.cold.pop(key, None) is not None:
            slot = state.slot if state is not None else slot_of(key, self.slots)
            members = self.by_slot[slot]
            members.discard(key)
            if not members:
                del self.by_slot[slot]
        return state

    def install(self, image: KeyImage, epoch: int) -> None:
        """State that came from elsewhere replaces whatever was here."""
        self.discard(image.key)
        if image.values is None and not image.timers:
            return
        state = self.state(image.key)
        state.epoch = epoch
        state.restore(image, self._deleted)
        if state.empty:
            self.discard(image.key)
        for expiry in state.timers:
            heapq.heappush(self._heap, (expiry, image.key))

    def absorb(self, other: KeySpace) -> None:
        """Take over all keys of another space: they are ours now."""
        for key, state in other.keys.items():
            self.discard(key)
            self.keys[key] = state
            self.by_slot.setdefault(state.slot, set()).add(key)
            for expiry in state.timers:
                heapq.heappush(self._heap, (expiry, key))
        self.dirty.update(dict.fromkeys(other.keys))
        self.dirty.update(other.dirty)
        self.snapshots += other.snapshots

    def detach(self, keys: Iterable[Key]) -> dict[Key, KeyState | None]:
        """Take these keys out of processing without forgetting them: no timer of theirs fires here.

        None: it is not in memory, and as it is stored.
        """
        return {key: self._remove(key) for key in keys if self.has(key)}

    def due(self, until_ms: int) -> list[Key]:
        """Keys with a timer up to `until_ms`, in order of their first due timer."""
        heap = self._heap
        found: dict[Key, None] = {}
        while heap and heap[0][0] <= until_ms:
            expiry, key = heapq.heappop(heap)
            state = self.find(key)
            if state is not None and expiry in state.timers:
                found[key] = None
        return list(found)

    def remind(self, key: Key) -> None:
        """The timers of this key did not fire when they were due: it is too early for them."""
        for expiry in self.keys[key].timers:
            heapq.heappush(self._heap, (expiry, key))

    def sample_bytes(self, count: int = 8) -> list[int]:
        """The sizes of the oldest and the newest keys: a cheap guess at all of them."""
        some = list(chain(islice(self.keys.items(), count), islice(reversed(self.keys.items()), count)))
        if not some:
            found = ((key, self.peek(key)) for key in islice(self.cold, count))
            some = [(key, state) for key, state in found if state is not None]
        return [state.image(key, 0, 0, 0).size_bytes for key, state in some]

    @property
    def has_timers(self) -> bool:
        return bool(self._heap)

    def members(self, slots: Iterable[int], keys: Iterable[Key]) -> list[Key]:
        """Those of these keys and slots that have state, in encoded order."""
        found = [k for k in keys if self.has(k)]
        for slot in slots:
            found += self.by_slot.get(slot, ())
        return sorted(found)
