"""The contents of logs: entries of rows, and control records between them.

Responsible for: the shape of everything durable that readers of a log see, in log order.
Not responsible for: storing it (drivers), appending and dispatching it (core/logs).

A row is a plain tuple, because a process handles millions of them:

    (key, event_time_ms, payload)                       as a producer sends it
    (key, event_time_ms, payload, origin, n, epoch)     between sites ("stamped")

`origin` and `n` number the rows of one key gap-free per origin (the storage of a site, an incarnation of a
mobile source, or a stream whose devices number their rows). With them the
key's sequencer drops repeated rows and holds early ones, whatever path they took. `epoch` is the epoch of
the sender's routing entry. Only the two ends decode a payload, so they encode it once (spark/rows).

Frequent structs are `array_like` (no field names are encoded) and `gc=False` (they are never part of a
cycle, so the garbage collector does not track them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tiercel.core.model.keys import Key, KeySet, StateImage
from tiercel.core.model.routing import RouteUpdate

Row = tuple[Any, ...]
Position = tuple[int, int]  # (stage, offset) of moving keys: SHADOW offsets are of the source's log

SHADOW, OWN = 0, 1

INITIAL = -2  # event time of a row that is initial state, not a tuple


def site_origin(site: str, storage: int) -> str:
    """The origin of rows that a site numbers: another storage of the site numbers anew, as another origin."""
    return f"{site}@{storage}"


def mobile_origin(source: str, incarnation: str) -> str:
    """The origin of rows that a mobile source numbers. Without its counters it is another incarnation."""
    return f"{source}@{incarnation}"


class OutputFence(msgspec.Struct, frozen=True, array_like=True):
    """A place among the outputs of a stream at its home: behind frame `n` of `origin`."""

    origin: str
    n: int

    def is_replaced_by(self, origin: str) -> bool:
        """Whether this is a later storage of the same site: frames of the earlier one come no more."""
        site, _, storage = self.origin.rpartition("@")
        other, _, later = origin.rpartition("@")
        return site == other and int(later) > int(storage)


def device_origin(stream: str) -> str:
    """The origin of rows that devices number: whoever brings them, a key of a stream has one sequence."""
    return f"~{stream}"


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Log time has advanced; processing-time timers up to the time of this entry are due."""


class Watermark(msgspec.Struct, frozen=True, tag=True):
    """The log appends no further row with an event time at or below this."""

    value_ms: int


class Begin(msgspec.Struct, frozen=True, tag=True):
    """From here on the rows of the move's keys form a part of their own, named after the move."""

    move: str


class Compare(msgspec.Struct, frozen=True, tag=True):
    """Source and destination digest the move's keys at this point; a difference ends the move."""

    move: str


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The move is undone: its keys stay with the source, which has owned them throughout."""

    move: str
    reason: str


class Flip(msgspec.Struct, frozen=True, tag=True):
    """The decision: from here on the destination owns the move's keys."""

    move: str
    keys: KeySet
    source: str
    destination: str
    strategy: str
    begin_offset: int
    epochs: RouteUpdate  # of the keys up to here


class Adopt(msgspec.Struct, frozen=True, tag=True):
    """At the destination's site: from here on this log sequences the move's keys."""

    move: str
    keys: KeySet
    source: str
    strategy: str
    update: RouteUpdate
    time_ms: int  # the keys' log time at the flip: their clock never runs backwards
    watermark_ms: int
    own_watermark_ms: int  # the watermark of this log at this point
    epochs: RouteUpdate  # of the keys before the flip
    flip_offset: int  # of the flip, in the log of the source's site


class Done(msgspec.Struct, frozen=True, tag=True):
    """At the destination's site: the move's keys are ordinary keys of the destination again."""

    move: str


class TakenOver(msgspec.Struct, frozen=True, tag=True):
    """An instance is dead; from here on its successors own its keys."""

    of: str
    update: RouteUpdate


class EpochOverride(msgspec.Struct, frozen=True):
    """The epochs that replace stored ones: versions up to a generation are of previous owners."""

    generation: int
    routes: RouteUpdate

    def epoch(self, image: StateImage, generation: int, slot: int) -> int:
        """The epoch of a key whose stored version is of that generation."""
        if generation > self.generation:
            return image.epoch
        route = self.routes.keys.get(image.key) or self.routes.slots.get(slot)
        return image.epoch if route is None else route.epoch


Control = Tick | Watermark | Begin | Compare | Abort | Flip | Adopt | Done | TakenOver


class Takeover(msgspec.Struct, frozen=True):
    """A successor's share of the checkpoint of a dead instance, and of the log behind it."""

    of: str
    keys: KeySet  # slots, and single keys with the same owner
    through: int  # up to this offset, rows of these keys are in the parts of the dead instance
    count: int = 0  # slots of the operator
    fresh: bool = True  # the successor has no checkpoint with these keys yet; its stored state is older
    before: tuple[str, ...] = ()  # dead instances that `of`, or its dead successor, was still taking over

    @property
    def readers(self) -> tuple[str, ...]:
        """The instances in whose parts the rows are."""
        return (self.of, *self.before)


class MovePart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The rows of an entry that belong to a move, and the instance that reads them."""

    move: str
    reader: str
    rows: list[Row]


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One log entry: the rows that arrived together, by the instance that reads them, or a control record.

    Rows of keys that move are in `moving`. Entries are never merged: an instance calls user code once per
    entry and key, so a replay makes the same calls.
    """

    offset: int
    time_ms: int
    parts: dict[str, list[Row]]
    control: Control | None = None
    moving: tuple[MovePart, ...] = ()

    def rows_of(self, reader: str) -> list[Row]:
        """All rows that an instance reads, its own and those of moves."""
        rows = self.parts.get(reader, [])
        for part in self.moving:
            if part.reader == reader:
                rows = rows + part.rows
        return rows

    @property
    def row_count(self) -> int:
        """The number of rows, a row batch counted as one."""
        count = sum(map(len, self.parts.values()))
        return count + sum(len(part.rows) for part in self.moving) if self.moving else count

    def all_rows(self) -> list[Row]:
        """The rows of all readers."""
        found = [row for rows in self.parts.values() for row in rows]
        return found + [row for part in self.moving for row in part.rows]


class Output(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One row that an operator has emitted, identified by (operator, key, epoch, offset, n)."""

    offset: int
    key: Key  # of the operator that emitted it; for a row that a feed refused: its producer
    epoch: int
    n: int
    row: Row  # (key for the next operator, event time, payload)


class StreamEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One entry of a stream's output log, as subscribers get it."""

    offset: int
    outputs: Sequence[Output]
