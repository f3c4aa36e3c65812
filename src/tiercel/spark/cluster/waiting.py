"""Waiting in the driver: a condition is polled until it is true, or until a time limit has passed.

Responsible for: the one polling loop of this package.
Not responsible for: what is waited for, and the error that says that it did not happen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.02  # a poll costs the driver, and the work beside it, while a move runs


def wait_until(
    condition: Callable[[], T],
    timeout_s: float,
    failure: Callable[[], Exception] | None = None,
    *,
    poll_s: float = POLL_S,
) -> T:
    """Polls until the condition is true; returns its last value.

    After the time limit this raises `failure()`, or without one returns the value as it is then. The
    condition is asked at least once, and may raise by itself.
    """
    give_up_s = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > give_up_s:
            if failure is None:
                return found
            raise failure()
        time.sleep(poll_s)
    return found
