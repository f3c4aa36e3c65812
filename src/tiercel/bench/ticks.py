"""A millisecond clock for an event loop: its own timers are only exact to a millisecond, and too late.

Responsible for: calling back once per tick, as punctually as the kernel wakes us.
Not responsible for: catching up after a delay (load.py looks at the time itself).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable

CLOCK_MONOTONIC = 1
O_NONBLOCK = os.O_NONBLOCK


class _Spec(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "first_s", "first_ns")]


class Ticks:
    """Calls back every `period_ns` while the loop runs: by a timerfd, elsewhere by the loop's timers."""

    def __init__(self, period_ns: int, call: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._call = call
        self._period_ns = period_ns
        self._file = -1
        self._timer: asyncio.TimerHandle | None = None
        if sys.platform == "linux":
            libc = ctypes.CDLL(None, use_errno=True)
            self._file = libc.timerfd_create(CLOCK_MONOTONIC, O_NONBLOCK)
        if self._file >= 0:
            spec = _Spec(*divmod(period_ns, 10**9), *divmod(period_ns, 10**9))
            libc.timerfd_settime(self._file, 0, ctypes.byref(spec), None)
            self._loop.add_reader(self._file, self._on_file)
        else:
            self._on_timer()

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
