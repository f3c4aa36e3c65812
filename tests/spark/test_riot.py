"""RIoTBench on Spark: with changes inside, every row of a dataflow equals the batch job's."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from tiercel.apps.catalogue import find_app
from tiercel.apps.run import Run, run

CHANGES = ["move", "scale", "kill"]


def check(
    spark: SparkSession, dataflow: str, dataset: str, rate: int, seconds: float, tasks: str = "separate"
) -> None:
    options = {"dataflow": dataflow, "dataset": dataset, "tasks": tasks}
    wanted = Run(find_app("riot"), options, seed=4, rate=rate, seconds=seconds, during=CHANGES)
    found = run(wanted, spark=spark)
    assert found.good, found.outputs
    assert all(one.expected for one in found.outputs.values())


def test_predictions_equal_the_batch_jobs_with_changes_inside(spark: SparkSession) -> None:
    check(spark, "pred", "city", 300, 5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("dataflow", "dataset"),
    [("etl", "city"), ("etl", "taxi"), ("stats", "city"), ("stats", "taxi"), ("pred", "taxi")],
)
def test_a_dataflow_equals_the_batch_job_with_changes_inside(
    spark: SparkSession, dataflow: str, dataset: str
) -> None:
    check(spark, dataflow, dataset, 600, 20)


@pytest.mark.long
@pytest.mark.parametrize(("dataflow", "dataset"), [("etl", "city"), ("stats", "taxi")])
def test_chained_tasks_equal_the_batch_job_of_the_separate_ones_with_changes_inside(
    spark: SparkSession, dataflow: str, dataset: str
) -> None:
    check(spark, dataflow, dataset, 2_000, 10, "chained")
