"""What crosses a process boundary. Names are nouns; every message is frozen data.

Responsible for: the shape of every message, and which side may send it.
Not responsible for: bytes on the wire (runtime/), or what a message makes a machine do.

Messages of one connection arrive in order or not at all. None of them is trusted to arrive: what
must arrive is repeated by its sender until it is answered, so each is idempotent.
"""

from __future__ import annotations

import msgspec

from tiercel.core.records import (
    Adopt,
    Control,
    Entry,
    Key,
    KeyImage,
    KeySet,
    Output,
    Position,
    Row,
    StreamEntry,
    TableUpdate,
)


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of everything that crosses a process boundary."""


# -- producers and subscribers ---------------------------------------------------------------


class Hello(Message, frozen=True):
    """A fixed producer introduces itself; answered by `ProducerMark`."""

    producer: str


class ProducerMark(Message, frozen=True):
    """Everything of this producer up to `seq` is durable. Sent as answer and as acknowledgement."""

    producer: str
    seq: int


class Produce(Message, frozen=True):
    """Rows of a fixed producer, numbered gap-free. `watermark_ms` promises later event times."""

    producer: str
    seq: int
    stream: str
    rows: list[Row]
    watermark_ms: int | None = None
    initial: bool = False  # initial state, before the first tuple


class ProduceMobile(Message, frozen=True):
    """Rows of a mobile source: (key, event time, payload, n), n gap-free per key."""

    source: str
    frame: int
    stream: str
    rows: list[Row]


class MobileReceipt(Message, frozen=True):
    """These frames of a mobile source are safe."""

    source: str
    frames: list[int]


class Subscribe(Message, frozen=True):
    """Send me this stream's entries with `offset > after`."""

    stream: str
    after: int


class Publish(Message, frozen=True):
    """Durable entries of an output log, in order."""

    stream: str
    entries: list[StreamEntry]


# -- router and instance ---------------------------------------------------------------------


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


class AttachReply(Message, frozen=True):
    """Before any replay: which log this is, how far it reached, and the moves that concern you."""

    life: int
    session: int  # an answer to an older connection's Attach is not for us
    incarnation: int
    start: int  # where an instance without a checkpoint begins
    flush: int  # the last flush of this life that was admitted
    ends: list[tuple[int, int]]  # (incarnation, end of log it found when it began)
    arrivals: list[ArrivalRole]
    departures: list[DepartureRole]


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


class Outputs(Message, frozen=True):
    """All outputs of the entries up to `through` that were not sent before."""

    instance: str
    life: int
    flush: int  # counts the flushes of this life; what was sent before it is admitted with it
    through: int
    outputs: list[Output]
    dead_letters: list[Output]
    watermark_ms: int  # every later output comes from input above this
    timers: bool  # whether anyone here waits for a tick


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


class Prepare(Message, frozen=True):
    """Source's router -> destination's router -> destination: make room for these keys."""

    move: str
    operator: str
    keys: KeySet
    source: str
    destination: str
    strategy: str
    epochs: TableUpdate  # of the keys before the flip


# -- what shares the lane of an inbox with its rows ------------------------------------------


class MoveNotice(msgspec.Struct, frozen=True, tag=True):
    """Base of the durable notices from the source's router to the destination's."""

    move: str


class ShadowNotice(MoveNotice, frozen=True):
    """An entry of the source's inbox, the move's part only."""

    offset: int
    time_ms: int
    rows: list[Row]
    control: Control | None


class FlippedNotice(MoveNotice, frozen=True):
    """The decision, with everything the new sequencer needs."""

    flip_offset: int
    time_ms: int
    watermark_ms: int
    update: TableUpdate
    marks: dict[Key, dict[str, int]]
    prepare: Prepare


class AbortedNotice(MoveNotice, frozen=True):
    """The move is undone."""


class EmitFromNotice(MoveNotice, frozen=True):
    """The source's last output is at `offset`, and everything up to it is where it belongs."""

    offset: int


class EmittedNotice(MoveNotice, frozen=True):
    """The source's outputs up to `offset` are where they belong."""

    offset: int


class ResumeNotice(MoveNotice, frozen=True):
    """Restart strategy: dispatch of the operator may go on."""


class DoneNotice(MoveNotice, frozen=True):
    """Everyone may forget the move."""


AnyNotice = (
    ShadowNotice | FlippedNotice | AbortedNotice | EmitFromNotice | EmittedNotice | ResumeNotice | DoneNotice
)


# -- between routers -------------------------------------------------------------------------


class LaneFrame(Message, frozen=True):
    """One frame of the lane (link, inbox), numbered. Rows are stamped; control shares the lane."""

    inbox: str
    n: int
    rows: list[Row]
    notice: AnyNotice | None = None
    outputs: list[Output] | None = None  # for the lane to a stream's home

    @property
    def size_bytes(self) -> int:
        return 64 + 48 * len(self.rows)


class LaneReceipt(Message, frozen=True):
    """`taken`: more may be sent. `settled`: every row is in the log of its owner, wherever that is."""

    inbox: str
    taken: list[int]
    settled: list[int]


class Moved(Message, frozen=True):
    """You sent rows the old way; this is what I know. Believed only where it is newer."""

    operator: str
    update: TableUpdate


class WatermarkReport(Message, frozen=True):
    """Every row this site took in below this watermark is in the log of its owner."""

    operator: str
    watermark_ms: int


# -- moves -----------------------------------------------------------------------------------


class Retirement(Message, frozen=True):
    """The controller tells a router that an instance will not come back."""

    instance: str


class MoveRequest(Message, frozen=True):
    """The controller asks the router of the source's site for a move."""

    move: str
    operator: str
    keys: KeySet
    source: str
    destination: str
    strategy: str
    deadline_ms: float


class MoveStatus(Message, frozen=True):
    """Where a move is. `phase` is one of departure.Phase's values, or "refused"."""

    move: str
    phase: str
    reason: str = ""


class StatusQuery(Message, frozen=True):
    """A (new) controller asks for every move a router carries, and the tables it sequences."""


class StatusReply(Message, frozen=True):
    """Answer to `StatusQuery`."""

    moves: list[MoveRequest]
    statuses: list[MoveStatus]
    tables: dict[str, TableUpdate]
    attached: list[str]


class Prepared(Message, frozen=True):
    """The destination is ready to receive and has stopped raising its watermark."""

    move: str
    watermark_ms: int


class Refused(Message, frozen=True):
    """The destination or its router cannot take part; the move is undone."""

    move: str
    reason: str


class Capture(Message, frozen=True):
    """Source's router -> source, out of band: stream these keys to the destination."""

    move: str
    keys: KeySet
    destination: str


class CaptureFrom(Message, frozen=True):
    """The source captures nothing below this offset: the shadow feed starts behind it."""

    move: str
    offset: int
    time_ms: int
    watermark_ms: int


class Captured(Message, frozen=True):
    """The source has captured every key."""

    move: str


class Chunk(Message, frozen=True):
    """Some keys of the move, each as of its own offset. Numbered from 0."""

    move: str
    n: int
    images: list[KeyImage]

    @property
    def size_bytes(self) -> int:
        return 64 + sum(i.size_bytes for i in self.images)


class EndOfKeys(Message, frozen=True):
    """The source has sent `chunks` chunks; keys not mentioned had no state and none was deleted."""

    move: str
    chunks: int


class ChunkReceipt(Message, frozen=True):
    """The destination has all chunks below `upto`."""

    move: str
    upto: int


class Fetch(Message, frozen=True):
    """The destination asks the source for everything, again or for the first time."""

    move: str


class Digests(Message, frozen=True):
    """Digest per key touched while both processed, taken at the Compare record."""

    move: str
    digests: dict[Key, int]


class Ready(Message, frozen=True):
    """The destination's vote: it has every key durably and is in step. From here only X decides."""

    move: str
    life: int
    digests: dict[Key, int]


class Installed(Message, frozen=True):
    """The destination has the state of every key (flip-first strategies)."""

    move: str


class FlipNotice(Message, frozen=True):
    """Router -> source: the move is decided at this offset; say where you stop."""

    move: str
    role: DepartureRole


class Cut(Message, frozen=True):
    """The source emitted everything of the keys up to `offset` and will emit nothing above."""

    move: str
    offset: int


class EmitFrom(Message, frozen=True):
    """Router -> destination: everything up to `offset` is where it belongs; yours from here on."""

    move: str
    offset: int


class EmittedThrough(Message, frozen=True):
    """The source's outputs up to here are safe; the destination may forget the ones it suppressed."""

    move: str
    offset: int


class Settled(Message, frozen=True):
    """The destination has emitted what it owed and its checkpoint covers the adoption."""

    move: str


class AbortNotice(Message, frozen=True):
    """The move is undone; forget it."""

    move: str


class Forget(Message, frozen=True):
    """The move is done; the source may delete the keys."""

    move: str


class Forgotten(Message, frozen=True):
    """The source's checkpoint no longer has the keys."""

    move: str


class Said(Message, frozen=True):
    """What an instance says to its router about a move, with the life that says it."""

    instance: str
    life: int
    message: Message


class Halt(Message, frozen=True):
    """Restart strategy: this life finishes what it has, checkpoints, ends, and is started again."""

    move: str
    life: int


class Shadow(Message, frozen=True):
    """Router -> destination: entries of the source's inbox for the keys on the move, in order."""

    move: str
    entries: list[ShadowNotice]
