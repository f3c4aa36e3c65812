"""The client of a batch task: rows of one task of the user's query in, the outputs that they cause out.

Responsible for: waiting for the router, digests of frames, one connection for all tasks of a Python worker.
Not responsible for: repetition after a reconnect (core/batch_client.py), columns (spark/rows).
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Sequence

import msgspec

from tiercel.core import messages as m
from tiercel.core.batch_client import IN_FLIGHT_FRAMES_MAX, BatchClient
from tiercel.core.machine.effects import Effect, Send
from tiercel.core.machine.events import Connected, Event, Received
from tiercel.core.model.log import Output, Row
from tiercel.errors import UserError
from tiercel.runtime.client.event_loop_thread import WOKEN, Client
from tiercel.runtime.deployment import DeploymentDir

DIGEST_BYTES = 12
SILENT_S_MAX = 120.0  # without any progress: a router or an instance that restarts takes less

_encode = msgspec.msgpack.Encoder().encode


class BatchTaskClient(Client):
    """Runs batch tasks, one at a time. Calls raise UserError if a task cannot be exactly once."""

    def __init__(self, deployment: DeploymentDir, site: str, outputs: str = "") -> None:
        self._machine = BatchClient(site, outputs)
        self._unsent: list[Effect] = []
        super().__init__(deployment, f"batch|{uuid.uuid4().hex}", site)

    def begin(self, task: m.BatchTask, stream: str, timers: tuple[int, int] | None = None) -> None:
        """Begin a task: the rows go to this stream. With `timers` it only has outputs, at these places."""
        self._do(lambda: self._machine.begin(task, stream, timers))
        self._wait(lambda: self._machine.begun, "the router does not answer")

    def send(self, stream: str, rows: list[Row], newest_ms: int = -1, numbers: Sequence[int] = ()) -> None:
        """The next frame of the task. Waits while too many are not durable."""
        digest = hashlib.blake2b(_encode(rows), digest_size=DIGEST_BYTES).digest()
        self._wait(lambda: self._machine.untaken < IN_FLIGHT_FRAMES_MAX, "rows are not taken")
        self._do(lambda: self._machine.submit(stream, rows, digest, newest_ms, tuple(numbers)))

    def end(self) -> None:
        """There are no more rows."""
        self._do(self._machine.end)

    def flush(self) -> None:
        """Wait until every frame is durable."""
        self._wait(lambda: not self._machine.untaken, "rows are not taken")

    def outputs(self) -> tuple[list[Output], bool]:
        """Outputs of the task's rows as they come, after `end`; and whether there may be more."""
        found: list[Output] = []

        def some() -> bool:
            self._check()
            outputs, effects = self._machine.take()
            found.extend(outputs)
            if effects:
                self._unsent += effects
                self._loop_thread.wake()
            return bool(found) or self._machine.done

        if not self._waiters.until(some, SILENT_S_MAX):
            raise self._silent("outputs do not come")
        with self._waiters:
            if not self._machine.done:
                return found, True
            found.extend(self._machine.take()[0])
            return found, False

    def forget(self) -> None:
        """End the task, whatever has become of it."""
        self._do(self._machine.forget)

    def _do(self, step: Callable[[], list[Effect]]) -> None:
        with self._waiters:
            effects = step()
            if effects:
                self._unsent += effects
                self._loop_thread.wake()

    def _wait(self, done: Callable[[], bool], missing: str) -> None:
        def attempt() -> bool:
            self._check()
            return done()

        if not self._waiters.until(attempt, SILENT_S_MAX):
            raise self._silent(missing)

    def _silent(self, what: str) -> UserError:
        return UserError(
            f"{what} for {SILENT_S_MAX:g} s",
            expected=f"a router at site {self._site!r}, and instances that keep up",
            hint="tiercel.deployments()[0].status() says which process is missing",
        )

    def _check(self) -> None:
        if self._machine.refused:
            raise UserError(self._machine.refused)
        super()._check()

    # -- the machine, in the loop thread --------------------------------------------------------

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        with self._waiters:
            effects = [] if event is WOKEN else self._machine.on_event(event, now_ms)
            self._ready = self._ready or self._machine.connected
            self._waiters.notify()
            effects, self._unsent = self._unsent + effects, []
            return effects


class TimerClient(Client):
    """Asks whether there are outputs of timers, as often as one likes."""

    def __init__(self, deployment: DeploymentDir, site: str, stream: str) -> None:
        self._stream = stream
        self._query: m.TimerQuery | None = None
        self._last = 0
        self._unsent: list[Effect] = []
        super().__init__(deployment, f"timers|{uuid.uuid4().hex}", site)

    def last(self, after: int, timeout_s: float, *, settled: bool = False) -> int | None:
        """The last place with outputs of timers, once there is one after this; None: no answer for so long.

        With `settled`, there is an answer as soon as everything that has entered is processed.
        """
        self.connect()
        query = m.TimerQuery(self._stream, after, settled)
        with self._waiters:
            self._query = query
            self._unsent.append(Send(self._site, query))
            self._loop_thread.wake()
        if not self._waiters.until(self._answered, timeout_s):
            return None
        return self._last

    def _answered(self) -> bool:
        self._check()
        return self._query is None

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        with self._waiters:
            effects, self._unsent = self._unsent, []
            match event:
                case Connected():
                    self._ready = True
                    effects = [] if self._query is None else [Send(self._site, self._query)]
                case Received(message=m.TimerPlaces() as places):
                    self._last, self._query = places.last, None
                case _:
                    pass
            self._waiters.notify()
            return effects


_kept: dict[tuple[str, str, str, str], BatchTaskClient] = {}


def client_for(deployment: DeploymentDir, site: str, outputs: str = "") -> BatchTaskClient:
    """The connection that this Python worker has kept from its last task, or a new one."""
    name = (str(deployment.directory), deployment.manifest().id, site, outputs)
    client = _kept.get(name)
    if client is not None:
        return client
    for other in list(_kept):
        drop(_kept[other])
    _kept[name] = BatchTaskClient(deployment, site, outputs)
    return _kept[name]


def drop(client: BatchTaskClient) -> None:
    """Close a connection, for example after an error: the next task makes a new one."""
    for name in [name for name, kept in _kept.items() if kept is client]:
        del _kept[name]
    client.close()
