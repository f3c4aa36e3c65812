"""Ready-made operators give what Spark's own give for the same rows, while keys move and an instance dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from operators_on_spark import INSTANCES, SPEEDS, TOLLS, alike, run, speeds, tolls
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tiercel import operators as ops


def batch(spark: SparkSession, rows: list[tuple[Any, ...]], schema: str) -> DataFrame:
    return spark.createDataFrame(rows, schema)


def of_windows(spark: SparkSession, column: Any, rows: list[tuple[Any, ...]]) -> DataFrame:
    return (
        batch(spark, rows, SPEEDS)
        .groupBy("car", column)
        .agg(
            f.mean("speed"),
            f.count("*"),
            f.count("n"),
            f.sum("n"),
            f.min("speed"),
            f.max("at"),
            f.approx_count_distinct("n"),
            f.slice(f.sort_array(f.collect_list("n"), asc=False), 1, 2),
            f.min_by("id", "at"),
        )
    )


AGGREGATES = (
    ops.mean("speed"),
    ops.count(),
    ops.count("n"),
    ops.sum("n"),
    ops.min("speed"),
    ops.max("at"),
    ops.approx_count_distinct("n"),
    ops.top_k("n", 2),
    ops.first("id"),
)
WINDOWS = {
    "tumbling": (ops.tumbling("10 seconds"), lambda: f.window("at", "10 seconds"), False),
    "sliding": (
        ops.sliding("15 seconds", "6 seconds"),
        lambda: f.window("at", "15 seconds", "6 seconds"),
        True,
    ),
    "session": (ops.session("2 seconds"), lambda: f.session_window("at", "2 seconds"), False),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_hold_what_spark_computes_for_them(name: str, spark: SparkSession, tmp_path: Path) -> None:
    window, column, killed = WINDOWS[name]
    rows = speeds(f"windows {name}")
    frame = of_windows(spark, column(), rows)
    wanted = [tuple(row) for row in frame.collect()]
    found = run(
        spark,
        tmp_path / "storage",
        {"speeds": (SPEEDS, rows)},
        lambda streams: streams["speeds"].window(window).agg(*AGGREGATES, name="op", instances=INSTANCES),
        len(wanted),
        killed=killed,
    )
    assert len(wanted) > 50
    assert alike(found) == alike(wanted)
    schema = ops.plan_windows(batch(spark, [], SPEEDS).schema, ["car"], "at", window, AGGREGATES).schema
    kinds = [field.dataType.simpleString() for field in frame.schema.fields]
    assert [field.dataType.simpleString() for field in schema.fields] == kinds
    assert schema.names[2:8] == frame.schema.names[2:8]


@pytest.mark.parametrize("how", ["inner", "full"])
def test_a_join_gives_the_pairs_that_spark_finds(how: str, spark: SparkSession, tmp_path: Path) -> None:
    left, right = speeds("left", 160), tolls("right", 160)
    one, other = batch(spark, left, SPEEDS).alias("l"), batch(spark, right, TOLLS).alias("r")
    close = f.expr("l.car = r.car AND r.at >= l.at - INTERVAL 1 SECOND AND r.at <= l.at + INTERVAL 3 SECONDS")
    joined = one.join(other, close, how).select(
        f.coalesce("l.car", "r.car"), "l.id", "l.n", "l.speed", "l.at", "r.id", "r.toll", "r.at"
    )
    wanted = [tuple(row) for row in joined.collect()]
    found = run(
        spark,
        tmp_path / "storage",
        {"speeds": (SPEEDS, left), "tolls": (TOLLS, right)},
        lambda streams: streams["speeds"].join(
            streams["tolls"], within=("-1 second", "3 seconds"), how=how, name="op", instances=INSTANCES
        ),
        len(wanted),
        killed=how == "full",
    )
    assert len(wanted) > 50
    assert alike(found) == alike(wanted)


def test_duplicates_are_those_that_spark_drops(spark: SparkSession, tmp_path: Path) -> None:
    rows = speeds("duplicates")
    directory = tmp_path / "rows"
    batch(spark, rows, SPEEDS).coalesce(1).write.parquet(str(directory))
    query = (
        spark.readStream.schema(batch(spark, [], SPEEDS).schema)
        .parquet(str(directory))
        .withWatermark("at", "1 hour")
        .dropDuplicatesWithinWatermark(["car", "id"])
        .writeStream.format("memory")
        .queryName("duplicates")
        .trigger(availableNow=True)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    query.awaitTermination()
    wanted = {(row.car, row.id) for row in spark.table("duplicates").collect()}
    found = run(
        spark,
        tmp_path / "storage",
        {"speeds": (SPEEDS, rows)},
        lambda streams: streams["speeds"].deduplicate("id", within="1 hour", name="op", instances=INSTANCES),
        len(wanted),
    )
    firsts = {(row[0], row[1]): row for row in reversed(rows)}
    assert {key for key in firsts} == wanted
    assert len(wanted) < len(rows)
    assert alike(found) == alike(list(firsts.values()))
