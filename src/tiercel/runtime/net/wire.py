"""The wire format between processes: length-prefixed frames, each one message in MessagePack.

Responsible for: the bytes of every message, the size limit of a frame, errors for malformed frames.
Not responsible for: sockets (connection.py), which messages are allowed (core/), bytes on disk (storage/).

    frame = length, 4 bytes big-endian | message, an array that begins with its name

A tuple becomes a list on the wire. Decoding restores it where the type of a field is tuple, set or bytes.
Inside a payload or a state value it stays a list, and the code that reads it makes tuples again.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import msgspec

from tiercel.core import messages as m
from tiercel.core.errors import ProtocolViolation
from tiercel.core.model.log import Output
from tiercel.runtime.net import gauge_messages as gauges
from tiercel.runtime.net import replication_messages as replication
from tiercel.runtime.net import site_messages as sites
from tiercel.runtime.net.lazy_outputs import LazyOutputs, encoder

LENGTH_BYTES = 4
FRAME_BYTES_MAX = 64 * 1024 * 1024  # a chunk of state is at most 256 KiB and one value; the rest is room

MESSAGES: tuple[type[m.Message], ...] = tuple(
    kind
    for module in (m, replication, sites, gauges)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, m.Message) and kind is not m.Message
)

CAN_LINGER = frozenset(
    (m.Confirmed, m.Consumed, m.ProducerAck)
)  # acknowledgements: no row waits for one of these


class _FromInstance(m.Message, frozen=True, tag="FromInstance"):
    """`FromInstance` holds any message: its inside is decoded in a second step."""

    instance: str
    incarnation: int
    message: msgspec.Raw


class _Outputs(m.Message, frozen=True, tag="Outputs"):
    """`Outputs` as a router decodes it: the outputs stay encoded."""

    instance: str
    incarnation: int
    flush: int
    through: int
    first: int
    outputs: msgspec.Raw
    dead_letters: list[Output]
    watermark_ms: int
    timers: bool
    rows: int = 0
    service_us: float = 0.0
    moves: dict[str, int] = msgspec.field(default_factory=dict)


_INSTEAD: dict[type[m.Message], type[m.Message]] = {m.FromInstance: _FromInstance, m.Outputs: _Outputs}
AnyMessage: Any = functools.reduce(operator.or_, [_INSTEAD.get(kind, kind) for kind in MESSAGES])

_decoder: msgspec.msgpack.Decoder[m.Message] = msgspec.msgpack.Decoder(AnyMessage)


class MalformedFrame(ProtocolViolation):
    """Bytes that are not a valid frame. Only the connection that sent them is closed."""


class FrameTooLong(MalformedFrame):
    """An outgoing message that no receiver would accept."""


def encode_frame(message: m.Message) -> bytes:
    """One message as one frame."""
    frame = bytearray(LENGTH_BYTES)
    encoder.encode_into(message, frame, LENGTH_BYTES)
    size = len(frame) - LENGTH_BYTES
    if size > FRAME_BYTES_MAX:
        reason = f"{type(message).__name__} of {size} bytes; a frame has at most {FRAME_BYTES_MAX}"
        raise FrameTooLong(reason)
    frame[:LENGTH_BYTES] = size.to_bytes(LENGTH_BYTES)
    return bytes(frame)


def encode_frames(message: m.Message) -> bytes:
    """One message as one frame, or as several equivalent messages if one would be too long."""
    try:
        return encode_frame(message)
    except FrameTooLong:
        match message:
            case m.Dispatch(entries=entries) if len(entries) > 1:
                half = len(entries) // 2
                halves: list[m.Message] = [m.Dispatch(entries[:half]), m.Dispatch(entries[half:])]
            case m.Publish(stream=stream, entries=entries) if len(entries) > 1:
                half = len(entries) // 2
                halves = [m.Publish(stream, entries[:half]), m.Publish(stream, entries[half:])]
            case _:
                raise
        return b"".join(encode_frames(part) for part in halves)


def decode_message(body: bytes | memoryview) -> m.Message:
    """The message of one frame."""
    try:
        message = _decoder.decode(body)
        if type(message) is _Outputs:
            return _outputs(message)
        if type(message) is _FromInstance:
            return m.FromInstance(message.instance, message.incarnation, _decoder.decode(message.message))
        return message
    except (msgspec.DecodeError, RecursionError) as error:
        reason = f"{len(body)} bytes are no message: {error}"
        raise MalformedFrame(reason) from error


def _outputs(message: _Outputs) -> m.Outputs:
    return m.Outputs(
        message.instance,
        message.incarnation,
        message.flush,
        message.through,
        message.first,
        LazyOutputs(bytes(message.outputs)),  # a copy: the original is part of the connection's buffer
        message.dead_letters,
        message.watermark_ms,
        message.timers,
        message.rows,
        message.service_us,
        message.moves,
    )


def pack(body: bytes) -> bytes:
    """A frame around bytes that are not a message: those of the handshake."""
    return len(body).to_bytes(LENGTH_BYTES) + body


class Frames:
    """Cuts a byte stream into frames. `limit` guards memory before a frame is read."""

    __slots__ = ("_buffer", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """The next whole frame's body, for streams with few of them."""
        end = self._end(0)
        if end is None:
            return None
        body = bytes(self._buffer[LENGTH_BYTES:end])
        del self._buffer[:end]
        return body

    def rest(self) -> bytes:
        """Take out everything that has not been read."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    def messages(self) -> list[m.Message]:
        """All whole frames, decoded."""
        found: list[m.Message] = []
        begin = 0
        with memoryview(self._buffer) as view:
            while (end := self._end(begin)) is not None:
                with view[begin + LENGTH_BYTES : end] as body:
                    found.append(decode_message(body))
                begin = end
        if begin:
            del self._buffer[:begin]
        return found

    def _end(self, begin: int) -> int | None:
        """The end of the frame that begins here; None until all of it has arrived."""
        buffer = self._buffer
        if len(buffer) - begin < LENGTH_BYTES:
            return None
        size = int.from_bytes(buffer[begin : begin + LENGTH_BYTES])
        if size > self.limit:
            reason = f"a frame of {size} bytes was announced; the limit here is {self.limit}"
            raise MalformedFrame(reason)
        end = begin + LENGTH_BYTES + size
        return end if len(buffer) >= end else None


def merged(earlier: m.Message, later: m.Message) -> m.Message | None:
    """One message equivalent to these two in this order; None if there is none.

    Frames are the main cost, so entries that wait for the same write leave as one.
    """
    match earlier, later:
        case m.Dispatch(), m.Dispatch():
            return m.Dispatch(earlier.entries + later.entries)
        case m.Publish(), m.Publish() if earlier.stream == later.stream:
            return m.Publish(earlier.stream, earlier.entries + later.entries)
        case m.Confirmed(), m.Confirmed() if earlier.incarnation == later.incarnation:
            return m.Confirmed(
                later.incarnation,
                max(earlier.flush, later.flush),
                max(earlier.durable, later.durable),
                later.lag,
            )
        case m.Consumed(), m.Consumed() if earlier.stream == later.stream:
            processed = max(earlier.processed, later.processed)
            return m.Consumed(later.stream, max(earlier.offset, later.offset), processed)
        case m.ProducerAck(), m.ProducerAck() if earlier.producer == later.producer:
            if earlier.greets is None:
                return later
            return m.ProducerAck(later.producer, later.seq, earlier.greets) if later.greets is None else None
        case replication.ReplicaAck(), replication.ReplicaAck() if earlier.process == later.process:
            return (
                later
                if later.incarnation == earlier.incarnation and later.through > earlier.through >= 0
                else None
            )
        case _:
            return None
