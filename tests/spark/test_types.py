"""Every type of Spark, as input, in state and as output: what comes out is what Spark's operator gives."""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, GroupedData, Row, SparkSession
from pyspark.sql import types as t
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import tiercel

UTC = dt.UTC
D = decimal.Decimal
NTZ = dt.datetime.fromisoformat

# type -> an ordinary value, and one at an end of what the type can hold
VALUES: dict[str, tuple[Any, Any]] = {
    "boolean": (True, False),
    "tinyint": (7, -128),
    "smallint": (-300, 32_767),
    "int": (70_000, -(2**31)),
    "bigint": (1, 2**63 - 1),
    "float": (0.5, -3.0e38),
    "double": (0.1, float("inf")),
    "decimal(5,2)": (D("12.30"), D("-999.99")),
    "decimal(38,18)": (D("0.000000000000000001"), D("-12345678901234567890.5")),
    "string": ("ä\u0000€", ""),
    "binary": (b"\x00\xff", b""),
    "date": (dt.date(2026, 11, 18), dt.date(1, 1, 1)),
    "timestamp": (dt.datetime(2026, 3, 29, 1, 30, 0, 123456, UTC), dt.datetime(1905, 1, 1, tzinfo=UTC)),
    "timestamp_ntz": (NTZ("2026-03-29T02:30:00"), NTZ("9999-12-31T23:59:59.999999")),
    "array<int>": ([1, None, 3], []),
    "array<array<string>>": ([["a"], [], None], [[None]]),
    "array<struct<a:decimal(5,1),b:date>>": ([(D("1.5"), None), None], []),
    "map<string,bigint>": ({"a": 1, "b": None}, {}),
    "map<int,array<double>>": ({1: [0.5], 2: None}, {-1: []}),
    "struct<x:double,y:struct<z:array<timestamp>>>": (
        (1.5, ([dt.datetime(2026, 1, 1, tzinfo=UTC), None],)),
        (None, None),
    ),
}
NAMES = [f"c{n}" for n in range(len(VALUES))]
COLUMNS = ", ".join(f"{name} {kind}" for name, kind in zip(NAMES, VALUES, strict=True))
# Spark's own state refuses maps whose keys are no strings, and gives other maps back as null; intervals are
# refused by its state and by us
KEPT = {name: kind for name, kind in zip(NAMES, VALUES, strict=True) if not kind.startswith("map<int")}
STATE = ", ".join(f"{name} {kind}" for name, kind in KEPT.items())
BEFORE = ", ".join(f"b_{name} {kind}" for name, kind in KEPT.items())
INPUT = f"k string, n int, {COLUMNS}"
OUTPUT_NAMES = ["k", "n", *NAMES, *(f"b_{name}" for name in KEPT)]
OUTPUT = f"k string, n int, {COLUMNS}, {BEFORE}"


class Remembers(StatefulProcessor):
    """Emits each row, and the row of its key before it, which it has kept in a value, a list and a map."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.value = handle.getValueState("value", STATE)
        self.list = handle.getListState("list", STATE)
        self.map = handle.getMapState("map", "n int", STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in sorted(rows, key=lambda row: row.n):
            columns = tuple(row[name] for name in NAMES)
            kept = tuple(row[name] for name in KEPT)
            before: tuple[Any, ...] = (None,) * len(KEPT)
            if row.n % 3 == 1 and self.value.exists():
                before = tuple(self.value.get())
            elif row.n % 3 == 2 and self.list.exists():
                before = tuple(list(self.list.get())[-1])
            elif self.map.containsKey((row.n - 1,)):
                before = tuple(self.map.getValue((row.n - 1,)))
            self.value.update(kept)
            self.list.appendValue(kept)
            self.map.updateValue((row.n,), kept)
            yield Row(**dict(zip(OUTPUT_NAMES, (key[0], row.n, *columns, *before), strict=True)))

    def close(self) -> None:
        """Holds no resources."""


def rows() -> list[tuple[Any, ...]]:
    ordinary, extreme = zip(*VALUES.values(), strict=True)
    nulls = (None,) * len(VALUES)
    kinds = [ordinary, extreme, nulls, ordinary, nulls, extreme, extreme]
    return [(f"k{key}", n, *kinds[(n + key) % len(kinds)]) for key in range(3) for n in range(7)]


Transform = Callable[..., DataFrame]


def outputs(spark: SparkSession, source: Path, checkpoint: Path, transform: Transform) -> list[Any]:
    frame = spark.readStream.schema(INPUT).option("maxFilesPerTrigger", 1).parquet(str(source))
    found: list[Any] = []
    query = (
        transform(frame.groupBy("k"), Remembers(), OUTPUT, "append", "none")
        .writeStream.outputMode("append")
        .option("checkpointLocation", str(checkpoint))
        .foreachBatch(lambda batch, _: found.extend(batch.collect()))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return sorted(found, key=lambda row: (row.k, row.n))


def test_values_of_every_type_come_out_as_spark_gives_them(spark: SparkSession, tmp_path: Path) -> None:
    given = spark.createDataFrame(rows(), t.StructType.fromDDL(INPUT))
    given.where("n < 4").coalesce(1).write.parquet(str(tmp_path / "first"))
    given.where("n >= 4").coalesce(1).write.parquet(str(tmp_path / "second"))
    source = tmp_path / "source"
    source.mkdir()
    for part in ("first", "second"):
        [file] = (tmp_path / part).glob("*.parquet")
        file.rename(source / f"{part}.parquet")
    expected = outputs(spark, source, tmp_path / "spark", GroupedData.transformWithState)
    try:
        found = outputs(spark, source, tmp_path / "tiercel", tiercel.transform_with_state)
        [live] = tiercel.deployments()
        assert set(live.status().dead_letters.values()) <= {0}
    finally:
        tiercel.stop_all()
    assert len(found) == len(expected) == len(rows())
    for mine, theirs in zip(found, expected, strict=True):
        for name in (*NAMES, *(f"b_{name}" for name in KEPT)):
            assert mine[name] == theirs[name], (mine.k, mine.n, name)
            assert type(mine[name]) is type(theirs[name]), (mine.k, mine.n, name)
