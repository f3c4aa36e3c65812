"""`transformWithState` with only the call changed: the same rows arrive in the same sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from oracle import Files, until
from pyspark.sql import DataFrame, GroupedData, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

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
    spark: SparkSession,
    grouped: Callable[[DataFrame], GroupedData],
    transform: Transform,
    rows: list[list[tuple[Any, ...]]],
    directory: Path,
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
def test_only_the_call_changes(time_mode: str, spark: SparkSession, tmp_path: Path) -> None:
    processor = Distances if time_mode == "none" else Minutes
    input_rows = batches(400 if time_mode == "none" else 1200)  # more than one frame of a feed

    def grouped(frame: DataFrame) -> GroupedData:
        if time_mode == "eventTime":
            frame = frame.withWatermark("at", "10 seconds")
        return frame.groupBy("car")

    expected = rows_of(
        spark,
        grouped,
        lambda g: g.transformWithState(processor(), OUTPUT, "append", time_mode),
        input_rows,
        tmp_path / "spark",
        lambda n, count: True,
    )
    found = rows_of(
        spark,
        grouped,
        lambda g: tiercel.transform_with_state(g, processor(), OUTPUT, "append", time_mode, instances=2),
        input_rows,
        tmp_path / "tiercel",
        lambda n, count: count >= len(expected[n]),
    )
    assert len(expected[-1]) >= len(CARS)
    assert found[-1] == expected[-1]
