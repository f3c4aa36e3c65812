"""The state of many keys as of one moment, looked at a few keys at a time while they go on changing.

Responsible for: that every key is looked at once, before the first change after that moment.
Not responsible for: what is done with it (checkpoints.py, the digests of a move).

    as of entry 40: a b c d e f        a few per turn:  a b | c d | ...
    entry 41 changes e: e is looked at first, then changed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tiercel.core.keyed import KeyState
from tiercel.core.records import Key

if TYPE_CHECKING:
    from tiercel.core.keyspace import KeySpace

Look = Callable[[Key, KeyState], None]


class Snapshot:
    """Keys that are still to be looked at."""

    __slots__ = ("look", "pending")

    def __init__(self, pending: dict[Key, KeyState], look: Look) -> None:
        self.pending = pending
        self.look = look

    def before_change(self, key: Key) -> None:
        """This key is about to change: its state as of the moment is now or never."""
        state = self.pending.pop(key, None)
        if state is not None:
            self.look(key, state)

    def look_at(self, count: int) -> int:
        """The next few; returns how many there were."""
        pending, look = self.pending, self.look
        seen = 0
        while pending and seen < count:
            look(*pending.popitem())
            seen += 1
        return seen


class Digests:
    """The digests of some keys as of now: what the two sides of a live move compare."""

    def __init__(self, space: KeySpace, keys: Iterable[Key]) -> None:
        self.found: dict[Key, int] = {}
        pending: dict[Key, KeyState] = {}
        for key in sorted(keys):
            state = space.find(key)
            if state is None:
                self.found[key] = 0  # it has no state
            else:
                pending[key] = state
        self._snapshot = Snapshot(pending, self._look)
        space.watch(self._snapshot)

    def _look(self, key: Key, state: KeyState) -> None:
        self.found[key] = state.digest()

    def look_at(self, count: int) -> None:
        self._snapshot.look_at(count)

    @property
    def complete(self) -> bool:
        return not self._snapshot.pending
