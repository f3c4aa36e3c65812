"""The speed monitor: an operator written as for PySpark, and the batch job that audits its outputs.

Responsible for: positions from recorded files, the running mean per car, the expected outputs.
Not responsible for: traffic (traffic.py), comparing (audit.py), deploying (run.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from tiercel.demo.audit import Audit, compare

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
        """Holds no resources."""


def positions_from_files(spark: SparkSession, directory: Path) -> DataFrame:
    """Recorded files as they appear, as positions. One file per micro-batch keeps the order of each car."""
    files = spark.readStream.schema(RECORDED).option("maxFilesPerTrigger", 1).parquet(str(directory))
    return files.selectExpr(*POSITION_COLUMNS)


EXPECTED = """
SELECT car AS key, seq, struct(n, mean, mean > {limit} AS alert) AS result FROM (
    SELECT car, seq, count(*) OVER so_far AS n, sum(speed) OVER so_far / count(*) OVER so_far AS mean
    FROM {inputs}
    WINDOW so_far AS (PARTITION BY car ORDER BY seq ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
)
"""


def audit(spark: SparkSession, recorded: list[Path], outputs: Path) -> Audit:
    """A Spark batch job: a sequential run over the recorded inputs, compared with what the sink holds.

    The order of outputs is that of the sink: one file per micro-batch, rows in it as they came.
    """
    inputs = spark.read.schema(RECORDED).parquet(*map(str, recorded)).selectExpr(*POSITION_COLUMNS)
    seen = spark.read.schema(SPEEDS).parquet(str(outputs))
    placed = seen.selectExpr(
        "car AS key",
        "seq",
        "struct(n, mean, alert) AS result",
        "_metadata.file_modification_time AS written",
        "_metadata.row_index AS place",
    )
    return compare(spark, spark.sql(EXPECTED, inputs=inputs, limit=LIMIT_KMH), placed)
