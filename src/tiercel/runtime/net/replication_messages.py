"""Messages between a process and the replica that holds a copy of its storage (replication/, recovery/)."""

from __future__ import annotations

from tiercel.core.messages.base import Message

ReplicatedPairs = list[tuple[bytes, bytes | None]]  # keys and values as they are stored; None: deleted


class ReplicaQuery(Message, frozen=True):
    """Process -> replica: asks what it holds. From here on the replica refuses earlier incarnations."""

    process: str
    incarnation: int


class ReplicaState(Message, frozen=True):
    """Replica -> process: the complete copy it holds; `through` is its last batch, -1 if there is none."""

    process: str
    incarnation: int  # the one that wrote this batch
    through: int


class ReplicaFenced(Message, frozen=True):
    """Replica -> process: a later incarnation of this process has begun, so this one must end."""

    process: str
    latest: int


class ReplicaSnapshotPart(Message, frozen=True):
    """Process -> replica, or back for a restore: a part of a full copy; `last` completes it."""

    process: str
    incarnation: int
    through: int
    pairs: ReplicatedPairs
    last: bool


class ReplicaBatch(Message, frozen=True):
    """Process -> replica: batches after those it holds. Without `last`, more pairs of them follow."""

    process: str
    incarnation: int
    first: int
    through: int
    pairs: ReplicatedPairs
    last: bool


class ReplicaAck(Message, frozen=True):
    """Replica -> process: acknowledges all batches through this one; -1: one part of a full copy."""

    process: str
    incarnation: int
    through: int


class ReplicaPull(Message, frozen=True):
    """Process -> replica: asks for the next part of the copy."""

    process: str
