"""A row that takes its time, as if user code called a service.

Responsible for: waiting a given time for each row, on average.
Not responsible for: what the row is for (the operators of applications and benchmarks).
"""

from __future__ import annotations

import time

SLEEPS_NS = 200_000  # a shorter sleep takes much longer than asked


class Service:
    """Lets user code take `service_us` for each row, on average. It sleeps: other processes have the core."""

    def __init__(self, service_us: float) -> None:
        self._row_ns = service_us * 1e3
        self._remaining_ns = 0.0  # a sleep is longer than asked for: the next one is shorter

    def spend(self) -> None:
        self._remaining_ns += self._row_ns
        if self._remaining_ns >= SLEEPS_NS:
            begun_ns = time.perf_counter_ns()
            time.sleep(self._remaining_ns / 1e9)
            self._remaining_ns -= time.perf_counter_ns() - begun_ns

    def __call__(self, row: object) -> bool:
        """As a filter in front of an operator: every row passes, and has taken its time."""
        self.spend()
        return True
