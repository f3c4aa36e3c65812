"""The commit of a feed's batch: which attempts of its tasks count; once, whatever Spark repeats.

Responsible for: waiting until a batch is published, giving a batch up, the site of a feed.
Not responsible for: rows (batch_task.py sends them), what a commit does (core/router/feed_intake.py).
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence

from tiercel.core import messages as m
from tiercel.core.batch_client import CommitClient
from tiercel.core.machine.effects import Effect
from tiercel.core.machine.events import Event
from tiercel.errors import UserError
from tiercel.runtime.client.event_loop_thread import WOKEN, Client
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.files import write_whole

WHOLE_BATCH = -1  # the partition of a commit
NO_PROGRESS_S = 600.0  # without a published frame, before a commit fails


class FeedClient(Client):
    """Commits batches of one feed."""

    def __init__(self, deployment: DeploymentDir, site: str, feed: str) -> None:
        self._feed = feed
        self._machine = CommitClient(site)
        self._unsent: list[Effect] = []
        super().__init__(deployment, f"commit|{uuid.uuid4().hex}", site)

    def commit(
        self,
        batch: int,
        stream: str,
        parts: Sequence[m.StagedPart],
        newest_ms: int = -1,
        *,
        consecutive: bool = True,
    ) -> None:
        """Publish these attempts unless the batch is decided; returns when all of it is durable."""
        self.connect()
        task = m.BatchTask(self._feed, batch, WHOLE_BATCH)
        commit = m.FeedCommit(task, stream, list(parts), newest_ms, consecutive)
        self._do(lambda: self._machine.commit(commit))
        while True:
            before = self._machine.frames
            if self._waiters.until(self._done, NO_PROGRESS_S):
                return
            if self._machine.frames == before:
                raise UserError(
                    f"batch {batch} of feed {self._feed!r} is not published for {NO_PROGRESS_S:g} s",
                    expected=f"a router at site {self._site!r}, and instances that keep up",
                    hint="live.status() says which process is missing",
                )

    def forget(self, batch: int | None = None) -> None:
        """The feed has ended, or this batch of it is given up."""
        self.connect()
        self._do(lambda: self._machine.forget(self._feed, batch))

    def _do(self, step: Callable[[], list[Effect]]) -> None:
        with self._waiters:
            self._unsent += step()
            self._loop_thread.wake()

    def _done(self) -> bool:
        if self._machine.refused:
            raise UserError(self._machine.refused)
        self._check()
        return self._machine.done

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        with self._waiters:
            effects = [] if event is WOKEN else self._machine.on_event(event, now_ms)
            self._ready = self._ready or self._machine.connected
            self._waiters.notify()
            effects, self._unsent = self._unsent + effects, []
            return effects


_kept: dict[tuple[str, str, str, str], FeedClient] = {}  # the last one of this process


@contextlib.contextmanager
def feed_client(deployment: DeploymentDir, site: str, feed: str) -> Iterator[FeedClient]:
    """A connection for one feed: the one of its last batch if this process still has it."""
    name = (str(deployment.directory), deployment.manifest().id, site, feed)
    client = _kept.pop(name, None)
    while _kept:
        _kept.popitem()[1].close()
    client = client or FeedClient(deployment, site, feed)
    try:
        yield client
    except BaseException:
        client.close()
        raise
    _kept[name] = client


def keep_site(deployment: DeploymentDir, feed: str, site: str) -> None:
    """Refuse a feed that has been at another site: only that router knows its last batch."""
    note = deployment.feeds / f"{feed}.site"
    if note.exists():
        known = note.read_text()
        if known != site:
            raise UserError(
                f"the feed has written at site {known!r}, and now writes at {site!r}",
                expected=f"site {known!r}: its router knows which batches are published",
                hint="a new checkpoint location begins a new feed",
            )
        return
    deployment.feeds.mkdir(parents=True, exist_ok=True)
    write_whole(note, site.encode())
