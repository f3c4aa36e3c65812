"""The speed monitor: an application as people write it for PySpark, and the batch job that audits it.

Responsible for: positions out of recorded files, the running mean per car, what should have come out.
Not responsible for: traffic and figures (bench/), deploying (live.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

LIMIT_KMH = 120.0
RECORDED = "number int, seq long, kmh int, due_ns long"  # whole km/h: sums are exact in any order
POSITIONS = "car string, seq long, speed double, due_ns long"
SPEEDS = "car string, seq long, n long, mean double, alert boolean, due_ns long"

POSITION_COLUMNS = (
    "concat('car-', lpad(number, 3, '0')) AS car",
    "seq",
    "CAST(kmh AS DOUBLE) AS speed",
    "due_ns",
)


class SpeedMonitor(StatefulProcessor):
    """Mean speed of each car so far; an alert while it is above the limit. Unmodified PySpark."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._seen = handle.getValueState("seen", "n long, total double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n, total = self._seen.get() or (0, 0.0)
        for row in rows:
            n, total = n + 1, total + row.speed
            mean = total / n
            yield Row(car=key[0], seq=row.seq, n=n, mean=mean, alert=mean > LIMIT_KMH, due_ns=row.due_ns)
        self._seen.update((n, total))

    def close(self) -> None:
        """Nothing to let go."""


def positions_from_files(spark: SparkSession, directory: Path) -> DataFrame:
    """Recorded files as they appear, as positions. One file per micro-batch keeps the order of each car."""
    files = spark.readStream.schema(RECORDED).option("maxFilesPerTrigger", 1).parquet(str(directory))
    return files.selectExpr(*POSITION_COLUMNS)


class Audit(msgspec.Struct, frozen=True):
    """Every output against every input."""

    inputs: int
    outputs: int
    lost: int  # inputs without an output
    doubled: int  # outputs beyond the first of an input
    reordered: int  # outputs that came after a later one of their car
    wrong: int  # outputs that do not carry what a sequential run gives
    invented: int  # outputs of no input

    @property
    def faults(self) -> int:
        return self.lost + self.doubled + self.reordered + self.wrong + self.invented


AUDIT = """
WITH expected AS (
    SELECT car, seq, count(*) OVER so_far AS n, sum(speed) OVER so_far / count(*) OVER so_far AS mean
    FROM {inputs}
    WINDOW so_far AS (PARTITION BY car ORDER BY seq ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
), seen AS (
    SELECT *, lag(seq) OVER (PARTITION BY car ORDER BY written, place) > seq AS overtaken FROM {outputs}
)
SELECT
    count(DISTINCT e.car, e.seq) AS inputs,
    count(s.car) AS outputs,
    count_if(s.car IS NULL) AS lost,
    count(s.car) - count(DISTINCT s.car, s.seq) AS doubled,
    count_if(s.overtaken) AS reordered,
    count_if(s.n <> e.n OR s.mean <> e.mean OR s.alert <> (e.mean > {limit})) AS wrong,
    count_if(e.car IS NULL) AS invented
FROM expected e FULL OUTER JOIN seen s ON e.car = s.car AND e.seq = s.seq
"""


def audit(spark: SparkSession, recorded: list[Path], outputs: Path) -> Audit:
    """A Spark batch job: a sequential run over the recorded inputs, compared with what the sink holds.

    The order of outputs is that of the sink: one file per micro-batch, rows in it as they came.
    """
    inputs = spark.read.schema(RECORDED).parquet(*map(str, recorded)).selectExpr(*POSITION_COLUMNS)
    seen = spark.read.schema(SPEEDS).parquet(str(outputs))
    placed = seen.selectExpr(
        "*", "_metadata.file_modification_time AS written", "_metadata.row_index AS place"
    )
    found = spark.sql(AUDIT, inputs=inputs, outputs=placed, limit=LIMIT_KMH).first()
    assert found is not None
    return Audit(**found.asDict())
