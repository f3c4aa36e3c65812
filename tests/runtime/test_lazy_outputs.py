"""Lazy outputs equal the outputs that they encode."""

from __future__ import annotations

import msgspec
import pytest

from tiercel.core import messages as m
from tiercel.core.model.log import Output, StreamEntry
from tiercel.runtime.net.lazy_outputs import LazyOutputs, MalformedOutputs, decode_stream_entry, encoder
from tiercel.runtime.net.wire import decode_message, encode_frame

OUTPUTS = [Output(9, b"k", 2, n, (b"k", 12, b"payload")) for n in range(20)]


def flush(outputs: list[Output]) -> m.Outputs:
    return m.Outputs("op@a#0", 1, 7, 9, 9, outputs, [], 5, timers=False)


def test_router_forwards_outputs_without_decoding_them(monkeypatch: pytest.MonkeyPatch) -> None:
    came = decode_message(encode_frame(flush(OUTPUTS))[4:])
    assert isinstance(came, m.Outputs)
    monkeypatch.delattr(LazyOutputs, "_unpacked")
    entry = encoder.encode(StreamEntry(1, came.outputs))
    assert entry == encoder.encode(StreamEntry(1, OUTPUTS))
    frame = encode_frame(m.Publish("s", [decode_stream_entry(entry)]))
    assert frame == encode_frame(m.Publish("s", [StreamEntry(1, OUTPUTS)]))


@pytest.mark.parametrize("outputs", [[], OUTPUTS[:1], OUTPUTS])
def test_lazy_outputs_decode_on_access(outputs: list[Output]) -> None:
    packed = LazyOutputs(encoder.encode(outputs))
    assert bool(packed) == bool(outputs)
    assert packed == outputs
    assert list(packed) == outputs
    assert len(packed) == len(outputs)
    assert packed[:1] == outputs[:1]
    assert repr(packed) == repr(outputs)


def test_malformed_outputs_raise_on_access() -> None:
    with pytest.raises(MalformedOutputs, match="are no outputs"):
        list(LazyOutputs(msgspec.msgpack.encode([1, 2])))


def test_value_without_encoding_is_refused_with_its_type() -> None:
    with pytest.raises(TypeError, match="object has no MessagePack"):
        encoder.encode(object())
