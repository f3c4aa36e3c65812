"""Names of timers and of readers of the log, which a driver returns to the machine unchanged.

Responsible for: the types of these names. A driver only compares them; they are neither stored nor sent.
Not responsible for: handling a timer or the answer to a read.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class TimerKind(enum.StrEnum):
    """The timers of the core's machines."""

    TICK = "tick"  # the next tick of an inbox
    TRIM = "trim"  # the next part of a log to delete
    IDLE = "idle"  # a stream may be idle
    ABSENT = "absent"  # a site may be cut off for too long
    GAP = "gap"  # numbers of devices may be missing for too long
    RETRY = "retry"  # messages without an answer are repeated
    CHECKPOINT = "checkpoint"  # an instance takes its next checkpoint
    SLICE = "slice"  # the next keys of a checkpoint that is being written
    CAPTURE = "capture"  # the next keys of a move that the source captures
    DIGESTS = "digests"  # the next digests of a move
    STANDBY = "standby"  # the next increment for a standby
    FETCH = "fetch"  # the destination checks whether the state of a move has begun to arrive


class Timer(NamedTuple):
    """A timer, and the inbox, stream or move that it belongs to."""

    kind: TimerKind
    of: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.of}" if self.of else self.kind


TimerName = Timer | str  # a machine outside of the core may name its timers as it likes


class ShadowReaderName(NamedTuple):
    """The reader of a log on behalf of a move."""

    move: str


class StagedReaderName(NamedTuple):
    """The reader of a staged log on behalf of a feed whose batch is published."""

    feed: str


LogReaderName = str | ShadowReaderName | StagedReaderName  # an instance or a subscriber, a move, a feed
