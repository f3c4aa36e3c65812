"""HyperLogLog registers as Spark's approx_count_distinct has them: same hash, same registers.

Responsible for: hashes of values, registers in bytes, their estimate.
Not responsible for: who counts what (aggregates.py).

While many registers are empty (up to 400 values at the default deviation) the estimate is Spark's exactly.
Above, Spark corrects its bias by tables. This module has the plain estimate; its error is about as large.
"""

from __future__ import annotations

import datetime
import decimal
import math
import struct
from collections.abc import Callable
from typing import Any

import xxhash
from pyspark.sql import types as t

from tiercel.errors import UserError
from tiercel.operators.values import to_micros

_SEED = 42  # Spark's
_BITS = 64
_EPOCH_DAY = datetime.date(1970, 1, 1).toordinal()
# up to which estimate Spark counts empty registers instead, by precision from 4 on
_LINEAR_UP_TO = (10, 20, 40, 80, 220, 400, 900, 1800, 3100, 6500, 11500, 20000, 50000, 120000, 350000)


def precision_of(rsd: float) -> int:
    """The number of bits that choose a register, as Spark derives it."""
    if not 0 < rsd <= 0.39:
        raise UserError(f"approx_count_distinct: rsd {rsd!r}", expected="a standard deviation, 0 to 0.39")
    found = math.ceil(2 * math.log(1.106 / rsd) / math.log(2))
    if found >= 4 + len(_LINEAR_UP_TO):
        raise UserError(f"approx_count_distinct: rsd {rsd!r}", expected="0.0022 or more")
    return found if found > 4 else 4


def hash_of(kind: t.DataType, column: str) -> Callable[[Any], int]:
    """Spark's xxhash64 of a value of this type."""
    match kind:
        case t.StringType():
            return lambda value: _digest(value.encode())
        case t.BinaryType():
            return lambda value: _digest(bytes(value))
        case t.LongType():
            return _long
        case t.IntegralType() | t.BooleanType():
            return lambda value: _digest(struct.pack("<i", value))
        case t.DoubleType():
            return lambda value: _digest(struct.pack("<d", _canonical(value)))
        case t.FloatType():
            return lambda value: _digest(struct.pack("<f", _canonical(value)))
        case t.DateType():
            return lambda value: _digest(struct.pack("<i", value.toordinal() - _EPOCH_DAY))
        case t.TimestampType() | t.TimestampNTZType():
            micros = to_micros(kind)
            return lambda value: _long(micros(value))
        case t.DecimalType() if kind.precision <= 18:
            unit = decimal.Decimal(10) ** kind.scale
            return lambda value: _long(int(value * unit))
        case _:
            what = f"approx_count_distinct({column}): the column is {kind.simpleString()}"
            raise UserError(what, expected="a simple type: no array, map, struct or wide decimal")


def _digest(content: bytes) -> int:
    return xxhash.xxh64_intdigest(content, seed=_SEED)


def _long(value: int) -> int:
    return _digest(struct.pack("<q", value))


def _canonical(value: float) -> float:
    """One form of zero, one of NaN."""
    return math.nan if math.isnan(value) else value + 0.0


def add(registers: bytes | None, digest: int, precision: int) -> bytes:
    """The registers with one more value."""
    index = digest >> (_BITS - precision)
    rest = (digest << precision) & ((1 << _BITS) - 1) | 1 << (precision - 1)
    length = _BITS - rest.bit_length() + 1
    if registers is not None and registers[index] >= length:
        return bytes(registers)
    changed = bytearray(1 << precision) if registers is None else bytearray(registers)
    changed[index] = length
    return bytes(changed)


def merge(one: bytes | None, other: bytes | None) -> bytes | None:
    if one is None or other is None:
        return other if one is None else one
    return bytes(map(max, one, other))


def estimate(registers: bytes) -> int:
    count = len(registers)
    precision = count.bit_length() - 1
    alpha = {4: 0.673, 5: 0.697, 6: 0.709}.get(precision, 0.7213 / (1 + 1.079 / count))
    raw = alpha * count * count / sum(2.0**-register for register in registers)
    zeros = registers.count(0)
    if zeros:
        linear = count * math.log(count / zeros)
        if linear <= _LINEAR_UP_TO[precision - 4]:
            return round(linear)
    return round(raw)
