"""A broadcast stream on Spark: every row meets the row of it that came before, through a move and a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from oracle import HANG_S, kill, until
from pyspark.sql import SparkSession

import tiercel
from tiercel.spark.api.clients import BROADCAST_BYTES_MAX

CARS = [f"car-{n}" for n in range(8)]
PHASES, ROWS = 6, 120


def count_fast(state: tuple[int], row: Any) -> tuple[tuple[int], tuple[Any, ...]]:
    fast = state[0] + (row.mph is not None and row.speed > row.mph)
    return (fast,), (row.car, row.n, row.mph, row.zone, fast)


def test_rows_carry_the_last_broadcast_row_through_a_move_between_sites_and_a_kill(
    spark: SparkSession, tmp_path: Path
) -> None:
    wanted: list[tuple[Any, ...]] = []
    fast = dict.fromkeys(CARS, 0)
    with tiercel.start(spark, ["cloud", "edge"], tmp_path / "storage") as live:
        positions = live.stream("positions", "car string, n long, speed long", key="car")
        limits = live.stream("limits", "zone string, mph long", key="zone")
        slow = positions.broadcast(limits).filter(lambda row: row.n % 10 > 0)
        counted = slow.fold(
            count_fast,
            (0,),
            "car string, n long, mph long, zone string, fast long",
            state_schema="fast long",
            name="fast",
            instances={"cloud": 1, "edge": 1},
        )
        found: list[tuple[Any, ...]] = []
        with (
            counted.subscribe(after=0) as subscriber,
            positions.producer("cars", site="cloud") as producer,
            limits.broadcast_producer("limits") as broadcaster,
        ):
            moving = None
            for phase in range(PHASES):
                mph, zone = (None, None) if phase == 0 else (phase * 15, f"zone {phase}")
                if phase:
                    broadcaster.send((zone, mph))
                for n in range(phase * ROWS, (phase + 1) * ROWS):
                    car, speed = CARS[n % 8], n * 37 % 100
                    producer.send((car, n, speed))
                    if n % 10:
                        fast[car] += mph is not None and speed > mph
                        wanted.append((car, n, mph, zone, fast[car]))
                if phase == 2:
                    owners = live.owners("fast", CARS)
                    leaving = [car for car, owner in owners.items() if owner == "fast@cloud#1"]
                    assert 0 < len(leaving) < len(CARS)
                    moving = live.move("fast", keys=leaving, to="fast@edge#1", retries=10)
                if phase == 4:
                    kill(live, "fast@edge#1")
                producer.flush()
            assert moving is not None
            moving.wait(HANG_S)

            def arrived() -> bool:
                found.extend(tuple(received.row) for received in subscriber.poll(0.05))
                return len(found) >= len(wanted)

            until(arrived, lambda: f"{len(found)} outputs of {len(wanted)}")
            found.extend(tuple(received.row) for received in subscriber.poll(0.3))
            with pytest.raises(tiercel.UserError, match="a broadcast row of"):
                broadcaster.send(("x" * BROADCAST_BYTES_MAX, 1))
    for car in CARS:
        assert [row for row in found if row[0] == car] == [row for row in wanted if row[0] == car]
    assert len(found) == len(wanted)


def test_what_cannot_be_broadcast_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
        cars = live.stream("cars", "car string, mph long", key="car")
        limits = live.stream("limits", "mph long, MPH_broadcast long", key="mph")
        others = live.stream("others", "zone long", key="zone")
        with pytest.raises(tiercel.UserError, match="broadcast of 'cars' to 'cars'"):
            cars.broadcast(cars)
        with pytest.raises(tiercel.UserError, match="as it was declared"):
            cars.filter(lambda row: True).broadcast(others)
        with pytest.raises(tiercel.UserError, match="two columns 'MPH_broadcast'"):
            cars.broadcast(limits)
        more = live.stream("more", "car string", key="car")
        both = cars.broadcast(others).union(more.broadcast(limits, suffix="_limit"))
        with pytest.raises(tiercel.UserError, match="has the broadcast streams limits, others"):
            both.fold(count_fast, (0,), "car string", state_schema="fast long")
