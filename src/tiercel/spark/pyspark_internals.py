"""The only use of PySpark's private API, with the reason for each.

Responsible for: the DataFrame and columns of a `GroupedData`; whether an executor is being decommissioned;
    the offline repartitioning of a query's state, for a benchmark. PySpark has no public way to any of them.
Not responsible for: anything else. Further private API belongs here, with its reason.
"""

from __future__ import annotations

import enum
import re

from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, GroupedData, SparkSession

from tiercel.errors import UserError


def grouped_frame(grouped: GroupedData) -> tuple[DataFrame, list[str]]:
    """The DataFrame and the columns of `df.groupBy(columns)`.

    The columns are read from its printed form, the DataFrame from a private attribute.
    """
    frame = getattr(grouped, "_df", None)
    found = re.search(r"grouping expressions: \[(.*?)\], value:", repr(grouped))
    if not isinstance(frame, DataFrame) or found is None:
        raise UserError(
            f"cannot tell what {grouped!r} groups by",
            expected="df.groupBy('column', ...)",
            hint="declare the stream: live.stream(name, schema, key=...) and feed the DataFrame to it",
        )
    columns = [part.strip().strip("`'") for part in found[1].split(",")]
    unknown = [c for c in columns if c not in frame.columns]
    if unknown:
        raise UserError(
            f"groupBy of an expression: {', '.join(unknown)}",
            expected="plain columns of the DataFrame",
            hint="give the expression a name first: df.withColumn(name, expression).groupBy(name)",
        )
    return frame, columns


class ExecutorState(enum.Enum):
    """The states of an executor."""

    ACTIVE = "active"
    LEAVING = "leaving"  # finishes its tasks, and gets no new ones
    GONE = "gone"


class CannotTell(Exception):
    """This Spark does not answer the question; the caller must do without."""


def executor_state(context: SparkContext, executor: str) -> ExecutorState:
    """Whether an executor gets new tasks, only finishes its tasks, or is gone.

    Only the scheduler knows: no signal reaches Python, and in Spark's REST API an executor is active until
    it is gone. A killed executor is not active while Spark finds out why; it counts as gone.
    """
    try:
        spark = context._jsc.sc()
        if spark.schedulerBackend().isExecutorActive(executor):
            return ExecutorState.ACTIVE
        leaving = bool(spark.taskScheduler().getExecutorDecommissionState(executor).isDefined())
    except Exception as error:
        raise CannotTell(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    return ExecutorState.LEAVING if leaving else ExecutorState.GONE


def repartition_checkpoint(spark: SparkSession, location: str, partitions: int) -> None:
    """Change the number of state partitions of a stopped query. Only benchmarks compare us with it."""
    manager = getattr(spark, "_streamingCheckpointManager", None)
    if manager is None:
        raise CannotTell("this Spark cannot repartition the state of a query")
    manager.repartition(location, partitions)


def repartition_complete_checkpoint(spark: SparkSession, location: str, partitions: int) -> str:
    """The same; returns the reason if Spark refuses, for example because the last batch is not complete."""
    try:
        repartition_checkpoint(spark, location, partitions)
    except PySparkException as refusal:
        return str(refusal).partition("\n")[0]
    return ""
