"""Linear Road: the rules of the benchmark, the traffic, and operators against them."""

from __future__ import annotations

import datetime
from collections import Counter, defaultdict
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tiercel import UserError
from tiercel.apps.toll.app import TollApp, TollOptions, is_answered
from tiercel.apps.toll.generator import BASE, INPUT, PERIOD, REPORT, Road, Traffic
from tiercel.apps.toll.processors import (
    ALERT,
    ANSWER,
    ASKS,
    ASKS_DAY,
    BASE_MS,
    CAR,
    DAY_QUERY,
    ENTERS,
    EVENT,
    GONE,
    LEAVES,
    MOVES,
    NO_CAR,
    NOTICE,
    QUERY,
    STOPS,
    TOLL,
    TRAVELS,
    Accounts,
    Tolls,
    follow,
)
from tiercel.apps.toll.rules import is_active, latest_average, toll_of, touched
from tiercel.spark.operators.folds import Fold
from tiercel.spark.rows.ddl import parse_ddl
from tiercel.testing import Trial


@pytest.mark.parametrize(
    ("average", "cars", "accident", "toll"),
    [(-1, 50, False, 0), (-1, 51, False, 2), (39, 52, False, 8), (40, 51, False, 0), (39, 90, True, 0)],
)
def test_a_toll_needs_more_than_fifty_slow_cars_and_no_accident(
    average: int, cars: int, accident: bool, toll: int
) -> None:
    assert toll_of(average, cars, accident) == toll


def test_an_accident_touches_its_segment_and_four_upstream() -> None:
    assert list(touched(0, 16)) == [16, 15, 14, 13, 12]
    assert list(touched(1, 16)) == [16, 17, 18, 19, 20]
    assert list(touched(0, 2)) == [2, 1, 0]


def test_an_accident_counts_from_the_minute_after_it_to_that_of_its_clearing() -> None:
    assert [minute for minute in range(10) if is_active(minute, 3, 6)] == [4, 5, 6]
    assert is_active(99, 3, None)


def test_the_latest_average_is_cut_and_counts_minutes_with_data_only() -> None:
    assert latest_average({1: 100.0, 4: 40.0, 6: 41.9}, 7) == 40
    assert latest_average({1: 100.0}, 7) == -1


# -- traffic -------------------------------------------------------------------------------------


def rows_of(road: Road, seconds: int, seed: int = 1) -> list[tuple[Any, ...]]:
    return [row for second in islice(Traffic(road, seed).seconds(), seconds) for _, row in second]


def test_cars_enter_by_lane_0_report_every_30_seconds_and_leave_by_lane_4() -> None:
    trips: dict[int, list[Any]] = defaultdict(list)
    for row in rows_of(Road(600, segments=20), 900):
        assert row[0] != REPORT or (row[7] == row[8] // 5280 and 0 <= row[7] < 20)
        if row[0] == REPORT:
            trips[row[2]].append(row)
    returned = 0
    for trip in trips.values():
        assert trip[0][5] == 0
        for one, other in pairwise(trip):
            if one[5] == 4:
                returned += 1
                assert other[5] == 0
                assert other[1] - one[1] > 60
            else:
                assert other[1] - one[1] == PERIOD
                assert abs(other[7] - one[7]) <= 1
    assert returned > 10


def test_traffic_is_a_function_of_the_seed() -> None:
    assert rows_of(Road(300), 60) == rows_of(Road(300), 60)
    assert rows_of(Road(300), 60) != rows_of(Road(300), 60, seed=2)


def test_a_speed_that_leaves_too_few_cars_is_refused() -> None:
    with pytest.raises(UserError, match="leaves 3 cars"):
        next(TollApp().generate(TollOptions(speed=1000), 1, 100))


# -- operators -----------------------------------------------------------------------------------


def at(seconds: float) -> datetime.datetime:
    return BASE + datetime.timedelta(seconds=seconds)


def report(vid: int, second: int, pos: int, lane: int = 1, speed: int = 50) -> tuple[Any, ...]:
    return (0, second, vid, speed, 0, lane, 0, pos // 5280, pos, *(-1,) * 6, at(second))


def test_a_car_stands_after_four_equal_reports_and_enters_each_segment_once() -> None:
    fold = Fold(follow, NO_CAR, parse_ddl(CAR), parse_ddl(EVENT))
    trial = Trial(fold, schema=INPUT, key="vid", output=EVENT)
    trial.send(report(1, 0, 300, lane=0), report(1, 30, 5300))
    trial.send(*[report(1, second, 6000, speed=0) for second in range(60, 210, 30)])
    trial.move(1)
    trial.send(report(1, 210, 8000), report(1, 240, 11000, lane=4), report(1, 400, 300, lane=0))
    kinds = [row.kind for row in trial.outputs()]
    assert kinds == [
        ENTERS,
        ENTERS,
        *[TRAVELS] * 3,
        *[STOPS] * 2,
        *[TRAVELS] * 2,
        *[MOVES] * 2,
        TRAVELS,
        LEAVES,
        ENTERS,
    ]
    assert [row.seg for row in trial.outputs() if row.kind == STOPS] == [1, 0]  # its own and those upstream


def event(kind: int, vid: int, second: float, **more: Any) -> dict[str, Any]:
    place = {"xway": 0, "dir": 0, "seg": 9, "spd": 30, "lane": 1, "pos": 50_000, "qid": -1}
    return {**place, "kind": kind, "vid": vid, "time": int(second), "at": at(second), **more}


def by_segment(processor: Any, output: str) -> Trial:
    return Trial(
        processor,
        schema=EVENT,
        key=["xway", "dir", "seg"],
        output=output,
        time_mode="eventTime",
        event_time="at",
    )


def test_two_cars_at_one_place_are_an_accident_whatever_the_order_of_arrival() -> None:
    trial = by_segment(Tolls(), NOTICE)
    trial.send(
        event(MOVES, 1, 300), event(STOPS, 2, 130), event(STOPS, 1, 100), event(STOPS, 3, 90, pos=51_000)
    )
    trial.crash()
    for minute in range(1, 8):
        trial.watermark(BASE_MS + minute * 60_000)
        trial.send(event(ENTERS, minute, minute * 60 + 1))
    alerts = [(row.vid, row.seg) for row in trial.outputs() if row.kind == ALERT]
    assert alerts == [(3, 9), (4, 9), (5, 9)]  # it stands from 2:10, which counts from 3:00, to 5:00


def test_a_car_that_enters_waits_until_the_minute_before_is_complete() -> None:
    trial = by_segment(Tolls(), NOTICE)
    trial.send(*[event(TRAVELS, vid, 30 + vid / 10) for vid in range(52)])
    trial.send(event(ENTERS, 99, 60))
    assert trial.outputs() == []
    trial.send(event(TRAVELS, 60, 59.9))  # the 53rd of the first minute
    trial.watermark(BASE_MS + 60_000)
    [notice] = trial.outputs()
    assert (notice.kind, notice.vid, notice.lav, notice.toll) == (TOLL, 99, 30, 2 * 3 * 3)


def test_an_accident_ahead_makes_the_toll_nothing_and_alerts_until_it_is_cleared() -> None:
    trial = by_segment(Tolls(), NOTICE)
    far, near = {"pos": 11 * 5280}, {"pos": 10 * 5280, "lane": 2}
    trial.send(event(STOPS, 21, 5, **far), event(STOPS, 22, 10, **far))
    trial.send(event(STOPS, 23, 5, **near), event(STOPS, 24, 12, **near))
    trial.watermark(BASE_MS + 60_000)
    trial.send(event(ENTERS, 1, 61))
    trial.send(event(MOVES, 24, 90, **near), event(MOVES, 21, 150, **far))
    for minute in (2, 3):
        trial.watermark(BASE_MS + minute * 60_000)
        trial.send(event(ENTERS, minute, minute * 60 + 1))
    alerts = [(row.vid, row.seg) for row in trial.outputs() if row.kind == ALERT]
    assert alerts == [(1, 10), (2, 11)]


def notice(kind: int, second: float, seg: int = 0, toll: int = 0, qid: int = -1) -> tuple[Any, ...]:
    return (kind, 7, int(second), at(second), 0, 0, seg, 50, toll, qid)


def test_a_toll_is_charged_when_the_car_enters_the_next_segment_not_when_it_leaves_by_its_ramp() -> None:
    trial = Trial(Accounts(), schema=NOTICE, key="vid", output=ANSWER, time_mode="eventTime", event_time="at")
    trial.send(
        notice(TOLL, 60, 2, 18),  # later rows come first
        notice(QUERY, 65, qid=2),
        notice(TOLL, 0, 1, 32),
        notice(QUERY, 10, qid=1),
        notice(GONE, 90, 2),
        notice(TOLL, 200, 5, 50),
        notice(GONE, 230, 6),
        notice(QUERY, 230, qid=3),
    )
    trial.move(7)
    trial.watermark(BASE_MS + 300_000)
    found = {row.qid: (row.amount, row.resultTime) for row in trial.outputs()}
    assert found == {1: (0, 0), 2: (32, 60), 3: (82, 200)}


def test_a_question_goes_to_the_account_by_way_of_the_cars_segment() -> None:
    fold = Fold(follow, NO_CAR, parse_ddl(CAR), parse_ddl(EVENT))
    trial = Trial(fold, schema=INPUT, key="vid", output=EVENT)
    trial.send(report(1, 0, 6000, lane=0), (2, 0, 1, *(-1,) * 6, 44, *(-1,) * 5, at(0)))
    trial.send((3, 0, 1, *(-1,) * 6, 45, *(-1,) * 4, 12, at(0)))
    assert [(row.kind, row.seg, row.qid) for row in trial.outputs()] == [
        (ENTERS, 1, -1),
        (ASKS, 1, 44),
        (ASKS_DAY, 1, 45),
    ]
    tolls = by_segment(Tolls(), NOTICE)
    tolls.send(*trial.outputs()[1:])
    assert [(row.kind, row.toll, row.qid) for row in tolls.outputs()] == [(QUERY, 0, 44), (DAY_QUERY, 12, 45)]


def test_questions_that_nobody_answers_go_no_further_than_the_forwarder() -> None:
    kinds = Counter(row[0] for row in rows_of(Road(600, queries=0.5), 120))
    assert set(kinds) == {0, 2, 3, 4}
    assert kinds[2] == pytest.approx(0.25 * kinds[0], rel=0.1)
    assert kinds[4] == pytest.approx(0.2 * kinds[0], rel=0.1)
    asked = [SimpleNamespace(type=kind) for kind in kinds]
    assert {one.type for one in asked if is_answered(one)} == {0, 2, 3}
