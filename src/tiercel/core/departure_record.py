"""Where a departure is, and what of it is durable.

Responsible for: the phases of a move at its source's router, and its record in that router's storage.
Not responsible for: what happens in a phase (departures.py).
"""

from __future__ import annotations

import enum

import msgspec

from tiercel.core import messages as m
from tiercel.core.records import TableUpdate


class Phase(enum.Enum):
    """Where it is; what each phase means stands beside it."""

    PREPARING = "preparing"  # the destination makes room; nothing is written
    SHADOWING = "shadowing"  # Begin is logged; the keys' rows go to both; state is streaming
    COMPARING = "comparing"  # every key is captured; both sides digest; the destination votes
    FLIPPED = "flipped"  # the decision is logged; the source owes its last word
    CUT = "cut"  # the source's last output is known; it is on its way to the receivers
    EMITTING = "emitting"  # the destination emits; the source keeps its copy
    DONE = "done"  # the source may forget
    ABORTED = "aborted"  # undone; the destination forgets


DECIDED = (Phase.FLIPPED, Phase.CUT, Phase.EMITTING, Phase.DONE)


class DepartureRecord(msgspec.Struct):
    """What of a departure is durable."""

    request: m.MoveRequest
    phase: str
    epochs: TableUpdate  # of the keys before the flip
    begin_offset: int = 0
    capture_from: int = -1
    flip_offset: int = 0
    cut: int = -1
    installed: bool = False  # flip first: the destination has all of the state
    reason: str = ""
