"""A parser for schemas written as text, without a JVM: "car string, speed double, tags array<string>".

Responsible for: the part of Spark's schema language that streams can carry.
Not responsible for: whether a stream can carry a type (values.py refuses those it cannot).
"""

from __future__ import annotations

import re

from pyspark import SparkContext
from pyspark.sql import types as t

from tiercel.errors import UserError

_SIMPLE: dict[str, t.DataType] = {
    "string": t.StringType(),
    "binary": t.BinaryType(),
    "boolean": t.BooleanType(),
    "tinyint": t.ByteType(),
    "byte": t.ByteType(),
    "smallint": t.ShortType(),
    "short": t.ShortType(),
    "int": t.IntegerType(),
    "integer": t.IntegerType(),
    "bigint": t.LongType(),
    "long": t.LongType(),
    "float": t.FloatType(),
    "real": t.FloatType(),
    "double": t.DoubleType(),
    "decimal": t.DecimalType(10, 0),
    "numeric": t.DecimalType(10, 0),
    "dec": t.DecimalType(10, 0),
    "date": t.DateType(),
    "timestamp": t.TimestampType(),
    "timestamp_ltz": t.TimestampType(),
    "timestamp_ntz": t.TimestampNTZType(),
}

_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)+`)|('(?:[^'\\]|\\.)*')|(\w+)|([<>,:()]))")
_EXAMPLE = '"car string, speed double, tags array<string>"'


def as_struct(schema: t.StructType | str) -> t.StructType:
    """The StructType of a schema in any form. Spark's own parser reads text where there is a session."""
    if isinstance(schema, t.StructType):
        return schema
    if not isinstance(schema, str):
        raise UserError(f"schema {schema!r}", expected=f"a StructType, or text such as {_EXAMPLE}")
    if SparkContext._active_spark_context is None:
        return parse_ddl(schema)
    try:
        found = t.StructType.fromDDL(schema)
    except Exception as error:  # for every error of the JVM, the text is at fault
        raise UserError(f"schema {schema!r}: {error}", expected=f"such as {_EXAMPLE}") from error
    assert isinstance(found, t.StructType)
    return found


def parse_ddl(text: str) -> t.StructType:
    """The StructType that this text describes."""
    return _Parser(text).whole()


class _Parser:
    """Recursive descent over the tokens of one schema."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[str] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._refusal(f"{text[at:].strip()[:20]!r} is no part of a schema")
            self._tokens.append(match.group().strip())
            at = match.end()
        self._at = 0

    def _refusal(self, what: str) -> UserError:
        return UserError(f"schema {self._text!r}: {what}", expected=f"such as {_EXAMPLE}")

    def _peek(self) -> str:
        return self._tokens[self._at].lower() if self._at < len(self._tokens) else ""

    def _take(self, wanted: str = "") -> str:
        found = self._peek()
        if not found or (wanted and found != wanted):
            raise self._refusal(f"{wanted or 'more'!r} expected, found {found or 'its end'!r}")
        self._at += 1
        return self._tokens[self._at - 1]

    def _skips(self, word: str) -> bool:
        if self._peek() != word:
            return False
        self._at += 1
        return True

    def whole(self) -> t.StructType:
        fields = self._fields()
        if self._peek():
            raise self._refusal(f"{self._peek()!r} is too much")
        return t.StructType(fields)

    def _fields(self) -> list[t.StructField]:
        fields = []
        while True:
            name = self._take()
            if not re.match(r"[\w`]", name):
                raise self._refusal(f"a column's name expected, found {name!r}")
            if name.startswith("`"):
                name = name[1:-1].replace("``", "`")
            self._skips(":")
            kind = self._type()
            nullable = True
            if self._skips("not"):
                self._take("null")
                nullable = False
            comment = {"comment": self._take()[1:-1]} if self._skips("comment") else None
            fields.append(t.StructField(name, kind, nullable, comment))
            if not self._skips(","):
                return fields

    def _type(self) -> t.DataType:
        name = self._take().lower()
        match name:
            case "array":
                self._take("<")
                element = self._type()
                self._take(">")
                return t.ArrayType(element)
            case "map":
                self._take("<")
                key = self._type()
                self._take(",")
                value = self._type()
                self._take(">")
                return t.MapType(key, value)
            case "struct":
                self._take("<")
                fields = self._fields()
                self._take(">")
                return t.StructType(fields)
            case "decimal" | "numeric" | "dec" if self._skips("("):
                precision = self._number()
                scale = self._number() if self._skips(",") else 0
                self._take(")")
                return t.DecimalType(precision, scale)
            case _ if name in _SIMPLE:
                return _SIMPLE[name]
            case _:
                known = ", ".join([*_SIMPLE, "array<…>, map<…, …>, struct<…>"])
                raise UserError(f"schema {self._text!r}: unknown type {name!r}", expected=f"one of: {known}")

    def _number(self) -> int:
        found = self._take()
        if not found.isdecimal():
            raise self._refusal(f"a number expected, found {found!r}")
        return int(found)
