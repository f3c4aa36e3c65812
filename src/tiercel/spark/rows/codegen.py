"""The code generator of row codecs: source text for one schema, compiled to functions.

Responsible for: the generated functions, so that most values cost one comparison and no call (four flat
    columns: about a microsecond a row from a dict, key included).
Not responsible for: what the functions are used for (row_codec.py), single types (values.py).

No `def` of these functions exists in any file. `row_functions` builds their source; a `RowCodec` has them as
attributes:

    pack(row)      -> (key, event time in ms, payload) of one row, and its number if devices number rows
    take(rows)     -> internal forms of rows as users write them: dicts, Rows, tuples
    gather(rows)   -> of internal forms: rows of the core, those of one key joined to row batches
    keys(rows)     -> of internal forms: their keys
    times(rows)    -> their event times in ms; none, if the stream has none
    key_parts(rows) -> their key columns, to see which rows have the same key
    payload(row)   -> the internal form of values in the order of the columns
    checked(row)   -> the same for a tuple, or a row in this order
    encoded(row)   -> the payload of such values
    key(row)       -> the key of an internal form
    time(row)      -> its event time in ms

Every function that takes a user's row raises BadRow if the row does not fit. In the source, the columns are
the variables v0, v1, ..., and c0, c1, ... are the functions that check and convert a value
(values.to_internal).
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

from pyspark.sql import types as t

from tiercel.spark.rows.values import View, already_internal, to_python

US_PER_MS = 1000

CoreRow = tuple[bytes, int, Any]


class RowFunctions(NamedTuple):
    """The functions generated for one schema; the module's docstring says what each does."""

    pack: Callable[[Any], CoreRow]
    take: Callable[[Iterable[Any]], list[tuple[Any, ...]]]
    gather: Callable[[list[tuple[Any, ...]]], list[CoreRow]]
    keys: Callable[[list[tuple[Any, ...]]], list[bytes]]
    times: Callable[[list[tuple[Any, ...]]], list[int]]
    key_parts: Callable[[list[tuple[Any, ...]]], list[Any]]
    payload: Callable[[Sequence[Any]], Any]
    checked: Callable[[Sequence[Any]], tuple[Any, ...]]
    encoded: Callable[[Sequence[Any]], bytes]
    key: Callable[[Any], bytes]
    time: Callable[[Any], int]


def row_functions(
    schema: t.StructType, key: Sequence[str], event_time: str, scope: Mapping[str, Any], sequence: str = ""
) -> RowFunctions:
    """The functions for these columns.

    `scope` has what they call: c0, c1, ..., encode, encode_rows, in_order, positional, no_time and no_number.
    """
    fields = schema.fields
    at = {name: n for n, name in enumerate(schema.names)}
    row, _ = column_test(fields, "v")
    checks = [_check(n, field) for n, field in enumerate(fields)]
    keys = [
        f"same_zero(v{at[name]})" if _holds_float(schema[name].dataType) else f"v{at[name]}" for name in key
    ]
    encoded_key = f"encode(({''.join(part + ', ' for part in keys)}))"
    time = f"v{at[event_time]}" if event_time else ""
    check_time = [f"if {time} is None or {time} < 0: no_time({time})"] if time else []
    number = f"v{at[sequence]}" if sequence else ""
    check_time += [f"if {number} is None: no_number({number})"] if number else []
    ms = f"{time} // {US_PER_MS}" if time else "0"
    packed = f"({encoded_key}, {ms}, encode(({row})){', ' + number if number else ''})"
    in_order = [f"try: {row} = row", f"except ValueError: {row} = in_order(row)"]
    by_name = [*_by_name(row, schema.names), *checks, *check_time]
    source = [
        *_function(
            "payload",
            "row",
            ["if type(row) is not tuple: row = positional(row)", *in_order, *checks, f"return ({row})"],
        ),
        *_function("checked", "row", [*in_order, *checks, f"return ({row})"]),
        *_function("encoded", "row", [*in_order, *checks, f"return encode(({row}))"]),
        *_function("key", "row", [f"{row} = row", f"return {encoded_key}"]),
        *_function("time", "row", [f"{row} = row", *check_time, f"return {ms}"]),
        *_function("pack", "row", [*by_name, f"return {packed}"]),
        *_function("take", "rows", _take(row, by_name)),
        *_function("gather", "rows", _gather(row, keys, packed if time or number else "")),
        *_function("keys", "rows", [f"return [{encoded_key} for {row} in rows]"]),
        *_function("times", "rows", [f"return [{ms} for {row} in rows]" if time else "return []"]),
        *_function("key_parts", "rows", [f"return [{_tuple_of(keys)} for {row} in rows]"]),
    ]
    made = {**scope, "same_zero": same_zero, "defaultdict": defaultdict}
    exec(compile_source("\n".join(source)), made)
    return RowFunctions(**{name: made[name] for name in RowFunctions._fields})


def restorer(kinds: list[t.DataType], view: View) -> Callable[[Any], tuple[Any, ...]]:
    """A function from internal forms to what user code sees; `tuple` itself where they are the same."""
    converts = {n: convert for n, kind in enumerate(kinds) if (convert := to_python(kind, view)) is not None}
    if not converts:
        return tuple
    scope: dict[str, Any] = {f"c{n}": convert for n, convert in converts.items()}
    row = ", ".join(f"v{n}" for n in range(len(kinds))) + ","
    lines = [f"if v{n} is not None: v{n} = c{n}(v{n})" for n in converts]
    restore = _function("restore", "row", [f"{row} = row", *lines, f"return ({row})"])
    exec(compile_source("\n".join(restore)), scope)
    return scope["restore"]  # type: ignore[no-any-return]


def column_test(fields: Sequence[t.StructField], prefix: str) -> tuple[str, str]:
    """Source text: the columns as variables, and a condition that is true if all are in internal form.

    The condition is False where no such test exists: then a function has to check the values.
    """
    variables = [f"{prefix}{n}" for n in range(len(fields))]
    fits = [already_internal(field.dataType) for field in fields]
    tests = [f"({fit.format(v=v)})" for fit, v in zip(fits, variables, strict=True)]
    return ", ".join(variables) + ",", " and ".join(tests) if all(fits) else "False"


@functools.lru_cache(maxsize=256)  # every process of a trial generates the same functions again
def compile_source(source: str) -> CodeType:
    """Compiles source that consists of numbers and quoted names only."""
    return compile(source, "<columns>", "exec")


# -- parts of the source ---------------------------------------------------------------------


def _function(name: str, argument: str, lines: list[str]) -> list[str]:
    return [f"def {name}({argument}):", *["  " + line for line in lines]]


def _by_name(row: str, names: list[str]) -> list[str]:
    """From a user's row to variables: tuples and dicts directly, everything else by `in_order`."""
    return [
        f"if type(row) is tuple and len(row) == {len(names)}:",
        f"  {row} = row",
        f"elif type(row) is dict and len(row) == {len(names)}:",
        "  try:",
        *[f"    v{n} = row[{name!r}]" for n, name in enumerate(names)],
        "  except KeyError:",
        f"    {row} = in_order(row)",
        "else:",
        f"  {row} = in_order(row)",
    ]


def _check(n: int, field: t.StructField) -> str:
    """The line that checks and converts one column."""
    fits = already_internal(field.dataType).format(v=f"v{n}")
    if fits:
        return f"if not ({fits}): v{n} = c{n}(v{n})"
    return f"v{n} = c{n}(v{n})"


def _take(row: str, by_name: list[str]) -> list[str]:
    return [
        "taken = []",
        "add = taken.append",
        "for row in rows:",
        *["  " + line for line in (*by_name, f"add(({row}))")],
        "return taken",
    ]


def _gather(row: str, key: list[str], packed: str) -> list[str]:
    """Joins rows of one key. With `packed` each row stays alone: the log reads its event time or number."""
    if packed:
        return [f"return [{packed} for {row} in rows]"]
    alone = len(key) == 1
    return [
        "by_key = defaultdict(list)",
        "for row in rows:",
        f"  {row} = row",
        f"  by_key[{_tuple_of(key)}].append(row)",
        f"return [(encode({'(key,)' if alone else 'key'}), 0, payload)",
        "  for key, of_key in by_key.items() for payload in encode_rows(of_key)]",
    ]


def _tuple_of(parts: list[str]) -> str:
    """One part is itself: then no tuple is made for each row."""
    return parts[0] if len(parts) == 1 else "(" + "".join(part + ", " for part in parts) + ")"


def _holds_float(kind: t.DataType) -> bool:
    match kind:
        case t.FloatType() | t.DoubleType():
            return True
        case t.ArrayType():
            return _holds_float(kind.elementType)
        case t.StructType():
            return any(_holds_float(f.dataType) for f in kind.fields)
        case _:
            return False


def same_zero(value: Any) -> Any:
    """As in Spark, 0.0 and -0.0 are one key, and every NaN is."""
    if type(value) is float:
        return math.nan if value != value else value + 0.0
    return tuple(map(same_zero, value)) if type(value) in (tuple, list) else value
