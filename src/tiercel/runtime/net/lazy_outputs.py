"""Outputs that stay encoded while no code reads them, and the MessagePack encoder of the runtime.

Responsible for: the one encoder for wire and disk; lists of outputs that are decoded on demand.
Not responsible for: frames (wire.py), tables (storage/store.py).

A router receives the outputs of an instance, writes them into a log and sends them to subscribers, and rarely
reads one. It carries `LazyOutputs` instead of a list: the bytes as they arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import msgspec

from tiercel.core.errors import ProtocolViolation
from tiercel.core.model.log import Output, StreamEntry

_NONE = b"\x90"  # an array of length zero
_LENGTH_BYTES = {0xDC: 2, 0xDD: 4}  # of longer arrays
_decode_outputs = msgspec.msgpack.Decoder(list[Output]).decode


class MalformedOutputs(ProtocolViolation):
    """Bytes that came as outputs and are none."""


class LazyOutputs(Sequence[Output]):
    """Encoded outputs, decoded on first access. Equal to the list they encode."""

    __slots__ = ("_data", "_outputs", "raw")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._outputs: list[Output] | None = None
        self.raw = msgspec.Raw(data)

    def _unpacked(self) -> list[Output]:
        if self._outputs is None:
            try:
                self._outputs = _decode_outputs(self._data)
            except msgspec.DecodeError as error:
                reason = f"{len(self._data)} bytes are no outputs: {error}"
                raise MalformedOutputs(reason) from error
        return self._outputs

    def __bool__(self) -> bool:
        return self._data != _NONE

    def __len__(self) -> int:
        if self._outputs is not None:
            return len(self._outputs)
        first = self._data[0]  # MessagePack says the length of an array first
        if first & 0xF0 == _NONE[0]:
            return first & 0x0F
        if first in _LENGTH_BYTES:
            return int.from_bytes(self._data[1 : 1 + _LENGTH_BYTES[first]])
        return len(self._unpacked())  # raises, with the reason

    def __iter__(self) -> Iterator[Output]:
        return iter(self._unpacked())

    @overload
    def __getitem__(self, index: int) -> Output: ...
    @overload
    def __getitem__(self, index: slice) -> list[Output]: ...
    def __getitem__(self, index: int | slice) -> Output | list[Output]:
        return self._unpacked()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._unpacked() == list(other)

    def __hash__(self) -> int:
        return hash(self._data)

    def __repr__(self) -> str:
        return repr(self._unpacked())


def _as_it_came(value: Any) -> msgspec.Raw:
    if type(value) is LazyOutputs:
        return value.raw
    reason = f"{type(value).__name__} has no MessagePack: {value!r}"
    raise TypeError(reason)


encoder = msgspec.msgpack.Encoder(enc_hook=_as_it_came)


class _StreamEntry(msgspec.Struct, array_like=True):
    """`StreamEntry` with its outputs left alone."""

    offset: int
    outputs: msgspec.Raw


_decode_stream_entry = msgspec.msgpack.Decoder(_StreamEntry).decode


def decode_stream_entry(data: bytes) -> StreamEntry:
    entry = _decode_stream_entry(data)
    return StreamEntry(entry.offset, LazyOutputs(bytes(entry.outputs)))
