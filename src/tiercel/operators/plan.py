"""An operator that is ready to run: the processor, and what must be said where it is declared.

Responsible for: the value that each module of this package makes, for Tiercel and for plain Spark alike.
Not responsible for: running it.
"""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType


class Plan(NamedTuple):
    """`frame.groupBy(*key).transformWithState(plan.processor, plan.schema, "append", plan.time_mode)`."""

    name: str  # what the operator does: the last part of its default name
    processor: StatefulProcessor
    schema: StructType  # of its output
    time_mode: str = "none"
    event_time: str = ""  # column of its output that the next operator may use
