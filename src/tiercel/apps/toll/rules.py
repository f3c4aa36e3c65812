"""The rules of Linear Road that generator, operators and tests share.

Responsible for: minutes, segments, the rounding of speeds, the toll, which segments an accident touches.
Not responsible for: the batch job (oracle.py), which states the same rules again in SQL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

FEET = 5280  # of a segment, a mile
SEGMENTS = 100
ENTRANCE, EXIT = 0, 4  # lanes
STOPPED_REPORTS = 4  # at one position: the car is stopped
SLOW, FREE_CARS = 40, 50  # mph; a toll needs slower traffic and more cars
MINUTES = 5  # of the latest average velocity
REACH = 4  # segments upstream of an accident that it touches, besides its own
NO_DATA = -1


def minute_of(second: int) -> int:
    return second // 60 + 1


def minute_start_s(minute: int) -> int:
    return (minute - 1) * 60


def latest_average(averages: Mapping[int, float], minute: int) -> int:
    """LAV: the mean over the last five minutes that have data, cut to a whole number; -1 without any."""
    found = [averages[m] for m in range(minute - MINUTES, minute) if m in averages]
    return int(sum(found) / len(found)) if found else NO_DATA


def toll_of(average: int, cars: int, accident: bool) -> int:
    """In cents, of a car that enters the segment; `cars` were there in the minute before."""
    if average >= SLOW or cars <= FREE_CARS or accident:
        return 0
    return 2 * (cars - FREE_CARS) ** 2


def touched(direction: int, segment: int) -> Iterable[int]:
    """The segments whose cars an accident concerns: its own and those upstream."""
    step = -1 if direction == 0 else 1
    return (seg for seg in range(segment, segment + (REACH + 1) * step, step) if 0 <= seg < SEGMENTS)


def is_active(minute: int, begun: int, cleared: int | None) -> bool:
    """Whether an accident counts in a minute: from the one after its detection to that of its clearing."""
    return begun < minute and (cleared is None or minute <= cleared)


def past_toll(vid: int, day: int) -> int:
    """What a car paid on a day before today, 10 to 99 cents: the made-up history."""
    return (vid * 7919 + day * 104_729) % 90 + 10
