"""Ready-made operators give what Spark's own give for drawn rows, while keys move and an instance dies."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from operators_on_spark import INSTANCES, SPEEDS, Checked, check_beside_spark
from pyspark.sql import Column, DataFrame, SparkSession, Window, WindowSpec
from pyspark.sql import functions as f

from tiercel import operators as ops

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
CLOSE = "r.at >= l.at - INTERVAL 1 SECOND AND r.at <= l.at + INTERVAL 3 SECONDS"
MINUTE = ops.tumbling("5 seconds")


def so_far() -> WindowSpec:
    """The rows of a car up to this one."""
    return Window.partitionBy("car").orderBy("place")


def of_windows(speeds: DataFrame, window: Column) -> DataFrame:
    return speeds.groupBy("car", window).agg(
        f.mean("speed"),
        f.count("*"),
        f.count("n"),
        f.sum("n"),
        f.min("speed"),
        f.max("at"),
        f.approx_count_distinct("n"),
        f.slice(f.sort_array(f.collect_list("n"), asc=False), 1, 2),
        f.min_by("id", f.struct("at", "place")),
    )


def windowed(window: ops.Window, by_spark: Any) -> Checked:
    return Checked(
        lambda speeds, tolls: speeds.window(window).agg(*AGGREGATES, instances=INSTANCES, name=by_spark[0]),
        lambda speeds, tolls: of_windows(speeds, by_spark[1]()),
    )


def interval_join(how: str) -> Checked:
    def by_spark(speeds: DataFrame, tolls: DataFrame) -> DataFrame:
        both = speeds.alias("l").join(tolls.alias("r"), f.expr(f"l.car = r.car AND {CLOSE}"), how)
        return both.select(
            f.coalesce("l.car", "r.car"), "l.id", "l.n", "l.speed", "l.at", "r.id", "r.toll", "r.at"
        )

    return Checked(
        lambda speeds, tolls: speeds.join(
            tolls, within=("-1 second", "3 seconds"), how=how, name=f"{how}-join", instances=INSTANCES
        ),
        by_spark,
    )


def window_join_by_spark(speeds: DataFrame, tolls: DataFrame) -> DataFrame:
    one = speeds.withColumn("window", f.window("at", "5 seconds")).alias("l")
    other = tolls.withColumn("window", f.window("at", "5 seconds")).alias("r")
    both = one.join(other, f.expr("l.car = r.car AND l.window = r.window"), "left")
    return both.select("l.car", "l.window", "l.id", "l.n", "l.speed", "l.at", "r.id", "r.toll", "r.at")


def by_row_numbers(speeds: DataFrame, tolls: DataFrame) -> DataFrame:
    """Windows of three rows, every two rows; those that are not full are not emitted."""
    numbered = speeds.withColumn("row", f.row_number().over(so_far()) - 1)
    starts = f.explode(f.sequence(f.lit(0), f.col("row"))).alias("start")
    inside = numbered.select("*", starts).filter("start % 2 = 0 AND row < start + 3")
    found = inside.groupBy("car", "start").agg(f.sum("n").alias("sum"), f.count("*").alias("rows"))
    return found.filter("rows = 3").select(
        "car", f.struct(f.col("start").cast("long"), (f.col("start") + 3).cast("long")), "sum"
    )


def tops_by_spark(speeds: DataFrame, tolls: DataFrame) -> DataFrame:
    """The two largest speeds after each row, where they have changed."""
    ranked = f.slice(f.sort_array(f.collect_list("speed").over(so_far()), asc=False), 1, 2)
    tops = speeds.withColumn("top", ranked)
    before = f.coalesce(f.lag("top").over(so_far()), f.array().cast("array<double>"))
    return tops.withColumn("before", before).filter("top <> before").select("car", "top")


def changed_tops(rows: list[tuple[Any, ...]]) -> list[Any]:
    """The speeds of the k largest rows of each car, without nulls, where they have changed."""
    last: dict[str, list[float]] = {}
    found = []
    for car, top in rows:
        speeds = [row.speed for row in top if row.speed is not None]
        if speeds != last.get(car, []):
            found.append((car, speeds))
        last[car] = speeds
    return found


def firsts_by_spark(speeds: DataFrame, tolls: DataFrame) -> DataFrame:
    """The rows that Spark's stream keeps; of equal ones the first, which Spark leaves open."""
    spark = speeds.sparkSession
    with tempfile.TemporaryDirectory() as place:
        speeds.coalesce(1).write.parquet(f"{place}/rows")
        query = (
            spark.readStream.schema(speeds.schema)
            .parquet(f"{place}/rows")
            .withWatermark("at", "1 hour")
            .dropDuplicatesWithinWatermark(["car", "id"])
            .writeStream.format("memory")
            .queryName("kept")
            .trigger(availableNow=True)
            .option("checkpointLocation", f"{place}/checkpoint")
            .start()
        )
        query.awaitTermination()
    kept = spark.createDataFrame(spark.table("kept").select("car", "id").collect(), "car string, id long")
    rows = speeds.withColumn("times", f.row_number().over(Window.partitionBy("car", "id").orderBy("place")))
    return rows.filter("times = 1").join(kept, ["car", "id"]).select(*speeds.columns[:-1])


def owners(spark: SparkSession) -> DataFrame:
    """Of every second car of the first courses."""
    rows = [(f"{course}-{car}", f"owner {car}") for course in range(1, 20) for car in (0, 2, 4)]
    return spark.createDataFrame(rows, "car string, owner string")


GROUPS: dict[str, dict[str, Checked]] = {
    "windows": {
        "tumbling": windowed(ops.tumbling("10 seconds"), ("tumbling", lambda: f.window("at", "10 seconds"))),
        "sliding": windowed(
            ops.sliding("15 seconds", "6 seconds"),
            ("sliding", lambda: f.window("at", "15 seconds", "6 seconds")),
        ),
        "session": windowed(
            ops.session("2 seconds"), ("session", lambda: f.session_window("at", "2 seconds"))
        ),
        "rate": Checked(
            lambda speeds, tolls: speeds.rate(
                "10 seconds", every="5 seconds", per="1 second", instances=INSTANCES, name="rate"
            ),
            lambda speeds, tolls: speeds.groupBy("car", f.window("at", "10 seconds", "5 seconds")).agg(
                f.count("*") / 10
            ),
        ),
    },
    "joins": {
        "inner": interval_join("inner"),
        "full": interval_join("full"),
        "window": Checked(
            lambda speeds, tolls: speeds.join(
                tolls, window=MINUTE, how="left", name="window-join", instances=INSTANCES
            ),
            window_join_by_spark,
        ),
        "deduplicate": Checked(
            lambda speeds, tolls: speeds.deduplicate("id", within="1 hour", name="once", instances=INSTANCES),
            firsts_by_spark,
        ),
    },
    "others": {
        "running": Checked(
            lambda speeds, tolls: speeds.aggregate(
                ops.count("n"), ops.mean("speed"), ops.max("at"), name="running", instances=INSTANCES
            ),
            lambda speeds, tolls: speeds.select(
                "car", f.count("n").over(so_far()), f.mean("speed").over(so_far()), f.max("at").over(so_far())
            ),
        ),
        "top": Checked(
            lambda speeds, tolls: speeds.top_k(2, by="speed", name="top", instances=INSTANCES),
            tops_by_spark,
            changed_tops,
        ),
        "counted": Checked(
            lambda speeds, tolls: speeds.window(ops.sliding_count(3, 2)).agg(
                ops.sum("n"), name="counted", instances=INSTANCES
            ),
            by_row_numbers,
        ),
        "enriched": Checked(
            lambda speeds, tolls: speeds.enrich(
                owners(SparkSession.active()), name="enriched", instances=INSTANCES
            ),
            lambda speeds, tolls: speeds.join(owners(speeds.sparkSession), "car", "left").drop("place"),
        ),
        "many": Checked(
            lambda speeds, tolls: speeds.aggregate(ops.count(), name="part", instances=INSTANCES).split(
                few=lambda row: row[1] < 4, some=lambda row: row[1] < 9
            )["some"],
            lambda speeds, tolls: speeds.select("car", f.count("*").over(so_far()).alias("n")).filter(
                "n >= 4 AND n < 9"
            ),
        ),
    },
}


@pytest.mark.parametrize("group", GROUPS)
def test_operators_give_what_sparks_own_give_while_keys_move_and_an_instance_dies(
    group: str, spark: SparkSession, tmp_path: Path
) -> None:
    check_beside_spark(spark, tmp_path / "storage", GROUPS[group], examples=2)


@pytest.mark.long
@pytest.mark.parametrize("group", GROUPS)
def test_operators_give_what_sparks_own_give_on_more_drawn_rows(
    group: str, spark: SparkSession, tmp_path: Path
) -> None:
    check_beside_spark(spark, tmp_path / "storage", GROUPS[group], examples=12)


@pytest.mark.parametrize("name", ["tumbling", "sliding", "session"])
def test_columns_of_windows_have_the_names_and_types_of_sparks_own(name: str, spark: SparkSession) -> None:
    windows = {
        "tumbling": (ops.tumbling("10 seconds"), f.window("at", "10 seconds")),
        "sliding": (ops.sliding("15 seconds", "6 seconds"), f.window("at", "15 seconds", "6 seconds")),
        "session": (ops.session("2 seconds"), f.session_window("at", "2 seconds")),
    }
    window, column = windows[name]
    empty = spark.createDataFrame([], SPEEDS)
    schema = ops.plan_windows(empty.schema, ["car"], "at", window, AGGREGATES).schema
    wanted = of_windows(empty.withColumn("place", f.lit(0)), column).schema
    kinds = [field.dataType.simpleString() for field in wanted.fields]
    assert [field.dataType.simpleString() for field in schema.fields] == kinds
    assert schema.names[2:8] == wanted.names[2:8]
