"""State of keys from elsewhere, for an operator to begin with: from an export, from Spark's own checkpoint.

Responsible for: whether it fits the operator; from columns to what is stored; export, and reading one.
Not responsible for: reading Spark's checkpoints (adopting.py), sending it (entering.py).

    LOCATION/keys/     parquet: key, state, timers, as state_schema.py has them
    LOCATION/about/    one line of JSON: what it is; written last

User code is not asked: the processor's state variables are set as they were, timers and expiries included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as t

from tiercel.errors import UserError
from tiercel.runtime.place import Place, VariableFacts
from tiercel.spark.hosting import reason_of
from tiercel.spark.processors import DeclaredState, Variable
from tiercel.spark.schema import Columns, CoreRow, decode_payload
from tiercel.spark.session import open_session
from tiercel.spark.state_schema import StateForm, facts_of, same_types, stored_name, struct_of
from tiercel.spark.stateful import IMAGE, decode_image, encode_image
from tiercel.spark.upgrading import Upgrades, converter, successor
from tiercel.state.ranges import put_keys

if TYPE_CHECKING:
    import pyarrow

FORMAT = 1  # of an export
WHEREABOUTS = ("slot", "instance", "epoch", "offset")  # of a key: not part of its state


class PackedState(NamedTuple):
    """Rows of initial state, ready to be sent; `source` says what they were made of."""

    source: str
    frame: DataFrame  # key and payload, as the core has them

    def rows(self) -> Iterator[CoreRow]:
        for row in self.frame.sort("key").toLocalIterator(prefetchPartitions=True):
            yield bytes(row.key), 0, bytes(row.payload)


@dataclass(frozen=True)
class KeptState:
    """State of keys, as columns (state_schema.py); given as `initial_state=` of an operator."""

    source: str
    form: StateForm
    frame: DataFrame

    def packed(
        self,
        operator: str,
        declared: DeclaredState,
        time_mode: str,
        columns: Columns,
        upgrades: Upgrades,
    ) -> PackedState:
        """For an operator with these variables and columns of initial state; UserError if it does not fit."""
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

    def _check_key(self, operator: str, columns: Columns) -> None:
        wanted = {name: columns.schema[name].dataType for name in columns.key}
        if wanted != {field.name: field.dataType for field in self.form.key.fields}:
            raise UserError(
                f"{self.source} is state of keys {_told(self.form.key)}",
                expected=f"keys of the input of {operator!r}: "
                + _told(t.StructType([columns.schema[name] for name in columns.key])),
            )

    def _fitting(
        self, operator: str, declared: DeclaredState, upgrades: Upgrades
    ) -> dict[str, Callable[[Any], Any]]:
        """Of each variable that the operator takes over, how its content becomes what is declared."""
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
            new = successor(operator, name, facts, wanted[name], upgrades.get(name))
            same = new.schema == facts.schema
            fitting[name] = _as_it_is if same else converter(name, facts.schema, new, upgrades[name])
        return fitting


def _as_it_is(content: Any) -> Any:
    return content


def _told(schema: t.StructType) -> str:
    return schema.simpleString().removeprefix("struct<").removesuffix(">")


def image_columns(read: Columns) -> Columns:
    """The columns of an operator's initial state: its key, and the state as it is stored."""
    fields = [read.schema[name] for name in read.key]
    return Columns(t.StructType([*fields, t.StructField(IMAGE, t.BinaryType())]), read.key)


# -- exports --------------------------------------------------------------------------------------


class About(msgspec.Struct, frozen=True):
    """What an export is; its last file."""

    kind: Literal["tiercel-export"]
    operator: str
    deployment: str
    key: str
    state: dict[str, VariableFacts]
    time_mode: str
    keys: int
    as_of: str = ""
    format: int = FORMAT


def export_state(
    storage: str | Path,
    operator: str,
    location: str,
    *,
    as_of: str = "",
    backup: str = "",
    spark: SparkSession | None = None,
) -> About:
    """An operator's state as parquet: as of its last checkpoints, or with `as_of` of a backup; it may run."""
    from tiercel.spark.datasource import register
    from tiercel.spark.state_source import Asked

    given = {
        "storage": str(storage),
        "operator": operator,
        "layout": "columns",
        "asOf": as_of,
        "backup": backup,
    }
    asked = Asked.of(given)
    _ = asked.schema, asked.numbers()  # what is not there is said before Spark starts
    spark = spark or open_session("tiercel")
    register(spark)
    frame = spark.read.format("tiercel-state").options(**given).load().drop(*WHEREABOUTS)
    location = location.rstrip("/")
    try:
        frame.write.mode("error").parquet(f"{location}/keys")
        keys = spark.read.schema(frame.schema).parquet(f"{location}/keys").count()
    except AnalysisException as error:
        if "PATH_ALREADY_EXISTS" not in str(error):
            raise
        raise UserError(
            f"{location} holds an export already", expected="a new location: nothing is overwritten"
        ) from error
    manifest = asked.manifest
    about = About(
        "tiercel-export",
        operator,
        manifest.id,
        frame.schema["key"].dataType.json(),
        dict(asked.form.live),
        manifest.topology.operators[operator].time_mode,
        keys,
        as_of,
    )
    line = spark.createDataFrame([(msgspec.json.encode(about).decode(),)], "value string")
    line.coalesce(1).write.mode("error").text(f"{location}/about")
    return about


def about_export(spark: SparkSession, location: str) -> About:
    """What an export is; UserError if there is none, or not the whole of it."""
    location = location.rstrip("/")
    try:
        [line] = spark.read.text(f"{location}/about").collect()
        about = msgspec.json.decode(line.value, type=About)
    except (PySparkException, Py4JJavaError, ValueError, msgspec.DecodeError) as error:
        what = f"{location} is no whole export: {reason_of(error)}"
        raise UserError(what, expected="a location that `tiercel state export` has finished") from error
    if about.format != FORMAT:
        what = f"{location} has format {about.format}"
        raise UserError(what, expected=f"format {FORMAT}", hint="use the version that wrote it")
    return about


def exported(spark: SparkSession, location: str) -> KeptState:
    """The state that `tiercel state export` wrote, as `initial_state=` of an operator."""
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
    return KeptState(f"the export {location} of {about.operator!r}", form, frame)


def import_state(
    location: str, storage: str | Path, operator: str, *, spark: SparkSession | None = None
) -> int:
    """An export into a stopped deployment whose operator has no keys yet; returns how many it has then."""
    from tiercel.spark.state_source import key_columns

    manifest = Place(storage).manifest()
    if operator not in manifest.state:
        names = ", ".join(sorted(manifest.state)) or "(none says which state it has)"
        raise UserError(f"no operator {operator!r} in {storage}", expected=f"one of: {names}")
    spark = spark or open_session("tiercel")
    facts = {name: each for name, each in manifest.state[operator].items() if not each.deleted}
    declared = DeclaredState(tuple(_variable(name, each) for name, each in facts.items()))
    columns = image_columns(key_columns(manifest, operator))
    time_mode = manifest.topology.operators[operator].time_mode
    packed = exported(spark, location).packed(operator, declared, time_mode, columns, {})

    def state() -> Iterator[tuple[bytes, dict[str, Any], list[int]]]:
        for key, _, payload in packed.rows():
            values, timers = decode_image(decode_payload(payload)[-1])
            yield (
                key,
                {stored_name(name, facts[name].version): value for name, value in values.items()},
                timers,
            )

    return put_keys(storage, operator, state())


def _variable(name: str, facts: VariableFacts) -> Variable:
    keys = struct_of(facts.key_schema) if facts.key_schema else None
    return Variable(name, facts.kind, struct_of(facts.schema), keys, 1 if facts.ttl else None)
