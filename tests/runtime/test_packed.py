"""Outputs that stay as they came are the outputs they stand for."""

from __future__ import annotations

import msgspec
import pytest

from tiercel.core import messages as m
from tiercel.core.records import Output, StreamEntry
from tiercel.runtime.packed import MalformedOutputs, Packed, decode_stream_entry, encoder
from tiercel.runtime.wire import decode_message, encode_frame

OUTPUTS = [Output(9, b"k", 2, n, (b"k", 12, b"payload")) for n in range(20)]


def flush(outputs: list[Output]) -> m.Outputs:
    return m.Outputs("op@a#0", 1, 7, 9, 9, outputs, [], 5, timers=False)


def test_a_router_passes_outputs_on_without_looking_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    came = decode_message(encode_frame(flush(OUTPUTS))[4:])
    assert isinstance(came, m.Outputs)
    monkeypatch.delattr(Packed, "_unpacked")
    entry = encoder.encode(StreamEntry(1, came.outputs))
    assert entry == encoder.encode(StreamEntry(1, OUTPUTS))
    frame = encode_frame(m.Publish("s", [decode_stream_entry(entry)]))
    assert frame == encode_frame(m.Publish("s", [StreamEntry(1, OUTPUTS)]))


@pytest.mark.parametrize("outputs", [[], OUTPUTS[:1], OUTPUTS])
def test_whoever_looks_finds_the_outputs(outputs: list[Output]) -> None:
    packed = Packed(encoder.encode(outputs))
    assert bool(packed) == bool(outputs)
    assert packed == outputs
    assert list(packed) == outputs
    assert len(packed) == len(outputs)
    assert packed[:1] == outputs[:1]
    assert repr(packed) == repr(outputs)


def test_what_was_no_list_of_outputs_is_refused_by_name_when_it_is_looked_at() -> None:
    with pytest.raises(MalformedOutputs, match="are no outputs"):
        list(Packed(msgspec.msgpack.encode([1, 2])))


def test_what_has_no_encoding_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="object has no MessagePack"):
        encoder.encode(object())
