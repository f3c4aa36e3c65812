"""Waiting for something that must happen: in a thread, and inside an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WAIT_S_MAX = 30.0


def until(happened: Callable[[], bool], what: str = "it does not happen") -> None:
    give_up = time.monotonic() + WAIT_S_MAX
    while not happened():
        assert time.monotonic() < give_up, what
        time.sleep(0.005)


async def until_in_loop(happened: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + WAIT_S_MAX
    while not happened():
        assert time.monotonic() < give_up, what
        await asyncio.sleep(0.005)
