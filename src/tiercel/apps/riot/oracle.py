"""RIoTBench's dataflows as Spark batch jobs: what every row of a streaming run must be equal to.

Responsible for: the expected rows of ETL, STATS and PRED, out of all messages in the order of their sensors.
Not responsible for: the comparison.

Filters and predictions depend on all values before, so they are computed a group at a time in pandas, with
NumPy's least squares and written apart from the operators.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from tiercel.apps.app import POSITION
from tiercel.apps.riot import tasks
from tiercel.apps.riot.generator import Dataset, known_sensors

_ENTRIES = "e array<struct<n string, v string>>"


def observations(messages: DataFrame, dataset: Dataset) -> DataFrame:
    """A row for each observation, with the position of its message."""
    entries = f.explode(f.from_json("senml", _ENTRIES).e).alias("entry")
    return (
        messages.filter("senml IS NOT NULL")
        .select("msgid", "sensor", "at", POSITION, entries)
        .select("msgid", "sensor", "at", POSITION, "entry.n", f.col("entry.v").cast("double").alias("value"))
        .withColumnRenamed("n", "field")
        .filter(f.col("field").isin(list(dataset.fields)))
    )


def expected_etl(spark: SparkSession, messages: DataFrame, dataset: Dataset) -> Mapping[str, DataFrame]:
    ranges = spark.createDataFrame(
        [(name, float(field.low), float(field.high)) for name, field in dataset.fields.items()],
        "field string, low double, high double",
    )
    known = f.col("sensor").isin(known_sensors(dataset))
    checked = (
        observations(messages, dataset)
        .join(f.broadcast(ranges), "field")
        .withColumn(
            "value", f.when(known & f.col("value").between(f.col("low"), f.col("high")), f.col("value"))
        )
    )
    if dataset.interpolate:
        checked = _with_last(checked, dataset.interpolate)
        mean = "aggregate(last, 0D, (total, one) -> total + one) / size(last)"
        checked = checked.selectExpr(
            "msgid", "sensor", "at", "field", f"coalesce(value, if(size(last) = 0, 0D, {mean})) AS value"
        )
    place = f.array_position(f.array(*map(f.lit, dataset.fields)), f.col("field"))
    joined = (
        checked.withColumn("place", place)
        .groupBy("msgid", "sensor", "at")
        .agg(f.array_sort(f.collect_list(f.struct("place", "value"))).alias("found"))
        .selectExpr("msgid", "sensor", "at", "transform(found, one -> one.value) AS values")
    )
    fields = list(dataset.fields)
    note = f.udf(tasks.annotation, "string", useArrow=False)
    text = f.udf(
        lambda sensor, note, values: tasks.to_senml(fields, sensor, note, values), "string", useArrow=False
    )
    annotated = joined.withColumn("annotation", note("sensor"))
    return {
        "etl": annotated.select(
            "msgid",
            "sensor",
            "annotation",
            "values",
            text("sensor", "annotation", "values").alias("senml"),
            "at",
        )
    }


def _with_last(checked: DataFrame, window: int) -> DataFrame:
    """The last values of each sensor and field that are not missing."""
    checked.createOrReplaceTempView("riot_checked")
    return checked.sparkSession.sql(f"""
        SELECT *, slice(past, greatest(size(past) - {window} + 1, 1), {window}) AS last FROM (
            SELECT *, collect_list(value) OVER (PARTITION BY sensor, field ORDER BY {POSITION}
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS past FROM riot_checked)""")


def expected_stats(spark: SparkSession, messages: DataFrame, dataset: Dataset) -> Mapping[str, DataFrame]:
    found = observations(messages, dataset)
    size = dataset.block
    numbered = found.selectExpr(
        "*", f"(row_number() OVER (PARTITION BY sensor, field ORDER BY {POSITION}) - 1) DIV {size} AS block"
    )
    averages = (
        numbered.groupBy("sensor", "field", "block")
        .agg(f.avg("value").alias("mean"), f.max("at").alias("at"), f.count("*").alias("n"))
        .filter(f.col("n") == size)
        .select("sensor", "field", "block", "mean", "at")
    )
    predictions = found.groupBy("sensor", "field").applyInPandas(_predictions, tasks.PREDICTED)
    digits = f.conv(f.substring(f.sha1("sensor"), 1, 8), 16, 10).cast("bigint")
    ranked = (
        found.withColumn("number", digits)
        .selectExpr(
            "field",
            "window(at, '10 seconds').end AS windowEnd",
            "number & 1023 AS bucket",
            "bin(number >> 10) AS rest",
        )
        .selectExpr(
            "field",
            "windowEnd",
            "bucket",
            "if(rest = '0', 31, length(rest) - length(trim(TRAILING '0' FROM rest))) AS rank",
        )
    )
    registers = ranked.groupBy("field", "windowEnd", "bucket").agg(f.max("rank").alias("rank"))
    sensors = registers.groupBy("field", "windowEnd").agg(
        f.expr("bigint(0.79402D * 1024 * pow(2, sum(rank) / 1024))").alias("sensors")
    )
    return {"averages": averages, "predictions": predictions, "sensors": sensors}


def by_message(found: Mapping[str, DataFrame], dataset: Dataset) -> Mapping[str, DataFrame]:
    """The same averages and predictions, a row for each message that has some: all fields have the same n."""
    place = f.array_position(f.array(*map(f.lit, dataset.fields)), f.col("field"))
    in_order = f.array_sort(f.collect_list(f.struct(place, "mean")))
    means = f.transform(in_order, lambda one: one["mean"])
    last = ((f.col("block") + 1) * dataset.block).alias("n")
    averages = found["averages"].groupBy("sensor", last, "at").agg(means.alias("averages"))
    predictions = found["predictions"].groupBy("sensor", "n", "at").agg(means.alias("predictions"))
    both = averages.join(predictions, ["sensor", "n", "at"], "full")
    return {
        "statistics": both.select("sensor", "n", "averages", "predictions", "at"),
        "sensors": found["sensors"],
    }


def _predictions(group: pd.DataFrame) -> pd.DataFrame:
    group = group.sort_values(POSITION)
    estimate, error = 0.0, 30.0
    filtered: list[float] = []
    for value in group["value"]:
        error = error + 0.125
        gain = error / (error + 0.32)
        estimate, error = estimate + gain * (value - estimate), error * (1 - gain)
        filtered.append(estimate)
    ahead = np.empty(0)
    if len(filtered) > 10:
        windows = np.lib.stride_tricks.sliding_window_view(np.array(filtered), 10)[1:]
        slopes, starts = np.polyfit(np.arange(10), windows.T, 1)  # a line through each ten
        ahead = starts + slopes * np.arange(10, 20).mean()
    rest = group.iloc[10:]
    found = {"sensor": rest["sensor"], "field": rest["field"], "n": 11 + np.arange(len(ahead)), "mean": ahead}
    return pd.DataFrame({**found, "at": rest["at"]})


def expected_pred(spark: SparkSession, messages: DataFrame, dataset: Dataset) -> Mapping[str, DataFrame]:
    first, observed, size = next(iter(dataset.fields)), dataset.observed, dataset.block
    wide = (
        observations(messages, dataset)
        .filter(f.col("field").isin(first, observed))
        .groupBy(POSITION)
        .agg(
            f.max(f.when(f.col("field") == first, f.col("value"))).alias("first"),
            f.max(f.when(f.col("field") == observed, f.col("value"))).alias("observed"),
        )
    )
    rows = messages.join(wide, POSITION, "left")
    rows.createOrReplaceTempView("riot_messages")
    models = ", ".join(
        f"struct({own}D AS own, {start}D AS start, array({'D, '.join(map(str, limits))}D) AS limits)"
        for (own, start), limits in tasks.MODELS
    )
    classes = ", ".join(f"'{name}'" for name in tasks.CLASSES)
    return {
        "pred": spark.sql(f"""
        WITH versions AS (
            SELECT *, array({models})[coalesce(last_value(model) IGNORE NULLS OVER (
                PARTITION BY sensor ORDER BY {POSITION}), 0) % {len(tasks.MODELS)}] AS rule
            FROM riot_messages),
        numbered AS (
            SELECT *, lag(observed) OVER car AS before, row_number() OVER car - 1 AS n
            FROM versions WHERE senml IS NOT NULL WINDOW car AS (PARTITION BY sensor ORDER BY {POSITION})),
        averages AS (
            SELECT sensor, n DIV {size} + 1 AS block, sum(observed) / {size} AS average FROM numbered
            GROUP BY ALL HAVING count(*) = {size})
        SELECT msgid, sensor,
               array({classes})[size(filter(rule.limits, one -> observed > one))] AS class, predicted,
               (observed - predicted) / average AS error, at
        FROM (SELECT v.*, a.average,
                     int(rule.own * coalesce(before, observed) + rule.start * first) AS predicted
              FROM numbered v LEFT JOIN averages a ON v.sensor = a.sensor AND v.n DIV {size} = a.block)""")
    }
