"""Messages between clients (producers, mobile sources, subscribers) and routers."""

from __future__ import annotations

from typing import Any

from tiercel.core.messages.base import Message
from tiercel.core.model.keys import Key
from tiercel.core.model.log import StreamEntry


class Hello(Message, frozen=True):
    """A fixed producer introduces itself; the router answers with `ProducerAck` or `ProducerFenced`.

    The first `Hello` of an incarnation takes over the name. With `again` the router only checks that the
    incarnation still owns the name.
    """

    producer: str
    incarnation: str = ""  # unique among the programs that have used the name
    again: bool = False  # the router has answered this incarnation before


class ProducerAck(Message, frozen=True):
    """All frames of this producer up to `seq` are durable: an answer to `Hello`, or an acknowledgement."""

    producer: str
    seq: int
    greets: str | None = None  # the incarnation whose `Hello` it answers; None: it is an acknowledgement


class ProducerFenced(Message, frozen=True):
    """A later incarnation of this producer owns the name; the router refuses the frames of this one."""

    producer: str


class Produce(Message, frozen=True):
    """A frame of rows of a fixed producer, numbered gap-free; `watermark_ms` promises later event times."""

    producer: str
    seq: int
    stream: str
    rows: list[tuple[Key, int, Any]]  # the full type, so that decoding refuses malformed rows
    watermark_ms: int | None = None
    initial: bool = False  # initial state, before the first tuple
    numbers: tuple[int, ...] = ()  # of a stream whose devices number their rows: the number of each row


class ProduceMobile(Message, frozen=True):
    """Rows of a mobile source: (key, event time, payload, n), n gap-free per key within its incarnation."""

    source: str
    incarnation: str
    frame: int
    stream: str
    rows: list[tuple[Key, int, Any, int]]


class MobileReceipt(Message, frozen=True):
    """These frames of a mobile source are durable; those of `again` are to be sent once more."""

    source: str
    origin: str  # of the frames
    frames: list[int]
    again: tuple[int, ...] = ()


class RangeQuery(Message, frozen=True):
    """A subscriber asks for the range of a stream's log, and for the mark of its named subscription.

    The answer comes when there is an entry after `beyond`: at once without it.
    """

    stream: str
    subscription: str = ""
    beyond: int = -1


class RangeReply(Message, frozen=True):
    """Entries `first` to `last` can be read; none if `last` is smaller. -1, -1: the site has no log of it."""

    stream: str
    first: int
    last: int
    mark: int = -1  # of the named subscription; -1: there is none


class Subscribe(Message, frozen=True):
    """A subscriber requests this stream's entries with `offset > after`.

    With the name of a `subscription` the log keeps every entry behind the subscription's mark.
    """

    stream: str
    after: int
    subscription: str = ""


class EndSubscription(Message, frozen=True):
    """A named subscription is over: the log keeps nothing for it any more."""

    stream: str
    subscription: str


class StreamCongested(Message, frozen=True):
    """A named subscription lags too far behind: producers whose rows lead to this stream wait, or go on."""

    stream: str
    congested: bool


class Consumed(Message, frozen=True):
    """The subscriber has received all entries up to `offset`; the router may send more."""

    stream: str
    offset: int
    processed: int = -1  # its caller has processed the entries up to here: the mark of a named subscription


class Publish(Message, frozen=True):
    """Durable entries of an output log, in order."""

    stream: str
    entries: list[StreamEntry]
