"""The interface of a machine that a host drives, a monotonic clock, and garbage collector settings.

Responsible for: the `Machine` protocol; time that never runs backwards; when garbage is collected.
Not responsible for: driving the machine (host.py).
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tiercel.core.machine.effects import Effect, StorageKey
from tiercel.core.machine.events import Event


class Machine(Protocol):
    """The interface of a machine. With `on_events` as well, it takes several events in one step.

    With `missing_state`, the host asks before each event which stored state it must read and deliver first.
    """

    def on_event(self, event: Event, now_ms: float) -> Sequence[Effect]: ...


OnEvents = Callable[[deque[Event], float], Sequence[Effect]]
MissingState = Callable[[Event], Sequence[StorageKey]]


class MissingStore(AssertionError):
    """The machine writes or reads, but its host has no store."""


def wall_clock() -> Callable[[], float]:
    """A clock in milliseconds since 1970 that never runs backwards within this process."""
    offset_ms = time.time() * 1e3 - time.monotonic() * 1e3
    return lambda: offset_ms + time.monotonic() * 1e3


def tame_collector() -> None:
    """Collect young garbage now and then, and old garbage hardly ever.

    Full collections stopped a router for up to 0.8 s and took 40 % of its time (1 M tuples under load). A
    young collection takes far less than a millisecond.
    """
    gc.collect()
    gc.freeze()  # objects of now stay: collections skip them
    gc.set_threshold(2_000, 4, 1_000_000)
