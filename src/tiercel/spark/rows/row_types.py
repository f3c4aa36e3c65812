"""The forms of a row: PySpark's `Row`s made cheaply, rows for folds, values by name or in order.

Responsible for: making rows; the values of a row in any form that users write; errors about rows that do
    not fit.
Not responsible for: the values themselves (values.py).
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import msgspec
from pyspark.sql import Row

from tiercel.errors import UserError

SHOWN_CHARACTERS_MAX = 80  # of a value in a message


class BadRow(UserError):
    """A value that does not fit its column: which column, which value, and what would have been right."""


def misfit(where: str, value: Any, expected: str, hint: str | None = None) -> BadRow:
    shown = repr(value)
    if len(shown) > SHOWN_CHARACTERS_MAX:
        shown = shown[:SHOWN_CHARACTERS_MAX] + "…"
    return BadRow(f"column {where}: {shown} ({type(value).__name__})", expected=expected, hint=hint)


def row_maker(fields: Sequence[str]) -> Callable[[Sequence[Any]], Row]:
    """Makes `Row`s with these columns out of their values.

    They are real `Row`s of a class with one descriptor per column, as a named tuple has: the descriptors read
    the tuple directly. `Row.__getitem__` is written in Python and ten times slower.
    """
    numbered = namedtuple("numbered", [f"column_{n}" for n in range(len(fields))])  # type: ignore[misc]
    columns = {name: vars(numbered)[f"column_{n}"] for n, name in enumerate(fields) if name not in dir(Row)}
    kind = type("Row", (Row,), {"__fields__": list(fields), **columns})
    return partial(tuple.__new__, kind)


class FastRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row as the step of a fold gets it: read like a `Row`, by name or by index, and made by the decoder.

    A `Row` would be made from a decoded tuple, which costs more than the decoding.
    """

    columns_: ClassVar[tuple[str, ...]] = ()

    def __getitem__(self, which: int | str) -> Any:
        return self.asDict()[which] if isinstance(which, str) else msgspec.structs.astuple(self)[which]

    def __iter__(self) -> Iterator[Any]:
        return iter(msgspec.structs.astuple(self))

    def __len__(self) -> int:
        return len(self.columns_)

    def asDict(self) -> dict[str, Any]:
        return dict(zip(self.columns_, self, strict=True))


def fast_row_type(names: Sequence[str]) -> type[FastRow]:
    """A type for rows with these columns. A column whose name is no attribute is read by name or by index."""
    fields = [
        (name if name.isidentifier() and name not in dir(FastRow) else f"column_{n}_", Any)
        for n, name in enumerate(names)
    ]
    own = {"columns_": tuple(names)}
    kind = msgspec.defstruct(
        "FastRow", fields, bases=(FastRow,), namespace=own, frozen=True, array_like=True, gc=False
    )
    return cast("type[FastRow]", kind)


def in_order(row: Any, names: list[str], where: str, expected: str) -> Sequence[Any]:
    """The values of a row in the order of its columns; by name where the row has names."""
    fields = getattr(row, "__fields__", None)
    if isinstance(row, Row) and fields is not None:
        if fields == names:
            return row
        row = dict(zip(fields, row, strict=False))
    prefix = f"{where}." if where else ""
    if isinstance(row, Mapping):
        missing = [name for name in names if name not in row]
        if missing:
            what = (
                f"column {prefix}{missing[0]} is missing; the row has: {', '.join(map(str, row)) or 'none'}"
            )
            raise BadRow(what, expected=expected)
        if len(row) != len(names):
            unknown = next(name for name in row if name not in names)
            raise BadRow(f"unknown column {prefix}{unknown}: {row[unknown]!r}", expected=expected)
        return [row[name] for name in names]
    if not isinstance(row, tuple | list):
        raise misfit(where or "*", row, f"a dict, a Row, or a sequence of: {', '.join(names)}")
    if len(row) != len(names):
        what = f"{where or 'the row'} has {len(row)} values: {row!r:.{SHOWN_CHARACTERS_MAX}}"
        raise BadRow(what, expected=f"{len(names)}: {', '.join(names)}")
    return row
