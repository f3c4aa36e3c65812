"""Asking replicas what they hold of a process, and getting it: before that process has begun.

Responsible for: an answer of every replica, each of which refuses earlier lives from then on; the parts.
Not responsible for: deciding what is newest, and storing it (replicated.py).

Blocking: a process has no loop yet when it looks for its storage. Between two calls nothing happens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

import uvloop

from tiercel.core import messages as m
from tiercel.core.effects import Effect, Send
from tiercel.core.events import Connected, Event, Received
from tiercel.runtime.host import Host
from tiercel.runtime.pieces import Pair
from tiercel.runtime.place import Place
from tiercel.runtime.replication import Fenced

ANSWER_S_MAX = 60.0  # replicas may have been lost too, and are started again
LOOK_S = 0.005

T = TypeVar("T")


class _Asker:
    """Asks whoever connects, and notes what is said."""

    def __init__(self, process: str, life: int) -> None:
        self._query = m.CopyQuery(process, life)
        self.states: dict[str, m.CopyState] = {}
        self.latest = 0  # of whom a replica knows that is later than we
        self.parts: list[m.CopyPart] = []

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        match event:
            case Connected(peer=peer):
                return [Send(peer, self._query)]
            case Received(sender=peer, message=m.CopyState() as state):
                self.states[peer] = state
            case Received(message=m.CopyRefused(latest=latest)):
                self.latest = latest
            case Received(message=m.CopyPart() as part):
                self.parts.append(part)
            case _:
                pass
        return []


class Fetching:
    """A conversation with replicas, in a `with`."""

    def __init__(self, place: Place, process: str, life: int, replicas: Sequence[str]) -> None:
        self._process, self._life, self._replicas = process, life, replicas
        self._asker = _Asker(process, life)
        self._host = Host(
            f"fetch|{process}|{life}",
            self._asker,
            place.registry,
            place.secret,
            dials=replicas,
            tls=place.manifest().tls,
            listens=False,
        )
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def __enter__(self) -> Self:
        self._serving = self._run(self._begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._run(self._end())
        finally:
            self._runner.close()

    def states(self) -> dict[str, m.CopyState]:
        """What each replica holds; those that did not answer in time are missing."""
        return self._run(self._ask())

    def parts(self, replica: str) -> Iterator[list[Pair]]:
        """All that a replica holds."""
        last = False
        while not last:
            part = self._run(self._pull(replica))
            last = part.last
            yield part.pairs

    def _run(self, work: Coroutine[None, None, T]) -> T:
        return self._runner.run(work)

    async def _begin(self) -> asyncio.Task[str]:
        return asyncio.create_task(self._host.run())

    async def _end(self) -> None:
        self._host.end("fetched")
        await self._serving

    async def _ask(self) -> dict[str, m.CopyState]:
        give_up = time.monotonic() + ANSWER_S_MAX
        while set(self._replicas) - self._asker.states.keys() and time.monotonic() < give_up:
            if self._asker.latest:
                raise Fenced.by(self._process, self._life, self._asker.latest)
            await asyncio.sleep(LOOK_S)
        return self._asker.states

    async def _pull(self, replica: str) -> m.CopyPart:
        give_up = time.monotonic() + ANSWER_S_MAX
        self._host.perform([Send(replica, m.CopyPull(self._process))])
        while not self._asker.parts:
            if time.monotonic() > give_up:
                reason = f"{replica} does not give the copy of {self._process} back"
                raise TimeoutError(reason)
            await asyncio.sleep(LOOK_S / 5)
        return self._asker.parts.pop()
