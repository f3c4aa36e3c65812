"""What a machine asks of its driver. Effects are performed in the order of the list.

Responsible for: the closed set of things the core can want done.
Not responsible for: doing them (runtime/ with sockets and RocksDB, sim/ with virtual ones).

Every driver handles every effect; `match` over `Effect` ends in `assert_never` there.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tiercel.core.records import Inheritance

StorageKey = tuple[Any, ...]  # (table, ...): ordered within a table, so a table prefix is a range


class Send(msgspec.Struct, frozen=True, gc=False):
    """Hand a message to the connection with a peer: FIFO while it lasts, lost when it breaks.

    To a peer that is not connected it is dropped. Whatever must not be lost is sent again by the
    machine when the peer connects or a retry timer fires.
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

    Sees every batch written before it, durable or not.
    """

    inbox: str
    after: int
    limit: int
    reader: str  # who it is for; comes back in the answer


class LoadCheckpoint(msgspec.Struct, frozen=True, gc=False):
    """Read the last durable checkpoint, or a share of another's; answered by `CheckpointLoaded`.

    The driver opens a copy of it in a place of this process's own: a predecessor that Spark
    believes dead may hold the old place for two more seconds.
    """

    values: bool = True  # False: of an instance's own keys only `KeyFacts`; it reads them when it needs them
    timers: bool = True  # False: no key has any, so nobody needs to look for them
    inherited: Inheritance | None = None
    number: int = 0  # comes back in the answer: one to an earlier question is of no use any more
    adopt: bool = False  # of a share: it may be put into our own storage, and count there like our own


class SetTimer(msgspec.Struct, frozen=True, gc=False):
    """Fire `TimerFired(name)` at `at_ms` of this process's clock. Setting a name again replaces it."""

    name: str
    at_ms: float


class Exit(msgspec.Struct, frozen=True, gc=False):
    """End this process cleanly. The supervisor starts it again if the deployment still wants it."""

    reason: str


class Launch(msgspec.Struct, frozen=True, gc=False):
    """Start a new instance (the controller asks; Spark or the simulator does)."""

    instance: str


class Retire(msgspec.Struct, frozen=True, gc=False):
    """End an instance that owns nothing any more, and do not start it again."""

    instance: str


class Note(msgspec.Struct, frozen=True, gc=False):
    """A line for the story: what happened and why. Drivers log it; it changes nothing."""

    text: str


Effect = Send | Write | ReadLog | LoadCheckpoint | SetTimer | Exit | Launch | Retire | Note
