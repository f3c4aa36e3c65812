"""The verdict: every output row of an application compared with the rows of its oracle, by Spark.

Responsible for: counting rows that are lost, doubled, invented, wrong or out of order, and examples of them.
Not responsible for: the expected rows (the application's oracle), collecting outputs (load.py).

Columns of the identity tell rows apart. Equal identities are numbered, so that duplicates count. Floats are
equal within a relative error of 1e-9: a sum depends on the order of its terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as f
from pyspark.sql import types as t

from tiercel import UserError
from tiercel.apps.app import POSITION, Output, Values

TOLERANCE = 1e-9
EXAMPLES = 3
NUMBER = "_number"
HEAP = {"spark.driver.memory": "3g"}  # of the session: inputs and outputs of a run are compared in it


class Comparison(msgspec.Struct, frozen=True):
    """One output stream against its oracle."""

    expected: int
    found: int
    lost: int
    doubled: int
    invented: int
    wrong: int
    reordered: int
    examples: list[str] = []

    @property
    def faults(self) -> int:
        return self.lost + self.doubled + self.invented + self.wrong + self.reordered


def frame_of(spark: SparkSession, rows: Sequence[Values], schema: t.StructType) -> DataFrame:
    """Rows with their position as the last column."""
    numbered = t.StructType([*schema.fields, t.StructField(POSITION, t.LongType())])
    return spark.createDataFrame(rows, numbered, verifySchema=False)


def compare(expected: DataFrame, found: DataFrame, output: Output, key: Sequence[str]) -> Comparison:
    """`found` has the columns of the output and their position of arrival."""
    schema = t.StructType([field for field in found.schema.fields if field.name != POSITION])
    wanted = _as(schema, expected)
    missing = [name for name in (*output.identity, *key) if name not in schema.names]
    if missing:
        raise UserError(f"no column {missing[0]!r}", expected=f"one of: {', '.join(schema.names)}")
    values = [name for name in schema.names if name not in output.identity]
    left, right = _numbered(wanted, output.identity, values), _numbered(found, output.identity, values)
    same = [left[name].eqNullSafe(right[name]) for name in (*output.identity, NUMBER)]
    joined = left.join(right, reduce(Column.__and__, same), "full_outer")
    equal = reduce(
        Column.__and__,
        [_equal(left[name], right[name], schema[name].dataType) for name in values],
        f.lit(True),
    )
    fault = (
        f.when(right[POSITION].isNull(), "lost")
        .when(left[POSITION].isNull() & (right[NUMBER] > 1), "doubled")
        .when(left[POSITION].isNull(), "invented")
        .when(~equal, "wrong")
    )
    judged = joined.select(
        fault.alias("fault"),
        f.struct(*[left[name] for name in schema.names]).alias("wanted"),
        f.struct(*[right[name] for name in schema.names]).alias("got"),
    ).cache()
    try:
        counts = {row.fault: row["count"] for row in judged.groupBy("fault").count().collect()}
        bad = judged.filter(f.col("fault").isNotNull()).limit(EXAMPLES).collect()
    finally:
        judged.unpersist()
    total = sum(counts.values())
    lost, extra = counts.get("lost", 0), counts.get("doubled", 0) + counts.get("invented", 0)
    return Comparison(
        expected=total - extra,
        found=total - lost,
        lost=lost,
        doubled=counts.get("doubled", 0),
        invented=counts.get("invented", 0),
        wrong=counts.get("wrong", 0),
        reordered=_reordered(found, output.order, key) if output.order else 0,
        examples=[f"{row.fault}: expected {tuple(row.wanted)}, found {tuple(row.got)}" for row in bad],
    )


def _as(schema: t.StructType, expected: DataFrame) -> DataFrame:
    """The oracle's rows with names and types of the output, by place."""
    if len(expected.columns) != len(schema.fields):
        raise UserError(
            f"the oracle has the columns {', '.join(expected.columns)}",
            expected=f"those of the output: {', '.join(schema.names)}",
        )
    cast = [
        f.col(f"`{name}`").cast(field.dataType).alias(field.name)
        for name, field in zip(expected.columns, schema.fields, strict=True)
    ]
    return expected.select(*cast, f.lit(0).cast("long").alias(POSITION))


def _numbered(frame: DataFrame, identity: Sequence[str], values: Sequence[str]) -> DataFrame:
    order = [f.col(f"`{name}`") for name in (*values, POSITION)]
    window = Window.partitionBy(*[f.col(f"`{name}`") for name in identity]).orderBy(*order)
    return frame.withColumn(NUMBER, f.row_number().over(window))


def _equal(left: Column, right: Column, kind: t.DataType) -> Column:
    if isinstance(kind, t.ArrayType) and isinstance(kind.elementType, t.DoubleType | t.FloatType):
        pairs = f.zip_with(left, right, lambda one, other: _equal(one, other, kind.elementType))
        all_close = (f.size(left) == f.size(right)) & f.forall(pairs, lambda close: close)
        return left.eqNullSafe(right) | f.coalesce(all_close, f.lit(False))
    if not isinstance(kind, t.DoubleType | t.FloatType):
        return left.eqNullSafe(right)
    scale = f.greatest(f.abs(left), f.abs(right), f.lit(1.0))
    close = f.abs(left - right) <= TOLERANCE * scale
    return left.eqNullSafe(right) | f.coalesce(close, f.lit(False))


def _reordered(found: DataFrame, order: str, key: Sequence[str]) -> int:
    window = Window.partitionBy(*[f.col(f"`{name}`") for name in key]).orderBy(POSITION)
    before = found.withColumn("_before", f.lag(f"`{order}`").over(window))
    return before.filter(f.col("_before") > f.col(f"`{order}`")).count()
