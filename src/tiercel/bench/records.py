"""The record of a run, judged by a Spark batch job: what was lost, doubled, out of order.

Responsible for: counting over the recorded inputs and outputs; reading the outputs for measures.py.
Not responsible for: writing the record (loader.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tiercel.bench.measures import Outputs

LOST = """
    SELECT count(*) AS lost FROM inputs i
    LEFT ANTI JOIN outputs o ON i.sensor = o.sensor AND i.n = o.n
"""
DOUBLED = "SELECT count(*) - count(DISTINCT sensor, n) AS doubled FROM outputs"
REORDERED = """
    SELECT count(*) AS reordered FROM (
        SELECT n, max(n) OVER (
            PARTITION BY sensor ORDER BY at ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS highest FROM outputs
    ) WHERE n < highest
"""


def count_faults(spark: Any, inputs: Path, outputs: Path) -> dict[str, int]:
    """By queries that share no code with what they check."""
    spark.read.parquet(str(inputs)).createOrReplaceTempView("inputs")
    spark.read.parquet(str(outputs)).createOrReplaceTempView("outputs")
    found: dict[str, int] = {}
    for query in (LOST, DOUBLED, REORDERED):
        found |= spark.sql(query).collect()[0].asDict()
    return found


def read_outputs(path: Path) -> Outputs:
    table = pq.read_table(path)
    return Outputs(*(table[name].to_numpy() for name in ("sensor", "due_ns", "emitted_ns")))
