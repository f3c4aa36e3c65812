"""The codec of one stream's rows: a user's row in, the core's row out, and back.

Responsible for: checking rows against their schema, keys, event times, and the form of a payload.
Not responsible for: single types (conversion.py), who sends or reads the rows.

    user's row --pack--> (key, event time in ms, payload) --values--> what user code sees

Internally a row is the tuple of its columns in internal form, in the order of the schema; a payload is the
MessagePack of that. Nobody outside this module and border.py may rely on it. The checks are made into one
function per schema: most values cost one comparison (four flat columns: about a microsecond a row from a
dict, key included).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import Row
from pyspark.sql import types as t

from tiercel.core.runs import RUN, RUN_MARK, RUN_ROWS_MAX
from tiercel.errors import UserError
from tiercel.runtime.place import StreamFacts
from tiercel.spark.conversion import (
    View,
    already_internal,
    refuse_unsupported,
    to_arrow,
    to_internal,
    to_python,
)
from tiercel.spark.ddl import as_struct, parse_ddl
from tiercel.spark.rows import BadRow, in_order, misfit, row_maker

if TYPE_CHECKING:
    import pyarrow

CoreRow = tuple[bytes, int, Any]
Schema = t.StructType | str  # a StructType, or text such as "car string, speed double"
US_PER_MS = 1000
DEAD_LETTER_SCHEMA = "reason string, key binary, offset bigint, row binary"  # as core/engine.py makes them
# of rows that feeds refused: `offset` is the row's number in its partition of the batch, `row` is JSON
FEED_LETTER_SCHEMA = (
    "reason string, key binary, offset bigint, row string, feed string, batch bigint, partition int"
)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[Any, ...]).decode
_decode_run = msgspec.msgpack.Decoder(list[tuple[Any, ...]]).decode


def encode_payload(internal: Sequence[Any]) -> bytes:
    return _encode(internal)


def decode_payload(payload: Any) -> Sequence[Any]:
    """Columns in internal form; dead letters, which the core makes, are not encoded."""
    return _decode(payload) if type(payload) is bytes else payload


def encode_rows(rows: Sequence[Sequence[Any]]) -> list[bytes]:
    """Rows of one key as few payloads."""
    if len(rows) == 1:
        return [_encode(rows[0])]
    parts = [rows[n : n + RUN_ROWS_MAX] for n in range(0, len(rows), RUN_ROWS_MAX)]
    return [_encode(part[0]) if len(part) == 1 else RUN_MARK + _encode(part) for part in parts]


def decode_rows(payload: Any) -> Sequence[Sequence[Any]]:
    """The columns of each row of a payload: of one row, or of a run."""
    if type(payload) is bytes and payload[0] == RUN:
        return _decode_run(payload[1:])
    return (decode_payload(payload),)


def decode_payloads(payloads: Iterable[Any]) -> list[Sequence[Any]]:
    """The rows of many payloads, one after the other."""
    found: list[Sequence[Any]] = []
    for payload in payloads:
        if type(payload) is bytes and payload[0] == RUN:
            found += _decode_run(payload[1:])
        else:
            found.append(decode_payload(payload))
    return found


class Columns:
    """The columns of one stream, which of them are its key, and which is its event time."""

    # Functions made for this schema. They are attributes, because a method would add half to their cost.
    pack: Callable[[Mapping[str, Any] | Row | Sequence[Any]], CoreRow]  # BadRow if the row does not fit
    take: Callable[[Iterable[Any]], list[tuple[Any, ...]]]  # internal forms of such rows; BadRow likewise
    gather: Callable[[list[tuple[Any, ...]]], list[CoreRow]]  # of those: one by one, or in runs if they may
    payload: Callable[[Sequence[Any]], Any]  # internal form of values in the order of the columns; checked
    checked: Callable[[Sequence[Any]], tuple[Any, ...]]  # the same for a tuple, or a row in this order
    encoded: Callable[[Sequence[Any]], bytes]  # the payload of such values; checked
    unpack: Callable[[Any], Sequence[Any]]  # the values of a payload, as they are seen
    values: Callable[[Any], tuple[Any, ...]]  # of an internal form, as they are seen
    key_of_payload: Callable[[Any], bytes]
    time_of_payload: Callable[[Any], int]
    plain: bool  # values are seen as they travel

    def __init__(
        self,
        schema: Schema,
        key: Sequence[str] = (),
        event_time: str = "",
        *,
        view: View = View.ROW,
        within: str = "",
    ) -> None:
        """`view`: for whom; `within`: what the columns belong to, for messages about them."""
        self.schema = as_struct(schema)
        self.names: list[str] = list(self.schema.names)
        self.key = (key,) if isinstance(key, str) else tuple(key)
        self.event_time = event_time
        self.view = view
        self.plain = all(
            to_python(f.dataType, view) is None for f in self.schema.fields
        )  # nothing to convert
        self.within = within
        refuse_unsupported(self.schema, within)
        self._check_key_and_time()
        self._build()

    @classmethod
    def of(cls, facts: StreamFacts) -> Columns:
        schema = t.StructType.fromJson(msgspec.json.decode(facts.schema))
        return cls(schema, facts.key, facts.event_time)

    def key_alone(self) -> Columns:
        """The key columns by themselves, in the order of the key."""
        return Columns(t.StructType([self.schema[name] for name in self.key]), self.key, view=self.view)

    def __reduce__(self) -> tuple[Any, ...]:
        return _columns, (self.schema, self.key, self.event_time, self.view, self.within)

    def __repr__(self) -> str:
        return f"Columns({self.schema.simpleString()}, key={self.key}, event_time={self.event_time!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Columns) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash((self.schema.json(), self.key, self.event_time))

    def _check_key_and_time(self) -> None:
        named = [(name, "key") for name in self.key]
        named += [(self.event_time, "event time")] if self.event_time else []
        for name, role in named:
            if name not in self.names:
                what = f"{role} column {name!r} is not in the schema"
                hint = "name one of these, or add it to the schema"
                raise UserError(what, expected=f"one of its columns: {', '.join(self.names)}", hint=hint)
        if len(set(self.key)) != len(self.key):
            raise UserError(f"key {self.key}", expected="each column once")
        for name in self.key:
            if _holds_map(self.schema[name].dataType):
                what = f"key column {name!r}: {self.schema[name].dataType.simpleString()}"
                raise UserError(what, expected="a type without maps: equal maps have no common form")
        if self.event_time:
            kind = self.schema[self.event_time].dataType
            if not isinstance(kind, t.TimestampType | t.TimestampNTZType):
                what = f"event time column {self.event_time!r}: {kind.simpleString()}"
                raise UserError(what, expected="timestamp or timestamp_ntz")

    # -- one row -----------------------------------------------------------------------------

    def key_of(self, values: Sequence[Any]) -> bytes:
        return self.key_of_payload(self.payload(values))

    def key_values(self, key: bytes) -> tuple[Any, ...]:
        """The key columns of a key as user code sees them."""
        return self._key_values(_decode(key))

    # -- many rows ---------------------------------------------------------------------------

    def pack_all(self, rows: Iterable[Any]) -> tuple[list[CoreRow], list[tuple[int, Any, BadRow]]]:
        """Those that fit, in order, and those that do not, each with its place and the reason."""
        pack = self.pack
        rows = list(rows)
        with contextlib.suppress(BadRow):  # nearly always all of them fit
            return list(map(pack, rows)), []
        packed: list[CoreRow] = []
        refused: list[tuple[int, Any, BadRow]] = []
        for n, row in enumerate(rows):
            try:
                packed.append(pack(row))
            except BadRow as reason:
                refused.append((n, row, reason))
        return packed, refused

    def arrow_batch(self, payloads: Sequence[Any]) -> pyarrow.RecordBatch:
        """These rows as Spark takes them from a data source."""
        import pyarrow
        from pyspark.sql.pandas.types import to_arrow_schema

        schema = to_arrow_schema(self.schema, timezone="UTC")
        arrays = []
        rows = decode_payloads(payloads)
        columns = zip(*rows, strict=True) if payloads else [()] * len(self.names)
        for column, field, convert in zip(columns, schema, self._arrow, strict=True):
            converted = column if convert is None else [None if v is None else convert(v) for v in column]
            arrays.append(pyarrow.array(converted, type=field.type))
        return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)

    # -- the functions made for this schema --------------------------------------------------

    def _build(self) -> None:
        fields = self.schema.fields
        self._arrow = [to_arrow(f.dataType) for f in fields]
        self._shown = self.schema.simpleString()  # for messages; making it takes longer than packing a row
        self.values = _restorer([f.dataType for f in fields], self.view)
        values = self.values
        self.unpack = decode_payload if self.plain else lambda payload: values(decode_payload(payload))
        self._key_values = _restorer([self.schema[name].dataType for name in self.key], self.view)
        at = {name: n for n, name in enumerate(self.names)}
        prefix = f"{self.within}." if self.within else ""
        scope: dict[str, Any] = {
            f"c{n}": to_internal(f.dataType, prefix + f.name, f.nullable, self.view)
            for n, f in enumerate(fields)
        }
        take, _ = self.test_of("v")
        checks = [_check(n, f) for n, f in enumerate(fields)]
        scope |= {"encode": _encode, "no_time": self._no_time, "same_zero": _same_zero}
        scope |= {"in_order": self.in_order, "positional": self._positional}
        scope |= {"encode_rows": encode_rows, "defaultdict": defaultdict}
        key = [
            f"same_zero(v{at[name]})" if _holds_float(self.schema[name].dataType) else f"v{at[name]}"
            for name in self.key
        ]
        time = f"v{at[self.event_time]}" if self.event_time else ""
        timing = [f"if {time} is None or {time} < 0: no_time({time})"] if time else []
        ms = f"{time} // {US_PER_MS}" if time else "0"
        made = f"encode(({''.join(part + ', ' for part in key)}))"
        taking = [f"try: {take} = row", f"except ValueError: {take} = in_order(row)"]
        given = [
            f"if type(row) is tuple and len(row) == {len(fields)}:",
            f"  {take} = row",
            f"elif type(row) is dict and len(row) == {len(fields)}:",
            "  try:",
            *[f"    v{n} = row[{name!r}]" for n, name in enumerate(self.names)],
            "  except KeyError:",
            f"    {take} = in_order(row)",
            "else:",
            f"  {take} = in_order(row)",
            *checks,
            *timing,
        ]
        single = f"({made}, {ms}, encode(({take})))"
        source = [
            *_function(
                "payload",
                "row",
                [
                    "if type(row) is not tuple: row = positional(row)",
                    *taking,
                    *checks,
                    f"return ({take})",
                ],
            ),
            *_function("checked", "row", [*taking, *checks, f"return ({take})"]),
            *_function("encoded", "row", [*taking, *checks, f"return encode(({take}))"]),
            *_function("key", "row", [f"{take} = row", f"return {made}"]),
            *_function("time", "row", [f"{take} = row", *timing, f"return {ms}"]),
            *_function("pack", "row", [*given, f"return {single}"]),
            *_function(
                "take",
                "rows",
                [
                    "taken = []",
                    "add = taken.append",
                    "for row in rows:",
                    *["  " + line for line in (*given, f"add(({take}))")],
                    "return taken",
                ],
            ),
            *_function("gather", "rows", _gathering(take, key, single if time else "")),
        ]
        exec(compiled("\n".join(source)), scope)
        self.payload, self.pack = scope["payload"], scope["pack"]
        self.take, self.gather = scope["take"], scope["gather"]
        self.checked, self.encoded = scope["checked"], scope["encoded"]
        self.key_of_payload, self.time_of_payload = scope["key"], scope["time"]

    def test_of(self, letter: str) -> tuple[str, str]:
        """For code made of this schema: the columns as variables, and what is true if all are internal.

        Where no such test exists it says False: then `payload` has to look at them.
        """
        variables = [f"{letter}{n}" for n in range(len(self.names))]
        fits = [already_internal(f.dataType) for f in self.schema.fields]
        tests = [f"({fit.format(v=v)})" for fit, v in zip(fits, variables, strict=True)]
        return ", ".join(variables) + ",", " and ".join(tests) if all(fits) else "False"

    def in_order(self, row: Any) -> Sequence[Any]:
        return in_order(row, self.names, self.within, self._shown)

    def _positional(self, row: Any) -> tuple[Any, ...]:
        if isinstance(row, Mapping | str | bytes) or not isinstance(row, Iterable):
            raise misfit(self.within or "*", row, f"a sequence of: {', '.join(self.names)}")
        return tuple(row)

    def _no_time(self, value: int | None) -> None:
        shown = None if value is None else self._values_of_time(value)
        raise misfit(self.event_time, shown, "an event time from 1970 on: it orders the rows")

    def _values_of_time(self, value: int) -> Any:
        convert = to_python(self.schema[self.event_time].dataType)
        assert convert is not None
        return convert(value)


def _columns(schema: t.StructType, key: Any, event_time: str, view: View, within: str) -> Columns:
    """Columns as they are unpickled: the functions made for them are made again."""
    return Columns(schema, key, event_time, view=view, within=within)


@functools.lru_cache(maxsize=256)  # every process of a trial makes the same functions again
def compiled(source: str) -> CodeType:
    """Source made of numbers and quoted names only."""
    return compile(source, "<columns>", "exec")


def _function(name: str, argument: str, lines: list[str]) -> list[str]:
    return [f"def {name}({argument}):", *["  " + line for line in lines]]


def _gathering(take: str, key: list[str], single: str) -> list[str]:
    """Rows of one key together; `single`: each by itself, for the log looks at its time."""
    if single:
        return [f"return [{single} for {take} in rows]"]
    alone = len(key) == 1  # then no tuple is made for each row
    return [
        "by_key = defaultdict(list)",
        "for row in rows:",
        f"  {take} = row",
        f"  by_key[{key[0] if alone else '(' + ''.join(part + ', ' for part in key) + ')'}].append(row)",
        f"return [(encode({'(key,)' if alone else 'key'}), 0, payload)",
        "  for key, of_key in by_key.items() for payload in encode_rows(of_key)]",
    ]


def _check(n: int, field: t.StructField) -> str:
    """The line that checks and converts one column."""
    fits = already_internal(field.dataType).format(v=f"v{n}")
    if fits:
        return f"if not ({fits}): v{n} = c{n}(v{n})"
    return f"v{n} = c{n}(v{n})"


def _restorer(kinds: list[t.DataType], view: View) -> Callable[[Any], tuple[Any, ...]]:
    """From internal forms to what user code sees; free where they are the same."""
    converts = {n: convert for n, kind in enumerate(kinds) if (convert := to_python(kind, view)) is not None}
    if not converts:
        return tuple
    scope: dict[str, Any] = {f"c{n}": convert for n, convert in converts.items()}
    take = ", ".join(f"v{n}" for n in range(len(kinds))) + ","
    lines = [f"if v{n} is not None: v{n} = c{n}(v{n})" for n in converts]
    restore = _function("restore", "row", [f"{take} = row", *lines, f"return ({take})"])
    exec(compiled("\n".join(restore)), scope)
    return scope["restore"]  # type: ignore[no-any-return]


def _holds_map(kind: t.DataType) -> bool:
    match kind:
        case t.MapType():
            return True
        case t.ArrayType():
            return _holds_map(kind.elementType)
        case t.StructType():
            return any(_holds_map(f.dataType) for f in kind.fields)
        case _:
            return False


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


def _same_zero(value: Any) -> Any:
    """0.0 and -0.0 are one key, and every NaN is, as in Spark."""
    if type(value) is float:
        return math.nan if value != value else value + 0.0
    return tuple(map(_same_zero, value)) if type(value) in (tuple, list) else value


__all__ = [
    "DEAD_LETTER_SCHEMA",
    "BadRow",
    "Columns",
    "Schema",
    "as_struct",
    "decode_payload",
    "decode_payloads",
    "decode_rows",
    "encode_payload",
    "encode_rows",
    "parse_ddl",
    "row_maker",
]
