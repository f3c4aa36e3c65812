"""Linear Road on Spark: with a move, a scale-out and a kill inside, every answer equals the batch job's."""

from __future__ import annotations

from pyspark.sql import SparkSession

from tiercel.apps.catalogue import find_app
from tiercel.apps.run import Run, run


def test_tolls_alerts_balances_and_expenditures_equal_the_batch_job_with_changes_inside(
    spark: SparkSession,
) -> None:
    options = {"speed": 100, "segments": 4, "queries_percent": 10}
    changes = ["move", "scale", "kill"]
    wanted = Run(find_app("toll"), options, seed=3, rate=1_000, seconds=6, during=changes)
    found = run(wanted, spark=spark)
    assert found.good, found.outputs
    assert {name: one.expected > 50 for name, one in found.outputs.items()} == dict.fromkeys(
        ("notices", "balances", "expenditures"), True
    )
    assert found.found > 100  # tolls above zero, and alerts
