"""The one place that looks behind PySpark's public face, and why.

Responsible for: what a `GroupedData` was made of; whether an executor is being decommissioned. PySpark
    gives no public way to ask either.
Not responsible for: anything else; add here, with a reason, or not at all.
"""

from __future__ import annotations

import enum
import re

from pyspark import SparkContext
from pyspark.sql import DataFrame, GroupedData

from tiercel.errors import UserError


def grouped_frame(grouped: GroupedData) -> tuple[DataFrame, list[str]]:
    """The DataFrame and the columns of `df.groupBy(columns)`.

    The columns are in its printed form; the DataFrame is an attribute without a public name.
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
    """Where an executor is in its life."""

    ACTIVE = "active"
    LEAVING = "leaving"  # runs what it has, and gets nothing new
    GONE = "gone"


class CannotTell(Exception):
    """This Spark does not answer; what goes without it must do so."""


def executor_state(context: SparkContext, executor: str) -> ExecutorState:
    """Whether it gets new tasks, only ends what it has, or has gone.

    The scheduler alone knows: no signal reaches Python, and to Spark's REST API an executor is active
    until it has gone. One that was killed is not active either while Spark asks why; it does not leave,
    it has gone.
    """
    try:
        spark = context._jsc.sc()
        if spark.schedulerBackend().isExecutorActive(executor):
            return ExecutorState.ACTIVE
        leaving = bool(spark.taskScheduler().getExecutorDecommissionState(executor).isDefined())
    except Exception as error:
        raise CannotTell(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    return ExecutorState.LEAVING if leaving else ExecutorState.GONE
