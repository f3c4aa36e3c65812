"""Stateless transforms in front of a processor: map, filter, flat_map, union; and a processor without state.

Responsible for: the rows that a processor sees, made from the payloads of its inputs.
Not responsible for: calling the processor (processor_adapter.py), checking single values (rows/values.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import ArrayType, MapType, StructType

from tiercel.errors import UserError
from tiercel.spark.operators.plans import InputPlan, Transform
from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.rows.row_types import BadRow, in_order, misfit, row_maker
from tiercel.spark.rows.values import View

Rows = Iterator[Row]


def union_schema(inputs: Iterable[InputPlan]) -> StructType:
    """The columns that a processor of several inputs sees: all of them, by name; a missing one is null."""
    fields: dict[str, Any] = {}
    plans = [plan for plan in inputs if not plan.initial]
    for plan in plans:
        for field in plan.schema.fields:
            known = fields.setdefault(field.name, field)
            if known.dataType != field.dataType:
                what = (
                    f"column {field.name} is {known.dataType.simpleString()} in one input and "
                    f"{field.dataType.simpleString()} in another"
                )
                raise UserError(what, expected="one type", hint="rename or cast it with map")
    result = StructType()
    for name, field in fields.items():
        everywhere = all(name in plan.schema.names for plan in plans)
        result.add(name, field.dataType, field.nullable or not everywhere, field.metadata)
    return result


def with_broadcast(codec: RowCodec, control: RowCodec, suffix: str) -> RowCodec:
    """The columns of a stream, then those of a broadcast stream, which may be null."""
    schema = StructType(list(codec.schema.fields))
    taken = {name.lower() for name in schema.names}
    for field in control.schema.fields:
        name = field.name + suffix if field.name.lower() in taken else field.name
        if name.lower() in {known.lower() for known in schema.names}:
            raise UserError(
                f"broadcast: two columns {name!r}", expected="different names", hint="suffix='...'"
            )
        schema.add(name, field.dataType, True, field.metadata)
    return RowCodec(schema, codec.key, codec.event_time)


def plain_row(plan: InputPlan, seen: StructType) -> Callable[[Any], Row] | None:
    """The function that makes a row of a payload, if no transform changes it; else None."""
    codec = RowCodec(plan.codec.schema, view=View.INPUT)
    if plan.transforms or codec.names != seen.names:
        return None
    make, values = row_maker(codec.names), codec.values
    return make if codec.plain else lambda internal: make(values(internal))


def reader(plan: InputPlan, seen: StructType) -> Callable[[Iterator[Any]], Rows]:
    """The function that makes rows with the columns of `seen` from the payloads of this input."""
    codec = RowCodec(plan.codec.schema, view=View.INPUT)
    make = row_maker(codec.names)
    values = codec.values
    pipes = []
    schema = codec.schema
    for transform in plan.transforms:
        schema = transform.schema or schema
        pipes.append(_pipe(transform, schema))
    if schema.names != seen.names:
        pipes.append(_rearranged(schema.names, seen.names))

    def read(payloads: Iterator[Any]) -> Rows:
        rows: Rows = map(make, payloads if codec.plain else map(values, payloads))
        for pipe in pipes:
            rows = pipe(rows)
        return rows

    return read


def row_of_view(plan: InputPlan) -> Callable[[Any], Row | None]:
    """What filters and maps make of one payload, as a subscriber sees it; None if a filter drops it.

    The functions see rows as they do in front of a processor: structs are dicts there.
    """
    read, schema = reader(plan, plan.schema), plan.schema
    inner, outer = RowCodec(schema, view=View.INPUT), RowCodec(schema)
    make = row_maker(schema.names)
    nested = any(isinstance(f.dataType, StructType | MapType | ArrayType) for f in schema.fields)

    def see(payload: Any) -> Row | None:
        row = next(read(iter((payload,))), None)
        return make(outer.values(inner.payload(tuple(row)))) if row is not None and nested else row

    return see


def _pipe(transform: Transform, schema: StructType) -> Callable[[Rows], Rows]:
    function = transform.function
    name = getattr(function, "__name__", repr(function))
    codec = RowCodec(schema, view=View.INPUT, within=f"{transform.kind}({name})")
    make = row_maker(codec.names)

    def fit(result: Any) -> Row:
        ordered = in_order(result, codec.names, codec.within, schema.simpleString())
        return make(codec.values(codec.payload(tuple(ordered))))

    def mapped(rows: Rows) -> Rows:
        return (fit(function(row)) for row in rows)

    def filtered(rows: Rows) -> Rows:
        for row in rows:
            passes = function(row)
            if passes is None:
                raise misfit(codec.within, passes, "True or False", "does the function return something?")
            if passes:
                yield row

    def flattened(rows: Rows) -> Rows:
        for row in rows:
            made = function(row)
            if not isinstance(made, Iterable) or isinstance(made, str | bytes | dict | Row):
                raise BadRow(f"{codec.within} returned {made!r:.80}", expected="an iterable of rows")
            for one in made:
                yield fit(one)

    kinds: dict[str, Callable[[Rows], Rows]] = {"map": mapped, "filter": filtered, "flat_map": flattened}
    if transform.kind not in kinds:
        raise UserError(f"transform {transform.kind!r}", expected=f"one of: {', '.join(kinds)}")
    return kinds[transform.kind]


def _rearranged(have: list[str], want: list[str]) -> Callable[[Rows], Rows]:
    at = [have.index(name) if name in have else len(have) for name in want]
    make = row_maker(want)

    def rearrange(rows: Rows) -> Rows:
        for row in rows:
            padded = (*row, None)
            yield make([padded[n] for n in at])

    return rearrange


class Identity(StatefulProcessor):
    """A processor without state that emits each row: for streams that only get another key or a log."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """No state."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        return rows

    def close(self) -> None:
        """Nothing to release."""
