"""A replica: holds copies of the stores of a site's processes, in memory.

Responsible for: complete copies, batch by batch; refusing earlier incarnations; sending a copy back.
Not responsible for: the content of batches; the primary side (primary.py), restoring
    (recovery/replica_fetch.py).

    ReplicaQuery --> ReplicaState --> nothing, or a gap:  ReplicaSnapshotPart ... last --> complete
                            --> then, while both run: ReplicaBatch --> ReplicaAck

A copy is the store itself: what a router trims or a checkpoint replaces is deleted here too, so a copy stays
as small as the store. An older copy stays until a newer one is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tiercel.core import messages as m
from tiercel.core.errors import ProtocolViolation
from tiercel.core.machine.effects import Effect, Send
from tiercel.core.machine.events import Disconnected, Event, Received
from tiercel.runtime.net import replication_messages as r
from tiercel.runtime.net.replication_messages import ReplicatedPairs

PART_BYTES = 1024 * 1024  # of a copy that is sent back


@dataclass
class ReplicatedStore:
    """The copy of one process's store."""

    fence: int = 0  # earlier incarnations are refused
    incarnation: int = 0  # the one that wrote the last batch
    through: int = -1  # the last batch; -1: there is no complete copy
    pairs: dict[bytes, bytes] = field(default_factory=dict)
    size: int = 0  # bytes
    draft: dict[bytes, bytes] | None = None  # of a full copy that is not complete yet
    pending: ReplicatedPairs = field(default_factory=list)  # of batches that are not complete yet

    def restart(self) -> None:
        """Drop incomplete transfers: a new connection sends them again."""
        self.draft, self.pending = None, []

    def replace(self, incarnation: int, through: int) -> None:
        assert self.draft is not None
        self.pairs, self.draft = self.draft, None
        self.size = sum(len(key) + len(value) for key, value in self.pairs.items())
        self.incarnation, self.through = incarnation, through

    def apply(self, incarnation: int, through: int) -> None:
        held = self.pairs
        for key, value in self.pending:
            old = held.get(key)
            if old is not None:
                self.size -= len(key) + len(old)
            if value is not None:
                held[key] = value
                self.size += len(key) + len(value)
            elif old is not None:
                del held[key]
        self.pending = []
        self.incarnation, self.through = incarnation, through


class Replica:
    """The machine of a replica. `last_incarnation` returns the last claimed incarnation of a process."""

    def __init__(self, last_incarnation: Callable[[str], int] = lambda process: 0) -> None:
        self._last_incarnation = last_incarnation
        self.stores: dict[str, ReplicatedStore] = {}
        self._pulled: dict[tuple[str, str], Iterator[r.ReplicaSnapshotPart]] = {}  # by peer and process
        self._batches = 0

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        match event:
            case Received(sender=peer, message=message):
                answer = self._answer(peer, message)
                return [] if answer is None else [Send(peer, answer)]
            case Disconnected(peer=peer):
                for pulled in [both for both in self._pulled if both[0] == peer]:
                    del self._pulled[pulled]
            case _:
                pass
        return []

    def gauges(self) -> Mapping[str, float]:
        """For the metrics of this process."""
        held = self.stores.values()
        return {
            "rows": self._batches,
            "state_keys": sum(len(store.pairs) for store in held),
            "state_bytes": sum(store.size for store in held),
        }

    def _answer(self, peer: str, message: m.Message) -> m.Message | None:
        match message:
            case r.ReplicaQuery():
                return self._on_query(message)
            case r.ReplicaSnapshotPart():
                return self._on_part(message)
            case r.ReplicaBatch():
                return self._on_batch(message)
            case r.ReplicaPull():
                return self._on_pull(peer, message.process)
            case _:
                reason = f"{type(message).__name__} is not a message for a replica"
                raise ProtocolViolation(reason)

    def _on_query(self, query: r.ReplicaQuery) -> m.Message:
        store = self.stores.setdefault(query.process, ReplicatedStore())
        store.fence = max(
            store.fence, self._last_incarnation(query.process)
        )  # this replica may have just started
        if query.incarnation < store.fence:
            return r.ReplicaFenced(query.process, store.fence)
        store.fence = query.incarnation
        store.restart()
        return r.ReplicaState(query.process, store.incarnation, store.through)

    def _on_part(self, part: r.ReplicaSnapshotPart) -> m.Message:
        store = self._store_of(part.process)
        if part.incarnation != store.fence:
            return r.ReplicaFenced(part.process, store.fence)
        if store.draft is None:
            store.draft = {}
        store.draft.update((key, value) for key, value in part.pairs if value is not None)
        if part.last:
            store.replace(part.incarnation, part.through)
        return r.ReplicaAck(part.process, part.incarnation, part.through if part.last else -1)

    def _on_batch(self, batch: r.ReplicaBatch) -> m.Message | None:
        store = self._store_of(batch.process)
        if batch.incarnation != store.fence:
            return r.ReplicaFenced(batch.process, store.fence)
        if store.through < 0 or store.draft is not None or batch.first != store.through + 1:
            reason = f"batch {batch.first} of {batch.process} does not follow {store.through}"
            raise ProtocolViolation(reason)
        store.pending += batch.pairs
        if not batch.last:
            return None
        store.apply(batch.incarnation, batch.through)
        self._batches += 1
        return r.ReplicaAck(batch.process, batch.incarnation, batch.through)

    def _on_pull(self, peer: str, process: str) -> m.Message:
        store = self._store_of(process)
        if store.through < 0:
            reason = f"there is no complete copy of {process}"
            raise ProtocolViolation(reason)
        pulled = self._pulled.setdefault((peer, process), _parts(process, store))
        part = next(pulled)
        if part.last:
            del self._pulled[peer, process]
        return part

    def _store_of(self, process: str) -> ReplicatedStore:
        store = self.stores.get(process)
        if store is None:
            reason = f"{process} sends before its query"
            raise ProtocolViolation(reason)
        return store


def _parts(process: str, store: ReplicatedStore) -> Iterator[r.ReplicaSnapshotPart]:
    """The parts of a copy, which does not change: the process that pulls it has fenced all others."""
    part: ReplicatedPairs = []
    size = 0
    for key, value in list(store.pairs.items()):
        part.append((key, value))
        size += len(key) + len(value)
        if size > PART_BYTES:
            yield r.ReplicaSnapshotPart(process, store.incarnation, store.through, part, last=False)
            part, size = [], 0
    yield r.ReplicaSnapshotPart(process, store.incarnation, store.through, part, last=True)
