"""Waiting inside an event loop for something that must happen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WAIT_S_MAX = 30.0


async def until(happened: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + WAIT_S_MAX
    while not happened():
        assert time.monotonic() < give_up, what
        await asyncio.sleep(0.005)
