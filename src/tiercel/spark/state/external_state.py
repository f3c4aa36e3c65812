"""External state: the initial state of an operator from an export or from a checkpoint of Spark.

Responsible for: whether it fits the operator; from columns to the stored form; reading an export.
Not responsible for: writing an export (api/export_import.py), reading Spark's checkpoints
    (spark_checkpoint.py), sending the state (api/initial_state.py).

    LOCATION/keys/     parquet: key, state, timers, with the columns of schema.py
    LOCATION/about/    one line of JSON that describes the export; written last

User code is not called: the processor's state variables are set as they were, with timers and expiries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as t

from tiercel.errors import UserError
from tiercel.runtime.deployment import VariableFacts
from tiercel.spark.job_errors import reason_of
from tiercel.spark.rows.row_codec import CoreRow, RowCodec
from tiercel.spark.state.declared_state import DeclaredState
from tiercel.spark.state.schema import StateForm, facts_of, same_types, struct_of
from tiercel.spark.state.schema_evolution import Upgrades, converter, next_variable_facts
from tiercel.spark.state.stored_state_adapter import IMAGE, encode_image

if TYPE_CHECKING:
    import pyarrow

FORMAT = 1  # of an export


class PackedState(NamedTuple):
    """Rows of initial state, ready to be sent; `source` names their origin."""

    source: str
    frame: DataFrame  # key and payload, in the core's form

    def rows(self) -> Iterator[CoreRow]:
        for row in self.frame.sort("key").toLocalIterator(prefetchPartitions=True):
            yield bytes(row.key), 0, bytes(row.payload)


@dataclass(frozen=True)
class ExternalState:
    """State of keys as columns (schema.py), for `initial_state=` of an operator."""

    source: str
    form: StateForm
    frame: DataFrame

    def packed(
        self,
        operator: str,
        declared: DeclaredState,
        time_mode: str,
        columns: RowCodec,
        upgrades: Upgrades,
    ) -> PackedState:
        """The rows for an operator with these variables and columns; UserError if they do not fit."""
        self._check_key(operator, columns)
        found = self._fitting(operator, declared, upgrades)
        if time_mode == "none" and not self.frame.where("size(timers) > 0").isEmpty():
            what = f"{self.source} has timers, operator {operator!r} has time mode none"
            raise UserError(what, expected="the time mode that they were registered in")
        form, names = self.form, list(columns.key)

        def pack(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
            import pyarrow

            read = form.reader()
            for batch in batches:
                made = []
                for row in batch.to_pylist():
                    values, timers = read(row)
                    image = {n: (kind, found[n](c)) for n, (kind, c) in values.items() if n in found}
                    key = [row["key"][name] for name in names]
                    made.append(columns.pack((*key, encode_image(image, list(timers)))))
                arrays = [pyarrow.array([row[n] for row in made], pyarrow.binary()) for n in (0, 2)]
                yield pyarrow.RecordBatch.from_arrays(arrays, ["key", "payload"])

        return PackedState(self.source, self.frame.mapInArrow(pack, "key binary, payload binary"))

    def _check_key(self, operator: str, columns: RowCodec) -> None:
        wanted = {name: columns.schema[name].dataType for name in columns.key}
        if wanted != {field.name: field.dataType for field in self.form.key.fields}:
            raise UserError(
                f"{self.source} is state of keys {_shown(self.form.key)}",
                expected=f"keys of the input of {operator!r}: "
                + _shown(t.StructType([columns.schema[name] for name in columns.key])),
            )

    def _fitting(
        self, operator: str, declared: DeclaredState, upgrades: Upgrades
    ) -> dict[str, Callable[[Any], Any]]:
        """For each variable that the operator takes, the function that converts its content."""
        wanted = {variable.name: facts_of(variable) for variable in declared.variables}
        fitting: dict[str, Callable[[Any], Any]] = {}
        for name, facts in self.form.live.items():
            if name in declared.deleted:
                continue
            if name not in wanted:
                raise UserError(
                    f"{self.source} has the state variable {name!r}, which operator {operator!r} lacks",
                    expected=f"among: {', '.join(wanted) or '(none)'}",
                    hint=f"handle.deleteIfExists({name!r}) in init leaves it out",
                )
            if same_types(facts.schema, wanted[name].schema):
                facts = msgspec.structs.replace(facts, schema=wanted[name].schema)
            if same_types(facts.key_schema, wanted[name].key_schema):
                facts = msgspec.structs.replace(facts, key_schema=wanted[name].key_schema)
            new = next_variable_facts(operator, name, facts, wanted[name], upgrades.get(name))
            same = new.schema == facts.schema
            fitting[name] = _unchanged if same else converter(name, facts.schema, new, upgrades[name])
        return fitting


def _unchanged(content: Any) -> Any:
    return content


def _shown(schema: t.StructType) -> str:
    return schema.simpleString().removeprefix("struct<").removesuffix(">")


def stored_state_codec(codec: RowCodec) -> RowCodec:
    """The codec of an operator's initial state: its key columns, and the state in stored form."""
    fields = [codec.schema[name] for name in codec.key]
    return RowCodec(t.StructType([*fields, t.StructField(IMAGE, t.BinaryType())]), codec.key)


# -- exports --------------------------------------------------------------------------------------


class About(msgspec.Struct, frozen=True):
    """The description of an export; its last file."""

    kind: Literal["tiercel-export"]
    operator: str
    deployment: str
    key: str
    state: dict[str, VariableFacts]
    time_mode: str
    keys: int
    as_of: str = ""
    format: int = FORMAT


def about_export(spark: SparkSession, location: str) -> About:
    """The description of an export; UserError if there is none, or if it is incomplete."""
    location = location.rstrip("/")
    try:
        [line] = spark.read.text(f"{location}/about").collect()
        about = msgspec.json.decode(line.value, type=About)
    except (PySparkException, Py4JJavaError, ValueError, msgspec.DecodeError) as error:
        what = f"{location} is no complete export: {reason_of(error)}"
        raise UserError(what, expected="a location that `tiercel state export` has finished") from error
    if about.format != FORMAT:
        what = f"{location} has format {about.format}"
        raise UserError(what, expected=f"format {FORMAT}", hint="use the version that wrote it")
    return about


def read_exported_state(spark: SparkSession, location: str) -> ExternalState:
    """The state that `tiercel state export` wrote, for `initial_state=` of an operator."""
    location = location.rstrip("/")
    about = about_export(spark, location)
    form = StateForm(
        struct_of(about.key), {n: msgspec.structs.replace(f, version=1) for n, f in about.state.items()}
    )
    frame = spark.read.schema(form.schema).parquet(f"{location}/keys")
    try:
        keys = frame.selectExpr("count(key)").collect()[0][0]
    except (PySparkException, Py4JJavaError) as error:
        what = f"{location}/keys cannot be read: {reason_of(error)}"
        raise UserError(what, expected="the files as they were written") from error
    if keys != about.keys:
        what = f"{location} has {keys} keys"
        raise UserError(what, expected=f"{about.keys}, as when it was written: files are missing or doubled")
    return ExternalState(f"the export {location} of {about.operator!r}", form, frame)
