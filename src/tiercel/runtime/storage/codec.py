"""The storage codec: one value type per table, and keys as bytes that keep their order.

Responsible for: every table of the core with its type; keys and values to bytes and back. Keys are encoded as
    in FoundationDB's tuple layer.
Not responsible for: when something is written (store.py), the meaning of the tables (core/).
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.stored import (
    TABLES,
)

_BYTES, _INT, _STR = 1, 2, 3
_SIGN = 1 << 63  # added to an int, so that negative ones sort first

decoders = {table: msgspec.msgpack.Decoder(kind) for table, kind in TABLES.items()}


def encode_key(key: StorageKey) -> bytes:
    """Bytes that compare as the tuples do, within one shape of tuple."""
    last = key[-1]
    if type(last) is str:
        return prefix_of(key)  # these are few, and repeat with every write
    return prefix_of(key[:-1]) + _element(last)


@functools.lru_cache(4096)
def prefix_of(elements: StorageKey) -> bytes:
    return b"".join(_element(element) for element in elements)


def _element(value: str | int | bytes) -> bytes:
    if type(value) is int:
        return b"\x02" + (value + _SIGN).to_bytes(8)
    if type(value) is str:
        return b"\x03" + value.encode().replace(b"\x00", b"\x00\xff") + b"\x00\x00"
    if type(value) is bytes:
        return b"\x01" + value.replace(b"\x00", b"\x00\xff") + b"\x00\x00"
    reason = f"a storage key holds str, int and bytes, not {value!r}"
    raise TypeError(reason)


def decode_key(data: bytes) -> StorageKey:
    if data.startswith(_STATE):
        return _decode_state_key(data)
    elements: list[str | int | bytes] = []
    at = 0
    while at < len(data):
        kind = data[at]
        if kind == _INT:
            elements.append(int.from_bytes(data[at + 1 : at + 9]) - _SIGN)
            at += 9
            continue
        end = at + 1
        while True:
            end = data.index(b"\x00", end)
            if data[end + 1 : end + 2] != b"\xff":
                break
            end += 2
        raw = data[at + 1 : end].replace(b"\x00\xff", b"\x00")
        elements.append(raw.decode() if kind == _STR else raw)
        at = end + 2
    return tuple(elements)


_STATE = prefix_of(("state",))
_SLOT, _KEY, _GENERATION = len(_STATE) + 1, len(_STATE) + 10, 9  # offsets; the last one counts from the end


def _decode_state_key(data: bytes) -> StorageKey:
    """As `decode_key`, at fixed offsets: an instance decodes all its keys when it starts."""
    raw = data[_KEY : -_GENERATION - 2]
    if b"\x00" in raw:
        raw = raw.replace(b"\x00\xff", b"\x00")
    slot = int.from_bytes(data[_SLOT : _SLOT + 8]) - _SIGN
    return "state", slot, raw, int.from_bytes(data[-8:]) - _SIGN


class _StoredTimers(msgspec.Struct, array_like=True):
    """A `StateImage` of which only the timers are decoded."""

    key: msgspec.Raw
    epoch: int
    at: int
    values: msgspec.Raw
    timers: tuple[int, ...] = ()


_decode_timers = msgspec.msgpack.Decoder(_StoredTimers).decode


def is_state(name: bytes) -> bool:
    """Whether a stored key belongs to the state of a key."""
    return name.startswith(_STATE)


def timers_in(value: bytes) -> tuple[int, ...]:
    """The timers in the stored value of such a key."""
    return _decode_timers(value).timers


def decode_value(key: StorageKey, value: bytes) -> Any:
    """Decode a value by the table of its key."""
    return decoders[str(key[0])].decode(value)


Pair = tuple[bytes, bytes | None]  # a stored key and its value; None: deleted
