"""Enriched rows: they have the columns of the table's row as it was when they came, also after a move."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyspark.sql import types as t

from tiercel.operators import plan_enrich
from tiercel.operators.enrichment import AsChange, sides
from tiercel.spark.rows.ddl import parse_ddl
from tiercel.testing import Trial, check_deterministic

ROWS = parse_ddl("car string, speed double")
TABLE = parse_ddl("car string, owner string, speed double")


def both(row: tuple[Any, ...] | None = None, change: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
    """A row of the stream, or a change of the table, as the operator reads it."""
    return ((row or change or ("",))[0], row, change)


def trial_of(how: str = "left") -> Trial:
    plan = plan_enrich(ROWS, ["car"], "", TABLE, how=how, changes=True)
    return Trial(plan.processor, schema=seen(), key="car", output=plan.schema)


def seen() -> t.StructType:
    as_row, as_change = sides(("car",), ROWS, TABLE)
    return t.StructType([*as_row.schema.fields, as_change.schema.fields[-1]])


def test_rows_get_the_columns_of_the_table_as_it_is_then() -> None:
    trial = trial_of()
    trial.send(both(("a", 1.0)))
    trial.send(both(change=("a", "Ann", 9.0)))
    trial.send(both(("a", 2.0)))
    trial.move("a")
    trial.send(both(("a", 3.0)))
    trial.send(both(change=("a", "Bob", 8.0)))
    trial.crash()
    trial.send(both(("a", 4.0)))
    assert trial.outputs("a") == [
        ("a", 1.0, None, None),
        ("a", 2.0, "Ann", 9.0),
        ("a", 3.0, "Ann", 9.0),
        ("a", 4.0, "Bob", 8.0),
    ]
    assert trial.output.names == ["car", "speed", "owner", "speed_table"]


def test_an_inner_one_leaves_out_rows_that_the_table_does_not_know() -> None:
    trial = trial_of("inner")
    trial.send(both(("a", 1.0)), both(change=("a", "Ann", 9.0)), both(("a", 2.0)), both(("b", 2.0)))
    assert trial.outputs() == [("a", 2.0, "Ann", 9.0)]


def test_a_row_that_is_gone_from_the_table_gives_no_columns_any_more() -> None:
    for how, wanted in (
        ("left", [("a", 1.0, "Ann", 9.0), ("a", 2.0, None, None)]),
        ("inner", [("a", 1.0, "Ann", 9.0)]),
    ):
        trial = trial_of(how)
        trial.send(both(change=("a", "Ann", 9.0)), both(("a", 1.0)))
        trial.send(("a", None, None))
        trial.crash()
        trial.send(both(("a", 2.0)))
        assert trial.outputs("a") == wanted


def test_a_change_of_a_table_has_no_columns_if_the_row_is_gone() -> None:
    as_change = AsChange(("car",), TABLE)
    assert as_change(("a", "Ann", 9.0, False)) == ("a", ("a", "Ann", 9.0))
    assert as_change(("a", None, None, True)) == ("a", None)


def test_the_operator_is_deterministic() -> None:
    rows: Iterable[tuple[Any, ...]] = [
        both(change=("a", str(n), 1.0)) if n % 3 == 0 else both(("a", n / 4)) for n in range(12)
    ]
    plan = plan_enrich(ROWS, ["car"], "", TABLE, changes=True)
    check_deterministic(plan.processor, rows, schema=seen(), key="car", output=plan.schema)


def test_without_changes_rows_are_read_as_they_are() -> None:
    plan = plan_enrich(ROWS, ["car"], "", TABLE)
    trial = Trial(plan.processor, schema=ROWS, key="car", output=plan.schema)
    trial.send(("a", 1.0))
    assert trial.outputs() == [("a", 1.0, None, None)]
