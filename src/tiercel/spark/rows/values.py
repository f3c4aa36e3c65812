"""Values of Spark's types in two forms: as user code sees them, and as they are sent and stored.

Responsible for: per type, whether a Python value fits, its internal form, and the conversion back.
Not responsible for: rows, keys and columns (row_codec.py, row_types.py), schemas written as text (ddl.py).

    type                     a row has                       internal form (MessagePack has it)
    timestamp                datetime, aware, in UTC         microseconds since 1970
    timestamp_ntz            datetime, naive                 microseconds since 1970
    date                     date                            days since 1970
    decimal                  Decimal of that scale           str
    array, map, struct       list, dict, Row                 tuple, tuple of pairs, tuple
    all others               str, bytes, bool, int, float    the same

PySpark 4.3 shows user code the same value in different forms, and Tiercel does the same (`View`): input
rows of a processor hold structs as dicts and maps as lists of pairs; state holds timestamps without a zone,
in the zone of the process.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import operator
import struct
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import types as t

from tiercel.errors import UserError
from tiercel.spark.rows.row_types import in_order, misfit, row_maker

Convert = Callable[[Any], Any]

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_EPOCH_NAIVE = datetime.datetime(1970, 1, 1)  # noqa: DTZ001  timestamp_ntz has no zone
_EPOCH_DAY = datetime.date(1970, 1, 1).toordinal()
_MICROSECOND = datetime.timedelta(microseconds=1)
_FIRST_US = (datetime.datetime.min.replace(tzinfo=datetime.UTC) - _EPOCH) // _MICROSECOND
_LAST_US = (datetime.datetime.max.replace(tzinfo=datetime.UTC) - _EPOCH) // _MICROSECOND
_EXACT = decimal.Context(prec=78, traps=[decimal.Inexact, decimal.InvalidOperation])
_BITS: dict[type[t.DataType], int] = {t.ByteType: 8, t.ShortType: 16, t.IntegerType: 32, t.LongType: 64}
_SHORT_INT = 1 << 30  # ints below it are one digit inside CPython
_SINGLE = struct.Struct("<f")  # the native form turns values that are too large into infinities


class View(enum.Enum):
    """Where a value is seen."""

    ROW = "row"  # structs are Rows, maps dicts: what collect() gives
    INPUT = "input"  # structs are dicts, maps lists of pairs: what handleInputRows is given
    STATE = "state"  # as ROW, but timestamps are naive, in the zone of the process


SUPPORTED = (
    "string, binary, boolean, tinyint, smallint, int, bigint, float, double, decimal, date, timestamp, "
    "timestamp_ntz, array, map, struct"
)


def refuse_unsupported(kind: t.DataType, where: str) -> None:
    """Refuse a column of a type that no stream can carry, when the stream is declared."""
    match kind:
        case t.ArrayType():
            refuse_unsupported(kind.elementType, f"{where}[]")
        case t.MapType():
            refuse_unsupported(kind.keyType, f"{where}.key")
            refuse_unsupported(kind.valueType, f"{where}.value")
            if isinstance(kind.keyType, t.ArrayType | t.MapType):
                what = f"column {where}: a map with keys of type {kind.keyType.simpleString()}"
                raise UserError(what, expected="keys that Python can look up: anything but arrays and maps")
        case t.StructType():
            if not kind.fields:
                raise UserError(f"{where or 'a schema'}: no columns", expected="at least one column")
            seen: dict[str, str] = {}
            for field in kind.fields:
                path = f"{where}.{field.name}" if where else field.name
                if field.name.lower() in seen:
                    what = f"column {path} is there twice ({seen[field.name.lower()]}, {field.name})"
                    raise UserError(what, expected="names that differ in more than upper and lower case")
                seen[field.name.lower()] = field.name
                refuse_unsupported(field.dataType, path)
        case t.StringType() if kind.collation not in (None, "UTF8_BINARY"):
            raise UserError(
                f"column {where}: collation {kind.collation}", expected="string without collation"
            )
        case _ if type(kind) in _CHECKS:
            pass
        case _:
            what = f"column {where}: type {kind.simpleString()}"
            raise UserError(what, expected=f"one of: {SUPPORTED}", hint="cast the column before it is sent")


# -- Python -> internal ------------------------------------------------------------------------


def already_internal(kind: t.DataType) -> str:
    """An expression that is true for values `v` that need neither a check nor a conversion; or an empty text.

    codegen.py inlines it, so that most values cost one comparison.
    """
    match kind:
        case t.StringType():
            return "type({v}) is str and {v}.isascii()"  # others may hold half a surrogate pair
        case t.BinaryType():
            return "type({v}) is bytes"
        case t.BooleanType():
            return "type({v}) is bool"
        case t.DoubleType():
            return "type({v}) is float"
        case _ if (limit := int_limit(kind)) is not None:
            if limit > _SHORT_INT:  # Python compares short ints faster, and most are short
                short = f"{-_SHORT_INT} < {{v}} < {_SHORT_INT}"
                return f"type({{v}}) is int and ({short} or {-limit} <= {{v}} < {limit})"
            return f"type({{v}}) is int and {-limit} <= {{v}} < {limit}"
        case _:
            return ""


def int_limit(kind: t.DataType) -> int | None:
    """The first number above the range of an integer type; None for other types."""
    bits = _BITS.get(type(kind))
    return None if bits is None else 1 << (bits - 1)


def to_internal(kind: t.DataType, where: str, nullable: bool, view: View = View.ROW) -> Convert:
    """A function that returns a value's internal form, and raises BadRow if the value does not fit."""
    check = _CHECKS[type(kind)](kind, where, view)
    if nullable:
        return lambda value: None if value is None else check(value)
    expected = f"{kind.simpleString()} not null"

    def not_null(value: Any) -> Any:
        if value is None:
            raise misfit(where, value, expected)
        return check(value)

    return not_null


def _string(kind: t.DataType, where: str, view: View) -> Convert:
    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise misfit(where, value, "string")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise misfit(where, value, "text that UTF-8 can hold") from error
        return str(value)

    return check


def _binary(kind: t.DataType, where: str, view: View) -> Convert:
    def check(value: Any) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise misfit(where, value, "binary: bytes")
        return bytes(value)

    return check


def _boolean(kind: t.DataType, where: str, view: View) -> Convert:
    def check(value: Any) -> bool:
        if type(value) is bool:
            return value
        if type(value).__name__ in ("bool_", "bool") and type(value).__module__ == "numpy":
            return bool(value)
        raise misfit(where, value, "boolean")

    return check


def _integer(kind: t.DataType, where: str, view: View) -> Convert:
    bits, name = _BITS[type(kind)], kind.simpleString()
    first, last = -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    def check(value: Any) -> int:
        if type(value) is not int:
            if isinstance(value, bool) or not hasattr(type(value), "__index__"):
                raise misfit(where, value, name)
            value = operator.index(value)
        if not first <= value <= last:
            raise misfit(where, value, f"{name}: {first} to {last}")
        return int(value)

    return check


def _double(kind: t.DataType, where: str, view: View) -> Convert:
    def check(value: Any) -> float:
        if isinstance(value, float):
            return float(value)
        if isinstance(value, bool) or not hasattr(type(value), "__index__"):
            if type(value).__module__ == "numpy" and type(value).__name__ in ("float32", "float16"):
                return float(value)
            raise misfit(where, value, kind.simpleString())
        try:
            return float(operator.index(value))
        except OverflowError as error:
            raise misfit(where, value, kind.simpleString()) from error

    return check


def _float(kind: t.DataType, where: str, view: View) -> Convert:
    as_double = _double(kind, where, view)

    def check(value: Any) -> float:
        try:
            return _SINGLE.unpack(_SINGLE.pack(as_double(value)))[0]  # type: ignore[no-any-return]
        except OverflowError as error:
            raise misfit(where, value, "float: up to 3.4028235e38") from error

    return check


def _decimal(kind: t.DataType, where: str, view: View) -> Convert:
    assert isinstance(kind, t.DecimalType)
    unit, name = decimal.Decimal(1).scaleb(-kind.scale), kind.simpleString()
    limit = decimal.Decimal(10) ** (kind.precision - kind.scale)

    def check(value: Any) -> str:
        if isinstance(value, int) and not isinstance(value, bool):
            value = decimal.Decimal(value)
        if not isinstance(value, decimal.Decimal) or not value.is_finite():
            raise misfit(where, value, f"{name}: a finite decimal.Decimal")
        try:
            exact = value.quantize(unit, context=_EXACT)
        except decimal.DecimalException as error:
            raise misfit(where, value, f"{name}: at most {kind.scale} decimal places") from error
        if not -limit < exact < limit:
            raise misfit(where, value, f"{name}: below {limit:f}")
        return f"{exact:f}" if exact else f"{abs(exact):f}"  # Spark's decimals know no negative zero

    return check


def _date(kind: t.DataType, where: str, view: View) -> Convert:
    def check(value: Any) -> int:
        if not isinstance(value, datetime.date) or isinstance(value, datetime.datetime):
            raise misfit(where, value, "date: a datetime.date")
        return value.toordinal() - _EPOCH_DAY

    return check


def _timestamp(kind: t.DataType, where: str, view: View) -> Convert:
    def check(value: Any) -> int:
        if not isinstance(value, datetime.datetime):
            raise misfit(where, value, "timestamp: a datetime.datetime with a time zone")
        if value.utcoffset() is None:
            if view is View.STATE:
                return check(value.astimezone(datetime.UTC))
            hint = "add tzinfo=datetime.UTC, or make the column timestamp_ntz"
            raise misfit(where, value, "timestamp: a datetime with a time zone", hint)
        us = (value - _EPOCH) // _MICROSECOND
        if not _FIRST_US <= us <= _LAST_US:
            raise misfit(where, value, "timestamp: from year 1 to 9999 in UTC")
        return us

    return check


def _timestamp_ntz(kind: t.DataType, where: str, view: View) -> Convert:
    def check(value: Any) -> int:
        if not isinstance(value, datetime.datetime) or value.tzinfo is not None or value != value:
            raise misfit(where, value, "timestamp_ntz: a datetime.datetime without a time zone")
        return (value - _EPOCH_NAIVE) // _MICROSECOND

    return check


def _array(kind: t.DataType, where: str, view: View) -> Convert:
    assert isinstance(kind, t.ArrayType)
    element = to_internal(kind.elementType, f"{where}[]", kind.containsNull, view)
    name = kind.simpleString()

    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise misfit(where, value, f"{name}: a list")
        return tuple([element(v) for v in value])

    return check


def _map(kind: t.DataType, where: str, view: View) -> Convert:
    assert isinstance(kind, t.MapType)
    to_key = to_internal(kind.keyType, f"{where}.key", False, view)
    to_value = to_internal(kind.valueType, f"{where}.value", kind.valueContainsNull, view)
    name = kind.simpleString()

    def check(value: Any) -> tuple[tuple[Any, Any], ...]:
        if isinstance(value, list | tuple) and all(type(v) is tuple and len(v) == 2 for v in value):
            pairs: Any = value  # the form in which a processor gets it
        elif isinstance(value, Mapping):
            pairs = value.items()
        else:
            raise misfit(where, value, f"{name}: a dict")
        return tuple([(to_key(k), to_value(v)) for k, v in pairs])

    return check


def _struct(kind: t.DataType, where: str, view: View) -> Convert:
    assert isinstance(kind, t.StructType)
    fields = [to_internal(f.dataType, f"{where}.{f.name}", f.nullable, view) for f in kind.fields]
    names, name = kind.names, kind.simpleString()

    def check(value: Any) -> tuple[Any, ...]:
        values = in_order(value, names, where, name)
        return tuple([field(v) for field, v in zip(fields, values, strict=True)])

    return check


_CHECKS: dict[type[t.DataType], Callable[[t.DataType, str, View], Convert]] = {
    t.StringType: _string,
    t.BinaryType: _binary,
    t.BooleanType: _boolean,
    **dict.fromkeys(_BITS, _integer),
    t.FloatType: _float,
    t.DoubleType: _double,
    t.DecimalType: _decimal,
    t.DateType: _date,
    t.TimestampType: _timestamp,
    t.TimestampNTZType: _timestamp_ntz,
    t.ArrayType: _array,
    t.MapType: _map,
    t.StructType: _struct,
}


# -- internal -> Python ------------------------------------------------------------------------


def to_python(kind: t.DataType, view: View = View.ROW) -> Convert | None:
    """A function from a value's internal form (not None) to what user code sees; None: they are the same."""
    match kind:
        case t.TimestampType() if view is View.STATE:
            return lambda us: (_EPOCH + us * _MICROSECOND).astimezone().replace(tzinfo=None)
        case t.TimestampType():
            return lambda us: _EPOCH + us * _MICROSECOND
        case t.TimestampNTZType():
            return lambda us: _EPOCH_NAIVE + us * _MICROSECOND
        case t.DateType():
            return lambda days: datetime.date.fromordinal(days + _EPOCH_DAY)
        case t.DecimalType():
            return decimal.Decimal
        case t.ArrayType():
            return _each(to_python(kind.elementType, view))
        case t.MapType():
            to_key = _or_none(to_python(kind.keyType, view))
            to_value = _or_none(to_python(kind.valueType, view))
            if view is View.INPUT:
                return lambda pairs: [(to_key(k), to_value(v)) for k, v in pairs]
            return lambda pairs: {to_key(k): to_value(v) for k, v in pairs}
        case t.StructType():
            fields = [_or_none(to_python(f.dataType, view)) for f in kind.fields]
            if view is View.INPUT:
                names = kind.names
                return lambda values: {n: f(v) for n, f, v in zip(names, fields, values, strict=True)}
            make = row_maker(kind.names)
            return lambda values: make([f(v) for f, v in zip(fields, values, strict=True)])
        case _:
            return None


def to_arrow(kind: t.DataType) -> Convert | None:
    """A function from a value's internal form (not None) to what pyarrow takes; None: they are the same.

    Times and dates are the same, because pyarrow takes their numbers.
    """
    match kind:
        case t.DecimalType():
            return decimal.Decimal
        case t.ArrayType():
            element = to_arrow(kind.elementType)
            return None if element is None else _each(element)
        case t.MapType():
            to_key, to_value = _or_none(to_arrow(kind.keyType)), _or_none(to_arrow(kind.valueType))
            return lambda pairs: [(to_key(k), to_value(v)) for k, v in pairs]
        case t.StructType():
            names, fields = kind.names, [_or_none(to_arrow(f.dataType)) for f in kind.fields]
            return lambda values: {n: f(v) for n, f, v in zip(names, fields, values, strict=True)}
        case _:
            return None


def _each(element: Convert | None) -> Convert:
    if element is None:
        return list
    convert = _or_none(element)
    return lambda values: [convert(v) for v in values]


def _or_none(convert: Convert | None) -> Convert:
    if convert is None:
        return lambda value: value
    return lambda value: None if value is None else convert(value)
