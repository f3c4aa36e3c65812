"""A timer for an event loop that fires every few milliseconds, more precisely than the loop's own timers.

Responsible for: one callback per tick from a given moment on, as punctually as the kernel wakes us.
Not responsible for: catching up after a delay (load.py reads the clock itself).

The caller gives the time of the first tick. With another phase, everything that is due at a tick would be
late by the same part of a tick, and by another part in each run.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from time import monotonic_ns

CLOCK_MONOTONIC = 1
O_NONBLOCK = os.O_NONBLOCK
ABSOLUTE = 1  # TFD_TIMER_ABSTIME


class _Spec(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "first_s", "first_ns")]


class TickTimer:
    """Calls back at `first_ns` and every `period_ns` after: by a timerfd, elsewhere by the loop's timers."""

    def __init__(self, first_ns: int, period_ns: int, call: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._call = call
        self._period_ns = period_ns
        self._file = -1
        self._timer: asyncio.TimerHandle | None = None
        if sys.platform == "linux":
            libc = ctypes.CDLL(None, use_errno=True)
            self._file = libc.timerfd_create(CLOCK_MONOTONIC, O_NONBLOCK)
        if self._file >= 0:
            spec = _Spec(*divmod(period_ns, 10**9), *divmod(first_ns, 10**9))
            libc.timerfd_settime(self._file, ABSOLUTE, ctypes.byref(spec), None)
            self._loop.add_reader(self._file, self._on_file)
        else:
            wait_s = max(0, first_ns - monotonic_ns()) / 1e9
            self._timer = self._loop.call_later(wait_s, self._on_timer)

    def _on_file(self) -> None:
        os.read(self._file, 8)
        self._call()

    def _on_timer(self) -> None:
        self._timer = self._loop.call_later(self._period_ns / 1e9, self._on_timer)
        self._call()

    def close(self) -> None:
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
        elif self._timer is not None:
            self._timer.cancel()
