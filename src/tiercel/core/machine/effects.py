"""Effects: the requests of a machine to its driver, which performs them in the order of the list.

Responsible for: the closed set of effects.
Not responsible for: performing them (runtime/ with sockets and RocksDB, sim/ with virtual ones).

Every driver handles every effect; `match` over `Effect` ends in `assert_never` there.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tiercel.core.machine.names import LogReaderName, TimerName
from tiercel.core.model.log import Takeover

StorageKey = tuple[Any, ...]  # (table, ...): ordered within a table, so a table prefix is a range


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send a message to a peer: in order while the connection lasts, lost when it breaks.

    The driver drops a message to a peer that is not connected. The machine repeats messages that must
    arrive when the peer connects or a retry timer fires.
    """

    to: str
    message: Any


class Write(msgspec.Struct, frozen=True, gc=False):
    """One atomic batch. Batches become durable in order; the driver answers `Durable(seq)`.

    A later durable batch implies that all earlier ones are durable. After a crash the disk holds
    a prefix of the batches.
    """

    seq: int
    puts: dict[StorageKey, Any]
    deletes: tuple[StorageKey, ...] = ()


class ReadLog(msgspec.Struct, frozen=True, gc=False):
    """Read entries of an inbox with `after < offset`, at most `limit`; answered by `LogRead`.

    The read includes every batch written before it, durable or not.
    """

    inbox: str
    after: int
    limit: int
    reader: LogReaderName  # the requester; the answer repeats it


class LoadCheckpoint(msgspec.Struct, frozen=True, gc=False):
    """Read the last durable checkpoint, or a share of another's; answered by `CheckpointLoaded`.

    The driver opens a copy in a directory of this process: a predecessor that Spark considers dead may hold
    the old directory for two more seconds.
    """

    values: bool = True  # False: only `StoredKeyInfo` of the instance's own keys (lazy restore)
    timers: bool = True  # False: no key has timers, so the driver need not look for them
    takeover: Takeover | None = None
    number: int = 0  # the answer repeats it: the machine ignores answers to earlier requests
    adopt: bool = False  # of a share: the driver may copy it into our own storage, where it counts as ours


class SetTimer(msgspec.Struct, frozen=True, gc=False):
    """Fire `TimerFired(name)` at `at_ms` of this process's clock. Setting a name again replaces the timer."""

    name: TimerName
    at_ms: float


class Continue(msgspec.Struct, frozen=True, gc=False):
    """Answer with `Continued` behind all events that have arrived by now. The last effect of its event.

    A machine that has much to do does some of it and asks to continue, so that others do not wait long.
    """


class Exit(msgspec.Struct, frozen=True, gc=False):
    """End this process cleanly. The supervisor starts it again if the deployment still wants it."""

    reason: str


class Launch(msgspec.Struct, frozen=True, gc=False):
    """Start a new instance (the controller requests it; Spark or the simulator starts it)."""

    instance: str


class Retire(msgspec.Struct, frozen=True, gc=False):
    """End an instance that owns nothing, and do not restart it."""

    instance: str


class Note(msgspec.Struct, frozen=True, gc=False):
    """A line for the log of the driver: an event and its reason. It changes nothing."""

    text: str


class Unexpected(msgspec.Struct, frozen=True, gc=False):
    """A message that no transition of a move allows: it changed nothing.

    The simulator and the in-memory driver raise an error; a deployment logs and counts it (metric
    `unexpected`).
    """

    role: str
    move: str
    phase: str
    message: str


Effect = (
    Send | Write | ReadLog | LoadCheckpoint | SetTimer | Continue | Exit | Launch | Retire | Note | Unexpected
)
