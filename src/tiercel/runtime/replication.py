"""Everything that a store commits, on its way to a replica: what it holds is durable.

Responsible for: which replica holds our copy, bringing it up to date, saying how far it is. One on another
    executor, and on another machine where there is one.
Not responsible for: holding copies (keeper.py), finding one when we come back (replicated.py).

    AWAY --connected--> ASKED --it holds what we had--> FOLLOWING: one CopyBatch per turn of the host
                          |                                ^
                          +--anything else--> COPYING -----+  everything as of now, a part at a time

Nothing is durable while no replica follows: producers wait, nobody is told anything that a lost disk
could take back. A replica that says that a later life of us has begun ends us.
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
from tiercel.core.messages.replicas import CopiedPairs
from tiercel.runtime.lives import Lives
from tiercel.runtime.pieces import Pair
from tiercel.runtime.place import Manifest
from tiercel.runtime.registry import Registry
from tiercel.runtime.store import Store

log = logging.getLogger(__name__)

PART_BYTES = 256 * 1024  # of everything, in one step: rows that pass meanwhile hardly notice
BATCH_BYTES = 8 * 1024 * 1024  # of batches in one frame
LOUD_S = 5.0  # without a replica, before it is said, and again


class Phase(enum.Enum):
    """How far we are with our replica."""

    AWAY = "away"
    ASKED = "asked"
    COPYING = "copying"
    FOLLOWING = "following"


class Fenced(Exception):
    """A later life of this process has begun elsewhere: this one is believed dead, and must be."""

    @classmethod
    def by(cls, process: str, life: int, latest: int) -> Fenced:
        return cls(f"life {life} of {process} ends: life {latest} has begun")


def replica_name(site: str, number: int) -> str:
    return f"replica {number} of {site}"


def is_replica(process: str) -> bool:
    return process.startswith("replica ")


def site_of_replica(process: str) -> str:
    return process.partition(" of ")[2]


def replicas_of(manifest: Manifest, site: str) -> list[str]:
    """Those that may hold copies for the processes of a site: its own, or those of the site it was given."""
    plan = manifest.replicas
    if plan is None:
        return []
    return [replica_name(plan.at.get(site, site), n + 1) for n in range(plan.per_site)]


class Copied(NamedTuple):
    """How far a process's copy is, as the process knows it."""

    replica: str  # that follows; empty: none does
    behind: int  # batches that were committed, and that no replica is known to hold


class Kept:
    """A batch until the replica has it."""

    __slots__ = ("number", "pairs", "seq")

    def __init__(self, number: int, seq: int, pairs: list[Pair]) -> None:
        self.number, self.seq, self.pairs = number, seq, pairs


class Replication:
    """One process's copy at a replica, as its host drives it. All in the loop's thread."""

    def __init__(
        self,
        process: str,
        store: Store,
        lives: Lives,
        registry: Registry,
        replicas: Sequence[str],
        executor: str = "",
        machine: str = "",
        *,
        apart: bool = False,
    ) -> None:
        self.process = process
        self.safe = 0  # seq of the last write that a replica holds
        self.peer = ""  # the replica of our choice
        self.phase = Phase.AWAY
        self._store, self._lives, self._registry = store, lives, registry
        self._replicas, self._apart = tuple(replicas), apart
        self._executor, self._machine = executor, machine
        self._opened_with = store.batches
        self._kept: deque[Kept] = deque()  # not known to be held, in order
        self._sent = 0  # the last batch that was sent
        self._parts: Iterator[tuple[CopiedPairs, bool]] = iter(())  # of everything, still to be sent
        self._through = 0  # the last batch in them
        self._quiet_until = time.monotonic() + LOUD_S
        self._send: Callable[[str, m.Message], object] = lambda to, message: None
        self._leave: Callable[[str], object] = lambda peer: None
        self._on_safe: Callable[[], object] = lambda: None
        self._on_fenced: Callable[[int], object] = lambda latest: None
        store.hand_over_to(self._take)

    def start(
        self,
        send: Callable[[str, m.Message], object],
        leave: Callable[[str], object],
        on_safe: Callable[[], object],
        on_fenced: Callable[[int], object],
    ) -> None:
        """How to say something and end a connection; what to do when more is safe, or a later life begins."""
        self._send, self._leave, self._on_safe, self._on_fenced = send, leave, on_safe, on_fenced
        self.choose()

    # -- which replica ---------------------------------------------------------------------------

    def dials(self) -> list[str]:
        return [self.peer] if self.peer else []

    def concerns(self, peer: str) -> bool:
        return peer in self._replicas

    def copied(self) -> Copied:
        """For the metrics of this process."""
        return Copied(self.peer if self.phase is Phase.FOLLOWING else "", len(self._kept))

    def choose(self) -> None:
        """Stay with the one we have while there is no better one; called a few times a second.

        While a better one gets everything nothing is acknowledged, so what the other holds stays enough.
        """
        best = max([self.peer, *self._replicas], key=self._worth)  # of equals the first: the one we have
        if not self._worth(best):
            best = ""  # a copy on our own executor would be lost with us
        if best != self.peer:
            left, self.peer, self.phase = self.peer, best, Phase.AWAY
            self._parts = iter(())
            self._leave(left)
        if self.phase is Phase.FOLLOWING or not self._kept:
            self._quiet_until = time.monotonic() + LOUD_S
        elif time.monotonic() > self._quiet_until:
            self._quiet_until = time.monotonic() + LOUD_S
            where = " on another executor" if self._apart else ""
            state = self.phase.value if self.peer else f"none{where}"
            log.warning(
                "%s acknowledges nothing: %d batches wait for a replica (%s)",
                self.process,
                len(self._kept),
                state,
            )

    def _worth(self, name: str) -> int:
        """0: it will not do; 1: it will; 2: it is on another machine as well."""
        address = self._registry.find(name) if name else None
        if address is None or (self._apart and address.executor == self._executor):
            return 0
        return 2 if self._apart and address.machine not in ("", self._machine) else 1

    def connected(self, peer: str) -> None:
        if peer == self.peer:
            self.phase = Phase.ASKED
            self._send(peer, m.CopyQuery(self.process, self._store.life))

    def disconnected(self, peer: str) -> None:
        if peer == self.peer:
            self.phase, self._parts = Phase.AWAY, iter(())

    # -- what we have for it ---------------------------------------------------------------------

    def _take(self, batch: int, seq: int, pairs: list[Pair]) -> None:
        self._kept.append(Kept(batch, seq, pairs))

    def flush(self) -> None:
        """Whatever was committed and not sent yet, as one batch."""
        if self.phase is not Phase.FOLLOWING or not self._kept or self._kept[-1].number <= self._sent:
            return
        first, through = self._sent + 1, self._kept[-1].number
        new = itertools.takewhile(lambda kept: kept.number >= first, reversed(self._kept))
        parts = list(_cut(itertools.chain.from_iterable(k.pairs for k in reversed(list(new))), BATCH_BYTES))
        for part, last in parts:
            self._say(m.CopyBatch(self.process, self._store.life, first, through, part, last))
        self._sent = through

    def _say(self, message: m.Message) -> None:
        self._send(self.peer, message)

    # -- what it says ----------------------------------------------------------------------------

    def take(self, peer: str, messages: Sequence[m.Message]) -> None:
        for message in messages:
            match message:
                case m.CopyRefused():
                    self._on_fenced(message.latest)
                case m.CopyState() if peer == self.peer and self.phase is Phase.ASKED:
                    self._on_state(message)
                case m.CopyReceipt() if peer == self.peer:
                    self._on_receipt(message)

    def _on_state(self, state: m.CopyState) -> None:
        first_kept = self._kept[0].number if self._kept else self._store.batches + 1
        as_opened = (state.life, state.through) == (self._store.last_life, self._opened_with)
        of_ours = state.life == self._store.life
        # we may have followed another one meanwhile: what that held, we did not keep for this one
        if state.through >= 0 and (as_opened or of_ours) and state.through + 1 >= first_kept:
            self._sent = state.through
            self._follow(state.through)
        else:
            self.phase = Phase.COPYING
            self._store.commit()
            self._through, everything = self._store.pairs()
            self._parts = _cut(everything, PART_BYTES)
            self._next_part()

    def _next_part(self) -> None:
        part, last = next(self._parts)
        self._say(m.CopyPart(self.process, self._store.life, self._through, part, last))

    def _on_receipt(self, receipt: m.CopyReceipt) -> None:
        if receipt.through < 0:
            self._next_part()
            return
        if self.phase is Phase.COPYING:
            self._sent = receipt.through
        self._follow(receipt.through)

    def _follow(self, through: int) -> None:
        """The replica holds everything through this batch."""
        if self.phase is not Phase.FOLLOWING:
            # first say who holds our copy, then look for a later life: that one does it the other way round,
            # so either it asks this replica, or we learn of it before we have told anyone anything
            self._lives.note_held(self._store.life, self.peer)
            if (latest := self._lives.last()) > self._store.life:
                self._on_fenced(latest)
                return
            self.phase = Phase.FOLLOWING
        while self._kept and self._kept[0].number <= through:
            self.safe = self._kept.popleft().seq
        self._on_safe()
        self.flush()


def _cut(pairs: Iterator[Pair], size_max: int) -> Iterator[tuple[CopiedPairs, bool]]:
    """Lists of about this size, and whether it is the last one; at least one."""
    part: CopiedPairs = []
    size = 0
    for key, value in pairs:
        if size > size_max:
            yield part, False
            part, size = [], 0
        part.append((key, value))
        size += len(key) + len(value or b"")
    yield part, True
