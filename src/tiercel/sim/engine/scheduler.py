"""The scheduler: virtual time, one queue of calls, one random source, one trace.

Responsible for: what runs next, how late it is, and whether two runs were the same run.
Not responsible for: what the calls do (network.py, disk.py, process.py), faults, checkers.

    call_at / call_after --> queue, ordered by (time, insertion) --> run --> call
                                                                       |
                                                    mark / trace <-----+   (the run's fingerprint)
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeVarTuple
from zlib import crc32

Args = TypeVarTuple("Args")

STEPS_MAX = 1_000_000  # some thirty times what a seed needs; only a livelock comes here


class NotQuiet(Exception):
    """The run still had work after the allowed number of steps: a livelock, or too small a limit."""

    def __init__(self, seed: int, at_ms: float, steps: int, waiting: int) -> None:
        super().__init__(
            f"seed {seed}: not quiet at {at_ms:.3f} ms after {steps} steps ({waiting} calls wait)"
        )
        self.seed = seed
        self.at_ms = at_ms
        self.steps = steps


class Scheduler:
    """Time, order and chance of one run. The same seed and the same calls give the same run.

    `keep_story` keeps the story of the run; `hash_events` lets the fingerprint cover also the contents
    of all events (slow: for a check that the code draws on nothing but the seed).
    """

    __slots__ = (
        "_crc",
        "_order",
        "_queue",
        "_rolling",
        "hash_events",
        "now_ms",
        "rng",
        "seed",
        "steps",
        "story",
    )

    def __init__(self, seed: int, *, keep_story: bool = False, hash_events: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now_ms = 0.0
        self.steps = 0
        self.story: list[str] | None = [] if keep_story else None
        self.hash_events = hash_events
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = 0
        self._crc = 0
        self._rolling = seed

    def call_at(self, at_ms: float, fn: Callable[[*Args], object], *args: *Args) -> None:
        """Call `fn` at that time, or now if it has passed; ties run in insertion order."""
        if at_ms < self.now_ms:
            at_ms = self.now_ms
        self._order = order = self._order + 1
        heappush(self._queue, (at_ms, order, fn, args))

    def call_after(self, delay_ms: float, fn: Callable[[*Args], object], *args: *Args) -> None:
        """Call `fn` that much later; with 0 after everything that is already due now."""
        self._order = order = self._order + 1
        heappush(self._queue, (self.now_ms + delay_ms, order, fn, args))

    def run(self, until_ms: float = math.inf, steps_max: int = STEPS_MAX) -> int:
        """Run all calls due by `until_ms` and return their number; time then stands at `until_ms`.

        Raises NotQuiet when more than `steps_max` calls would be needed: liveness has a bound.
        """
        queue = self._queue
        steps = 0
        try:
            while queue and queue[0][0] <= until_ms:
                if steps == steps_max:
                    raise NotQuiet(self.seed, self.now_ms, steps, len(queue))
                self.now_ms, _, fn, args = heappop(queue)
                steps += 1
                fn(*args)
        finally:
            self.steps += steps
        if until_ms != math.inf:
            self.now_ms = max(self.now_ms, until_ms)
        return steps

    def drawn_ms(self, around_ms: float) -> float:
        """Draw a duration from half to one and a half times the given one."""
        return around_ms * (0.5 + self.rng.random())

    def mark(self, number: int) -> None:
        """Feed the fingerprint on the hot path: this happened now to the thing of that number.

        Hashes of numbers, unlike those of strings, are the same in every Python process.
        """
        self._rolling = hash((self._rolling, self.now_ms, number))

    def trace(self, kind: str, *fields: object) -> None:
        """Feed the fingerprint with something readable, and the story if it is kept."""
        self._crc = crc32(repr((self.now_ms, kind, fields)).encode(), self._crc)
        if self.story is not None:
            self.note(kind, *fields)

    def note(self, kind: str, *fields: object) -> None:
        """Add a line to the story only; callers on the hot path check first whether it is kept."""
        if self.story is not None:
            self.story.append(f"{self.now_ms:10.3f} {kind} {' '.join(map(str, fields))}")

    def trace_hash(self) -> str:
        """Fingerprint of all that was marked and traced so far."""
        return f"{self._rolling & 0xFFFF_FFFF_FFFF_FFFF:016x}{self._crc:08x}"
