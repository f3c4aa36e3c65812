"""Rows of a stream with the columns of a table's row that has the same key.

Responsible for: the table's rows as keyed state, their changes, and the columns that a row gets.
Not responsible for: how the table comes in: as initial state, and changes as a second stream of its schema.

The table's rows are state like any other: they move with their keys, and a change takes effect at one
position of the log. Rows before it have the old columns, those behind it the new ones, also after a replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import Row
from pyspark.sql import types as t
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from tiercel.errors import UserError
from tiercel.operators.joins import AsSide
from tiercel.operators.plan import Plan
from tiercel.operators.values import (
    distinct_names,
    from_stored,
    key_fields,
    place_of,
    row_of,
    stored_type,
    to_stored,
)

ROW, TABLE = "row", "table"
HOW = ("left", "inner")


def plan_enrich(
    schema: t.StructType,
    key: Sequence[str],
    event_time: str,
    table: t.StructType,
    *,
    how: str = "left",
    suffix: str = "_table",
    changes: bool = False,
) -> Plan:
    """The columns of a row, then those of the table's row with its key; null, or no row at all, without one.

    With `changes`, rows come as the columns `row` and `table`, of which one is null (`sides`); both are null
    if the table's row is gone (`AsChange`).
    """
    what = "enrich"
    if how not in HOW:
        raise UserError(f"enrich how={how!r}", expected=f"one of: {', '.join(HOW)}")
    key_fields(schema, key, what)
    for name in key:
        if name not in table.names:
            raise UserError(
                f"enrich: the table has no column {name!r}",
                expected=f"the key of the stream, {', '.join(key)}, among: {', '.join(table.names)}",
                hint="key_by(...) gives the stream the key by which rows are looked up",
            )
        if table[name].dataType != schema[name].dataType:
            kinds = f"{schema[name].dataType.simpleString()} and {table[name].dataType.simpleString()}"
            raise UserError(f"enrich on {name}, which is {kinds}", expected="one type")
    added = t.StructType([field for field in table.fields if field.name not in key])
    if not added.fields:
        raise UserError("enrich: the table has no column but the key", expected="columns to add to rows")
    output = t.StructType(list(schema.fields))
    taken = {name.lower() for name in schema.names}
    for field in added.fields:
        output.add(field.name + suffix if field.name.lower() in taken else field.name, field.dataType)
    distinct_names(output.names, what, "give another suffix='...', or rename a column of the table")
    places = [place_of(table, name, what) for name in added.names]
    processor = Enriched(
        len(key), schema, table, places, output.names, keeps_all=how == "left", changes=changes
    )
    return Plan(what, processor, output, event_time=event_time)


def sides(key: Sequence[str], schema: t.StructType, table: t.StructType) -> tuple[AsSide, AsSide]:
    """How rows of the stream and changes of the table come to one operator."""
    return AsSide(key, schema, ROW), AsSide(key, table, TABLE)


class AsChange:
    """A function for `map`: the key, and the table's row as one struct; null if the row is gone."""

    def __init__(self, key: Sequence[str], table: t.StructType) -> None:
        self._places, self._columns = [table.names.index(name) for name in key], len(table.names)
        self.schema = t.StructType([table[name] for name in key]).add(TABLE, table)
        self.__name__ = "change of a table"

    def __call__(self, row: Any) -> tuple[Any, ...]:
        values = tuple(row)
        removed = values[self._columns]
        return (*[values[n] for n in self._places], None if removed else values[: self._columns])


class Enriched(StatefulProcessor):
    """Adds columns to rows. State: the table's row of the key."""

    def __init__(
        self,
        keys: int,
        schema: t.StructType,
        table: t.StructType,
        places: Sequence[int],
        names: Sequence[str],
        *,
        keeps_all: bool,
        changes: bool,
    ) -> None:
        self._keys, self._table, self._places = keys, table, list(places)
        self._keeps_all, self._changes = keeps_all, changes
        self._row = row_of(names)
        self._read, self._show_row = to_stored(schema), from_stored(schema)
        self._store, self._show = to_stored(table), from_stored(table)

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._known = handle.getValueState(TABLE, t.StructType().add("row", stored_type(self._table)))

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._known.update((self._store(tuple(initialState)),))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        found = self._known.get()
        for row in rows:
            given = row
            if self._changes:
                change, given = row[self._keys + 1], row[self._keys]
                if change is not None:
                    found = (self._store(change),)
                    self._known.update(found)
                    continue
                if given is None:  # the table has no such row any more
                    found = None
                    self._known.clear()
                    continue
                given = self._show_row(self._read(given))
            if found is not None:
                shown = self._show(found[0])
                yield self._row([*given, *[shown[n] for n in self._places]])
            elif self._keeps_all:
                yield self._row([*given, *[None] * len(self._places)])

    def close(self) -> None:
        """Nothing to release."""
