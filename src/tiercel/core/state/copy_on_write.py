"""Snapshots: the state of many keys as of one moment, captured a few keys at a time while they change.

Responsible for: capturing every key once, before its first change after that moment.
Not responsible for: the use of the state (checkpoint_writer.py, digests.py).

    as of entry 40: a b c d e f        a few per turn:  a b | c d | ...
    entry 41 changes e: e is captured first, then changed
"""

from __future__ import annotations

from collections.abc import Callable

from tiercel.core.model.keys import Key
from tiercel.core.state.handle import KeyState

Look = Callable[[Key, KeyState], None]


class Snapshot:
    """The keys that are still to be captured."""

    __slots__ = ("look", "pending")

    def __init__(self, pending: dict[Key, KeyState], look: Look) -> None:
        self.pending = pending
        self.look = look

    def before_change(self, key: Key) -> None:
        """Capture a key that is about to change."""
        state = self.pending.pop(key, None)
        if state is not None:
            self.look(key, state)

    def look_at(self, count: int) -> int:
        """Capture the next few keys; returns their number."""
        pending, look = self.pending, self.look
        seen = 0
        while pending and seen < count:
            look(*pending.popitem())
            seen += 1
        return seen
