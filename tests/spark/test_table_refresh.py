"""A table that is refreshed: rows get its columns as they are then, through a move, a kill and a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from oracle import HANG_S, kill, until
from pyspark.sql import DataFrame, SparkSession

import tiercel

CARS = [f"car-{n}" for n in range(6)]
ROWS = 60
INSTANCES = {"cloud": 2}


class Table:
    """A table that a test changes, and the driver reads again."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.rows: dict[str, str] = {}

    def read(self) -> DataFrame:
        return self._spark.createDataFrame(list(self.rows.items()), "car string not null, owner string")


class Enriched:
    """A deployment whose rows are enriched, and what a sequential run would give."""

    def __init__(self, live: tiercel.Live, table: Table, refresh: str) -> None:
        self.live, self.table = live, table
        self.cars = live.stream("cars", "car string, n long", key="car")
        self.output = self.cars.enrich(table.read, refresh=refresh, name="owners", instances=INSTANCES)
        self.subscriber = self.output.subscribe(after=0)
        self.producer = self.cars.producer("cars")
        self.wanted: list[tuple[Any, ...]] = []
        self.n = 0

    def send(self) -> None:
        """Rows that meet the table as it is now."""
        for n in range(self.n, self.n + ROWS):
            car = CARS[n % len(CARS)]
            self.producer.send((car, n))
            self.wanted.append((car, n, self.table.rows.get(car)))
        self.n += ROWS
        self.producer.flush()

    def check(self) -> None:
        found: list[tuple[Any, ...]] = []

        def arrived() -> bool:
            found.extend(tuple(received.row) for received in self.subscriber.poll(0.05))
            return len(found) >= len(self.wanted)

        until(arrived, lambda: f"{len(found)} outputs of {len(self.wanted)}")
        for car in CARS:
            assert [row for row in found if row[0] == car] == [row for row in self.wanted if row[0] == car]


def test_rows_get_the_columns_of_the_table_as_it_was_refreshed_last(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = Table(spark)
    table.rows = {"car-0": "Ann", "car-1": "Bob", "car-2": "Cem"}
    with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
        run = Enriched(live, table, "1 hour")
        run.send()
        table.rows["car-0"] = "Zoe"  # different
        table.rows["car-3"] = "Dan"  # new
        del table.rows["car-1"]  # gone
        assert live.refresh("owners") == 3
        leaving = [car for car, owner in live.owners("owners", CARS).items() if owner.endswith("#1")]
        moving = live.move("owners", keys=leaving, to="owners@cloud#2", retries=10)
        run.send()
        kill(live, "owners@cloud#2")
        run.send()
        moving.wait(HANG_S)
        del table.rows["car-2"]
        table.rows["car-1"] = "Eve"
        assert live.refresh("owners") == 2
        assert live.refresh("owners") == 0
        run.send()
        run.check()
        with pytest.raises(tiercel.UserError, match="operator 'cars' has no table that is refreshed"):
            live.refresh("cars")


@pytest.mark.long
def test_a_restarted_deployment_knows_the_table_that_it_had(spark: SparkSession, tmp_path: Path) -> None:
    table = Table(spark)
    table.rows = {"car-0": "Ann", "car-1": "Bob"}
    with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
        run = Enriched(live, table, "1 hour")
        table.rows["car-2"] = "Cem"
        assert live.refresh("owners") == 1
        run.send()
        run.check()
    with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
        again = Enriched(live, table, "500 milliseconds")
        again.wanted, again.n = run.wanted, run.n
        again.send()
        del table.rows["car-0"]  # an earlier start has sent it
        until(lambda: live._refreshes["owners"].changes == 1, lambda: live._refreshes["owners"].failure)
        again.send()
        again.check()


def test_a_refresh_that_cannot_be_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    table = Table(spark)
    table.rows = {"car-0": "Ann"}
    with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
        cars = live.stream("cars", "car string, n long", key="car")
        changes = live.stream("changes", "car string, owner string", key="car")
        with pytest.raises(tiercel.UserError, match="changes= and refresh="):
            cars.enrich(table.read, changes=changes, refresh="1 minute")
        with pytest.raises(tiercel.UserError, match="refresh '0 seconds'"):
            cars.enrich(table.read, refresh="0 seconds")
