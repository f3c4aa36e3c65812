"""The operators of Linear Road: cars, tolls by segment, accounts.

Responsible for: what each operator keeps and answers.
Not responsible for: the rules (rules.py), how operators are connected (app.py).

    rows --> cars --(by segment)--> tolls --(by car)--> accounts

What a toll depends on is in one inbox by segment: reports, crossings, cars that stand in it or ahead of it.
The toll of minute M needs minute M - 1 to be complete: a car that enters waits until the watermark says so.
Rows of one car reach its account from several segments, so an account takes them in the order of their times.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from tiercel.apps.times import from_ms, to_ms
from tiercel.apps.toll.generator import BALANCE, BASE, EXPENDITURE
from tiercel.apps.toll.rules import (
    EXIT,
    FEET,
    MINUTES,
    STOPPED_REPORTS,
    is_active,
    latest_average,
    minute_of,
    minute_start_s,
    toll_of,
    touched,
)

BASE_MS = to_ms(BASE)

# what a car does in a segment
TRAVELS, ENTERS, LEAVES, STOPS, MOVES, ASKS, ASKS_DAY = range(7)
EVENT = (
    "xway int, dir int, seg int, kind int, vid int, time int, at timestamp, "
    "spd int, lane int, pos int, qid int"
)
CAR = "xway int, dir int, seg int, lane int, pos int, equal int"
NO_CAR = (-1, 0, -1, EXIT, -1, 0)

# what a segment answers
TOLL, ALERT, QUERY, DAY_QUERY, GONE = range(5)
NOTICE = "kind int, vid int, time int, at timestamp, xway int, dir int, seg int, lav int, toll int, qid int"
ANSWER = "kind int, vid int, time int, at timestamp, qid int, resultTime int, day int, amount int"
BALANCES = "vid int, time int, at timestamp, qid int, resultTime int, balance int"
SPENT = "vid int, time int, at timestamp, qid int, day int, toll int"
PAST = "vid int, tolls array<int>"


def minute_start_ms(minute: int) -> int:
    return BASE_MS + minute_start_s(minute) * 1000


def follow(car: Sequence[int], row: Any) -> tuple[Any, Any]:
    """One step of a car, as a fold: what it does in which segment, out of its last reports.

    `equal` counts the reports at one position: a sliding window over the last four of them. That a car
    stands, or moves again, concerns its segment and the four upstream. `spd` of a question is its day.
    """
    xway, direction, seg, lane, pos, equal = car
    moment = (row.vid, row.time, row.at)
    if row.type == BALANCE:
        return car, [(xway, direction, seg, ASKS, *moment, 0, lane, pos, row.qid)]
    if row.type == EXPENDITURE:
        return car, [(xway, direction, seg, ASKS_DAY, *moment, row.day, lane, pos, row.qid)]
    done: list[tuple[Any, ...]] = []
    fresh = lane == EXIT  # it has left before, or was never here
    if not fresh and (row.xway, row.dir, row.lane, row.pos) == (xway, direction, lane, pos):
        equal += 1
        if equal == STOPPED_REPORTS:
            done += [
                (xway, direction, near, STOPS, *moment, 0, lane, pos, -1) for near in touched(direction, seg)
            ]
    else:
        if equal >= STOPPED_REPORTS:
            done += [
                (xway, direction, near, MOVES, *moment, 0, lane, pos, -1) for near in touched(direction, seg)
            ]
        equal = 1
    if row.lane == EXIT:
        kind = LEAVES
    else:
        kind = ENTERS if fresh or (row.xway, row.dir, row.seg) != (xway, direction, seg) else TRAVELS
    done.append((row.xway, row.dir, row.seg, kind, *moment, row.spd, row.lane, row.pos, -1))
    return (row.xway, row.dir, row.seg, row.lane, row.pos, equal), done


class Tolls(StatefulProcessor):
    """Statistics of a segment by minute, accidents, and what it tells the cars that enter it. Key: segment.

    Two cars that stand at one place are an accident, until one of them moves. An accident counts from the
    next minute on, so cars that stand are looked at when a minute is complete, in the order of their times:
    they come from several instances. The accident's own segment follows from its position.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._cars = handle.getMapState("cars", "minute int, vid int", "total int, n int")
        self._minutes = handle.getValueState(
            "minutes", "minutes array<int>, averages array<double>, cars array<int>"
        )
        self._entering = handle.getListState("entering", "at bigint, vid int, time int")
        self._standing = handle.getListState(
            "standing", "at bigint, kind int, vid int, time int, lane int, pos int"
        )
        self._places = handle.getMapState("places", "lane int, pos int", "cars array<int>, begun int")
        self._accidents = handle.getMapState(
            "accidents", "lane int, pos int, begun int", "first int, last int"
        )

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        watermark = timerValues.getCurrentWatermarkInMs()
        for row in rows:
            if row.kind in (STOPS, MOVES):
                self._standing.appendValue((to_ms(row.at), row.kind, row.vid, row.time, row.lane, row.pos))
                self._handle.registerTimer(minute_start_ms(minute_of(row.time) + 1))
                continue
            if row.kind in (ASKS, ASKS_DAY):
                kind = QUERY if row.kind == ASKS else DAY_QUERY
                yield self._notice(key, kind, row.vid, row.time, row.at, toll=row.spd, qid=row.qid)
                continue
            minute = minute_of(row.time)
            car = (minute, row.vid)
            found = self._cars.getValue(car)
            if found is None:
                self._cars.updateValue(car, (row.spd, 1))
                self._handle.registerTimer(minute_start_ms(minute + 1))
            else:
                self._cars.updateValue(car, (found[0] + row.spd, found[1] + 1))
            if row.kind == LEAVES:
                yield self._notice(key, GONE, row.vid, row.time, row.at)
            elif row.kind == ENTERS:
                if minute_start_ms(minute) <= watermark:
                    yield from self._answer(key, row.vid, row.time, row.at)
                else:
                    self._entering.appendValue((to_ms(row.at), row.vid, row.time))
                    self._handle.registerTimer(minute_start_ms(minute))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        """A minute is complete."""
        now = expiredTimerInfo.getExpiryTimeInMs()
        minute = (now - BASE_MS) // 60_000 + 1  # the one that begins
        self._complete(minute)
        for standing in take_due(self._standing, now - 1):
            self._note_standing(*standing)
        end = now + 60_000
        for at, vid, time in take_due(self._entering, end - 1):
            yield from self._answer(key, vid, time, from_ms(at))
        for place, (_, last) in list(self._accidents.iterator()):
            if 0 <= last < minute:
                self._accidents.removeKey(place)

    def _note_standing(self, at: int, kind: int, vid: int, time: int, lane: int, pos: int) -> None:
        """A car stands, or moves again: an accident begins, or is cleared."""
        found = self._places.getValue((lane, pos))
        cars, begun = ([], -1) if found is None else (list(found[0]), found[1])
        if kind == STOPS:
            cars.append(vid)
            if len(cars) >= 2 and begun < 0:
                begun = time
                self._accidents.updateValue((lane, pos, begun), (minute_of(begun), -1))
        else:
            cars = [car for car in cars if car != vid]
            if begun >= 0:
                self._accidents.updateValue((lane, pos, begun), (minute_of(begun), minute_of(time)))
                begun = -1
        if cars:
            self._places.updateValue((lane, pos), (cars, begun))
        else:
            self._places.removeKey((lane, pos))

    def _complete(self, minute: int) -> None:
        """Keep what counts of the cars of earlier minutes."""
        means: dict[int, list[float]] = {}
        for (m, vid), (total, n) in list(self._cars.iterator()):
            if m < minute:
                means.setdefault(m, []).append(total / n)
                self._cars.removeKey((m, vid))
        if not means:
            return
        kept = [one for one in self._kept() if one[0] >= minute - MINUTES]
        kept += [(m, sum(means[m]) / len(means[m]), len(means[m])) for m in sorted(means)]
        minutes, averages, cars = (list(column) for column in zip(*kept, strict=True))
        self._minutes.update((minutes, averages, cars))

    def _kept(self) -> list[tuple[int, float, int]]:
        found = self._minutes.get()
        return [] if found is None else list(zip(*found, strict=True))

    def _answer(self, key: Sequence[int], vid: int, time: int, at: datetime.datetime) -> Iterator[Row]:
        """The toll of a car that enters, and an alert if there is an accident ahead."""
        _, _, segment = key
        minute = minute_of(time)
        kept = self._kept()
        ahead = [
            pos // FEET
            for (_, pos, _), (first, last) in self._accidents.iterator()
            if is_active(minute, first, None if last < 0 else last)
        ]
        average = latest_average({m: one for m, one, _ in kept}, minute)
        cars = next((n for m, _, n in kept if m == minute - 1), 0)
        toll = toll_of(average, cars, bool(ahead))
        yield self._notice(key, TOLL, vid, time, at, lav=average, toll=toll)
        if ahead:
            nearest = min(ahead, key=lambda seg: abs(seg - segment))
            yield self._notice((key[0], key[1], nearest), ALERT, vid, time, at)

    def _notice(
        self,
        place: Sequence[int],
        kind: int,
        vid: int,
        time: int,
        at: datetime.datetime,
        *,
        lav: int = -1,
        toll: int = 0,
        qid: int = -1,
    ) -> Row:
        xway, direction, seg = place
        return Row(
            kind=kind,
            vid=vid,
            time=time,
            at=at,
            xway=xway,
            dir=direction,
            seg=seg,
            lav=lav,
            toll=toll,
            qid=qid,
        )

    def close(self) -> None:
        """Nothing to release."""


class Accounts(StatefulProcessor):
    """Charges tolls, and answers what a car's balance is and what it paid on an earlier day. Key: car.

    The toll of a segment is charged when the car enters the next one, or leaves by the exit ramp of the next
    one; not when it leaves by that of the same segment. The history of earlier days is the initial state.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._waiting = handle.getListState(
            "waiting", "at bigint, kind int, time int, xway int, dir int, seg int, toll int, qid int"
        )
        self._account = handle.getValueState(
            "account", "balance int, announced int, xway int, dir int, seg int, since int"
        )
        self._past = handle.getValueState("past", "tolls array<int>")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._past.update((list(initialState.tolls),))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.kind == DAY_QUERY:
                past, day = self._past.get(), row.toll
                spent = 0 if past is None else past[0][day - 1]
                yield answer(DAY_QUERY, key[0], row.time, row.at, row.qid, day=day, amount=spent)
                continue
            at = to_ms(row.at)
            # what changes the account comes before a question of the same moment
            kind = 9 if row.kind == QUERY else row.kind
            self._waiting.appendValue((at, kind, row.time, row.xway, row.dir, row.seg, row.toll, row.qid))
            self._handle.registerTimer(at)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        found = self._account.get()
        balance, announced, *place, since = (0, 0, -1, -1, -1, 0) if found is None else found
        due = take_due(self._waiting, expiredTimerInfo.getExpiryTimeInMs())
        for at, kind, time, xway, direction, seg, toll, qid in due:
            if kind == TOLL:
                balance, announced, place, since = balance + announced, toll, [xway, direction, seg], time
            elif kind == GONE:
                balance += announced if [xway, direction, seg] != place else 0
                announced = 0
            else:
                yield answer(QUERY, key[0], time, from_ms(at), qid, result_time=since, amount=balance)
        if due:
            self._account.update((balance, announced, *place, since))

    def close(self) -> None:
        """Nothing to release."""


def answer(
    kind: int,
    vid: int,
    time: int,
    at: datetime.datetime,
    qid: int,
    *,
    result_time: int = 0,
    day: int = 0,
    amount: int = 0,
) -> Row:
    return Row(kind=kind, vid=vid, time=time, at=at, qid=qid, resultTime=result_time, day=day, amount=amount)


def take_due(state: Any, up_to_ms: int) -> list[tuple[Any, ...]]:
    """Take the rows of a list whose time, their first column, has come; in order."""
    rows = sorted(tuple(row) for row in state.get()) if state.exists() else []
    due = [row for row in rows if row[0] <= up_to_ms]
    if due and len(due) == len(rows):
        state.clear()
    elif due:
        state.put(rows[len(due) :])
    return due
