"""Loads over time for policies: ramp, square wave, noise, skew that drifts, a day, a flash crowd, and more.

Responsible for: rows per second, how they are spread over slots, and the speed of each instance, second by
    second, from a seed.
Not responsible for: what the operator does with them (operator_model.py).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import msgspec

SLOTS = 64
ONE = 1_000.0  # rows per second that one instance can process


class LoadSecond(msgspec.Struct, frozen=True):
    """One second of a load."""

    rate: float  # rows per second
    weights: tuple[float, ...] = (1.0 / SLOTS,) * SLOTS  # share of each slot
    slow: dict[int, float] = {}  # instance by its place -> part of its speed that is left


Trace = tuple[LoadSecond, ...]


def ramp(seed: int) -> Trace:
    """From a fifth of an instance to five instances and back, in ten minutes."""
    up = [200 + 4_300 * t / 300 for t in range(300)]
    return tuple(LoadSecond(rate) for rate in [*up, *reversed(up)])


def square(seed: int) -> Trace:
    """Half an instance and three instances, in turns of two minutes."""
    return tuple(LoadSecond(2_400.0 if t // 120 % 2 else 500.0) for t in range(960))


def noise(seed: int) -> Trace:
    """About one and a half instances, with a quarter more or less in each second."""
    draw = random.Random(seed)
    return tuple(LoadSecond(1_500.0 * draw.uniform(0.75, 1.25)) for _ in range(600))


def drifting_skew(seed: int) -> Trace:
    """Two instances' worth; a third of it in one slot, another one every two minutes."""
    draw = random.Random(seed)
    seconds = []
    for _ in range(5):
        hot = draw.randrange(SLOTS)
        weights = tuple(1 / 3 if slot == hot else 2 / 3 / (SLOTS - 1) for slot in range(SLOTS))
        seconds += [LoadSecond(1_500.0, weights)] * 120
    return tuple(seconds)


def day(seed: int) -> Trace:
    """A day's curve in 24 minutes: low at night, a peak in the evening, with noise."""
    draw = random.Random(seed)
    rates = []
    for t in range(1_440):
        hour = t / 60
        curve = 0.5 - 0.5 * math.cos((hour - 4) / 24 * 2 * math.pi)
        evening = math.exp(-((hour - 20) ** 2) / 4)
        rates.append((300 + 2_200 * curve + 1_200 * evening) * draw.uniform(0.95, 1.05))
    return tuple(LoadSecond(rate) for rate in rates)


def flash_crowd(seed: int) -> Trace:
    """Half an instance; from one second to the next six instances' worth, which fall off in minutes."""
    rates = [500.0] * 120 + [500 + 5_000 * math.exp(-t / 120) for t in range(480)]
    return tuple(LoadSecond(rate) for rate in rates)


def slow_instance(seed: int) -> Trace:
    """One and a half instances' worth; from minute two to six the first instance has half of its speed."""
    return tuple(LoadSecond(1_500.0, slow={0: 0.5} if 120 <= t < 360 else {}) for t in range(600))


TRACES: dict[str, Callable[[int], Trace]] = {
    "ramp": ramp,
    "square": square,
    "noise": noise,
    "drifting-skew": drifting_skew,
    "day": day,
    "flash-crowd": flash_crowd,
    "slow-instance": slow_instance,
}


def turns(trace: Trace, window: int = 30, swing: float = 0.3) -> int:
    """How often a load changes: its direction by more than `swing`, its skew, or the speed of an instance.

    Rates are averaged over `window` seconds: noise is no change.
    """
    rates = [
        sum(s.rate for s in trace[max(0, t - window) : t + 1]) / len(trace[max(0, t - window) : t + 1])
        for t in range(len(trace))
    ]
    low = high = rates[0]
    direction = 0
    found = sum((a.weights, a.slow) != (b.weights, b.slow) for a, b in itertools.pairwise(trace))
    for rate in rates:
        low, high = min(low, rate), max(high, rate)
        if direction >= 0 and rate < high * (1 - swing):
            found += direction > 0
            direction, low = -1, rate
        elif direction <= 0 and rate > low * (1 + swing):
            found += direction < 0
            direction, high = 1, rate
        if direction > 0:
            low = rate
        elif direction < 0:
            high = rate
    return found
