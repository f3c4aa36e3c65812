"""Stateless work fused in front of a processor: map, filter, flat_map; and what an operator reads.

Responsible for: from an input's payloads to the rows that the processor sees.
Not responsible for: calling the processor (border.py), checking single values (conversion.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pyspark.sql import Row
from pyspark.sql.types import StructType

from tiercel.errors import UserError
from tiercel.spark.conversion import View
from tiercel.spark.rows import BadRow, in_order, misfit, row_maker
from tiercel.spark.schema import Columns

Kind = Literal["map", "filter", "flat_map"]
Rows = Iterator[Row]


@dataclass(frozen=True)
class Step:
    """One function of a row. `schema`: of what it makes; None: the same as of what it takes."""

    kind: Kind
    function: Callable[[Row], Any]
    schema: StructType | None = None


@dataclass(frozen=True)
class InputPlan:
    """One input of an operator: its columns, the steps in front, whether its rows are initial state."""

    columns: Columns
    steps: tuple[Step, ...] = ()
    initial: bool = False
    images: bool = False  # initial state as it is stored, not rows for handleInitialState

    @property
    def schema(self) -> StructType:
        """What comes out of the last step."""
        schemas = [step.schema for step in self.steps if step.schema is not None]
        return schemas[-1] if schemas else self.columns.schema

    @property
    def drops_rows(self) -> bool:
        return any(step.kind != "map" for step in self.steps)


def union(inputs: Iterable[InputPlan]) -> StructType:
    """What a processor of several inputs sees: all their columns, by name; a missing one is null."""
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


def plain_row(plan: InputPlan, seen: StructType) -> Callable[[Any], Row] | None:
    """One row out of one payload, if nothing happens to it in between; else None."""
    columns = Columns(plan.columns.schema, view=View.INPUT)
    if plan.steps or columns.names != seen.names:
        return None
    make, values = row_maker(columns.names), columns.values
    return make if columns.plain else lambda internal: make(values(internal))


def reader(plan: InputPlan, seen: StructType) -> Callable[[Iterator[Any]], Rows]:
    """Makes rows with the columns of `seen` out of payloads of this input."""
    columns = Columns(plan.columns.schema, view=View.INPUT)
    make = row_maker(columns.names)
    values = columns.values
    pipes = []
    schema = columns.schema
    for step in plan.steps:
        schema = step.schema or schema
        pipes.append(_pipe(step, schema))
    if schema.names != seen.names:
        pipes.append(_rearranged(schema.names, seen.names))

    def read(payloads: Iterator[Any]) -> Rows:
        rows: Rows = map(make, payloads if columns.plain else map(values, payloads))
        for pipe in pipes:
            rows = pipe(rows)
        return rows

    return read


def _pipe(step: Step, schema: StructType) -> Callable[[Rows], Rows]:
    function, name = step.function, getattr(step.function, "__name__", repr(step.function))
    columns = Columns(schema, view=View.INPUT, within=f"{step.kind}({name})")
    make = row_maker(columns.names)

    def fit(result: Any) -> Row:
        ordered = in_order(result, columns.names, columns.within, schema.simpleString())
        return make(columns.values(columns.payload(tuple(ordered))))

    def mapped(rows: Rows) -> Rows:
        return (fit(function(row)) for row in rows)

    def filtered(rows: Rows) -> Rows:
        for row in rows:
            kept = function(row)
            if kept is None:
                raise misfit(columns.within, kept, "True or False", "does the function return something?")
            if kept:
                yield row

    def flattened(rows: Rows) -> Rows:
        for row in rows:
            made = function(row)
            if not isinstance(made, Iterable) or isinstance(made, str | bytes | dict | Row):
                raise BadRow(f"{columns.within} gave {made!r:.80}", expected="an iterable of rows")
            for one in made:
                yield fit(one)

    kinds: dict[str, Callable[[Rows], Rows]] = {"map": mapped, "filter": filtered, "flat_map": flattened}
    if step.kind not in kinds:
        raise UserError(f"step {step.kind!r}", expected=f"one of: {', '.join(kinds)}")
    return kinds[step.kind]


def _rearranged(have: list[str], want: list[str]) -> Callable[[Rows], Rows]:
    at = [have.index(name) if name in have else len(have) for name in want]
    make = row_maker(want)

    def rearrange(rows: Rows) -> Rows:
        for row in rows:
            padded = (*row, None)
            yield make([padded[n] for n in at])

    return rearrange
