"""A checkpoint as it is asked for, taken and written.

Responsible for: what is known of one checkpoint, from the moment it is taken until it is stored.
Not responsible for: taking and writing it (checkpoints.py).
"""

from __future__ import annotations

import enum
from collections import deque

import msgspec

from tiercel.core import messages as m
from tiercel.core.arrival_images import ArrivalImage
from tiercel.core.effects import StorageKey
from tiercel.core.records import Era, Key, KeyImage, TableUpdate
from tiercel.core.snapshots import Snapshot


class Scope(enum.IntEnum):
    """What a checkpoint is asked to hold."""

    NOTHING = 0
    ARRIVALS = 1
    EVERYTHING = 2


class Cursor(msgspec.Struct, frozen=True):
    """Where a checkpoint stands, and that it is whole."""

    generation: int
    applied: int
    incarnation: int
    time_ms: int
    watermark_ms: int
    arrivals: list[ArrivalImage]
    era: Era | None = None
    inherited: int = -1  # taken since this inheritance, by the offset up to which it reads another's rows


class Taken:
    """A checkpoint that was taken and is being written."""

    def __init__(self, scope: Scope, cursor: Cursor, rests_on: int, flush: int) -> None:
        self.scope = scope
        self.cursor = cursor
        self.rests_on = rests_on  # the log must be durable up to here
        self.flush = flush  # and the outputs of what it covers must be admitted
        self.deletes: list[StorageKey] = []  # with the cursor: keys that are gone
        self.routes: TableUpdate | None = None  # if they have changed
        self.snapshots: list[Snapshot] = []
        self.seen: deque[tuple[StorageKey, KeyImage]] = deque()  # looked at, not yet written
        self.written: list[StorageKey] = []
        self.of_moves: list[tuple[str, dict[Key, int]]] = []  # what it knows of keys under a move's name
        self.superseded: list[StorageKey] = []  # versions that nobody reads once the cursor is there
        self.followers: list[m.Message] = []
        self.halting = ""
        self.seq = 0

    @property
    def complete(self) -> bool:
        return not self.seen and not any(snapshot.pending for snapshot in self.snapshots)
