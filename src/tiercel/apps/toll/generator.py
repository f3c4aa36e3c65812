"""Cars on expressways: position reports every 30 seconds, accidents, queries.

Responsible for: every row, as a function of the seed and the size of the traffic.
Not responsible for: when a row is sent.

The rules are those of Linear Road's generators: a car enters by lane 0, reports every 30 s, moves by its
speed, leaves by lane 4, and may come back. What differs: traffic is in a steady state from the start, a car
that leaves is replaced, and one third of the road is slow, so that tolls are due. The rows of a second are
spread over its milliseconds.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercel.apps.toll.rules import ENTRANCE, EXIT, FEET

PERIOD = 30  # seconds between two reports of a car
FEET_PER_MPH = 44  # in that time
BASE = datetime.datetime(2026, 6, 1, tzinfo=datetime.UTC)
REPORT, BALANCE, EXPENDITURE, TRAVEL_TIME = 0, 2, 3, 4  # types of rows
DAYS = 69  # of history
NONE = -1
INPUT = (
    "type int, time int, vid int, spd int, xway int, lane int, dir int, seg int, pos int, qid int, "
    "sinit int, send int, dow int, tod int, day int, at timestamp"
)

Ints = NDArray[np.int64]
Timed = tuple[int, tuple[Any, ...]]  # millisecond, row


@dataclass(frozen=True)
class Road:
    """The size of the traffic."""

    cars: int  # on the road at any time
    expressways: int = 1
    segments: int = 100
    queries: float = 0.01  # of a report: that the car asks something, too
    accident_every_s: int = 300  # on each expressway
    history_cars: int = 2_000  # cars below this number have a history to ask for


class Traffic:
    """The rows of one road and seed, second by second."""

    def __init__(self, road: Road, seed: int) -> None:
        self._road = road
        self._random = np.random.default_rng(seed)
        n = road.cars
        self._vid, self._next_vid, self._next_qid = np.full(n, NONE, np.int64), 0, 0
        self._xway, self._dir, self._lane, self._pos, self._exit, self._returning = (
            np.zeros(n, np.int64) for _ in range(6)
        )
        self._silent = np.zeros(n, np.int64)  # reports that a slot leaves out before its next car
        self._stopped = np.zeros(n, np.int64)  # reports for which a car will stand still
        self._next_accident = [
            int(self._random.integers(road.accident_every_s // 4, road.accident_every_s))
            for _ in range(road.expressways)
        ]

    def seconds(self) -> Iterator[list[Timed]]:
        """The rows of each second, without an end."""
        second = 0
        while True:
            yield self._second(second)
            second += 1

    def _second(self, second: int) -> list[Timed]:
        slots = np.arange(second % PERIOD, self._road.cars, PERIOD)
        waiting = self._silent[slots] > 0
        self._silent[slots[waiting]] -= 1
        slots = slots[~waiting]
        fresh = self._vid[slots] == NONE
        speeds = np.zeros(len(slots), np.int64)
        speeds[fresh] = self._enter(slots[fresh])
        speeds[~fresh] = self._drive(slots[~fresh])
        self._crash(second, slots[~fresh])
        rows = self._rows(second, slots, speeds)
        self._leave(slots[self._lane[slots] == EXIT])
        count = max(len(rows), 1)
        ms = [second * 1000 + n * 1000 // count for n in range(len(rows))]
        return [(at, (*row, _time(at))) for at, row in zip(ms, rows, strict=True)]

    # -- what cars do -------------------------------------------------------------------------------

    def _enter(self, slots: Ints) -> Ints:
        """New cars, one tenth of which have been here before."""
        n, random, road = len(slots), self._random, self._road
        fresh = self._next_vid + 1 + np.arange(n)
        self._next_vid += n
        back = self._returning[slots]
        self._vid[slots] = np.where(back > 0, back, fresh)
        self._xway[slots] = random.integers(0, road.expressways, n)
        direction = random.integers(0, 2, n)
        length = random.integers(2, max(3, road.segments // 2), n)
        first = random.integers(0, road.segments - length)  # along the direction of travel
        entry = np.where(direction == 0, first, road.segments - 1 - first)
        self._exit[slots] = np.where(direction == 0, first + length, road.segments - 1 - first - length)
        offset = random.integers(250, 600, n)
        self._dir[slots], self._lane[slots], self._stopped[slots] = direction, ENTRANCE, 0
        self._pos[slots] = entry * FEET + np.where(direction == 0, offset, FEET - 1 - offset)
        speeds: Ints = random.integers(14, 35, n)
        return speeds

    def _drive(self, slots: Ints) -> Ints:
        """Cars that are on the road move on, or stand still."""
        n, random, road = len(slots), self._random, self._road
        still = self._stopped[slots] > 0
        self._stopped[slots[still]] -= 1
        before = self._pos[slots] // FEET
        third = road.segments / 3
        slow = (before >= third) & (before < 2 * third)
        drawn = np.rint(random.normal(np.where(slow, 33, 58), 7)).astype(np.int64)
        speeds = np.where(still, 0, np.clip(drawn, 10, 90))
        ahead = np.where(self._dir[slots] == 0, 1, -1)
        position = self._pos[slots] + ahead * speeds * FEET_PER_MPH
        segment = position // FEET
        beyond = (segment - self._exit[slots]) * ahead > 0
        low, high = self._exit[slots] * FEET, (self._exit[slots] + 1) * FEET - 1
        position = np.where(beyond, np.clip(position, low, high), position)
        segment = position // FEET
        arrived = segment == self._exit[slots]
        leaves = ~still & arrived & ((before == segment) | (random.random(n) < 0.5))
        lanes = np.where(leaves, EXIT, random.integers(1, 4, n))
        self._lane[slots] = np.where(still, self._lane[slots], lanes)
        self._pos[slots] = position
        return speeds

    def _crash(self, second: int, slots: Ints) -> None:
        """Now and then two cars of one segment stop at one place, for some minutes."""
        for xway, due in enumerate(self._next_accident):
            if second < due:
                continue
            driving = (
                (self._vid != NONE) & (self._lane > ENTRANCE) & (self._lane < EXIT) & (self._stopped == 0)
            )
            for one in slots:
                if not (driving[one] and self._xway[one] == xway):
                    continue
                near = (
                    driving
                    & (self._xway == xway)
                    & (self._dir == self._dir[one])
                    & (self._pos // FEET == self._pos[one] // FEET)
                )
                near[one] = False
                others = np.flatnonzero(near)
                if not len(others):
                    continue
                other = int(others[self._random.integers(0, len(others))])
                self._stopped[[one, other]] = int(self._random.integers(8, 17))
                self._pos[other], self._lane[other] = self._pos[one], self._lane[one]
                self._next_accident[xway] = second + self._road.accident_every_s
                break

    def _leave(self, slots: Ints) -> None:
        back = self._random.random(len(slots)) < 0.1
        self._returning[slots] = np.where(back, self._vid[slots], 0)
        self._silent[slots] = np.where(back, self._random.integers(2, 8, len(slots)), 0)
        self._vid[slots] = NONE

    # -- rows ---------------------------------------------------------------------------------------

    def _rows(self, second: int, slots: Ints, speeds: Ints) -> list[tuple[int, ...]]:
        asks = self._random.random(len(slots))
        days = self._random.integers(1, DAYS + 1, len(slots))
        columns = (self._vid, self._xway, self._lane, self._dir, self._pos)
        values = zip(*(column[slots].tolist() for column in columns), speeds.tolist(), strict=True)
        rows: list[tuple[int, ...]] = []
        road = self._road
        for n, (vid, xway, lane, direction, pos, speed) in enumerate(values):
            report = (REPORT, second, vid, speed, xway, lane, direction, pos // FEET, pos)
            rows.append((*report, *(NONE,) * 6))
            ask = asks[n] / road.queries if road.queries else 1.0
            if ask < 0.5:
                rows.append((BALANCE, second, vid, *(NONE,) * 6, self._qid(), *(NONE,) * 5))
            elif ask < 0.6 and vid < road.history_cars:
                day = int(days[n])
                where = (vid + day) % road.expressways
                row = (EXPENDITURE, second, vid, NONE, where, *(NONE,) * 4, self._qid(), *(NONE,) * 4, day)
                rows.append(row)
            elif 0.6 <= ask < 1.0:  # as the public generator writes them: without what is asked
                rows.append(
                    (TRAVEL_TIME, second, vid, NONE, xway, *(NONE,) * 4, self._qid(), 0, 0, 0, 0, NONE)
                )
        return rows

    def _qid(self) -> int:
        self._next_qid += 1
        return self._next_qid


def _time(ms: int) -> datetime.datetime:
    return BASE + datetime.timedelta(milliseconds=ms)
