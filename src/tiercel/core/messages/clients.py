"""Producers, mobile sources and subscribers, and what routers answer them."""

from __future__ import annotations

from typing import Any

from tiercel.core.messages.base import Message
from tiercel.core.records import Key, StreamEntry


class Hello(Message, frozen=True):
    """A fixed producer introduces itself; answered by `ProducerMark`, or `ProducerFenced`.

    The first word of a life takes the name over; a life that says it `again` must still have it.
    """

    producer: str
    life: str = ""  # unlike that of any other program that has used the name
    again: bool = False  # this life was answered before


class ProducerMark(Message, frozen=True):
    """Everything of this producer up to `seq` is durable. Sent as answer and as acknowledgement."""

    producer: str
    seq: int
    greets: str | None = None  # the life whose `Hello` it answers; None: it is an acknowledgement


class ProducerFenced(Message, frozen=True):
    """A later life of this producer has the name: what is sent here would be taken for its frames."""

    producer: str


class Produce(Message, frozen=True):
    """Rows of a fixed producer, numbered gap-free. `watermark_ms` promises later event times."""

    producer: str
    seq: int
    stream: str
    rows: list[tuple[Key, int, Any]]  # said in full, so that decoding refuses what would hurt a router
    watermark_ms: int | None = None
    initial: bool = False  # initial state, before the first tuple


class ProduceMobile(Message, frozen=True):
    """Rows of a mobile source: (key, event time, payload, n), n gap-free per key."""

    source: str
    frame: int
    stream: str
    rows: list[tuple[Key, int, Any, int]]


class MobileReceipt(Message, frozen=True):
    """These frames of a mobile source are safe."""

    source: str
    frames: list[int]


class RangeQuery(Message, frozen=True):
    """Asks how far a stream's log is."""

    stream: str


class RangeReply(Message, frozen=True):
    """Entries `first` to `last` can be read; there are none if `last` is smaller. -1, -1: not kept here."""

    stream: str
    first: int
    last: int


class Subscribe(Message, frozen=True):
    """Send me this stream's entries with `offset > after`."""

    stream: str
    after: int


class Consumed(Message, frozen=True):
    """The subscriber has taken everything up to `offset`; more may be sent."""

    stream: str
    offset: int


class Publish(Message, frozen=True):
    """Durable entries of an output log, in order."""

    stream: str
    entries: list[StreamEntry]
