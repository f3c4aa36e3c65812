"""An unmodified processor does under Tiercel what it does under Spark, while it is moved and killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import differences, under_spark, under_tiercel
from oracle_cases import CASES
from pyspark.sql import SparkSession

ROUTERS_TOO = {"value state", "event-time timers", "join", "initial state"}


@pytest.mark.parametrize("name", CASES)
def test_outputs_of_each_key_are_those_of_spark(name: str, spark: SparkSession, tmp_path: Path) -> None:
    case = CASES[name]()
    expected, counts = under_spark(spark, case, tmp_path / "spark")
    kills = ("op@edge#1", "cloud" if name in ROUTERS_TOO else "op@cloud#1")
    found = under_tiercel(spark, case, tmp_path / "tiercel", counts, kills)
    assert sum(map(len, expected.values())) == counts[-1] > 100
    assert not differences(found, expected)[:3]
