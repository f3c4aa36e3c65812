"""`transformWithState` with only the call changed: the same rows arrive in the same sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from oracle import Files, until
from plain_spark import run_until_worker_connects
from pyspark.sql import DataFrame, GroupedData, Row, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle, StreamingQuery

import tiercel

START = datetime(2026, 1, 1, tzinfo=UTC)
INPUT = "car string, seq long, speed double, at timestamp"
OUTPUT = "car string, seq long, distance double, seen array<string>"
CARS = [f"car-{n}" for n in range(40)]


class Distances(StatefulProcessor):
    """How far each car has come."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.distance = handle.getValueState("distance", "d double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        distance = (self.distance.get() or (0.0,))[0]
        for row in sorted(rows, key=lambda row: row.seq):
            distance += row.speed
            yield Row(car=key[0], seq=row.seq, distance=distance, seen=[str(row.at.timestamp())])
        self.distance.update((distance,))

    def close(self) -> None:
        pass


class Minutes(StatefulProcessor):
    """What each car did in each minute of event time, once that is over."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.minutes = handle.getMapState("minutes", "minute long", "distance double, rows long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            minute = int(row.at.timestamp()) // 60
            distance, count = self.minutes.getValue((minute,)) or (0.0, 0)
            self.minutes.updateValue((minute,), (distance + row.speed, count + 1))
            self.handle.registerTimer((minute + 1) * 60_000)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        minute = expiredTimerInfo.getExpiryTimeInMs() // 60_000 - 1
        distance, count = self.minutes.getValue((minute,))
        self.minutes.removeKey((minute,))
        yield Row(car=key[0], seq=minute, distance=distance, seen=[str(count)])

    def close(self) -> None:
        pass


def batches(rows: int) -> list[list[tuple[Any, ...]]]:
    """Three files of cars in no order: most rows behind newer ones of the same file, some really late."""
    random = Random("cars")
    found = []
    for batch in range(3):
        times = [batch * 120 + random.randint(-90, 119) for _ in range(rows)]
        found.append(
            [
                (
                    random.choice(CARS),
                    batch * rows + n,
                    float(random.randint(1, 9)),
                    START + timedelta(seconds=at),
                )
                for n, at in enumerate(times)
            ]
        )
    return found


@pytest.fixture
def ended() -> Iterator[None]:
    yield
    tiercel.stop_all()


Transform = Callable[[GroupedData], DataFrame]


def rows_of(
    directory: Path,
    spark: SparkSession,
    grouped: Callable[[DataFrame], GroupedData],
    transform: Transform,
    rows: list[list[tuple[Any, ...]]],
    settled: Callable[[int, int], bool],
) -> list[list[Row]]:
    """What a parquet sink holds after each file."""
    files = Files(directory / "files", INPUT)
    sink = str(directory / "sink")
    query = (
        transform(grouped(files.frame(spark)))
        .writeStream.outputMode("append")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .start(sink, format="parquet")
    )
    found: list[list[Row]] = []
    try:
        for n, batch in enumerate(rows):
            files.write(batch)

            def arrived(n: int = n) -> bool:
                query.processAllAvailable()
                return settled(
                    n, 0 if not query.recentProgress else spark.read.schema(OUTPUT).parquet(sink).count()
                )

            until(arrived, lambda n=n: f"the sink does not settle after file {n}")
            found.append(sorted(spark.read.schema(OUTPUT).parquet(sink).collect()))
    finally:
        query.stop()
    return found


@pytest.mark.usefixtures("ended")
@pytest.mark.parametrize("time_mode", [pytest.param("none", marks=pytest.mark.long), "eventTime"])
def test_drop_in_needs_only_another_call(time_mode: str, spark: SparkSession, tmp_path: Path) -> None:
    processor = Distances if time_mode == "none" else Minutes
    input_rows = batches(400 if time_mode == "none" else 1200)  # more than one frame of a feed

    def grouped(frame: DataFrame) -> GroupedData:
        if time_mode == "eventTime":
            frame = frame.withWatermark("at", "10 seconds")
        return frame.groupBy("car")

    expected = run_until_worker_connects(rows_of)(
        tmp_path / "spark",
        spark,
        grouped,
        lambda g: g.transformWithState(processor(), OUTPUT, "append", time_mode),
        input_rows,
        lambda n, count: True,
    )
    found = rows_of(
        tmp_path / "tiercel",
        spark,
        grouped,
        lambda g: tiercel.transform_with_state(g, processor(), OUTPUT, "append", time_mode, instances=2),
        input_rows,
        lambda n, count: count >= len(expected[n]),
    )
    assert len(expected[-1]) >= len(CARS)
    assert found[-1] == expected[-1]


class Odometer(Distances):
    """Goes on from what a car has on the clock."""

    def handleInitialState(self, key: Any, initialState: Row, timerValues: Any) -> None:
        self.distance.update((initialState.distance,))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        rows = list(rows)
        for row, out in zip(rows, super().handleInputRows(key, iter(rows), timerValues), strict=True):
            yield Row(car=out.car, seq=out.seq, distance=out.distance, at=row.at)


@pytest.mark.usefixtures("ended")
def test_drop_in_takes_initial_state_and_refuses_a_checkpoint_of_a_lost_deployment(
    spark: SparkSession, tmp_path: Path
) -> None:
    files = Files(tmp_path / "files", INPUT)
    sink, checkpoint = str(tmp_path / "sink"), str(tmp_path / "checkpoint")
    output = "car string, seq long, distance double, at timestamp"
    initial = spark.createDataFrame([("car-1", 1000.0), ("car-2", 2000.0)], "car string, distance double")

    def transform(**options: Any) -> DataFrame:
        grouped = files.frame(spark).groupBy("car")
        given = {"initialState": initial.groupBy("car"), "eventTimeColumnName": "at"} | options
        return tiercel.transform_with_state(grouped, Odometer(), output, "append", "none", **given)

    def start() -> StreamingQuery:
        writer = transform().writeStream.option("checkpointLocation", checkpoint).queryName("clocks")
        return writer.start(sink, format="parquet")

    def found() -> list[tuple[Any, ...]]:
        return sorted(map(tuple, spark.read.schema(output).parquet(sink).collect()))

    for options, said in (
        (
            {"initialState": initial.groupBy("distance")},
            "grouped by distance\nexpected: the key of its input: car",
        ),
        ({"eventTimeColumnName": "when"}, "'when'"),
        ({"eventTimeColumnName": "distance"}, "'distance'"),
    ):
        with pytest.raises(tiercel.UserError) as refusal:
            transform(**options)
        assert said in str(refusal.value)
    assert tiercel.deployments() == []

    files.write([(car, n, 5.0, START) for n, car in enumerate(["car-1", "car-2", "car-3"])])
    query = start()
    [live] = tiercel.deployments()
    assert live.graph.streams["odometer.out"].codec.event_time == "at"
    assert live.status().feeds == {}
    assert [active.name for active in spark.streams.active] == ["clocks"], "one query, the user's own"
    until(lambda: query.lastProgress is not None and len(found()) >= 3, lambda: "no rows come")
    at = spark.range(1).select(f.lit(START).alias("at")).first()["at"]  # as Spark gives it
    expected = [("car-1", 0, 1005.0, at), ("car-2", 1, 2005.0, at), ("car-3", 2, 5.0, at)]
    assert found() == expected
    query.stop()
    tiercel.stop_all()
    assert tiercel.deployments() == []
    assert live.stopped

    query = start()  # from the same checkpoint, but what it has read is gone
    until(lambda: not query.isActive, lambda: f"it goes on: {query.lastProgress}")
    said = str(query.exception())
    assert "another deployment than the query's checkpoint" in said
    assert "storage= belongs to checkpointLocation" in said
    assert found() == expected
