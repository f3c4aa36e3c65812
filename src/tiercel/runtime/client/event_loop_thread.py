"""The thread with an event loop in which the machine of a client runs.

Responsible for: the thread and its end, waking threads and coroutines when something has changed.
Not responsible for: the machine (producer.py, subscriber.py), connections (process/host.py).

    caller's thread or loop --wake--> event loop: Host drives the machine
            ^                                   |
            +----------- Waiters <--------------+
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

import uvloop

from tiercel.core.machine.effects import Effect
from tiercel.core.machine.events import Event, TimerFired
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.net.connection import HandshakeFailed, Mistrusted
from tiercel.runtime.process.host import Host, HostConfig
from tiercel.runtime.process.machine import Machine

WOKEN = TimerFired("woken")  # the event that a machine gets when its caller has something for it

CONNECT_S_MAX = 30.0  # a router that is started again answers sooner than this

T = TypeVar("T")


class Waiters:
    """A lock, and the threads and coroutines that wait for a change."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._futures: set[asyncio.Future[None]] = set()  # one per coroutine that waits

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._condition.release()

    def notify(self) -> None:
        """Wake all waiters, because something has changed. With the lock held."""
        self._condition.notify_all()
        for future in self._futures:
            with contextlib.suppress(RuntimeError):  # that loop has ended, and with it its coroutines
                future.get_loop().call_soon_threadsafe(_wake, future)
        self._futures.clear()

    def until(self, attempt: Callable[[], T | None], timeout_s: float | None) -> T | None:
        """Call `attempt` with the lock held until its result is true, or the time is over."""
        with self:
            return self._condition.wait_for(attempt, timeout_s)

    async def until_async(self, attempt: Callable[[], T | None], timeout_s: float | None) -> T | None:
        """The same for a coroutine."""
        loop = asyncio.get_running_loop()
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self:
                result = attempt()
                if result:
                    return result
                future: asyncio.Future[None] = loop.create_future()
                self._futures.add(future)
            left_s = None if give_up is None else give_up - time.monotonic()
            try:
                if left_s is not None and left_s <= 0:
                    return result
                await asyncio.wait([future], timeout=left_s)
            finally:
                with self:
                    self._futures.discard(future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class LoopThread:
    """Runs a machine in its own host until `close`; `failure` is the error that ended it before."""

    def __init__(
        self,
        name: str,
        machine: Machine,
        deployment: DeploymentDir,
        site: str,
        waiters: Waiters,
        on_refused: Callable[[str, HandshakeFailed], object],
        at: str = "",
    ) -> None:
        self.failure: BaseException | None = None
        self.ended = False
        self._waiters = waiters
        self._host = Host(
            name,
            machine,
            HostConfig.of(
                deployment,
                dials=[site],
                tls=deployment.manifest().tls,
                listens=False,
                on_refused=on_refused,
                site=at or site,
                links=deployment.manifest().links,
            ),
        )
        self._loop = uvloop.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tiercel-{name}", daemon=True)
        atexit.register(self.close)  # a loop that still runs at interpreter exit can crash it
        self._thread.start()
        self._started.wait()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except Exception as error:
            self.failure = error
        finally:
            with self._waiters:
                self.ended = True
                self._waiters.notify()

    async def _serve(self) -> None:
        serving = asyncio.create_task(self._host.run())
        await asyncio.sleep(0)  # now it accepts events
        self._started.set()
        await serving

    def wake(self) -> None:
        """Give the machine the event `WOKEN`, from any thread."""
        with contextlib.suppress(RuntimeError):  # it has ended, and `ended` is set
            self._loop.call_soon_threadsafe(self._host.deliver, WOKEN)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._host.end, "closed")
        self._thread.join()
        atexit.unregister(self.close)


class Client(ABC):
    """Base of all clients: one machine in a loop thread, connected with one site.

    Created inside a running event loop, a client connects when it is entered with `async with`, or at its
    first use. Created elsewhere, it is connected when the constructor returns.
    """

    def __init__(
        self,
        deployment: DeploymentDir,
        name: str,
        site: str,
        timeout_s: float = CONNECT_S_MAX,
        *,
        at: str = "",  # the site where the client itself is, if another one: an emulated link lies between
    ) -> None:
        self._waiters = Waiters()  # its lock guards everything that both threads touch
        self._name = name
        self._site = site
        self._ready = False  # the router has answered
        self._closed = False
        self._refusal: HandshakeFailed | None = None
        self._loop_thread = LoopThread(name, self, deployment, site, self._waiters, self._on_refused, at)
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # there is no event loop that waiting would block
            try:
                self.connect(timeout_s)
            except BaseException:
                self._end()
                raise

    def connect(self, timeout_s: float = CONNECT_S_MAX) -> None:
        """Wait until the router has answered."""
        if not self._ready and not self._waiters.until(self._if_ready, timeout_s):
            raise self._no_answer(timeout_s)

    async def connect_async(self, timeout_s: float = CONNECT_S_MAX) -> None:
        if not self._ready and not await self._waiters.until_async(self._if_ready, timeout_s):
            raise self._no_answer(timeout_s)

    def close(self) -> None:
        self._end()

    async def close_async(self) -> None:
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(*([UserError] if error else [])):  # the first error is the one to see
            self.close()

    async def __aenter__(self) -> Self:
        try:
            await self.connect_async()
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(*([UserError] if error else [])):
            await self.close_async()

    @abstractmethod
    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        """The machine of the host; called in the loop thread."""

    def _if_ready(self) -> bool:
        self._check()
        return self._ready

    def _check(self) -> None:
        """Raise the error that makes every further call fail."""
        if self._closed:
            what = f"{self._name} is closed"
            expected = "calls before close(), and before its deployment ends"
            raise UserError(what, expected=expected, hint="create another one when the deployment runs")
        if isinstance(self._refusal, Mistrusted):
            what = f"the router of site {self._site!r} has another secret than {self._name!r}"
            hint = "give the directory that the deployment runs in, not a copy of it"
            raise UserError(what, expected="the storage directory of that deployment", hint=hint)
        if self._refusal is not None:
            what = f"the router of site {self._site!r} does not let {self._name!r} in: {self._refusal}"
            hint = "give each program's producers names of their own"
            raise UserError(what, expected="one program at a time under each name", hint=hint)
        if self._loop_thread.ended:
            what = f"{self._name} failed: {self._loop_thread.failure}"
            raise UserError(what, hint="create a new one; what was acknowledged is safe")

    def _on_refused(self, peer: str, refusal: HandshakeFailed) -> None:
        """The router has refused the connection; called in the loop thread."""
        with self._waiters:
            self._refusal = refusal
            self._waiters.notify()

    def _no_answer(self, timeout_s: float) -> UserError:
        return UserError(
            f"the router of site {self._site!r} has not answered for {timeout_s:g} s",
            expected="a running deployment in the storage directory",
            hint="is it started, and can its address be reached from here?",
        )

    def _end(self) -> None:
        with self._waiters:
            self._closed = True
            self._waiters.notify()
        self._loop_thread.close()
