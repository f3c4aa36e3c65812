"""How plain Spark gets more partitions of state: stop the query, repartition its checkpoint, start it again.

Responsible for: the three steps, and how long rows wait for them.
Not responsible for: the query itself (its caller's).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiercel.errors import UserError
from tiercel.spark.pyspark_internals import repartition_complete_checkpoint

BATCH_S_MAX = 300


def stop_repartition_restart(
    spark: Any, query: Any, start: Callable[..., Any], checkpoint: Path, partitions: int
) -> tuple[list[Any], float]:
    """Returns the queries that ran since, the last of which runs, and the seconds until it had started.

    A batch that the stop interrupted must be complete before Spark repartitions: a query that takes only what
    is there runs it again.
    """
    begun = time.monotonic()
    query.stop()
    ran = []
    if repartition_complete_checkpoint(spark, str(checkpoint), partitions):
        rest = start(availableNow=True)
        rest.awaitTermination(BATCH_S_MAX)
        rest.stop()
        ran.append(rest)
        if refused := repartition_complete_checkpoint(spark, str(checkpoint), partitions):
            raise UserError(f"Spark does not repartition the state: {refused}")
    ran.append(start())
    return ran, time.monotonic() - begun
