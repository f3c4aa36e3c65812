"""Every message survives the wire, and invalid frames are refused."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, Union, get_args, get_origin

import msgspec
import pytest

from tiercel.core import messages as m
from tiercel.core.model.log import Control, Entry, Output, StreamEntry
from tiercel.runtime.net import wire
from tiercel.runtime.net.wire import (
    FRAME_BYTES_MAX,
    MESSAGES,
    Frames,
    MalformedFrame,
    encode_frame,
    merged,
    pack,
)

OUTPUT = Output(9, b"\x80k", 2, 0, (b"\x80k", 12, [1, 2.5, "x", None, b"raw"]))


def samples(kind: Any, depth: int = 0) -> list[Any]:
    """Values of a type: every member of a union, every field both absent and there."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return [[1, 2.5, "x", None, b"raw", [True]]]
    if kind is m.Message:
        return [m.Captured("mv")]
    if origin in (Union, types.UnionType):
        return [value for arg in args for value in samples(arg, depth)]
    if origin in (list, Sequence):
        return [[], samples(args[0], depth + 1)]
    if origin is frozenset:
        return [frozenset(), frozenset(samples(args[0]))]
    if origin is dict:
        return [{}, {samples(args[0])[-1]: samples(args[1], depth + 1)[-1]}]
    if origin is tuple:
        if args[-1] is ...:
            return [(b"\x80k", 12, [1, 2.5, "x", None])] if args[0] is Any else [(), (samples(args[0])[-1],)]
        return [tuple(samples(arg)[-1] for arg in args)]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        columns = [samples(field.type, depth + 1) for field in msgspec.structs.fields(kind)]
        count = max((len(column) for column in columns), default=1)
        return [kind(*(column[n % len(column)] for column in columns)) for n in range(count)]
    return {
        int: [0, -1, (1 << 64) - 1],
        float: [0.5],
        bool: [True, False],
        str: ["", "avg@a#1"],
        bytes: [b"", b"\x00\xff\x80"],
        type(None): [None],
    }[kind]


SAMPLES: list[m.Message] = [value for kind in MESSAGES for value in samples(kind)]


def through_the_wire(*messages: m.Message, cut: int = 1 << 20) -> list[m.Message]:
    data = b"".join(encode_frame(message) for message in messages)
    frames = Frames(FRAME_BYTES_MAX)
    found = []
    for begin in range(0, len(data), cut):
        frames.feed(data[begin : begin + cut])
        found += frames.messages()
    return found


def test_the_samples_hold_every_message_control_record_and_notice() -> None:
    assert {type(sample) for sample in SAMPLES} == set(MESSAGES)
    assert len(MESSAGES) > 40
    controls = {type(e.control) for s in SAMPLES if isinstance(s, m.Dispatch) for e in s.entries}
    assert controls == {type(None), *get_args(Control)}
    notices = {type(s.notice) for s in SAMPLES if isinstance(s, m.SiteFrame)}
    assert notices == {type(None), *get_args(m.AnyNotice)}


def test_outputs_keep_their_bytes_and_order() -> None:
    message = m.Publish("s", [StreamEntry(1, [OUTPUT, OUTPUT])])
    assert through_the_wire(message) == [message]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda s: type(s).__name__)
def test_message_encodes_and_decodes_unchanged(message: m.Message) -> None:
    assert through_the_wire(message) == [message]


def test_frames_decode_however_the_stream_is_split() -> None:
    assert through_the_wire(*SAMPLES, cut=3) == SAMPLES


def test_a_tuple_inside_a_payload_becomes_a_list_and_nothing_else_changes() -> None:
    (came,) = through_the_wire(m.Produce("p", 1, "s", [(b"k", 1, (1, (2, 3)))]))
    assert isinstance(came, m.Produce)
    assert came.rows == [(b"k", 1, [1, [2, 3]])]


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa4Nope", encode_frame(m.Hello("p"))[4:-1]]
)
def test_invalid_bytes_are_refused_as_malformed_frame(body: bytes) -> None:
    frames = Frames(FRAME_BYTES_MAX)
    frames.feed(pack(body))
    with pytest.raises(MalformedFrame, match="are no message"):
        frames.messages()


def test_frame_above_the_limit_is_refused_before_it_is_read() -> None:
    frames = Frames(512)
    frames.feed((513).to_bytes(4))
    with pytest.raises(MalformedFrame, match="513 bytes was announced; the limit here is 512"):
        frames.next()


@pytest.mark.parametrize(
    ("earlier", "later", "both"),
    [
        (
            m.Dispatch([Entry(1, 1, {})]),
            m.Dispatch([Entry(2, 1, {})]),
            m.Dispatch([Entry(1, 1, {}), Entry(2, 1, {})]),
        ),
        (m.Publish("s", []), m.Publish("t", []), None),
        (m.Confirmed(1, 1, 5, 9), m.Confirmed(1, 2, 4, 3), m.Confirmed(1, 2, 5, 3)),
        (m.Confirmed(1, 1, 5), m.Confirmed(2, 2, 4), None),
        (m.ProducerAck("p", 1), m.ProducerAck("p", 2), m.ProducerAck("p", 2)),
        (m.ProducerAck("p", 1), m.ProducerAck("q", 2), None),
        (m.ProducerAck("p", 1, "x"), m.ProducerAck("p", 2), m.ProducerAck("p", 2, "x")),
        (m.ProducerAck("p", 1), m.ProducerAck("p", 2, "x"), m.ProducerAck("p", 2, "x")),
        (m.ProducerAck("p", 1, "x"), m.ProducerAck("p", 2, "y"), None),
        (m.Consumed("s", 7), m.Consumed("s", 9), m.Consumed("s", 9)),
        (m.Consumed("s", 7), m.Consumed("t", 9), None),
        (m.Dispatch([]), m.Confirmed(1, 1, 1), None),
    ],
)
def test_messages_are_merged_only_if_equivalent(earlier: Any, later: Any, both: Any) -> None:
    assert merged(earlier, later) == both


def test_entries_too_large_for_one_frame_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that catches up on large rows must not end its router."""
    monkeypatch.setattr(wire, "FRAME_BYTES_MAX", 2_000)
    entries = [StreamEntry(n, [Output(n, b"k", 1, 0, (b"k", 0, "x" * 300))]) for n in range(1, 21)]
    frames = Frames(2_000)
    frames.feed(wire.encode_frames(m.Publish("out", entries)))
    parts = frames.messages()
    assert len(parts) > 1
    assert [e.offset for part in parts if isinstance(part, m.Publish) for e in part.entries] == [
        e.offset for e in entries
    ]
    with pytest.raises(wire.FrameTooLong, match="a frame has at most 2000"):
        wire.encode_frames(m.Publish("out", [StreamEntry(1, [Output(1, b"k", 1, 0, (b"k", 0, "x" * 3000))])]))
