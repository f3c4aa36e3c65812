"""Messages between routers: frames of site outboxes, and notices of moves within those frames."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tiercel.core.messages.base import Message
from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.log import Control, Output, OutputFence, Row
from tiercel.core.model.routing import RouteUpdate


class Prepare(Message, frozen=True):
    """The source router asks the destination router, and that one the destination, to expect these keys."""

    move: str
    operator: str
    keys: KeySet
    source: str
    destination: str
    strategy: str
    epochs: RouteUpdate  # of the keys before the flip


class MoveNotice(msgspec.Struct, frozen=True, tag=True):
    """Base of the durable notices from the source router to the destination router."""

    move: str


class ShadowNotice(MoveNotice, frozen=True):
    """An entry of the source's inbox with the move's part only."""

    offset: int
    time_ms: int
    rows: list[Row]
    control: Control | None


class FlipToDestination(MoveNotice, frozen=True):
    """The decision, with all facts that the new sequencer needs."""

    flip_offset: int
    time_ms: int
    watermark_ms: int
    update: RouteUpdate
    marks: dict[Key, dict[str, int]]
    prepare: Prepare
    recent: dict[Key, dict[str, bytes]] = {}  # digests of the last rows that devices numbered


class AbortedNotice(MoveNotice, frozen=True):
    """The move is undone."""


class EmitFromNotice(MoveNotice, frozen=True):
    """The source's last output is at `offset`.

    All outputs up to it are in their logs, or on their way: then the home of a stream appends the
    destination's outputs behind its fence.
    """

    offset: int
    fences: dict[str, OutputFence] = {}  # by stream


class EmittedNotice(MoveNotice, frozen=True):
    """The source's outputs up to `offset` are in their logs."""

    offset: int


class ResumeNotice(MoveNotice, frozen=True):
    """Restart strategy: the router may resume dispatch to the operator."""


class ServedByNotice(MoveNotice, frozen=True):
    """The source is dead, and this successor of it sends the units."""

    instance: str


class DoneNotice(MoveNotice, frozen=True):
    """The move is done; both sides may forget it."""


AnyNotice = (
    ShadowNotice
    | FlipToDestination
    | AbortedNotice
    | EmitFromNotice
    | EmittedNotice
    | ResumeNotice
    | ServedByNotice
    | DoneNotice
)


class SiteFrame(Message, frozen=True):
    """One numbered frame of the site outbox for (link, inbox), with stamped rows or a notice."""

    inbox: str
    origin: str  # the sender's storage, which numbers its frames
    n: int
    rows: list[Row]
    notice: AnyNotice | None = None
    outputs: Sequence[Output] | None = None  # for the outbox to a stream's home
    after: OutputFence | None = None  # the outputs come behind this

    @property
    def size_bytes(self) -> int:
        return 64 + 48 * len(self.rows)


class SiteFrameReceipt(Message, frozen=True):
    """`taken`: the sender may send more. `settled`: every row is in the log of its owner, at any site.

    `again`: a row of the frame was over the limit of held rows when the frame came, and is next now.
    """

    inbox: str
    origin: str  # of the frames
    taken: list[int]
    settled: list[int]
    again: tuple[int, ...] = ()


class MarksForgotten(Message, frozen=True):
    """The sender has forgotten its numbers of these keys: all rows up to them are settled.

    It begins again above all numbers that it has used. So the owner may forget its marks, too.
    """

    operator: str
    origin: str
    numbers: dict[Key, int]


class OwnerChanged(Message, frozen=True):
    """The sender of some rows used an old route; these are newer ones. It accepts only newer epochs."""

    operator: str
    update: RouteUpdate


class WatermarkReport(Message, frozen=True):
    """Every row that this site has accepted below this watermark is in the log of its owner."""

    operator: str
    watermark_ms: int
    sources: tuple[str, ...] = ()  # of the operator's input at this site, as far as it knows them
    concluded_ms: int = -1  # the watermark of this site's log: other sites may adopt it
