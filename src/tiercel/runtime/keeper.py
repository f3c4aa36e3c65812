"""A replica: holds copies of what the processes of a site store, in its memory.

Responsible for: copies that are whole, batch by batch; refusing earlier lives; giving a copy back.
Not responsible for: what is in the batches, who sends them (replication.py), who asks (fetching.py).

    CopyQuery --> CopyState --> nothing, or not what follows:  CopyPart ... last --> whole
                            --> then, for as long as both live: CopyBatch --> CopyReceipt

A copy is the store itself, so what a router trims and a checkpoint replaces goes here too: what is held
stays as small as what must be held. An older copy stays until a newer one is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tiercel.core import messages as m
from tiercel.core.effects import Effect, Send
from tiercel.core.events import Disconnected, Event, Received
from tiercel.core.faults import ProtocolViolation
from tiercel.core.messages.replicas import CopiedPairs

PART_BYTES = 1024 * 1024  # of a copy that is given back


@dataclass
class Copy:
    """What is held of one process."""

    fence: int = 0  # earlier lives are refused
    life: int = 0  # the one that wrote the last batch
    through: int = -1  # the last batch; -1: there is no whole copy
    pairs: dict[bytes, bytes] = field(default_factory=dict)
    size: int = 0  # bytes
    draft: dict[bytes, bytes] | None = None  # of a copy that is not whole yet
    pending: CopiedPairs = field(default_factory=list)  # of batches that are not complete yet

    def restart(self) -> None:
        """A new connection begins: what was under way comes again."""
        self.draft, self.pending = None, []

    def replace(self, life: int, through: int) -> None:
        assert self.draft is not None
        self.pairs, self.draft = self.draft, None
        self.size = sum(len(key) + len(value) for key, value in self.pairs.items())
        self.life, self.through = life, through

    def apply(self, life: int, through: int) -> None:
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
        self.life, self.through = life, through


class Keeper:
    """The machine of a replica. `last_life` says which life of a process was claimed last."""

    def __init__(self, last_life: Callable[[str], int] = lambda process: 0) -> None:
        self._last_life = last_life
        self.copies: dict[str, Copy] = {}
        self._pulled: dict[tuple[str, str], Iterator[m.CopyPart]] = {}  # by peer and process
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
        """For the metrics of this process: what it holds."""
        held = self.copies.values()
        return {
            "rows": self._batches,
            "state_keys": sum(len(copy.pairs) for copy in held),
            "state_bytes": sum(copy.size for copy in held),
        }

    def _answer(self, peer: str, message: m.Message) -> m.Message | None:
        match message:
            case m.CopyQuery():
                return self._on_query(message)
            case m.CopyPart():
                return self._on_part(message)
            case m.CopyBatch():
                return self._on_batch(message)
            case m.CopyPull():
                return self._on_pull(peer, message.process)
            case _:
                reason = f"{type(message).__name__} is nothing for a replica"
                raise ProtocolViolation(reason)

    def _on_query(self, query: m.CopyQuery) -> m.Message:
        copy = self.copies.setdefault(query.process, Copy())
        copy.fence = max(copy.fence, self._last_life(query.process))  # we may be new here ourselves
        if query.life < copy.fence:
            return m.CopyRefused(query.process, copy.fence)
        copy.fence = query.life
        copy.restart()
        return m.CopyState(query.process, copy.life, copy.through)

    def _on_part(self, part: m.CopyPart) -> m.Message:
        copy = self._of(part.process)
        if part.life != copy.fence:
            return m.CopyRefused(part.process, copy.fence)
        if copy.draft is None:
            copy.draft = {}
        copy.draft.update((key, value) for key, value in part.pairs if value is not None)
        if part.last:
            copy.replace(part.life, part.through)
        return m.CopyReceipt(part.process, part.life, part.through if part.last else -1)

    def _on_batch(self, batch: m.CopyBatch) -> m.Message | None:
        copy = self._of(batch.process)
        if batch.life != copy.fence:
            return m.CopyRefused(batch.process, copy.fence)
        if copy.through < 0 or copy.draft is not None or batch.first != copy.through + 1:
            reason = f"batch {batch.first} of {batch.process} does not follow {copy.through}"
            raise ProtocolViolation(reason)
        copy.pending += batch.pairs
        if not batch.last:
            return None
        copy.apply(batch.life, batch.through)
        self._batches += 1
        return m.CopyReceipt(batch.process, batch.life, batch.through)

    def _on_pull(self, peer: str, process: str) -> m.Message:
        copy = self._of(process)
        if copy.through < 0:
            reason = f"there is no whole copy of {process}"
            raise ProtocolViolation(reason)
        pulled = self._pulled.setdefault((peer, process), _parts(process, copy))
        part = next(pulled)
        if part.last:
            del self._pulled[peer, process]
        return part

    def _of(self, process: str) -> Copy:
        copy = self.copies.get(process)
        if copy is None:
            reason = f"{process} sends before it has asked"
            raise ProtocolViolation(reason)
        return copy


def _parts(process: str, copy: Copy) -> Iterator[m.CopyPart]:
    """The copy stays as it is meanwhile: who pulls it has fenced everyone else off."""
    part: CopiedPairs = []
    size = 0
    for key, value in list(copy.pairs.items()):
        part.append((key, value))
        size += len(key) + len(value)
        if size > PART_BYTES:
            yield m.CopyPart(process, copy.life, copy.through, part, last=False)
            part, size = [], 0
    yield m.CopyPart(process, copy.life, copy.through, part, last=True)
