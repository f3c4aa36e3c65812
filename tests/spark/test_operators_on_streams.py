"""Ready-made operators as methods of a stream: all in one deployment, late rows, and under plain Spark."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

from operators_on_spark import SPEEDS, START, alike, speeds
from oracle import until
from plain_spark import run_until_worker_connects
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f

import tiercel
from tiercel import operators as ops
from tiercel.spark.api.clients import RowSubscriber
from tiercel.testing import Trial

TABLE = "car string, owner string"


def at(seconds: float) -> datetime.datetime:
    return START + datetime.timedelta(seconds=seconds)


def collected(subscriber: RowSubscriber, wanted: int) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []

    def arrived() -> bool:
        found.extend(tuple(received.row) for received in subscriber.poll(0.05))
        return len(found) >= wanted

    until(arrived, lambda: f"{len(found)} rows of {wanted}: {found}")
    return found


def test_every_method_of_a_stream_declares_an_operator_that_runs(spark: SparkSession, tmp_path: Path) -> None:
    with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
        cars = live.stream("cars", SPEEDS, key="car", event_time="at", delay="1 second")
        changes = live.stream("changes", TABLE, key="car")
        owners = spark.createDataFrame([("a", "Ann"), ("b", "Bob")], TABLE)
        outputs: dict[str, tuple[Any, Callable[[Any], Any], list[Any]]] = {
            # a view: reading it declares an operator, so it is read before the deployment begins
            "once": (
                cars.deduplicate("id", within="1 minute", name="once").split(first=lambda row: row.n == 1)[
                    "first"
                ],
                lambda row: row[2],
                [1],
            ),
            "lately": (
                cars.window(ops.tumbling("10 seconds"), lateness="5 seconds").agg(ops.count(), name="lately"),
                lambda row: (row[0], row[1].end, row[2]),
                [("a", at(10), 2), ("a", at(10), 3), ("a", at(20), 1)],
            ),
            "counted": (
                cars.window(ops.sliding_count(2, 1)).agg(ops.sum("n"), name="counted"),
                lambda row: (tuple(row[1]), row[2]),
                [((0, 2), 3), ((1, 3), 5), ((2, 4), 7), ((3, 5), 9)],
            ),
            "running": (
                cars.aggregate(ops.max("speed"), ops.count(), name="running"),
                lambda row: row,
                [("a", 1.0, 1), ("a", 2.0, 2), ("a", 2.0, 3), ("a", 2.0, 4), ("a", 2.0, 5)],
            ),
            "top": (
                cars.top_k(2, by="speed", name="top"),
                lambda row: [each.n for each in row[1]],
                [[1], [2, 1]],
            ),
            "rate": (
                cars.rate("10 seconds", per="1 second", name="rate"),
                lambda row: (row[1].end, row[2]),
                [(at(10), 0.2), (at(20), 0.1)],
            ),
            "enriched": (
                cars.enrich(owners, changes=changes, name="enriched"),
                lambda row: (row[2], row[-1]),
                [(1, "Ann"), (2, "Ann"), (3, "Ann"), (4, "Zoe"), (5, "Zoe")],
            ),
        }
        parts = cars.split(early=lambda row: row.n < 4, late=lambda row: row.n < 6)
        early = (
            parts["early"].map(lambda row: (row.car, row.n * 10), "car string, tens int").subscribe(after=0)
        )
        reading = {name: stream.subscribe(after=0) for name, (stream, _, _) in outputs.items()}
        late = outputs["lately"][0].dead_letters.subscribe(after=0)
        with cars.producer("cars") as producer, changes.producer("changes") as changer:

            def send(row: tuple[Any, ...]) -> None:
                """One by one: the watermark behind a row is known before the next one comes."""
                producer.send(row)
                producer.flush()

            for n, time in ((1, 1), (2, 5), (3, 13)):  # the watermark is then 12: a window has ended
                send(("a", n, n, float(n) if n < 3 else 0.5, at(time)))
            collected(reading["enriched"], 3)
            collected(reading["lately"], 1)
            changer.send(("a", "Zoe"))
            changer.flush()
            send(("a", 1, 4, 0.0, at(6)))  # late, and allowed
            collected(reading["enriched"], 1)
            send(("a", 9, 5, 0.0, at(40)))  # the watermark is 39
            collected(reading["lately"], 2)
            producer.send(("a", 9, 6, 0.0, at(2)))  # too late
            producer.flush()
            [letter] = collected(late, 1)
        # parts of one stream, in any order, also while the deployment runs; nothing but a subscriber each
        assert [row[1] for row in collected(early, 3)] == [10, 20, 30]
        assert [row[2] for row in collected(parts["late"].subscribe(after=0), 2)] == [4, 5]
        assert [row[2] for row in collected(parts["rest"].subscribe(after=0), 1)] == [6]
        assert list(early.codec.names) == ["car", "tens"]
        assert letter[0].startswith(
            "LateRow: event time 2026-06-01T12:00:02+00:00: its last window closed at"
        )
        for name, (stream, shown, wanted) in outputs.items():
            rows = collected(stream.subscribe(after=0), len(wanted))
            assert list(map(shown, rows))[: len(wanted)] == wanted, name


@run_until_worker_connects
def all_rows_of(directory: Path, stream: DataFrame) -> list[Row]:
    """What a query of plain Spark appends until its source has no more rows."""
    rows: list[Row] = []
    query = (
        stream.writeStream.foreachBatch(lambda batch, _: rows.extend(batch.collect()))
        .outputMode("append")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return rows


def test_the_same_processor_runs_under_sparks_own_transform_with_state(
    spark: SparkSession, tmp_path: Path
) -> None:
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", provider)
    rows = speeds("plain", 200)
    frame = spark.createDataFrame([*rows, ("clock", 0, 0, 0.0, at(3600))], SPEEDS)
    frame.coalesce(1).write.parquet(str(tmp_path / "rows"))
    aggregates = [
        ops.mean("speed"),
        ops.count("n"),
        ops.max("at"),
        ops.approx_count_distinct("n"),
        ops.top_k("n", 2),
    ]
    plan = ops.plan_windows(frame.schema, ["car"], "at", ops.sliding("10 seconds", "5 seconds"), aggregates)
    stream = (
        spark.readStream.schema(frame.schema)
        .parquet(str(tmp_path / "rows"))
        .withWatermark("at", "10 seconds")
        .groupBy("car")
        .transformWithState(plan.processor, plan.schema, "append", plan.time_mode)
    )
    everything = all_rows_of(tmp_path / "query", stream)
    wanted = (
        spark.createDataFrame(rows, SPEEDS)
        .groupBy("car", f.window("at", "10 seconds", "5 seconds"))
        .agg(
            f.mean("speed"),
            f.count("n"),
            f.max("at"),
            f.approx_count_distinct("n"),
            f.slice(f.sort_array(f.collect_list("n"), asc=False), 1, 2),
        )
    )
    found = [row for row in everything if row.car != "clock"]
    assert alike(found) == alike(wanted.collect())


def test_rows_exactly_a_gap_apart_are_in_the_sessions_that_spark_makes(spark: SparkSession) -> None:
    rows = [("a", n, n, 0.0, at(second)) for n, second in enumerate((0, 2, 5, 7, 9.5))]
    frame = spark.createDataFrame(rows, SPEEDS)
    plan = ops.plan_windows(frame.schema, ["car"], "at", ops.session("2 seconds"), [ops.count()])
    trial = Trial(
        plan.processor,
        schema=frame.schema,
        key="car",
        output=plan.schema,
        time_mode=plan.time_mode,
        event_time="at",
    )
    trial.send(*rows)
    trial.watermark(int(at(100).timestamp() * 1000))
    wanted = frame.groupBy("car", f.session_window("at", "2 seconds")).agg(f.count("*"))
    assert alike(trial.outputs()) == alike(wanted.collect())
