"""Between routers: lane frames, and the notices of moves that share the lane with the rows."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tiercel.core.messages.base import Message
from tiercel.core.records import Control, Key, KeySet, Output, Row, TableUpdate


class Prepare(Message, frozen=True):
    """Source's router -> destination's router -> destination: make room for these keys."""

    move: str
    operator: str
    keys: KeySet
    source: str
    destination: str
    strategy: str
    epochs: TableUpdate  # of the keys before the flip


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


class LaneFrame(Message, frozen=True):
    """One frame of the lane (link, inbox), numbered. Rows are stamped; control shares the lane."""

    inbox: str
    n: int
    rows: list[Row]
    notice: AnyNotice | None = None
    outputs: Sequence[Output] | None = None  # for the lane to a stream's home

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
    sources: tuple[str, ...] = ()  # of the operator's input at this site, known so far
    concluded_ms: int = -1  # the watermark of this site's log: others may conclude it too
