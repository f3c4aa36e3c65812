"""About moves: between the controller, the two routers and the two instances."""

from __future__ import annotations

import msgspec

from tiercel.core.messages.base import Message
from tiercel.core.messages.instances import DepartureRole
from tiercel.core.messages.lanes import ShadowNotice
from tiercel.core.records import Key, KeyImage, KeySet, TableUpdate


class Retirement(Message, frozen=True):
    """The controller tells a router that an instance will not come back."""

    instance: str


class RetirementReply(Message, frozen=True):
    """Whether an instance may go: it owns nothing and no move concerns it."""

    instance: str
    accepted: bool


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
    keys: int = 0  # captured, once they are
    size_bytes: int = 0


class StatusQuery(Message, frozen=True):
    """A (new) controller asks for every move a router carries, and the tables it sequences."""

    n: int = 0  # comes back with the answer: an answer to an older question tells older tables
    # operator -> the version of its table that the asker has
    known: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)


class StatusReply(Message, frozen=True):
    """Answer to `StatusQuery`."""

    moves: list[MoveRequest]
    statuses: list[MoveStatus]
    tables: dict[str, TableUpdate]  # those that the asker does not know
    attached: dict[str, int]  # instance -> how many keys had state there when it last told
    n: int = 0
    # of all operators: (incarnation, changes since)
    versions: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)


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
    """The source has captured every key: so many, of that size."""

    move: str
    keys: int = 0
    size_bytes: int = 0


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
    keys: int = 0  # captured so far
    size_bytes: int = 0


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


class Succession(Message, frozen=True):
    """Controller -> router: this instance is dead; all it owns goes to these new ones. See core/heirs.py."""

    recovery: str  # its name; answered with a `MoveStatus`
    instance: str
    heirs: tuple[str, ...]


class Shadow(Message, frozen=True):
    """Router -> destination: entries of the source's inbox for the keys on the move, in order."""

    move: str
    entries: list[ShadowNotice]
