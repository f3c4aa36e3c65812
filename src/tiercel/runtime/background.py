"""A client's machine at work behind the caller's back: one thread with one event loop.

Responsible for: the thread, waking threads and coroutines when something has changed, the thread's end.
Not responsible for: what the machine does (client.py), connections (host.py).

    caller's thread or loop --poke--> event loop: Host drives the machine
            ^                                   |
            +------------- Bell <---------------+
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

from tiercel.core.effects import Effect
from tiercel.core.events import Event, TimerFired
from tiercel.errors import UserError
from tiercel.runtime.host import Host
from tiercel.runtime.link import HandshakeFailed, Mistrusted
from tiercel.runtime.machine import Machine
from tiercel.runtime.place import Place

POKED = TimerFired("poked")  # what a machine is told when its caller wants something

CONNECT_S_MAX = 30.0  # a router that is started again is back sooner than this

T = TypeVar("T")


class Bell:
    """A lock, and a bell that wakes those who wait: threads and coroutines alike."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._sleepers: set[asyncio.Future[None]] = set()  # one per coroutine that waits

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._condition.release()

    def ring(self) -> None:
        """Something has changed. With the lock held."""
        self._condition.notify_all()
        for sleeper in self._sleepers:
            with contextlib.suppress(RuntimeError):  # that loop has ended, and nobody waits there
                sleeper.get_loop().call_soon_threadsafe(_wake, sleeper)
        self._sleepers.clear()

    def until(self, attempt: Callable[[], T | None], timeout_s: float | None) -> T | None:
        """Try, with the lock held, until it gives something; None when the time is over."""
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
                sleeper: asyncio.Future[None] = loop.create_future()
                self._sleepers.add(sleeper)
            left_s = None if give_up is None else give_up - time.monotonic()
            try:
                if left_s is not None and left_s <= 0:
                    return result
                await asyncio.wait([sleeper], timeout=left_s)
            finally:
                with self:
                    self._sleepers.discard(sleeper)


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)


class Background:
    """Runs a machine in a host of its own until `close`; `failure` is what ended it before that."""

    def __init__(
        self,
        name: str,
        machine: Machine,
        place: Place,
        site: str,
        bell: Bell,
        on_refused: Callable[[str, HandshakeFailed], object],
    ) -> None:
        self.failure: BaseException | None = None
        self.ended = False
        self._bell = bell
        self._host = Host(
            name,
            machine,
            place.registry,
            place.secret,
            dials=[site],
            tls=place.manifest().tls,
            listens=False,
            on_refused=on_refused,
        )
        self._loop = uvloop.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tiercel-{name}", daemon=True)
        atexit.register(self.close)  # a loop that still runs while the interpreter goes can crash it
        self._thread.start()
        self._started.wait()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except Exception as error:
            self.failure = error
        finally:
            with self._bell:
                self.ended = True
                self._bell.ring()

    async def _serve(self) -> None:
        serving = asyncio.create_task(self._host.run())
        await asyncio.sleep(0)  # now it takes events
        self._started.set()
        await serving

    def poke(self) -> None:
        """Tell the machine, from any thread, that its caller wants something."""
        with contextlib.suppress(RuntimeError):  # it has ended, and the caller is told so by `ended`
            self._loop.call_soon_threadsafe(self._host.take, POKED)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._host.end, "closed")
        self._thread.join()
        atexit.unregister(self.close)


class Client(ABC):
    """What all clients share: one machine in the background, connected with one site.

    Made where an event loop runs, it connects when it is entered with `async with`, or first used;
    made elsewhere, it is connected when the constructor returns.
    """

    def __init__(self, place: Place, name: str, site: str, timeout_s: float = CONNECT_S_MAX) -> None:
        self._bell = Bell()  # its lock guards everything that both threads touch
        self._name = name
        self._site = site
        self._ready = False  # the router has answered
        self._closed = False
        self._refusal: HandshakeFailed | None = None
        self._background = Background(name, self, place, site, self._bell, self._on_refused)
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # no event loop here that waiting would stop
            try:
                self.connect(timeout_s)
            except BaseException:
                self._end()
                raise

    def connect(self, timeout_s: float = CONNECT_S_MAX) -> None:
        """Wait until the router has answered."""
        if not self._ready and not self._bell.until(self._if_ready, timeout_s):
            raise self._silent(timeout_s)

    async def connect_async(self, timeout_s: float = CONNECT_S_MAX) -> None:
        if not self._ready and not await self._bell.until_async(self._if_ready, timeout_s):
            raise self._silent(timeout_s)

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
        """In the background: this is the host's machine."""

    def _if_ready(self) -> bool:
        self._check()
        return self._ready

    def _check(self) -> None:
        """Raise what makes every further call senseless."""
        if self._closed:
            what = f"{self._name} is closed"
            expected = "calls before close(), and before its deployment ends"
            raise UserError(what, expected=expected, hint="make another one when the deployment runs")
        if isinstance(self._refusal, Mistrusted):
            what = f"the router of site {self._site!r} has another secret than {self._name!r}"
            hint = "give the directory that the deployment runs in, not a copy of it"
            raise UserError(what, expected="the storage directory of that deployment", hint=hint)
        if self._refusal is not None:
            what = f"the router of site {self._site!r} does not let {self._name!r} in: {self._refusal}"
            hint = "give each program's producers names of their own"
            raise UserError(what, expected="one program at a time under each name", hint=hint)
        if self._background.ended:
            what = f"{self._name} failed: {self._background.failure}"
            raise UserError(what, hint="make a new one; what was acknowledged is safe")

    def _on_refused(self, peer: str, refusal: HandshakeFailed) -> None:
        """In the background: the router does not want us, and says why."""
        with self._bell:
            self._refusal = refusal
            self._bell.ring()

    def _silent(self, timeout_s: float) -> UserError:
        return UserError(
            f"the router of site {self._site!r} has not answered for {timeout_s:g} s",
            expected="a running deployment in the storage directory",
            hint="is it started, and can its address be reached from here?",
        )

    def _end(self) -> None:
        with self._bell:
            self._closed = True
            self._bell.ring()
        self._background.close()
