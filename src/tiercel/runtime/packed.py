"""MessagePack for the wire and for disk: outputs that stay encoded while nobody looks into them.

Responsible for: the one way to encode, and lists of outputs that are decoded on demand.
Not responsible for: frames (wire.py), tables (store.py).

A router takes the outputs of an instance, writes them into a log and sends them to subscribers, and
mostly needs to know none of them. `Packed` is what it carries instead of a list: the bytes as they came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import msgspec

from tiercel.core.faults import ProtocolViolation
from tiercel.core.records import Output, StreamEntry

_NONE = b"\x90"  # an array of length zero
_LENGTH_BYTES = {0xDC: 2, 0xDD: 4}  # of longer arrays
_decode_outputs = msgspec.msgpack.Decoder(list[Output]).decode


class MalformedOutputs(ProtocolViolation):
    """Bytes that came as outputs and are none."""


class Packed(Sequence[Output]):
    """Outputs as they came: equal to the list they stand for, decoded when somebody looks."""

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
        return len(self._unpacked())  # which says what is wrong

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
    if type(value) is Packed:
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
    return StreamEntry(entry.offset, Packed(bytes(entry.outputs)))
