"""The subscriber: reads the entries of a stream, for any Python program, with blocking and asyncio calls.

Responsible for: returning entries in order, limiting how many wait, the range of a stream, clear errors.
Not responsible for: resuming after a reconnect (core/clients.py), the thread and its event loop
    (event_loop_thread.py).
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator

from tiercel.core import clients as core
from tiercel.core import messages as m
from tiercel.core.machine.effects import Effect, Send
from tiercel.core.machine.events import Connected, Event, Received
from tiercel.core.model.log import StreamEntry
from tiercel.errors import UserError
from tiercel.runtime.client.event_loop_thread import Client
from tiercel.runtime.client.validation import log_of
from tiercel.runtime.deployment import DeploymentDir

BUFFERED_ENTRIES_MAX = (
    256  # entries that the caller has not polled; beyond it the router is not asked for more
)


RANGE_S_MAX = 10.0


class Subscriber(Client):
    """Reads the entries of a stream, each once and in order, across restarts of the router.

    `after=None` begins with new entries, 0 with the first entry, n behind entry n. `at` is the site where the
    subscriber is, if an emulated link lies between it and the log. With a `site` it reads what that site has
    made, from the log that the site keeps of it (`outputs_at`). With the name of a
    `subscription` the stream keeps what this reader has not processed, also while no program reads, and
    `after=None` continues there. What a call has returned counts as processed at the next call.
    """

    def __init__(
        self,
        deployment: DeploymentDir,
        stream: str,
        *,
        after: int | None = None,
        at: str = "",
        site: str = "",
        subscription: str = "",
    ) -> None:
        home, stream = log_of(deployment.manifest(), stream, site)
        self._stream = stream
        self._machine = core.Subscriber(
            stream,
            home,
            after,
            range_first=True,
            entries_max=BUFFERED_ENTRIES_MAX,
            subscription=subscription,
        )
        self._fetched: deque[StreamEntry] = deque()  # fetched from the machine, not returned yet
        self._offset = 0 if after is None else after
        self._unsent: list[Effect] = []
        self._range: tuple[int, int] | None = None
        self._asking = False
        super().__init__(deployment, f"subscriber|{uuid.uuid4().hex}", home, at=at)

    # -- for callers ----------------------------------------------------------------------

    @property
    def offset(self) -> int:
        """The last returned entry: `after=offset` continues behind it."""
        return self._offset

    def poll(self, timeout_s: float) -> list[StreamEntry]:
        """All entries that have arrived; waits for the first one, at most this long."""
        self.connect()
        return self._waiters.until(self._take, timeout_s) or []

    async def poll_async(self, timeout_s: float) -> list[StreamEntry]:
        await self.connect_async()
        return await self._waiters.until_async(self._take, timeout_s) or []

    def __iter__(self) -> Iterator[StreamEntry]:
        """Entry by entry, until the subscriber is closed."""
        self.connect()
        while (found := self._waiters.until(self._take_one, None)) and found[0] is not None:
            yield found[0]

    async def __aiter__(self) -> AsyncIterator[StreamEntry]:
        await self.connect_async()
        while (found := await self._waiters.until_async(self._take_one, None)) and found[0] is not None:
            yield found[0]

    def range(self, timeout_s: float = RANGE_S_MAX) -> tuple[int, int]:
        """First and last entry of the stream that can be read now; there is none if last is smaller."""
        self.connect()
        self._ask_range()
        found = self._waiters.until(self._answered, timeout_s)
        if found is None:
            raise self._no_answer(timeout_s)
        return found

    async def range_async(self, timeout_s: float = RANGE_S_MAX) -> tuple[int, int]:
        await self.connect_async()
        self._ask_range()
        found = await self._waiters.until_async(self._answered, timeout_s)
        if found is None:
            raise self._no_answer(timeout_s)
        return found

    def end_subscription(self) -> None:
        """End the named subscription for good: the stream keeps nothing for it any more."""
        self.connect()
        with self._waiters:
            self._unsent.append(Send(self._site, m.EndSubscription(self._stream, self._machine.subscription)))
            self._loop_thread.wake()

    # -- attempts, in the caller's thread with the lock held -----------------------------------

    def _take(self) -> list[StreamEntry]:
        self._fetch()
        entries = list(self._fetched)
        self._fetched.clear()
        if entries:
            self._offset = entries[-1].offset
        return entries

    def _take_one(self) -> tuple[StreamEntry | None, ...]:
        """One entry, nothing yet, or None for the end."""
        if self._closed:
            return (None,)
        if not self._fetched:
            self._fetch()
        if not self._fetched:
            return ()
        entry = self._fetched.popleft()
        self._offset = entry.offset
        return (entry,)

    def _fetch(self) -> None:
        if not self._machine.entries and not self._fetched:
            self._check()
        if not self._machine.has_news:
            return
        entries, effects = self._machine.take()
        self._fetched += entries
        if effects:
            self._unsent += effects
            self._loop_thread.wake()

    def _ask_range(self) -> None:
        with self._waiters:
            self._range, self._asking = None, True
            self._unsent.append(Send(self._site, m.RangeQuery(self._stream)))
            self._loop_thread.wake()

    def _answered(self) -> tuple[int, int] | None:
        self._check()
        return self._range

    def _check(self) -> None:
        if self._machine.refused:
            raise UserError(
                self._machine.refused,
                expected="after=None for what comes from now on, or an offset within what the stream holds",
                hint="stream_range returns what it holds",
            )
        super()._check()

    # -- the machine, in the loop thread --------------------------------------------------------

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        with self._waiters:
            machine = self._machine
            was_subscribed, had = machine.subscribed, len(machine.entries)
            effects = machine.on_event(event, now_ms)
            match event:
                case Connected() if self._asking:
                    effects.append(Send(self._site, m.RangeQuery(self._stream)))
                case Received(message=m.RangeReply() as reply) if was_subscribed and self._asking:
                    self._range, self._asking = (reply.first, reply.last), False
                    self._waiters.notify()
                case _:
                    pass
            if machine.subscribed and not self._ready:
                self._ready, self._offset = True, machine.offset
            if len(machine.entries) > had or machine.subscribed != was_subscribed or machine.refused:
                self._waiters.notify()
            effects += self._unsent
            self._unsent = []
            return effects


class LogEnd(Client):
    """Asks for the range of a stream's log, as often as one likes."""

    def __init__(self, deployment: DeploymentDir, stream: str, timeout_s: float = RANGE_S_MAX) -> None:
        self._stream = stream
        self._range: tuple[int, int] | None = None
        self._beyond = -1
        self._unsent: list[Effect] = []
        home, _ = log_of(deployment.manifest(), stream)
        super().__init__(deployment, f"reader|{uuid.uuid4().hex}", home, timeout_s)

    def range(self, timeout_s: float = RANGE_S_MAX) -> tuple[int, int]:
        """First and last entry that can be read now; there is none if last is smaller."""
        found = self._ask(-1, timeout_s)
        if found is None:
            raise self._no_answer(timeout_s)
        return found

    def beyond(self, offset: int, timeout_s: float) -> tuple[int, int] | None:
        """The same, once there is an entry after this one; None if there is none for so long."""
        return self._ask(offset, timeout_s)

    def _ask(self, beyond: int, timeout_s: float) -> tuple[int, int] | None:
        self.connect()
        with self._waiters:
            self._range, self._beyond = None, beyond
            self._unsent.append(Send(self._site, m.RangeQuery(self._stream, beyond=beyond)))
            self._loop_thread.wake()
        return self._waiters.until(self._answered, timeout_s)

    def _answered(self) -> tuple[int, int] | None:
        self._check()
        return self._range

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        with self._waiters:
            effects: list[Effect] = []
            match event:
                case Connected():
                    self._ready = True
                    effects.append(Send(self._site, m.RangeQuery(self._stream, beyond=self._beyond)))
                case Received(message=m.RangeReply() as reply):
                    self._range = (reply.first, reply.last)
                case _:
                    pass
            self._waiters.notify()
            effects += self._unsent
            self._unsent = []
            return effects


def stream_range(deployment: DeploymentDir, stream: str, timeout_s: float = RANGE_S_MAX) -> tuple[int, int]:
    """First and last entry of a stream that can be read now; there is none if last is smaller."""
    with LogEnd(deployment, stream, timeout_s) as reader:
        return reader.range(timeout_s)
