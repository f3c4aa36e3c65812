"""Messages between a router and the instances of its site: attach, dispatch, outputs, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tiercel.core.messages.base import Message
from tiercel.core.model.keys import KeySet
from tiercel.core.model.log import Adopt, Entry, Output, Position, Takeover
from tiercel.core.model.routing import RouteUpdate


class Attach(Message, frozen=True):
    """An incarnation of an instance connects to its router. It fences every earlier incarnation."""

    instance: str
    incarnation: int
    session: int  # counts the connections of this incarnation


class IncomingRole(msgspec.Struct, frozen=True):
    """The facts that a destination needs after it attached, about one of its moves."""

    move: str
    keys: KeySet
    source: str
    strategy: str
    epochs: RouteUpdate  # of the keys before the flip
    adopt: Adopt | None
    adopted: int  # offset of Adopt in the log of the destination's site; -1 before it
    merged: int  # offset of Done there; -1 before it
    emit_from: int | None


class OutgoingRole(msgspec.Struct, frozen=True):
    """The facts that a source needs after it attached, about a move whose flip is decided."""

    move: str
    keys: KeySet
    destination: str
    strategy: str
    begin_offset: int
    flip_offset: int
    last_offset: int | None  # the source must not emit above this; None: it chooses where it stops
    epochs: RouteUpdate  # of the keys before the flip: copies with newer epochs have returned, and stay
    emitted: int = -1  # the router has the source's outputs up to here: it must not stop before


class AttachReply(Message, frozen=True):
    """Answer to `Attach`, before any replay: the log, its end, and the moves of this instance."""

    incarnation: int
    session: int  # the instance ignores an answer to the Attach of an older connection
    router_incarnation: int
    start: int  # where an instance without a checkpoint begins
    start_watermark_ms: int  # the log's watermark there
    fresh: bool  # the router does not know it: its stored state is from before its retirement
    flush: int  # the last admitted flush of this incarnation
    ends: list[tuple[int, int]]  # (incarnation of the router, end of the log at its start)
    incoming_moves: list[IncomingRole]
    outgoing_moves: list[OutgoingRole]
    takeover: Takeover | None = None  # an instance without a checkpoint begins with this
    stored: bool = False  # the instance has reported a checkpoint that covers `start`
    head: int = 0  # the last entry of the log


class InstanceFenced(Message, frozen=True):
    """This incarnation of an instance must end: a later one has attached, or successors took over.

    The later one may be a process that Spark considers dead. Then the router ignores the task that Spark
    knows, and that task must end so that Spark restarts it.
    """

    incarnation: int


class Resume(Message, frozen=True):
    """The instance has applied its own keys up to `applied` and each incoming move up to its position."""

    instance: str
    incarnation: int
    session: int
    applied: int
    moves: dict[str, Position]
    watermark_ms: int


class Dispatch(Message, frozen=True):
    """Entries of the inbox with the parts of this instance only, in log order."""

    entries: list[Entry]

    @property
    def size_bytes(self) -> int:
        return 64 + 48 * sum(e.row_count for e in self.entries)


class Confirmed(Message, frozen=True):
    """This flush of outputs, and the inbox up to `durable`, are durable."""

    incarnation: int
    flush: int
    durable: int
    lag: int = 0  # rows in the inbox that this instance has not processed


class Outputs(Message, frozen=True):
    """All outputs of the entries up to `through` that the instance has not sent before."""

    instance: str
    incarnation: int
    flush: int  # counts the flushes of this incarnation; admitting one admits all earlier ones
    through: int
    first: int  # offset of the first output: above the admitted ones, the router need not compare each
    outputs: Sequence[Output]
    dead_letters: list[Output]
    watermark_ms: int  # every later output comes from input above this
    timers: bool  # whether a key here waits for a tick
    rows: int = 0  # number of output rows, including those within row batches
    service_us: float = 0.0  # measured time of one input row; 0: not measured yet
    # incoming moves of which everything up to this offset is emitted; a move that withholds is missing
    moves: dict[str, int] = msgspec.field(default_factory=dict)


class MoveOutputs(Message, frozen=True):
    """Outputs of moving keys, from their destination; the router stores a mark per key."""

    instance: str
    incarnation: int
    move: str
    stage: int
    outputs: list[Output]
    dead_letters: list[Output]


class Checkpointed(Message, frozen=True):
    """A durable checkpoint covers these positions; the instance requests no entries below them."""

    instance: str
    incarnation: int
    applied: int
    moves: dict[str, Position]
    keys: int = 0  # number of keys with state
