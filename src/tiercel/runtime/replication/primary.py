"""The primary side of replication: sends everything a store commits to a replica.

Responsible for: choosing the replica, on another executor and if possible on another machine; bringing it up
    to date; how far it has acknowledged.
Not responsible for: holding copies (replica.py), restoring from one (recovery/recover.py).

    DISCONNECTED --connected--> QUERYING --it holds our state--> FOLLOWING: a ReplicaBatch per turn
                                   |                            ^
                                   +--anything else--> COPYING -+  everything as of now, a part at a time

Nothing is durable while no replica follows: producers wait, and nothing is acknowledged that a lost disk
could take back. A process ends when a replica reports a later incarnation of it.
"""

from __future__ import annotations

import enum
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tiercel.core import messages as m
from tiercel.runtime.deployment import Manifest
from tiercel.runtime.net import replication_messages as r
from tiercel.runtime.net.registry import Registry
from tiercel.runtime.net.replication_messages import ReplicatedPairs
from tiercel.runtime.storage.codec import Pair
from tiercel.runtime.storage.incarnations import IncarnationClaims
from tiercel.runtime.storage.store import Store

log = logging.getLogger(__name__)

PART_BYTES = 256 * 1024  # of a full copy, in one step: short enough not to delay rows
BATCH_BYTES = 8 * 1024 * 1024  # of batches in one frame
WARN_S = 5.0  # without a replica, before a warning, and between warnings


class ReplicationPhase(enum.Enum):
    """The phase of replication with the chosen replica."""

    DISCONNECTED = "disconnected"
    QUERYING = "querying"
    COPYING = "copying"
    FOLLOWING = "following"


class ProcessFenced(Exception):
    """A later incarnation of this process has begun elsewhere, so this one must end."""

    @classmethod
    def by(cls, process: str, incarnation: int, latest: int) -> ProcessFenced:
        return cls(f"incarnation {incarnation} of {process} ends: incarnation {latest} has begun")


def replica_name(site: str, number: int) -> str:
    return f"replica {number} of {site}"


def is_replica(process: str) -> bool:
    return process.startswith("replica ")


def site_of_replica(process: str) -> str:
    return process.partition(" of ")[2]


def replicas_of(manifest: Manifest, site: str) -> list[str]:
    """The replicas for the processes of a site: its own, or those of the configured site."""
    plan = manifest.replicas
    if plan is None:
        return []
    return [replica_name(plan.at.get(site, site), n + 1) for n in range(plan.per_site)]


class ReplicaProgress(NamedTuple):
    """How far the replica of a process is, as the process knows it."""

    replica: str  # that follows; empty: none
    behind: int  # committed batches that are not acknowledged


class UnackedBatch:
    """A batch that the replica has not acknowledged."""

    __slots__ = ("number", "pairs", "seq")

    def __init__(self, number: int, seq: int, pairs: list[Pair]) -> None:
        self.number, self.seq, self.pairs = number, seq, pairs


class Replication:
    """Replication of one process, driven by its host in the loop's thread."""

    def __init__(
        self,
        process: str,
        store: Store,
        incarnations: IncarnationClaims,
        registry: Registry,
        replicas: Sequence[str],
        executor: str = "",
        machine: str = "",
        *,
        apart: bool = False,
    ) -> None:
        self.process = process
        self.acknowledged = 0  # seq of the last write that a replica holds
        self.peer = ""  # the chosen replica
        self.phase = ReplicationPhase.DISCONNECTED
        self._store, self._incarnations, self._registry = store, incarnations, registry
        self._replicas, self._apart = tuple(replicas), apart
        self._executor, self._machine = executor, machine
        self._opened_with = store.batches
        self._unacked: deque[UnackedBatch] = deque()  # in order
        self._sent = 0  # the last batch that was sent
        self._parts: Iterator[tuple[ReplicatedPairs, bool]] = iter(())  # of a full copy, still to be sent
        self._through = 0  # the last batch in them
        self._next_warning_s = time.monotonic() + WARN_S
        self._send: Callable[[str, m.Message], object] = lambda to, message: None
        self._drop: Callable[[str], object] = lambda peer: None
        self._on_acknowledged: Callable[[], object] = lambda: None
        self._on_fenced: Callable[[int], object] = lambda latest: None
        store.add_commit_listener(self._on_commit)

    def start(
        self,
        send: Callable[[str, m.Message], object],
        drop: Callable[[str], object],
        on_acknowledged: Callable[[], object],
        on_fenced: Callable[[int], object],
    ) -> None:
        """Start with the callbacks of the host: send, disconnect, acknowledged, fenced."""
        self._send, self._drop, self._on_acknowledged, self._on_fenced = (
            send,
            drop,
            on_acknowledged,
            on_fenced,
        )
        self.choose_replica()

    # -- which replica ---------------------------------------------------------------------------

    def dials(self) -> list[str]:
        return [self.peer] if self.peer else []

    def is_replica(self, peer: str) -> bool:
        return peer in self._replicas

    def progress(self) -> ReplicaProgress:
        """For the metrics of this process."""
        return ReplicaProgress(
            self.peer if self.phase is ReplicationPhase.FOLLOWING else "", len(self._unacked)
        )

    def choose_replica(self) -> None:
        """Choose the best replica, and stay with the current one among equals. Called a few times a second.

        Nothing is acknowledged while a better replica receives a full copy, so the old one stays sufficient.
        """
        best = max([self.peer, *self._replicas], key=self._rank)  # the first among equals: the current one
        if not self._rank(best):
            best = ""  # a replica on our own executor would be lost with us
        if best != self.peer:
            left, self.peer, self.phase = self.peer, best, ReplicationPhase.DISCONNECTED
            self._parts = iter(())
            self._drop(left)
        if self.phase is ReplicationPhase.FOLLOWING or not self._unacked:
            self._next_warning_s = time.monotonic() + WARN_S
        elif time.monotonic() > self._next_warning_s:
            self._next_warning_s = time.monotonic() + WARN_S
            where = " on another executor" if self._apart else ""
            state = self.phase.value if self.peer else f"none{where}"
            log.warning(
                "%s acknowledges nothing: %d batches wait for a replica (%s)",
                self.process,
                len(self._unacked),
                state,
            )

    def _rank(self, name: str) -> int:
        """0: unusable; 1: usable; 2: on another machine as well."""
        address = self._registry.find(name) if name else None
        if address is None or (self._apart and address.executor == self._executor):
            return 0
        return 2 if self._apart and address.machine not in ("", self._machine) else 1

    def connected(self, peer: str) -> None:
        if peer == self.peer:
            self.phase = ReplicationPhase.QUERYING
            self._send(peer, r.ReplicaQuery(self.process, self._store.incarnation))

    def disconnected(self, peer: str) -> None:
        if peer == self.peer:
            self.phase, self._parts = ReplicationPhase.DISCONNECTED, iter(())

    # -- sending ---------------------------------------------------------------------

    def _on_commit(self, batch: int, seq: int, pairs: list[Pair]) -> None:
        self._unacked.append(UnackedBatch(batch, seq, pairs))

    def flush(self) -> None:
        """Send everything committed and not sent yet, as one batch."""
        if (
            self.phase is not ReplicationPhase.FOLLOWING
            or not self._unacked
            or self._unacked[-1].number <= self._sent
        ):
            return
        first, through = self._sent + 1, self._unacked[-1].number
        new = itertools.takewhile(lambda batch: batch.number >= first, reversed(self._unacked))
        parts = list(
            _chunked(itertools.chain.from_iterable(batch.pairs for batch in reversed(list(new))), BATCH_BYTES)
        )
        for part, last in parts:
            self._send_to_replica(
                r.ReplicaBatch(self.process, self._store.incarnation, first, through, part, last)
            )
        self._sent = through

    def _send_to_replica(self, message: m.Message) -> None:
        self._send(self.peer, message)

    # -- messages of the replica ----------------------------------------------------------------------------

    def on_messages(self, peer: str, messages: Sequence[m.Message]) -> None:
        for message in messages:
            match message:
                case r.ReplicaFenced():
                    self._on_fenced(message.latest)
                case r.ReplicaState() if peer == self.peer and self.phase is ReplicationPhase.QUERYING:
                    self._on_state(message)
                case r.ReplicaAck() if peer == self.peer:
                    self._on_receipt(message)

    def _on_state(self, state: r.ReplicaState) -> None:
        first_unacked = self._unacked[0].number if self._unacked else self._store.batches + 1
        as_opened = (state.incarnation, state.through) == (self._store.last_incarnation, self._opened_with)
        of_ours = state.incarnation == self._store.incarnation
        # batches acknowledged by another replica in between are not available any more
        if state.through >= 0 and (as_opened or of_ours) and state.through + 1 >= first_unacked:
            self._sent = state.through
            self._follow(state.through)
        else:
            self.phase = ReplicationPhase.COPYING
            self._store.commit()
            self._through, everything = self._store.pairs()
            self._parts = _chunked(everything, PART_BYTES)
            self._next_part()

    def _next_part(self) -> None:
        part, last = next(self._parts)
        self._send_to_replica(
            r.ReplicaSnapshotPart(self.process, self._store.incarnation, self._through, part, last)
        )

    def _on_receipt(self, receipt: r.ReplicaAck) -> None:
        if receipt.through < 0:
            self._next_part()
            return
        if self.phase is ReplicationPhase.COPYING:
            self._sent = receipt.through
        self._follow(receipt.through)

    def _follow(self, through: int) -> None:
        """The replica holds everything through this batch: follow, and acknowledge."""
        if self.phase is not ReplicationPhase.FOLLOWING:
            # First note the holder, then look for a later incarnation, which does both in the other order. So
            # either it asks this replica, or we learn of it before anything is acknowledged.
            self._incarnations.set_holder(self._store.incarnation, self.peer)
            if (latest := self._incarnations.last()) > self._store.incarnation:
                self._on_fenced(latest)
                return
            self.phase = ReplicationPhase.FOLLOWING
        while self._unacked and self._unacked[0].number <= through:
            self.acknowledged = self._unacked.popleft().seq
        self._on_acknowledged()
        self.flush()


def _chunked(pairs: Iterator[Pair], size_max: int) -> Iterator[tuple[ReplicatedPairs, bool]]:
    """Lists of about this size, and whether each is the last; at least one."""
    part: ReplicatedPairs = []
    size = 0
    for key, value in pairs:
        if size > size_max:
            yield part, False
            part, size = [], 0
        part.append((key, value))
        size += len(key) + len(value or b"")
    yield part, True
