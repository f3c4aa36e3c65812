"""Events: the inputs that a driver delivers to a machine. Names are in the past tense.

Responsible for: the closed set of inputs of `Router`, `Instance`, `Controller`, `Producer`.
Not responsible for: messages between processes (core/messages), which arrive inside `Received`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.names import LogReaderName, TimerName
from tiercel.core.model.keys import StateImage
from tiercel.core.model.log import Entry


class Connected(msgspec.Struct, frozen=True, gc=False):
    """A new FIFO connection with a peer exists. Messages sent on an older one may be lost."""

    peer: str


class Disconnected(msgspec.Struct, frozen=True, gc=False):
    """The connection with a peer broke. Messages in flight, in both directions, are lost."""

    peer: str


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message of a peer has arrived."""

    sender: str
    message: Any


class Durable(msgspec.Struct, frozen=True, gc=False):
    """`Write(seq)` and all before it are durable, as the log's durability setting defines it."""

    seq: int


class LogRead(msgspec.Struct, frozen=True, gc=False):
    """Answer to `ReadLog`."""

    inbox: str
    reader: LogReaderName
    entries: list[Entry]


class CheckpointLoaded(msgspec.Struct, frozen=True, gc=False):
    """Answer to `LoadCheckpoint`: the contents of the last durable checkpoint."""

    items: dict[StorageKey, Any]
    number: int = 0  # of the request
    adopted: bool = False  # the driver copies this share into our storage, before it confirms later writes


class StateRead(msgspec.Struct, frozen=True, gc=False):
    """Stored versions of evicted keys that the next event needs, each with the bytes it has in storage.

    Before each event the driver asks the machine for its `missing_state`. If there is some, the driver reads
    it, delivers this event, and then at once the event that needs it.
    """

    items: dict[StorageKey, tuple[StateImage, int]]


class TimerFired(msgspec.Struct, frozen=True, gc=False):
    """The timer of that name is due."""

    name: TimerName


class Continued(msgspec.Struct, frozen=True, gc=False):
    """Answer to `Continue`, with the time that the driver measured for the event that asked."""

    took_ms: float


Event = (
    Connected
    | Disconnected
    | Received
    | Durable
    | LogRead
    | CheckpointLoaded
    | StateRead
    | TimerFired
    | Continued
)
