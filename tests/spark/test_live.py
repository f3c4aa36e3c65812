"""Calls of the public API that no other test makes: pandas, status as plain values, lag as a column."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pandas
import pytest
from oracle import until
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import tiercel
from tiercel.spark.api.deployment import Live
from tiercel.spark.api.streams import LiveStream

CARS, ROWS = 6, 120
INSTANCES = ["totals@local#1", "totals@local#2"]


class Totals(StatefulProcessor):
    """As written for transformWithStateInPandas: frames in, frames out."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("state", "n long, total double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        n, total = self.state.get() or (0, 0.0)
        for frame in rows:
            totals = total + frame["speed"].cumsum()
            numbers = range(n + 1, n + 1 + len(frame))
            yield frame.assign(n=list(numbers), total=totals)[["car", "n", "total"]]
            n, total = n + len(frame), float(totals.iloc[-1])
        self.state.update((n, total))


class Running:
    """A deployment, and the ends of its one operator."""

    def __init__(self, live: Live, cars: LiveStream, totals: LiveStream) -> None:
        self.live, self.cars, self.totals = live, cars, totals


@pytest.fixture(scope="module")
def running(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with tiercel.start(spark, storage=tmp_path_factory.mktemp("api") / "storage") as live:
        cars = live.stream("cars", "car string, speed double", key="car")
        totals = cars.transform_with_state_in_pandas(
            Totals(), "car string, n long, total double", instances={"local": 2}
        )
        yield Running(live, cars, totals)


def test_pandas_processor_runs_while_its_keys_move(running: Running) -> None:
    rows = [{"car": f"car-{n % CARS}", "speed": float(n)} for n in range(ROWS)]
    expected = []
    for n, row in enumerate(rows):
        earlier = [r["speed"] for r in rows[: n + 1] if r["car"] == row["car"]]
        expected.append((row["car"], len(earlier), sum(earlier)))
    with running.cars.producer("gateway") as producer, running.totals.subscribe(after=0) as subscriber:
        producer.send_many(rows[: ROWS // 2])
        producer.flush()
        moved = running.live.move("totals", keys=[f"car-{n}" for n in range(CARS)], to=INSTANCES[0]).wait()
        producer.send_columns(pandas.DataFrame(rows[ROWS // 2 :]))
        found: list[tuple[Any, ...]] = []
        while len(found) < ROWS:
            found += [tuple(received.row) for received in subscriber.poll(60.0)]
    assert moved
    assert sorted(found) == sorted(expected)
    for car in {row["car"] for row in rows}:
        assert [row for row in found if row[0] == car] == [row for row in expected if row[0] == car]


def test_status_converts_to_plain_values(running: Running) -> None:
    status = running.live.status()
    found = status.as_dict()
    assert json.loads(json.dumps(found)) == found
    assert set(found) == set(status.__struct_fields__)
    processes = {process["name"]: process for process in found["processes"]}
    assert set(processes) == {"local", *INSTANCES}
    assert {process["state"] for process in found["processes"]} == {"running"}
    assert found["operators"]["totals"] == {name: processes[name]["slots"] for name in INSTANCES}
    assert processes["local"]["kind"] == "router"
    assert all(process["pid"] > 0 and process["stage"] >= 0 for process in found["processes"])


def test_metrics_have_the_lag_of_routers_and_instances(spark: SparkSession, running: Running) -> None:
    status = running.live.status()
    metrics = spark.read.format("tiercel-metrics").option("storage", status.storage).load()

    def last() -> dict[str, int | None]:
        return {row.process: row.lag for row in metrics.orderBy("at").collect()}

    nothing_waits = dict.fromkeys(["local", *INSTANCES], 0)
    until(lambda: last() == nothing_waits, lambda: f"all that came was processed, but {last()}")


def test_feeds_and_sinks_have_the_names_in_the_guide(spark: SparkSession, running: Running) -> None:
    nothing = spark.readStream.format("rate").option("numPartitions", 1).load().where("value < 0")
    frame = nothing.selectExpr("'a' car", "1.0D speed")
    cars, live = running.cars, running.live
    first, second = cars.feed(frame), cars.feed(frame, name="from-gateways")
    fails = cars.feed(
        spark.readStream.format("rate")
        .option("numPartitions", 1)
        .load()
        .selectExpr("'a' car", "cast(raise_error('no luck') as double) speed"),
        name="bad",
    )
    sink = running.totals.dataframe().writeStream.queryName("totals-to-nowhere").format("noop").start()
    try:
        assert live.status().feeds.keys() == {"tiercel-feed-cars", "from-gateways", "bad"}
        names = {query.name for query in spark.streams.active}
        assert {"tiercel-feed-cars", "from-gateways", "totals-to-nowhere"} <= names
        until(lambda: live.status().feeds["bad"].startswith("failed: "), lambda: str(live.status().feeds))
        assert "feed tiercel-feed-cars: running\nfeed from-gateways: running\nfeed bad: failed: " in str(
            live.status()
        )
        with pytest.raises(tiercel.UserError, match=r"a feed 'tiercel-feed-cars' already(?s:.*)name="):
            cars.feed(frame)
        with pytest.raises(
            tiercel.UserError, match=r"'totals-to-nowhere' cannot start: (?s:.*)already active"
        ):
            cars.feed(frame, name="totals-to-nowhere")
        second.stop()
        assert live.status().feeds["from-gateways"] == "ended"
        again = cars.feed(frame, name="from-gateways")  # its name is free again
        assert live.status().feeds["from-gateways"] == "running"
        again.stop()
    finally:
        for query in (first, second, fails, sink):
            query.stop()
