"""format("tiercel-state"): an operator's keyed state, as of the last checkpoints, as a DataFrame.

Responsible for: columns, one row per key and state variable (per entry of a map), a single key if asked.
Not responsible for: which copy of a key counts (runtime/stored_state.py).

    key          struct of the key columns, typed as in the operator's input
    variable     name of the state variable; null: the key has timers and nothing else
    map_key      JSON of the map's key, null unless it is a map
    value        JSON of the value's columns, or of the list of them
    timers       expiry times in ms
    slot, instance, epoch, offset      where it lies, and up to which log entry it is

JSON shows values as they are kept: times in microseconds, dates in days since 1970, decimals as text.
A variable with a time to live keeps each value as [value, expiry in ms], and so it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo, Filter, InputPartition

from tiercel.core.records import KeyImage
from tiercel.errors import UserError
from tiercel.runtime.place import Manifest, Place
from tiercel.runtime.stored_state import StoredKey, stored_keys
from tiercel.spark.options import Options
from tiercel.spark.schema import Columns

_COLUMNS = (
    t.StructField("variable", t.StringType()),
    t.StructField("map_key", t.StringType()),
    t.StructField("value", t.StringType()),
    t.StructField("timers", t.ArrayType(t.LongType(), containsNull=False)),
    t.StructField("slot", t.IntegerType()),
    t.StructField("instance", t.StringType()),
    t.StructField("epoch", t.LongType()),
    t.StructField("offset", t.LongType()),
)


class State(DataSource):
    """Options: storage, operator."""

    @classmethod
    def name(cls) -> str:
        return "tiercel-state"

    def _asked_for(self) -> tuple[Place, str, Columns]:
        options = Options(self.options, ("storage", "operator"))
        place = options.place()
        manifest = place.manifest()
        names = ", ".join(sorted(manifest.topology.operators))
        operator = options.needed("operator", f"one of: {names}")
        if operator not in manifest.topology.operators:
            what = f"no operator {operator!r} in {place.directory}"
            raise UserError(what, expected=f"one of: {names}")
        return place, operator, key_columns(manifest, operator)

    def schema(self) -> t.StructType:
        _, _, key = self._asked_for()
        return t.StructType([t.StructField("key", key.schema), *_COLUMNS])

    def reader(self, schema: t.StructType) -> DataSourceReader:
        return StateReader(*self._asked_for())


def key_columns(manifest: Manifest, operator: str) -> Columns:
    """The columns of an operator's keys.

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
                of_stream = Columns.of(facts)
                schema = t.StructType([of_stream.schema[name] for name in facts.key])
                return Columns(schema, facts.key)
            if facts.written_by:
                operator = facts.written_by
                break
    what = f"the key of operator {operator!r} has no columns"
    raise UserError(what, expected="an input stream with key columns")


class StateReader(DataSourceReader):
    """Reads the checkpoints of all instances of one operator, beside these instances."""

    def __init__(self, place: Place, operator: str, key: Columns) -> None:
        self._place, self._operator, self._key = place, operator, key
        self._wanted: dict[str, Any] = {}

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """With all key columns given, one key is looked up; Spark still checks every filter itself."""
        for condition in filters:
            if isinstance(condition, EqualTo) and condition.attribute[:1] == ("key",):
                self._wanted[condition.attribute[-1]] = condition.value
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(self._wanted_key())]

    def _wanted_key(self) -> bytes | None:
        names = self._key.names
        if self._wanted.keys() != set(names):
            return None
        try:
            return self._key.key_of([self._wanted[name] for name in names])
        except UserError:
            return None  # a literal of another type: Spark compares, we read everything

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        for stored in stored_keys(self._place, self._operator, partition.value):
            key = self._key.key_values(stored.key)
            for variable, map_key, value in variables(stored.image):
                yield (key, variable, map_key, value, *_whereabouts(stored))


def variables(image: KeyImage) -> Iterator[tuple[str | None, str | None, str | None]]:
    """(variable, map key, value) of everything a key holds, the latter two as JSON."""
    if not image.values:
        yield None, None, None
    for name, (kind, content) in sorted((image.values or {}).items()):
        if kind == "map":
            for map_key, value in content:
                yield name, _json(map_key), _json(value)
        else:
            yield name, None, _json(content)


def _json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()


def _whereabouts(stored: StoredKey) -> tuple[Any, ...]:
    return list(stored.image.timers), stored.slot, stored.instance, stored.image.epoch, stored.image.at
