"""The errors of the core. The class of an error tells who can fix it.

`ProtocolViolation`: a peer broke the protocol. The driver drops the peer; nothing else is harmed.
`InvalidRequest`: the user can correct the request. The text names the value, the allowed ones, a command.
`LostCheckpoint`, `LostLog`: storage was damaged or removed. The machine stops rather than lose state.
`OperatorFailed`: user code raised in an operator that is declared to fail. The user can fix the code.
`CoreBug`: an invariant of the core is broken. The process crashes; the simulator records the seed.
"""

from __future__ import annotations

from collections.abc import Iterable

LISTED = {"strategy": "strategies", "running instance": "instances", "instance": "instances"}


class ProtocolViolation(Exception):
    """A peer broke the protocol. The driver recovers by dropping the peer."""


class CoreBug(AssertionError):
    """An invariant of the core is broken. The process must crash; the seed reproduces it."""


class LimitExceeded(CoreBug):
    """A queue has exceeded its limit: flow control failed to slow the senders down."""


class LostCheckpoint(Exception):
    """The stored checkpoint is older than the one that the instance has reported to its router."""

    def __init__(self, instance: str, found: int, reported: int) -> None:
        self.instance, self.found, self.reported = instance, found, reported
        super().__init__(instance, found, reported)

    def __str__(self) -> str:
        there = f"a checkpoint at offset {self.found}" if self.found >= 0 else "no checkpoint"
        return (
            f"the storage of {self.instance} holds {there}; "
            f"expected the one at {self.reported}, or a later one: "
            "its log no longer holds the entries before it. With backup= move the directory aside: the "
            "instance then restores the backup"
        )


class LostLog(Exception):
    """The log that an instance reads ends before what its checkpoint has processed."""

    def __init__(self, instance: str, end: int, applied: int) -> None:
        self.instance, self.end, self.applied = instance, end, applied
        super().__init__(instance, end, applied)

    def __str__(self) -> str:
        return (
            f"the log that {self.instance} reads ends at {self.end}; expected one that holds {self.applied}, "
            "which its checkpoint has processed: the storage of its router has lost durable data. With "
            "backup= move the router's directory aside: the router then restores the backup"
        )


class OperatorFailed(Exception):
    """User code raised in an operator that is declared to fail. The changes of the call are undone."""

    def __init__(self, operator: str, key: bytes, offset: int, reason: str) -> None:
        self.operator, self.key, self.offset, self.reason = operator, key, offset, reason
        super().__init__(operator, key, offset, reason)

    def __str__(self) -> str:
        return f"operator {self.operator} failed at offset {self.offset}, key {self.key!r}: {self.reason}"


class InvalidRequest(Exception):
    """A request that cannot be carried out as asked. Nothing was changed."""

    def __init__(self, what: str, expected: str = "", hint: str = "") -> None:
        self.what, self.expected, self.hint = what, expected, hint
        super().__init__("; ".join(part for part in (what, expected, hint) if part))

    @classmethod
    def unknown(
        cls, kind: str, value: object, allowed: Iterable[object], command: str = ""
    ) -> InvalidRequest:
        return cls(
            f"unknown {kind} {value!r}",
            f"expected one of: {', '.join(str(a) for a in allowed)}",
            "list them with: " + (command or "tiercel sim --list " + LISTED.get(kind, kind + "s")),
        )


def check_limit(what: str, count: int, limit: int) -> None:
    """Raise `LimitExceeded` above a limit; the message names the queue, its size and the limit."""
    if count > limit:
        msg = f"{what}: {count}, the limit is {limit}"
        raise LimitExceeded(msg)
