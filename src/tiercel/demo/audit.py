"""The audit: a Spark batch job compares every output with every input of a recording.

Responsible for: counting what was lost, doubled, out of order, wrong or invented.
Not responsible for: the expected outputs (speed_monitor.py, chaos/verdict.py), recording.
"""

from __future__ import annotations

import msgspec
from pyspark.sql import DataFrame, SparkSession


class Audit(msgspec.Struct, frozen=True):
    """The result of comparing every output with every input."""

    inputs: int
    outputs: int
    lost: int  # inputs without an output
    doubled: int  # outputs beyond the first of an input
    reordered: int  # outputs that came after a later one of their key
    wrong: int  # outputs that do not carry what a sequential run gives
    invented: int  # outputs of no input

    @property
    def faults(self) -> int:
        return self.lost + self.doubled + self.reordered + self.wrong + self.invented


COMPARE = """
WITH seen AS (
    SELECT *, lag(seq) OVER (PARTITION BY key ORDER BY written, place) > seq AS overtaken FROM {outputs}
)
SELECT
    count(DISTINCT e.key, e.seq) AS inputs,
    count(s.key) AS outputs,
    count_if(s.key IS NULL) AS lost,
    count(s.key) - count(DISTINCT s.key, s.seq) AS doubled,
    count_if(s.overtaken) AS reordered,
    count_if(s.result <> e.result) AS wrong,
    count_if(e.key IS NULL) AS invented
FROM {expected} e FULL OUTER JOIN seen s ON e.key = s.key AND e.seq = s.seq
"""


def compare(spark: SparkSession, expected: DataFrame, outputs: DataFrame) -> Audit:
    """Both have key, seq and result, `outputs` also their order: written, place. A seq is expected once."""
    found = spark.sql(COMPARE, expected=expected, outputs=outputs).first()
    assert found is not None
    return Audit(**found.asDict())
