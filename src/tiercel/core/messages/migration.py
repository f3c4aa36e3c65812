"""Messages about moves: between the controller, the two routers and the two instances."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from tiercel.core.messages.base import Message
from tiercel.core.messages.instance import OutgoingRole
from tiercel.core.messages.site_link import ShadowNotice
from tiercel.core.model.keys import Key, KeySet, StateImage
from tiercel.core.model.routing import RouteUpdate


class Retirement(Message, frozen=True):
    """The controller asks a router to let an instance go for good."""

    instance: str
    number: int = 0  # of this retirement; 0: no answer is awaited


class RetirementReply(Message, frozen=True):
    """Whether an instance may end: it owns nothing, and no move names it."""

    instance: str
    accepted: bool
    retirement: int = 0  # the number of the retirement that this answers


class MoveRequest(Message, frozen=True):
    """The controller requests a move from the source router."""

    move: str
    operator: str
    keys: KeySet
    source: str
    destination: str
    strategy: str
    deadline_ms: float


class MoveOutcome(enum.Enum):
    """How a move ended. The values are those of `MoveStatus.phase`."""

    DONE = "done"
    ABORTED = "aborted"  # undone; the keys are where they were
    REFUSED = "refused"  # never started


class OutcomeStored(Message, frozen=True):
    """The controller has stored how a move ended, and never asks for it again: the router may forget it."""

    move: str


class MoveStatus(Message, frozen=True):
    """The progress of a move. `phase` is the value of a SourceRouterPhase or of a MoveOutcome."""

    move: str
    phase: str
    reason: str = ""
    keys: int = 0  # number of captured keys, once it is known
    size_bytes: int = 0
    messages: int = 0  # so far: those of its source router, chunks and their receipts
    overlap: float = 1.0  # how much of the transfer a unit was processed, on average

    @property
    def outcome(self) -> MoveOutcome | None:
        """How the move ended; None while it runs."""
        return _OUTCOMES.get(self.phase)


_OUTCOMES = {outcome.value: outcome for outcome in MoveOutcome}


class StatusQuery(Message, frozen=True):
    """A controller asks for all moves of a router and for the tables that it sequences."""

    n: int = 0  # the answer repeats it: an answer to an older query has older tables
    # operator -> the version of its table that the controller has
    known: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)


class StatusReply(Message, frozen=True):
    """Answer to `StatusQuery`."""

    moves: list[MoveRequest]
    statuses: list[MoveStatus]
    tables: dict[str, RouteUpdate]  # those that the controller does not have
    attached: dict[str, int]  # instance -> the number of keys with state that it last reported
    n: int = 0
    # of all operators: (incarnation of the router, changes since its start)
    versions: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)


class Prepared(Message, frozen=True):
    """The destination is ready to receive, and no longer raises its watermark."""

    move: str
    watermark_ms: int


class Refused(Message, frozen=True):
    """The destination or its router cannot take part; the move is undone."""

    move: str
    reason: str


class Capture(Message, frozen=True):
    """The source router asks the source, outside of the log, to send these keys to the destination."""

    move: str
    keys: KeySet
    destination: str
    copies: bool = False  # what the destination has as a standby need not be sent


class CaptureFrom(Message, frozen=True):
    """The source captures nothing below this offset; the shadow starts behind it."""

    move: str
    offset: int
    time_ms: int
    watermark_ms: int


class Captured(Message, frozen=True):
    """The source has captured every key, and reports their number and size."""

    move: str
    keys: int = 0
    size_bytes: int = 0
    chunks: int = 0


class SetStandby(Message, frozen=True):
    """The controller names the standby of an instance to its router; an empty name ends it."""

    instance: str
    standby: str


class StandbyRole(Message, frozen=True):
    """The router tells an instance who its standby is; an empty name: it has none."""

    standby: str


class Increment(Message, frozen=True):
    """Keys that have changed at the source since its earlier increments, for its standby."""

    source: str
    session: tuple[int, int]  # incarnation of the source, number in it
    n: int  # of the increment in its session; 1 is the first
    images: list[StateImage]

    @property
    def size_bytes(self) -> int:
        return 64 + sum(i.size_bytes for i in self.images)


class IncrementReceipt(Message, frozen=True):
    """The standby has the increments up to this one; -1: one is missing, and the session is over."""

    session: tuple[int, int]
    n: int


class Chunk(Message, frozen=True):
    """Some keys of the move, each as of its own offset. The source numbers the chunks that it sends."""

    move: str
    n: int
    images: list[StateImage]
    units: Sequence[int] = ()  # whole with this chunk: a key of theirs that no chunk has had no state
    sent_before: int = 0  # keys of the first image's unit that earlier chunks have
    kept: Sequence[Key] = ()  # keys whose image has no state here: the destination has a copy of it
    copy: tuple[int, int, int] | None = None  # session of that copy, and its last increment

    @property
    def size_bytes(self) -> int:
        return 64 + sum(i.size_bytes for i in self.images)


class UnitReceipt(Message, frozen=True):
    """The destination has these units. A durable unit is in a checkpoint of the destination."""

    move: str
    n: int  # of the chunk that brought them: the source may send another one
    taken: Sequence[int]
    durable: Sequence[int] = ()


class UnitRequest(Message, frozen=True):
    """The destination asks for units that it does not have. The source sends them first."""

    move: str
    units: list[int]
    again: bool = False  # nothing has come for a while: chunks without a receipt are lost
    in_full: bool = False  # the copy of a standby does not have them


class Backlog(Message, frozen=True):
    """The source router reports which rows wait for the units of a move. A hint for the order."""

    move: str
    waiting: dict[int, tuple[int, int]]  # unit -> offset of its first waiting row, number of rows


class Digests(Message, frozen=True):
    """The digests at the Compare record, of the keys with rows since both instances process them."""

    move: str
    digests: dict[Key, int]


class Ready(Message, frozen=True):
    """The vote: the destination has every key durably. From here on only the source router decides."""

    move: str
    incarnation: int
    digests: dict[Key, int]


class StateComplete(Message, frozen=True):
    """The destination has the state of every key (flip-first strategies)."""

    move: str
    overlap: float = 0.0  # for how much of the transfer a unit was there already, on average


class FlipToSource(Message, frozen=True):
    """The move is decided at this offset; the source must stop and report its last offset."""

    move: str
    role: OutgoingRole


class SourceStopped(Message, frozen=True):
    """The source has emitted all outputs of the keys up to `offset`, and emits none above."""

    move: str
    offset: int
    keys: int = 0  # captured so far
    size_bytes: int = 0
    watermark_ms: int = -1  # of the log at `offset`


class EmitFrom(Message, frozen=True):
    """All outputs up to `offset` are in their logs; the destination emits from there on."""

    move: str
    offset: int


class EmittedThrough(Message, frozen=True):
    """The source's outputs up to here are durable; the destination may drop its withheld ones."""

    move: str
    offset: int


class DestinationCheckpointed(Message, frozen=True):
    """The destination has emitted its withheld outputs, and its checkpoint covers the adoption."""

    move: str


class ServedBy(Message, frozen=True):
    """The source is dead, and this successor of it sends the units: the destination asks nobody else."""

    move: str
    instance: str


class DestinationReplaced(Message, frozen=True):
    """The destination is dead, and this successor of it receives the keys of a decided move."""

    move: str
    destination: str


class AbortNotice(Message, frozen=True):
    """The move is undone; the receiver forgets it."""

    move: str


class Forget(Message, frozen=True):
    """The move is done; the source may delete the keys."""

    move: str


class Forgotten(Message, frozen=True):
    """The source's checkpoint no longer has the keys."""

    move: str


class FromInstance(Message, frozen=True):
    """A message of an instance about a move, with the incarnation that sent it."""

    instance: str
    incarnation: int
    message: Message


class RestartRequest(Message, frozen=True):
    """Restart strategy: this incarnation processes its entries, checkpoints, and ends to be restarted."""

    move: str
    incarnation: int


class TakeoverRequest(Message, frozen=True):
    """An instance is dead: the controller asks its router to give everything it owns to these successors."""

    recovery: str  # its name; the router answers with a `MoveStatus`
    instance: str
    successors: tuple[str, ...]


class Shadow(Message, frozen=True):
    """Entries of the source's inbox for the moving keys, in order."""

    move: str
    entries: list[ShadowNotice]
