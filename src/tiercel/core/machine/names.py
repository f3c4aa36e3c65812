"""Names of timers and of readers of the log, which a driver returns to the machine unchanged.

Responsible for: building and parsing these names. For a driver they are plain strings.
Not responsible for: handling a timer or the answer to a read.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class TimerKind(enum.Enum):
    """The timers of a router that belong to one inbox or stream."""

    TICK = "tick"  # the next tick of an inbox
    TRIM = "trim"  # the next part of a log to delete
    IDLE = "idle"  # a stream may be idle


class Timer(NamedTuple):
    """A timer and its inbox or stream."""

    kind: TimerKind
    of: str

    def __str__(self) -> str:
        return f"{self.kind.value}|{self.of}"

    @classmethod
    def parse(cls, name: str) -> Timer | None:
        """The timer of this name; None if it is of another kind."""
        kind, _, of = name.partition("|")
        return cls(TimerKind(kind), of) if kind in _KINDS else None


_KINDS = {kind.value for kind in TimerKind}


class ShadowReaderName(NamedTuple):
    """The reader of a log on behalf of a move."""

    move: str

    def __str__(self) -> str:
        return f"shadow|{self.move}"

    @classmethod
    def parse(cls, name: str) -> str | None:
        """The move that reads under this name; None for other readers."""
        return name[7:] if name.startswith("shadow|") else None
