"""What a host drives, and what it needs of its process: a clock, a collector that does not get in the way.

Responsible for: the shape of a machine; time that never runs backwards; when garbage is collected.
Not responsible for: driving it (host.py).
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tiercel.core.effects import Effect
from tiercel.core.events import Event


class Machine(Protocol):
    """What a host drives. With `on_events` as well, it takes several in one step, as many as it sees fit."""

    def on_event(self, event: Event, now_ms: float) -> Sequence[Effect]: ...


OnEvents = Callable[[deque[Event], float], Sequence[Effect]]


class MissingStore(AssertionError):
    """A machine wants to write or read, but its host was given no store."""


def wall_clock() -> Callable[[], float]:
    """Milliseconds since 1970 that never run backwards while this process lives."""
    offset_ms = time.time() * 1e3 - time.monotonic() * 1e3
    return lambda: offset_ms + time.monotonic() * 1e3


def tame_collector() -> None:
    """Young garbage is collected now and then, old garbage hardly ever.

    Full collections stopped a router for up to 0.8 s and were 40 % of its time (1 M tuples under load).
    Small steps keep a young one far below a millisecond; what survives a few of them is left alone.
    """
    gc.collect()
    gc.freeze()  # what is here now stays: no collection needs to look at it
    gc.set_threshold(2_000, 4, 1_000_000)
