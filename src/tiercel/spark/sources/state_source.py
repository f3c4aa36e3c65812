"""The format "tiercel-state": an operator's keyed state as a DataFrame, now or at a past time.

Responsible for: options, columns, which keys must be read for a filter.
Not responsible for: which stored version of a key counts (runtime/storage/state_reader.py), past times
    (runtime/backup/point_in_time.py).

    option     meaning
    storage    the deployment's directory; or only `backup`
    operator   its name
    layout     variables (default): a row per key and state variable (per entry of a map), values as JSON
               columns: a row per key, each variable a column with the types it was declared with
    asOf       a past time, or the number of a state in the backup (runtime/backup/point_in_time.py)
    backup     the location of a backup; with asOf the deployment's own, if it has one

    key          struct of the key columns, typed as in the operator's input
    variable     name of the state variable; null: the key has timers and nothing else
    map_key      JSON of the map's key, null unless it is a map
    value        JSON of the value's columns, or of the list of them
    state        in place of these three, with layout columns: state/schema.py
    timers       expiry times in ms
    slot, instance, epoch, offset      where it is stored, and up to which log entry

JSON shows values in stored form: times in microseconds, dates in days since 1970, decimals as text.
A variable with a time to live has each value as [value, expiry in ms].

Where a filter gives all key columns (=, <=> or IN), only these keys are read; Spark checks all filters again.
From a backup (asOf, backup, a deployment with `local`) whole instances are restored first, then read.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from pyspark.sql import types as t
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    In,
    InputPartition,
)

from tiercel.core.model.keys import Key, StateImage
from tiercel.errors import UserError
from tiercel.runtime.backup.location import Location
from tiercel.runtime.backup.point_in_time import LATEST, manifest_of_backup, numbers_as_of, processes_as_of
from tiercel.runtime.deployment import DeploymentDir, Manifest
from tiercel.runtime.recovery.read_only import readable_storage
from tiercel.runtime.storage.state_reader import StoredKey, keys_in
from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.sources.options import Options
from tiercel.spark.state.schema import StateForm, stored_values

if TYPE_CHECKING:
    import pyarrow

OPTIONS = ("storage", "operator", "layout", "asOf", "backup")
LAYOUTS = ("variables", "columns")
KEYS_MAX = 10_000  # of a filter; with more keys everything is read
BATCH_KEYS = 1_000  # in one Arrow batch

_VARIABLES = (
    t.StructField("variable", t.StringType()),
    t.StructField("map_key", t.StringType()),
    t.StructField("value", t.StringType()),
    t.StructField("timers", t.ArrayType(t.LongType(), containsNull=False)),
)
_LOCATION = (
    t.StructField("slot", t.IntegerType()),
    t.StructField("instance", t.StringType()),
    t.StructField("epoch", t.LongType()),
    t.StructField("offset", t.LongType()),
)


class StateQuery(NamedTuple):
    """Which state a DataFrame reads."""

    manifest: Manifest
    operator: str
    key: RowCodec
    deployment: DeploymentDir | None  # None: the state is read from a backup
    backup: str
    as_of: str
    layout: str

    @classmethod
    def of(cls, given: Mapping[str, str]) -> StateQuery:
        options = Options(given, OPTIONS)
        backup, as_of = options.text("backup"), options.text("asOf")
        storage = options.text("storage") or (not backup and options.needed("storage", "a storage directory"))
        deployment = DeploymentDir(storage) if storage else None
        manifest = deployment.manifest() if deployment is not None else manifest_of_backup(Location(backup))
        if as_of and not backup:
            if manifest.backup is None:
                raise UserError(
                    "option asOf of a deployment without a backup",
                    expected="option backup with the location of one",
                    hint="its own disk has the last checkpoint only",
                )
            backup = manifest.backup.location
        if deployment is not None and backup:
            found = manifest_of_backup(Location(backup))
            if found.id != manifest.id:
                what = f"{backup} holds the backup of another deployment ({found.id})"
                raise UserError(what, expected=f"the backup of {manifest.id}")
        names = ", ".join(sorted(manifest.topology.operators))
        operator = options.needed("operator", f"one of: {names}")
        if operator not in manifest.topology.operators:
            raise UserError(f"no operator {operator!r} in {storage or backup}", expected=f"one of: {names}")
        layout = options.choice("layout", LAYOUTS)
        key = key_codec(manifest, operator)
        return cls(manifest, operator, key, None if backup else deployment, backup, as_of or LATEST, layout)

    @property
    def form(self) -> StateForm:
        if self.operator not in self.manifest.state:
            what = f"the deployment does not say which state variables {self.operator!r} has"
            raise UserError(what, expected='layout "variables"', hint="start it once with this version")
        return StateForm(self.key.schema, self.manifest.state[self.operator])

    @property
    def schema(self) -> t.StructType:
        if self.layout == "columns":
            return t.StructType([*self.form.schema.fields, *_LOCATION])
        return t.StructType([t.StructField("key", self.key.schema), *_VARIABLES, *_LOCATION])

    def numbers(self) -> dict[str, int]:
        """For each instance, the number of its state in the backup."""
        return (
            {}
            if self.deployment
            else numbers_as_of(Location(self.backup), self.manifest, self.operator, self.as_of)
        )

    @contextlib.contextmanager
    def processes(self, numbers: Mapping[str, int]) -> Iterator[Path]:
        if self.deployment is not None:
            with readable_storage(self.deployment) as processes:
                yield processes
        else:
            with processes_as_of(Location(self.backup), self.manifest.id, numbers) as processes:
                yield processes

    def stored(self, numbers: Mapping[str, int], keys: Sequence[Key] | None = None) -> Iterator[StoredKey]:
        """The state of all keys, or of the given ones."""
        slots = self.manifest.topology.operator(self.operator).slots
        with self.processes(numbers) as processes:
            yield from keys_in(processes, self.operator, slots, keys)


class State(DataSource):
    """The module's docstring lists the options."""

    @classmethod
    def name(cls) -> str:
        return "tiercel-state"

    def schema(self) -> t.StructType:
        return StateQuery.of(self.options).schema

    def reader(self, schema: t.StructType) -> DataSourceReader:
        return StateReader(StateQuery.of(self.options))


def key_codec(manifest: Manifest, operator: str) -> RowCodec:
    """The codec of an operator's keys.

    Rows of a stream without a key of its own keep the key of the operator that emitted them.
    """
    seen: set[str] = set()
    while operator not in seen:
        seen.add(operator)
        for stream in manifest.topology.operators[operator].inputs:
            facts = manifest.streams.get(stream)
            if facts is None:
                continue
            if facts.key:
                of_stream = RowCodec.of(facts)
                schema = t.StructType([of_stream.schema[name] for name in facts.key])
                return RowCodec(schema, facts.key)
            if facts.written_by:
                operator = facts.written_by
                break
    what = f"the key of operator {operator!r} has no columns"
    raise UserError(what, expected="an input stream with key columns")


class Part(InputPartition):
    """The part that one task reads."""

    def __init__(self, numbers: Mapping[str, int], keys: Sequence[Key] | None) -> None:
        super().__init__(None)
        self.numbers, self.keys = dict(numbers), keys


class StateReader(DataSourceReader):
    """Reads the checkpoints of all instances of one operator, while they run or from a backup."""

    def __init__(self, query: StateQuery) -> None:
        self._query = query
        self._filters: dict[str, tuple[Any, ...]] = {}  # key column -> the values that filters let through

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """If filters give all key columns, only these keys are read.

        Spark still checks every filter itself.
        """
        for condition in filters:
            match condition:
                case EqualTo(("key", name), value) | EqualNullSafe(("key", name), value):
                    self._add_filter(name, (value,))
                case In(("key", name), values):
                    self._add_filter(name, values)
                case _:
                    pass
        return filters

    def _add_filter(self, name: str, values: Sequence[Any]) -> None:
        """Keep the condition with the fewest values of each column. Spark checks the others."""
        if name not in self._filters or len(values) < len(self._filters[name]):
            self._filters[name] = tuple(values)

    def partitions(self) -> Sequence[InputPartition]:
        return [Part(self._query.numbers(), self.requested_keys())]

    def requested_keys(self) -> list[Key] | None:
        """The keys that filters let through; None: it may be any key."""
        names = self._query.key.names
        if self._filters.keys() != set(names):
            return None
        choices = [self._filters[name] for name in names]
        if math.prod(len(values) for values in choices) > KEYS_MAX:
            return None
        try:
            return sorted({self._query.key.key_of(values) for values in itertools.product(*choices)})
        except UserError:
            return None  # a literal of another type: read everything, Spark compares

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Part)
        stored = self._query.stored(partition.numbers, partition.keys)
        return self._as_columns(stored) if self._query.layout == "columns" else self._as_variables(stored)

    def _as_variables(self, stored: Iterable[StoredKey]) -> Iterator[tuple[Any, ...]]:
        for each in stored:
            key, timers = self._query.key.key_values(each.key), list(each.image.timers)
            for variable, map_key, value in variables(each.image):
                yield (key, variable, map_key, value, timers, *_location(each))

    def _as_columns(self, stored: Iterable[StoredKey]) -> Iterator[pyarrow.RecordBatch]:
        form, columns = self._query.form, RowCodec(self._query.schema)
        rows = ((*form.columns(each.image), *_location(each)) for each in stored)
        while batch := list(itertools.islice(rows, BATCH_KEYS)):
            yield columns.arrow_batch(batch)


def variables(image: StateImage) -> Iterator[tuple[str | None, str | None, str | None]]:
    """(variable, map key, value) of all values of a key, the latter two as JSON."""
    if not image.values:
        yield None, None, None
    for name, _, kind, content in sorted(stored_values(image), key=lambda value: value[:2]):
        if kind == "map":
            for map_key, value in content:
                yield name, _json(map_key), _json(value)
        else:
            yield name, None, _json(content)


def _json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()


def _location(stored: StoredKey) -> tuple[Any, ...]:
    return stored.slot, stored.instance, stored.image.epoch, stored.image.at
