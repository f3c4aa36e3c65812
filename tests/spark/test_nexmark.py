"""NEXMark on Spark: with a move, a scale-out and a kill inside, every query equals its batch job."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from tiercel.apps.catalogue import find_app
from tiercel.apps.nexmark.queries import QUERIES
from tiercel.apps.run import Run, run

SHORT = ("q4", "q5")  # of two stages each
CHANGES = ("move", "scale", "kill")


def check(query: str, spark: SparkSession, seconds: float) -> None:
    options = {"query": query, "speed": 20}
    wanted = Run(find_app("nexmark"), options, seed=5, rate=600, seconds=seconds, during=CHANGES)
    found = run(wanted, spark=spark)
    assert found.good, found.outputs
    assert [change.kind for change in found.changes] == list(CHANGES)


@pytest.mark.parametrize("query", SHORT)
def test_a_query_of_two_stages_equals_its_batch_job_with_changes_inside(
    query: str, spark: SparkSession
) -> None:
    check(query, spark, 4)


@pytest.mark.long
@pytest.mark.parametrize("query", [query for query in QUERIES if query not in SHORT])
def test_a_query_equals_its_batch_job_with_changes_inside(query: str, spark: SparkSession) -> None:
    check(query, spark, 8)
