"""The digests of some keys as of one moment, which the two sides of a live move compare.

Responsible for: one digest per key, computed a few keys at a time while the keys change.
Not responsible for: the comparison (migration/source_router.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.machine.step import Step
from tiercel.core.model.keys import Key
from tiercel.core.settings import Settings
from tiercel.core.state.copy_on_write import Snapshot
from tiercel.core.state.handle import KeyState
from tiercel.core.state.table import StateTable


class DigestJob:
    """A job that computes the digests of some keys as of its creation."""

    def __init__(self, space: StateTable, keys: Iterable[Key]) -> None:
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

    def advance(self, step: Step, move: str, settings: Settings) -> bool:
        """Compute the digests of the next few keys. True: all are done; otherwise a timer continues."""
        self.look_at(4 * settings.slice_keys)  # cheaper than writing them
        if not self.complete:
            step.timer(Timer(TimerKind.DIGESTS, move), step.now_ms + settings.capture_pause_ms)
        return self.complete

    @property
    def complete(self) -> bool:
        return not self._snapshot.pending
