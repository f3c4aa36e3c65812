"""NEXMark in plain PySpark equals the batch jobs too: both sides of the benchmark compute the same."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from tiercel.apps.nexmark import beside
from tiercel.apps.nexmark.plain import PLAIN
from tiercel.apps.nexmark.queries import QUERIES


def test_every_query_has_a_plain_form() -> None:
    assert set(PLAIN) == set(QUERIES)


@pytest.mark.long
@pytest.mark.parametrize("query", PLAIN)
def test_both_sides_of_the_benchmark_equal_the_batch_job(query: str, spark: SparkSession) -> None:
    found = beside.measure(query, beside.BATCH, 3, lambda step: None, spark)
    assert (found.tiercel_faults, found.spark_faults) == (0, 0), found
    assert found.expected > 0
    assert 0 < found.slower_tiercel_events_per_s <= found.tiercel_events_per_s
    assert 0 < found.slower_plain.events_per_s <= found.plain.events_per_s
