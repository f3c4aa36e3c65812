"""CPU time of a process's loop, beside the wall time: a core that a neighbour took is not work.

Responsible for: the share of time in which the calling thread had a core, and in which it waited for one.
Not responsible for: the time in which the loop had work (host.py), reporting it (metrics.py).

Linux counts how long a thread was ready and had no core. Elsewhere that share is not known.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

SCHEDSTAT = Path("/proc/thread-self/schedstat")  # ns on a core, ns waiting for one, number of turns


class CpuTime:
    """Shares of time of the thread that calls it, since its last call."""

    def __init__(self) -> None:
        self._ran_s = time.thread_time()
        self._waited_s = _waited_s()

    def shares(self, took_s: float) -> tuple[float, float | None]:
        """(share with a core, share waiting for one), of `took_s` seconds."""
        ran_s, waited_s = time.thread_time(), _waited_s()
        ran = max(0.0, ran_s - self._ran_s) / took_s
        waited = None
        if waited_s is not None and self._waited_s is not None:
            waited = round(min(1.0, max(0.0, waited_s - self._waited_s) / took_s), 4)
        self._ran_s, self._waited_s = ran_s, waited_s
        return round(min(1.0, ran), 4), waited


def _waited_s() -> float | None:
    try:
        return int(SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


@functools.cache
def cores_here() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
