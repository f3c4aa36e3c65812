"""History first, then the stream: no row is missing, doubled, or before a row of history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from driver import OUTPUT, Chain
from oracle import Files, until
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import tiercel

CARS = 5
SCHEMA = "car string, seq long"


def rows(first: int, last: int) -> list[tuple[str, int]]:
    return [(f"car-{n % CARS}", n) for n in range(first, last)]


class Received:
    """What a stream has published, from its first entry on."""

    def __init__(self, stream: tiercel.LiveStream) -> None:
        self._subscriber = stream.subscribe(after=0)
        self.rows: list[Any] = []

    def wait(self, count: int) -> list[Any]:
        until(lambda: self._poll() >= count, lambda: f"{len(self.rows)} rows of {count}")
        return self.rows

    def _poll(self) -> int:
        self.rows.extend(received.row for received in self._subscriber.poll(0.1))
        return len(self.rows)


def test_history_comes_once_and_first_and_the_stream_goes_on_behind_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    files = Files(tmp_path / "files", SCHEMA)
    files.write(rows(400, 600))  # the stream overlaps the history
    history = spark.createDataFrame(rows(0, 500), SCHEMA).repartition(3)
    for start in range(2):  # the second time all of it is known
        with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
            cars = live.stream("cars", SCHEMA, key="car")
            chains = cars.transform_with_state(Chain(), OUTPUT, name="chain")
            feed = cars.from_dataframe(history, then=files.frame(spark), boundary=f.col("seq") < 450)
            if start == 1:
                files.write(rows(600, 700))
            found = Received(chains).wait(600 if start == 0 else 700)
            assert feed.state == "running"
            with pytest.raises(tiercel.UserError, match="a feed 'tiercel-feed-cars' already"):
                cars.feed(files.frame(spark))
        by_car = {car: [row.seq for row in found if row.car == car] for car, _ in rows(0, CARS)}
        assert sorted(row.seq for row in found) == list(range(600 if start == 0 else 700))
        for seqs in by_car.values():
            assert max(seqs.index(n) for n in seqs if n < 450) < min(seqs.index(n) for n in seqs if n >= 450)


def test_a_batch_that_foreach_batch_repeats_adds_nothing(spark: SparkSession, tmp_path: Path) -> None:
    with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
        cars = live.stream("cars", SCHEMA, key="car")
        chains = cars.transform_with_state(Chain(), OUTPUT, name="chain")
        with pytest.raises(tiercel.UserError, match=r"from_dataframe\(then=…\): .* not a streaming one"):
            cars.from_dataframe(spark.range(1), then=spark.range(1))
        write = cars.foreach_batch("trips")

        def twice(frame: DataFrame, number: int) -> None:
            write(frame, number)
            write(frame.repartition(2), number)  # as after a crash, in other partitions

        files = Files(tmp_path / "files", SCHEMA)
        for first in (0, 50):
            files.write(rows(first, first + 50))
            query = (
                files.frame(spark)
                .writeStream.foreachBatch(twice)
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
        assert sorted(row.seq for row in Received(chains).wait(100)) == list(range(100))
