"""The durable tables of the core: every table with the type of its values, declared once.

Responsible for: the name and value type of each table; the records that only storage holds.
Not responsible for: bytes (the driver's codec), the time of a write (the owner of the record).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from tiercel.core import messages as m
from tiercel.core.messages import ShadowNotice, SiteFrame, StagedPart
from tiercel.core.model.keys import ABSENT_WATERMARK, KeySet, StateImage
from tiercel.core.model.log import (
    Adopt,
    Entry,
    EpochOverride,
    Output,
    OutputFence,
    Position,
    Takeover,
)
from tiercel.core.model.routing import Route, RouteUpdate


class OutgoingMoveRecord(msgspec.Struct):
    """The durable part of a move at the source router."""

    request: m.MoveRequest
    phase: str
    epochs: RouteUpdate  # of the keys before the flip
    begin_offset: int = 0
    flip_offset: int = 0
    last_offset: int = -1
    last_watermark_ms: int = -1  # of the log at `last_offset`
    retained_from: int = 0  # the log above this offset is retained until the destination has its rows
    installed: bool = False  # flip first: the destination has the state of every key
    reason: str = ""
    successors: tuple[str, ...] = ()  # of a dead source, that have the keys in their checkpoints
    served_for: tuple[str, ...] = ()  # dead sources; the one of the request serves the units in their place


class IncomingMoveRecord(msgspec.Struct):
    """The durable part of a move at the destination router."""

    prepare: m.Prepare
    phase: str
    adopt: Adopt | None = None
    adopted: int = -1  # offset of Adopt
    emit_from: int = -1
    merged: int = -1  # offset of Done
    watermark_ms: int = -1
    frozen_ms: int = -1  # the promised watermark of the operator's outputs; constant during the move
    vote: m.Ready | None = None
    successors: tuple[str, ...] = ()  # of a dead destination, whose checkpoints do not cover Done
    fences: dict[str, OutputFence] = {}  # stream -> the outputs of the keys come behind this at its home
    replaced: bool = False  # the destination of `prepare` is a successor of a dead one


class HeldOutputs(msgspec.Struct, frozen=True):
    """Outputs at the home of their stream that wait for those of another site."""

    after: OutputFence
    outputs: Sequence[Output]
    sender: str = ""  # of the frame that brought them; empty: they were made here
    origin: str = ""
    n: int = 0


class LogReader(msgspec.Struct, frozen=True):
    """The coverage of an instance's last checkpoint, and its last incarnation that attached."""

    incarnation: int
    applied: int
    moves: dict[str, int]  # incoming moves: offset in this log, once they read it
    start_watermark_ms: int = ABSENT_WATERMARK  # of the log, where an instance without a checkpoint begins
    stored: bool = False  # a checkpoint covers `applied`: the log up to there may be trimmed

    def fences(self, incarnation: int) -> bool:
        """Rule R29: an incarnation older than the last one that attached may not attach again."""
        return incarnation < self.incarnation


class DispatchPause(msgspec.Struct, frozen=True):
    """Dispatch stops behind `limit` until the operator's instances have been relaunched."""

    limit: int
    awaited: dict[str, int]  # instance -> the incarnation that must end
    released: bool = False  # nothing else pauses dispatch


class StoredIncomingMove(msgspec.Struct, frozen=True):
    """The key set of an incoming move as of a checkpoint."""

    move: str
    keys: KeySet
    source: str
    strategy: str
    epochs: RouteUpdate
    position: Position
    adopt: Adopt | None
    adopted_at: int
    shadow_watermark_ms: int
    own_watermark_ms: int
    floors: dict[bytes, int]
    at: dict[bytes, Position]
    withheld: list[tuple[int, Output]]  # withheld outputs: no replay would produce them again
    withheld_dead_letters: list[tuple[int, Output]]
    renewed: list[tuple[int, RouteUpdate]] = []  # takeovers since the adoption, by their offset
    missing: list[int] = []  # units without their state or some of their rows: nothing of them is stored


class CheckpointHeader(msgspec.Struct, frozen=True):
    """The position of a complete checkpoint; a checkpoint without a header is incomplete."""

    generation: int
    applied: int
    router_incarnation: int
    time_ms: int
    watermark_ms: int
    incoming_moves: list[StoredIncomingMove]
    era: EpochOverride | None = None
    takeover: int = -1  # written after this takeover, which is identified by its `through` offset


class CurrentBatch(msgspec.Struct, frozen=True):
    """The query that writes a stream in its own tasks, and its last batch that has begun."""

    query: str
    batch: int
    newest_ms: int = -1  # the newest event time of the batches before


class FramePlace(msgspec.Struct, frozen=True, array_like=True):
    """One frame: the digest of its rows, and the offset of its inbox entry; 0 if it made none."""

    digest: bytes
    offset: int


class TimerPlace(msgspec.Struct, frozen=True, array_like=True):
    """An entry of the output log with outputs of timers: those of these inbox offsets."""

    entry: int
    offsets: list[int]


class StagedAttempt(msgspec.Struct, frozen=True, array_like=True):
    """What one attempt of a task of a feed has staged: a log of its own, with this many frames."""

    feed: str
    batch: int
    partition: int
    frames: int = 0


class Publication(msgspec.Struct, frozen=True):
    """A batch of a feed whose frames go from the staged logs to the inboxes, one after the other."""

    batch: int
    stream: str
    parts: list[StagedPart]
    newest_ms: int
    part: int = 0  # the next frame: `after` frames of this part are published
    after: int = 0
    frames: int = 0  # published

    @property
    def is_complete(self) -> bool:
        return self.part >= len(self.parts)


TABLES: Final[dict[str, Any]] = {
    # a router's
    "storage": int,  # the incarnation that created this storage
    "head": tuple[int, int, int],
    "trimmed": int,
    "ends": list[tuple[int, int]],
    "route": Route,
    "route_key": Route,
    "mark": dict[str, int],
    "recent": dict[str, bytes],
    "count": int,
    "count_base": int,
    "reader": LogReader,
    "retired": bool,
    "takeover": Takeover,
    "emitted": int,
    "pause": DispatchPause,
    "broadcast": bytes,
    "producer": int,
    "producer_incarnation": str,
    "source": int,
    "batch": CurrentBatch,
    "batch_task": int,
    "batch_frame": FramePlace,
    "batch_timer": TimerPlace,
    "feed": int,  # the last batch of a feed that was published
    "staged": StagedAttempt,
    "publication": Publication,
    "outbox": tuple[SiteFrame, int],
    "outbox_next": int,
    "stream_head": int,
    "stream_trimmed": int,
    "subscription": int,
    "received": int,
    "held_outputs": HeldOutputs,
    "outgoing": OutgoingMoveRecord,
    "incoming": IncomingMoveRecord,
    "ended": tuple[str, str],
    "standby": str,
    "shadow": ShadowNotice,
    "move_mark": Position,
    "inbox": Entry,  # or StreamEntry, in an output log: see `read_log`
    # an instance's
    "state": StateImage,
    "move": StateImage,
    "routes": RouteUpdate,
    "checkpoint": CheckpointHeader,
    "schema": dict[str, int],  # variable -> schema version of all its stored values; 1 if missing
}
