"""Between a router and the instances of its site: attach, dispatch, outputs, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tiercel.core.messages.base import Message
from tiercel.core.records import Adopt, Entry, Inheritance, KeySet, Output, Position, TableUpdate


class Attach(Message, frozen=True):
    """An instance (this life of it: `life`) is here. Fences every earlier life."""

    instance: str
    life: int
    session: int  # counts the connections of this life


class ArrivalRole(msgspec.Struct, frozen=True):
    """What a destination must know about a move it takes part in, after it attached."""

    move: str
    keys: KeySet
    source: str
    strategy: str
    epochs: TableUpdate  # of the keys before the flip
    adopt: Adopt | None
    adopted: int  # offset of Adopt in the log of the destination's site; -1 before it
    merged: int  # offset of Done there; -1 before it
    emit_from: int | None


class DepartureRole(msgspec.Struct, frozen=True):
    """What a source must know about a move whose flip is decided, after it attached."""

    move: str
    keys: KeySet
    destination: str
    strategy: str
    begin_offset: int
    flip_offset: int
    cut: int | None  # it must not emit above this; None: it may say itself where it stops
    epochs: TableUpdate  # of the keys before the flip: newer copies came back since, and stay


class AttachReply(Message, frozen=True):
    """Before any replay: which log this is, how far it reached, and the moves that concern you."""

    life: int
    session: int  # an answer to an older connection's Attach is not for us
    incarnation: int
    start: int  # where an instance without a checkpoint begins
    start_watermark_ms: int  # the log's watermark there
    fresh: bool  # it is not known here: whatever it has stored is from a time before it was retired
    flush: int  # the last flush of this life that was admitted
    ends: list[tuple[int, int]]  # (incarnation, end of log it found when it began)
    arrivals: list[ArrivalRole]
    departures: list[DepartureRole]
    inherited: Inheritance | None = None  # without a checkpoint of its own it begins with this
    stored: bool = False  # it has told us of a checkpoint that covers `start`
    head: int = 0  # the last entry of the log


class Outlived(Message, frozen=True):
    """This life of an instance is heard no more, and ends: a later one has attached, or heirs took over.

    The later one may have been what Spark believes dead. Then the task that Spark knows is the one that
    nobody hears; it has to end to be started again.
    """

    life: int


class Resume(Message, frozen=True):
    """Go on from here: my own keys are applied up to `applied`, each arriving move up to its position."""

    instance: str
    life: int
    session: int
    applied: int
    moves: dict[str, Position]
    watermark_ms: int


class Dispatch(Message, frozen=True):
    """Entries of the inbox, this instance's parts only, in log order."""

    entries: list[Entry]

    @property
    def size_bytes(self) -> int:
        return 64 + 48 * sum(len(rows) for e in self.entries for rows in e.parts.values())


class Confirmed(Message, frozen=True):
    """This flush of outputs, and the inbox up to `durable`, are durable."""

    life: int
    flush: int
    durable: int
    lag: int = 0  # rows in the inbox for this instance, beyond what it has processed


class Outputs(Message, frozen=True):
    """All outputs of the entries up to `through` that were not sent before."""

    instance: str
    life: int
    flush: int  # counts the flushes of this life; what was sent before it is admitted with it
    through: int
    first: int  # offset of the first output: behind what was admitted, they need not be looked at
    outputs: Sequence[Output]
    dead_letters: list[Output]
    watermark_ms: int  # every later output comes from input above this
    timers: bool  # whether anyone here waits for a tick
    rows: int = 0  # that the outputs are, those within runs included


class MoveOutputs(Message, frozen=True):
    """Outputs of a key set on the move, by its destination; the router keeps a mark per key."""

    instance: str
    life: int
    move: str
    stage: int
    outputs: list[Output]
    dead_letters: list[Output]


class Checkpointed(Message, frozen=True):
    """A durable checkpoint covers this much; nothing below will be asked for again."""

    instance: str
    life: int
    applied: int
    moves: dict[str, Position]
    keys: int = 0  # how many have state there
