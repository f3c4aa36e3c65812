"""Fetching the copy of a process from its replicas, before that process has started.

Responsible for: an answer of every replica, which from then on refuses earlier incarnations; the parts of a
    copy.
Not responsible for: deciding which copy is the newest, and storing it (recover.py).

Calls block: a process has no event loop yet while it opens its storage. Nothing happens between two calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

import uvloop

from tiercel.core.machine.effects import Effect, Send
from tiercel.core.machine.events import Connected, Event, Received
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.net import replication_messages as r
from tiercel.runtime.process.host import Host, HostConfig
from tiercel.runtime.replication.primary import ProcessFenced
from tiercel.runtime.storage.codec import Pair

ANSWER_S_MAX = 60.0  # a lost replica may be restarting
POLL_S = 0.005

T = TypeVar("T")


class _ReplicaClient:
    """Queries each replica that connects, and collects the answers."""

    def __init__(self, process: str, incarnation: int) -> None:
        self._query = r.ReplicaQuery(process, incarnation)
        self.states: dict[str, r.ReplicaState] = {}
        self.latest = 0  # a later incarnation that a replica knows; 0: none
        self.parts: list[r.ReplicaSnapshotPart] = []

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        match event:
            case Connected(peer=peer):
                return [Send(peer, self._query)]
            case Received(sender=peer, message=r.ReplicaState() as state):
                self.states[peer] = state
            case Received(message=r.ReplicaFenced(latest=latest)):
                self.latest = latest
            case Received(message=r.ReplicaSnapshotPart() as part):
                self.parts.append(part)
            case _:
                pass
        return []


class ReplicaFetch:
    """A session with replicas, in a `with`."""

    def __init__(
        self, deployment: DeploymentDir, process: str, incarnation: int, replicas: Sequence[str]
    ) -> None:
        self._process, self._incarnation, self._replicas = process, incarnation, replicas
        self._client = _ReplicaClient(process, incarnation)
        self._host = Host(
            f"fetch|{process}|{incarnation}",
            self._client,
            HostConfig.of(deployment, dials=replicas, tls=deployment.manifest().tls, listens=False),
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

    def states(self) -> dict[str, r.ReplicaState]:
        """What each replica holds; replicas without an answer in time are missing."""
        return self._run(self._query())

    def parts(self, replica: str) -> Iterator[list[Pair]]:
        """The copy of a replica, part by part."""
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

    async def _query(self) -> dict[str, r.ReplicaState]:
        give_up = time.monotonic() + ANSWER_S_MAX
        while set(self._replicas) - self._client.states.keys() and time.monotonic() < give_up:
            if self._client.latest:
                raise ProcessFenced.by(self._process, self._incarnation, self._client.latest)
            await asyncio.sleep(POLL_S)
        return self._client.states

    async def _pull(self, replica: str) -> r.ReplicaSnapshotPart:
        give_up = time.monotonic() + ANSWER_S_MAX
        self._host.perform([Send(replica, r.ReplicaPull(self._process))])
        while not self._client.parts:
            if time.monotonic() > give_up:
                reason = f"{replica} does not send the copy of {self._process}"
                raise TimeoutError(reason)
            await asyncio.sleep(POLL_S / 5)
        return self._client.parts.pop()
