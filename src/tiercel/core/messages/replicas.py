"""Between a process and the replica that holds a copy of its storage (runtime/replication.py, keeper.py)."""

from __future__ import annotations

from tiercel.core.messages.base import Message

CopiedPairs = list[tuple[bytes, bytes | None]]  # keys and values as they are stored; None: deleted


class CopyQuery(Message, frozen=True):
    """Process -> replica: what do you hold of me? From here on you refuse earlier lives of mine."""

    process: str
    life: int


class CopyState(Message, frozen=True):
    """Replica -> process: the copy that is whole; `through` is its last batch, -1 if there is none."""

    process: str
    life: int  # the one that wrote this batch
    through: int


class CopyRefused(Message, frozen=True):
    """Replica -> process: a later life of yours has begun; you are to end."""

    process: str
    latest: int


class CopyPart(Message, frozen=True):
    """Process -> replica, or back when it is restored: some of everything; the last part makes it whole."""

    process: str
    life: int
    through: int
    pairs: CopiedPairs
    last: bool


class CopyBatch(Message, frozen=True):
    """Process -> replica: batches that follow those it holds. Without `last` more of the same follows."""

    process: str
    life: int
    first: int
    through: int
    pairs: CopiedPairs
    last: bool


class CopyReceipt(Message, frozen=True):
    """Replica -> process: all batches through this one are held; -1: a part was taken, go on."""

    process: str
    life: int
    through: int


class CopyPull(Message, frozen=True):
    """Process -> replica: give me the next part of what you hold."""

    process: str
