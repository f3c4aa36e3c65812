"""What is written into logs: entries of rows, and control records between them.

Responsible for: the shape of everything durable that readers of a log see, in log order.
Not responsible for: how it is stored (drivers), or who reads it (router.py, feed.py).

A row is a plain tuple, because millions of them pass:

    (key, event_time_ms, payload)                       as a producer sends it
    (key, event_time_ms, payload, origin, n, epoch)     on its way between sites ("stamped")

`origin` and `n` number the rows of one key gap-free per origin (a site, or a mobile source), so
that the key's sequencer can drop what it has and hold what came too early, whichever way it came.
`epoch` is that of the sender's routing entry. A payload is whatever the two ends agree upon: nobody
in between looks into it, so they had better encode it once (spark/border.py).

What passes by the million is `array_like` (no names of fields travel) and `gc=False` (it is never part of
a cycle, so the collector need not follow it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tiercel.core.topology import site_of

_encode = msgspec.msgpack.Encoder().encode

Key = bytes
Row = tuple[Any, ...]
Position = tuple[int, int]  # (stage, offset) of keys on the move: SHADOW offsets are X's, OWN ones W's

SHADOW, OWN = 0, 1

INITIAL = -2  # event time of a row that is initial state, not a tuple
ABSENT_WATERMARK = -1  # no row seen yet: nothing is late, no event-time timer is due


class KeySet(msgspec.Struct, frozen=True):
    """Which keys a move takes: whole slots, or single keys. Never both."""

    slots: frozenset[int] = frozenset()
    keys: frozenset[Key] = frozenset()

    def has(self, key: Key, slot: int) -> bool:
        return slot in self.slots or key in self.keys


class Route(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One routing entry: the owner and how often it has changed."""

    instance: str
    epoch: int

    @property
    def site(self) -> str:
        return site_of(self.instance)


class TableUpdate(msgspec.Struct, frozen=True):
    """Entries of a routing table as they travel in Flip, Adopt and Moved."""

    slots: dict[int, Route]
    keys: dict[Key, Route]


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Log time has advanced; processing-time timers up to the entry's time are due."""


class Watermark(msgspec.Struct, frozen=True, tag=True):
    """No row with an event time at or below this will be appended any more."""

    value_ms: int


class Begin(msgspec.Struct, frozen=True, tag=True):
    """From here on the rows of the move's keys are in a part of their own, named after the move."""

    move: str


class Compare(msgspec.Struct, frozen=True, tag=True):
    """Source and destination digest the move's keys at this point; a difference ends the move."""

    move: str


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The move is undone: its keys are the source's again, and never ceased to be."""

    move: str
    reason: str


class Flip(msgspec.Struct, frozen=True, tag=True):
    """The decision. From here on the move's keys belong to the destination."""

    move: str
    keys: KeySet
    source: str
    destination: str
    strategy: str
    begin_offset: int
    epochs: TableUpdate  # of the keys up to here


class Adopt(msgspec.Struct, frozen=True, tag=True):
    """At the destination's site: the move's keys are sequenced by this log from here on."""

    move: str
    keys: KeySet
    source: str
    strategy: str
    update: TableUpdate
    time_ms: int  # the keys' log time at the flip: their clock never runs backwards
    watermark_ms: int
    own_watermark_ms: int  # this log's own at this point


class Done(msgspec.Struct, frozen=True, tag=True):
    """At the destination's site: the move's keys are ordinary keys of the destination again."""

    move: str


class Inherited(msgspec.Struct, frozen=True, tag=True):
    """An instance is dead, and others have its keys from here on."""

    of: str
    update: TableUpdate


class Era(msgspec.Struct, frozen=True):
    """Whatever was stored up to a generation is of owners before; who reads it goes on with these epochs."""

    generation: int
    routes: TableUpdate

    def epoch(self, image: KeyImage, generation: int, slot: int) -> int:
        """Of a key whose stored version is of that generation."""
        if generation > self.generation:
            return image.epoch
        route = self.routes.keys.get(image.key) or self.routes.slots.get(slot)
        return image.epoch if route is None else route.epoch


Control = Tick | Watermark | Begin | Compare | Abort | Flip | Adopt | Done | Inherited


class Inheritance(msgspec.Struct, frozen=True):
    """What one heir gets of an instance that died: its share of the checkpoint, and of the log behind it."""

    of: str
    keys: KeySet  # slots, and single keys that lived with it
    through: int  # up to this offset, rows of these keys are in the parts of the dead one
    fresh: bool = True  # the heir has no checkpoint with them yet: whatever it has stored is of an older time


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One log entry: the rows that arrived together, by the target that reads them, or a control record.

    A part is named after the instance that reads it, or, for keys on the move, `move|instance`. An
    entry is never merged with another:
    user code is called once per entry and key, so a replay makes the same calls.
    """

    offset: int
    time_ms: int
    parts: dict[str, list[Row]]
    control: Control | None = None


class Output(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One row that an operator emitted; (operator, key, epoch, offset, n) is its identity."""

    offset: int
    key: Key  # of the operator that emitted it; of rows that feeds refused: their producer
    epoch: int
    n: int
    row: Row  # (key for the next operator, event time, payload)


class StreamEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One entry of a stream's output log, as subscribers get it."""

    offset: int
    outputs: Sequence[Output]


class KeyImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The state of one key as it travels or rests: encoded values, timers, and up to where it is."""

    key: Key
    epoch: int
    at: int  # offset of the last entry applied to it
    values: dict[str, Any] | None  # None: the key has no state (deleted, or never had)
    timers: tuple[int, ...] = ()
    time_ms: int = 0
    watermark_ms: int = ABSENT_WATERMARK

    @property
    def size_bytes(self) -> int:
        return 64 + (len(_encode(self.values)) if self.values else 0)


class KeyFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an instance must know of a key that stays in storage until it is needed."""

    timers: tuple[int, ...] = ()
