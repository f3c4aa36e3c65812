"""The schema of an operator's state: the names under which it is stored, the columns that show it.

Responsible for: facts about state variables, from what `init` declares; the state of a key as columns.
Not responsible for: changes of a schema (schema_evolution.py), reading and writing (sources/state_source.py,
    external_state.py).

A value is stored under its variable's name and the version of its schema: `average`, after a change
`average@2`. So a stored key says by itself which schema each of its values has, wherever it is stored or
sent, and code of one version never sees a value of another.

    key     struct of the key columns
    state   struct with a column per variable: a struct, an array or a map of structs; null: no value.
            With a time to live, each value is a struct<value, expiry_ms>
    timers  array of expiry times in ms

Values are stored as these columns in internal form (rows/row_codec.py), without a conversion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from pyspark.sql import types as t

from tiercel.core.model.keys import StateImage
from tiercel.errors import UserError
from tiercel.runtime.deployment import VariableFacts
from tiercel.spark.rows.values import to_internal
from tiercel.spark.state.declared_state import Variable

Facts = Mapping[str, VariableFacts]  # by variable
Content = Any  # a variable's value in internal form: a tuple, several of them, or pairs of them

_VERSIONED = re.compile(r"(.*)@(\d+)", re.DOTALL)

TIMERS = t.ArrayType(t.LongType(), containsNull=False)


def stored_name(variable: str, version: int) -> str:
    return variable if version == 1 else f"{variable}@{version}"


def variable_of(stored: str) -> tuple[str, int]:
    """The variable of a stored name, and the version of its schema."""
    found = _VERSIONED.fullmatch(stored)
    return (found[1], int(found[2])) if found else (stored, 1)


# -- facts --------------------------------------------------------------------------------------


def facts_of(variable: Variable) -> VariableFacts:
    """The facts of a variable that is declared for the first time."""
    if _VERSIONED.fullmatch(variable.name):
        raise UserError(
            f"state variable {variable.name!r}", expected="a name that does not end with @ and a number"
        )
    keys = "" if variable.key_schema is None else schema_text(variable.key_schema)
    return VariableFacts(variable.kind, schema_text(variable.schema), keys, variable.ttl_ms is not None)


def schema_text(schema: t.StructType) -> str:
    """PySpark's JSON of a schema, without metadata, which does not change how values are stored."""
    return msgspec.json.encode(_without_metadata(schema.jsonValue()), order="deterministic").decode()


def _without_metadata(value: Any) -> Any:
    if isinstance(value, dict):
        fields = {name: _without_metadata(each) for name, each in value.items() if name != "metadata"}
        return fields | {"metadata": {}} if "nullable" in fields else fields
    return [_without_metadata(each) for each in value] if isinstance(value, list) else value


def same_types(one: str, other: str) -> bool:
    """Whether two schemas differ at most in which fields may be null: values are stored alike."""
    return one.replace('"nullable":false', '"nullable":true') == other.replace(
        '"nullable":false', '"nullable":true'
    )


def struct_of(text: str) -> t.StructType:
    return t.StructType.fromJson(msgspec.json.decode(text))


def shown(text: str) -> str:
    """A schema in a message."""
    return struct_of(text).simpleString().removeprefix("struct<").removesuffix(">")


# -- columns ------------------------------------------------------------------------------------


def column_type(facts: VariableFacts) -> t.DataType:
    value: t.DataType = struct_of(facts.schema)
    if facts.ttl:
        value = t.StructType([t.StructField("value", value), t.StructField("expiry_ms", t.LongType())])
    match facts.kind:
        case "list":
            return t.ArrayType(value)
        case "map":
            return t.MapType(struct_of(facts.key_schema), value)
        case _:
            return value


@dataclass(frozen=True)
class StateForm:
    """One key's state as columns, and back."""

    key: t.StructType
    facts: Facts

    @property
    def live(self) -> dict[str, VariableFacts]:
        return {name: facts for name, facts in sorted(self.facts.items()) if not facts.deleted}

    @property
    def schema(self) -> t.StructType:
        fields = [t.StructField("key", self.key)]
        if self.live:
            columns = [t.StructField(name, column_type(facts)) for name, facts in self.live.items()]
            fields.append(t.StructField("state", t.StructType(columns)))
        return t.StructType([*fields, t.StructField("timers", TIMERS)])

    def columns(self, image: StateImage) -> tuple[Any, ...]:
        """In internal form; UserError if a value has another schema than these columns."""
        key = msgspec.msgpack.decode(image.key)
        timers = list(image.timers)
        if not self.live:
            return (key, timers)
        values = dict(image.values or {})
        state = [values.pop(stored_name(n, facts.version), (None, None))[1] for n, facts in self.live.items()]
        for name, version in map(variable_of, values):
            if name in self.live:
                raise UserError(
                    f"state variable {name!r} has values of version {version} of its schema",
                    expected=f"version {self.live[name].version}",
                    hint='layout "variables" shows values of every version',
                )
        return (key, state, timers)

    def reader(self) -> Callable[[Mapping[str, Any]], Images]:
        """A function from a row of these columns, as Arrow has it, to an image; BadRow if it does not fit."""
        readers = {n: to_internal(column_type(f), n, True) for n, f in self.live.items()}
        kinds = {name: facts.kind for name, facts in self.live.items()}

        def read(row: Mapping[str, Any]) -> Images:
            state = row.get("state") or {}
            values: dict[str, tuple[str, Content]] = {
                name: (kinds[name], content)
                for name, convert in readers.items()
                if (content := convert(state.get(name))) is not None and (content or kinds[name] == "value")
            }
            return values, sorted(row.get("timers") or ())

        return read


Images = tuple[dict[str, tuple[str, Content]], list[int]]  # values and timers, as an image has them


def single_values(kind: str, content: Content, convert: Callable[[Any], Any], ttl: bool) -> Content:
    """The same content with each single value converted; keys of maps and expiries stay."""
    one = (lambda stored: (convert(stored[0]), stored[1])) if ttl else convert
    match kind:
        case "list":
            return tuple(one(each) for each in content)
        case "map":
            return tuple((key, one(each)) for key, each in content)
        case _:
            return one(content)


def stored_values(image: StateImage) -> Iterator[tuple[str, int, str, Content]]:
    """(variable, version, kind, content) of all values of a key."""
    for stored, (kind, content) in (image.values or {}).items():
        yield *variable_of(stored), kind, content
