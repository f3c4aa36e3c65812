"""The state of an existing Spark query with `transformWithState`, read from its checkpoint.

Responsible for: Spark's own readers (`state-metadata`, `statestore`), from their columns to ours.
Not responsible for: whether the state fits an operator (external_state.py), sending it
    (api/initial_state.py).

    speeds.transform_with_state(Monitor(), ..., initial_state=tiercel.read_spark_state(spark, CHECKPOINT))

The query must be stopped, and its input must continue where it stopped: the state is that of its last
committed batch. Value, list and map state, times to live and timers are read. The watermark is not: it starts
again.
"""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t

from tiercel.errors import UserError
from tiercel.runtime.deployment import VariableFacts
from tiercel.spark.job_errors import reason_of
from tiercel.spark.state.external_state import ExternalState
from tiercel.spark.state.schema import StateForm, column_type, schema_text

KINDS = {"ValueState": "value", "ListState": "list", "MapState": "map"}
TIMERS = "TimerState"
OPERATORS = ("transformWithStateInPySparkExec", "transformWithStateExec", "transformWithStateInPandasExec")


class _Variable(msgspec.Struct, rename="camel"):
    """A state variable, as Spark records it in the checkpoint."""

    state_name: str
    state_variable_type: str
    ttl_enabled: bool = False


class _Properties(msgspec.Struct, rename="camel"):
    state_variables: list[_Variable]
    time_mode: str = ""


def read_spark_state(
    spark: SparkSession, checkpoint: str | Path, *, operator_id: int = 0, batch_id: int | None = None
) -> ExternalState:
    """The state of a stopped Spark query, for `initial_state=` of an operator with the same processor.

    `operator_id` selects one of several stateful operators; `batch_id` selects an earlier batch than the
    last.
    """
    location = str(checkpoint).rstrip("/")
    what = f"the checkpoint {location}"
    try:
        found = spark.read.format("state-metadata").load(location).collect()
        operators = {row.operatorId: row for row in found}
        if operator_id not in operators:
            expected = f"one of: {', '.join(map(str, operators)) or '(there are none)'}"
            raise UserError(f"{what} has no stateful operator {operator_id}", expected=expected)
        operator = operators[operator_id]
        if operator.operatorName not in OPERATORS:
            raise UserError(
                f"operator {operator_id} of {what} is {operator.operatorName}", expected="transformWithState"
            )
        batch = operator.maxBatchId if batch_id is None else batch_id
        if not operator.minBatchId <= batch <= operator.maxBatchId:
            expected = f"{operator.minBatchId} to {operator.maxBatchId}"
            raise UserError(f"{what} has no batch {batch}", expected=expected)
        properties = msgspec.json.decode(operator.operatorProperties, type=_Properties)
        reader = _Reader(spark, location, {"operatorId": str(operator_id), "batchId": str(batch)})
        return reader.state(f"{what}, operator {operator_id}, batch {batch}", properties)
    except (PySparkException, Py4JJavaError, msgspec.DecodeError) as error:
        raise UserError(
            f"{what} cannot be read: {reason_of(error)}",
            expected="the checkpointLocation of a query with transformWithState that has committed a batch",
        ) from error


class _Reader:
    """Reads one operator's state as of one batch."""

    def __init__(self, spark: SparkSession, location: str, options: dict[str, str]) -> None:
        self._spark, self._location, self._options = spark, location, options

    def _read(self, **options: str) -> DataFrame:
        reader = self._spark.read.format("statestore").options(**self._options, **options)
        return reader.load(self._location)

    def state(self, source: str, properties: _Properties) -> ExternalState:
        frames: dict[str, DataFrame] = {}
        facts: dict[str, VariableFacts] = {}
        timers = None
        for variable in properties.state_variables:
            if variable.state_variable_type == TIMERS:
                timers = self._timers()
                continue
            if variable.state_variable_type not in KINDS:
                what = f"state variable {variable.state_name!r} is a {variable.state_variable_type}"
                raise UserError(what, expected=f"one of: {', '.join(KINDS)}")
            frame = self._read(stateVarName=variable.state_name, flattenCollectionTypes="false")
            facts[variable.state_name], content = _read_as(variable, frame.schema)
            frames[variable.state_name] = frame.select("key", content.alias(variable.state_name))
        if timers is None:
            timers = self._none(next(iter(frames.values())), "timers") if frames else None
        if timers is None:
            raise UserError(f"{source} has no state", expected="state variables or timers")
        whole = reduce(_beside, [*frames.values(), timers])
        form = StateForm(timers.schema["key"].dataType, facts)  # type: ignore[arg-type]
        columns = (
            [f.struct(*sorted(frames)).cast(form.schema["state"].dataType).alias("state")] if frames else []
        )
        return ExternalState(source, form, whole.select("key", *columns, f.col("timers").alias("timers")))

    def _timers(self) -> DataFrame:
        registered = self._read(readRegisteredTimers="true")
        return registered.groupBy("key").agg(
            f.sort_array(f.collect_list("expiration_timestamp_ms")).alias("timers")
        )

    def _none(self, like: DataFrame, name: str) -> DataFrame:
        return like.limit(0).select("key", f.lit(None).cast("array<bigint>").alias(name))


def _beside(left: DataFrame, right: DataFrame) -> DataFrame:
    """The columns of both for each key that either has."""
    other = right.withColumnRenamed("key", "other key")
    joined = left.join(other, left["key"].eqNullSafe(other["other key"]), "full_outer")
    return joined.withColumn("key", f.coalesce("key", "other key")).drop("other key")


def _read_as(variable: _Variable, schema: t.StructType) -> tuple[VariableFacts, Column]:
    """The facts of a variable, and its column in our form."""
    kind = KINDS[variable.state_variable_type]
    name = {"value": "value", "list": "list_value", "map": "map_value"}[kind]
    found: Any = schema[name].dataType
    keys = ""
    if kind == "list":
        found = found.elementType
    elif kind == "map":
        keys, found = schema_text(found.keyType), found.valueType
    if variable.ttl_enabled:
        found = found["value"].dataType
    facts = VariableFacts(kind, schema_text(found), keys, variable.ttl_enabled)  # type: ignore[arg-type]
    return facts, f.col(name).cast(column_type(facts))
