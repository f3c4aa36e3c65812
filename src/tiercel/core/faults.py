"""Errors of the core; their class says whose fault it is.

`ProtocolViolation`: a peer did what the protocol forbids; drop the peer, nothing else is harmed.
`InvalidRequest`: the person who asked can mend it; says what was wrong, what is allowed, what to run.
`LostCheckpoint`, `LostLog`: storage was damaged or taken away; nothing is processed on top of less than was
stored.
`OperatorFailed`: the user's code raised, and the operator is to end then; the user can mend it.
`CoreBug`: our own invariant broke; crash and keep the seed.
"""

from __future__ import annotations

from collections.abc import Iterable

LISTED = {"strategy": "strategies", "running instance": "instances", "instance": "instances"}


class ProtocolViolation(Exception):
    """A peer did something the protocol forbids. Recoverable: drop the peer."""


class CoreBug(AssertionError):
    """Our own invariant broke. Crash, print the story, keep the seed."""


class LimitExceeded(CoreBug):
    """A queue grew above its limit: senders should have been slowed down."""


class LostCheckpoint(Exception):
    """What an instance finds in its storage is older than what it has told its router to be there."""

    def __init__(self, instance: str, found: int, told: int) -> None:
        self.instance, self.found, self.told = instance, found, told
        super().__init__(instance, found, told)

    def __str__(self) -> str:
        there = f"a checkpoint at offset {self.found}" if self.found >= 0 else "no checkpoint"
        return (
            f"the storage of {self.instance} holds {there}; expected the one at {self.told}, or a later one: "
            "its log has forgotten what came before. With backup= set the directory aside, and it is restored"
        )


class LostLog(Exception):
    """The log that an instance reads ends before what its checkpoint has processed."""

    def __init__(self, instance: str, end: int, applied: int) -> None:
        self.instance, self.end, self.applied = instance, end, applied
        super().__init__(instance, end, applied)

    def __str__(self) -> str:
        return (
            f"the log that {self.instance} reads ends at {self.end}; expected one that holds {self.applied}, "
            "which its checkpoint has processed: the storage of its router has lost what was durable. With "
            "backup= set the router's directory aside, and it is restored"
        )


class OperatorFailed(Exception):
    """User code raised, and its operator was declared to end when it does. What the call did is undone."""

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


def within(what: str, count: int, limit: int) -> None:
    """Check a limit; the message says what grew, how far, and how far it may."""
    if count > limit:
        msg = f"{what}: {count}, the limit is {limit}"
        raise LimitExceeded(msg)
