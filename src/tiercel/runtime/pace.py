"""Time and garbage of a process that must not stop for long.

Responsible for: a clock that never runs backwards; collections that stay short.
Not responsible for: when anything happens (host.py).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


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
