"""Plans of operators: the data that an instance needs in addition to the core's facts.

Responsible for: what an operator reads, with which transforms in front; its processor, output and state.
Not responsible for: making the plans (api/operator_declaration.py), running them (transforms.py,
    processor_adapter.py). They are pickled and travel to the executors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    StatefulProcessor,
)
from pyspark.sql.types import StructType

from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.state.schema_evolution import StatePlan

Kind = Literal["map", "filter", "flat_map"]


@dataclass(frozen=True)
class Transform:
    """One function of a row. `schema` is that of its results; None: the same as that of its rows."""

    kind: Kind
    function: Callable[[Row], Any]
    schema: StructType | None = None


@dataclass(frozen=True)
class InputPlan:
    """One input of an operator: its columns, the transforms in front, whether its rows are initial state."""

    codec: RowCodec
    transforms: tuple[Transform, ...] = ()
    initial: bool = False
    images: bool = False  # initial state in stored form, not rows for handleInitialState
    broadcast: str = ""  # a small stream; the columns of its last row are the last ones of `codec`
    broadcast_columns: int = 0

    @property
    def schema(self) -> StructType:
        """The columns behind the last transform."""
        schemas = [each.schema for each in self.transforms if each.schema is not None]
        return schemas[-1] if schemas else self.codec.schema

    @property
    def drops_rows(self) -> bool:
        return any(each.kind != "map" for each in self.transforms)


@dataclass(frozen=True)
class OperatorPlan:
    """An operator as its instances run it."""

    processor: StatefulProcessor
    inputs: tuple[InputPlan, ...]  # in the order of the core's Operator.inputs
    schema: StructType  # of rows as the processor sees them: behind the transforms, or the union of inputs
    output: RowCodec  # no key: rows keep the operator's key
    time_mode: str = "none"
    pandas: bool = False  # the processor takes and yields DataFrames
    state: StatePlan = field(default_factory=StatePlan)  # the names under which its values are stored
