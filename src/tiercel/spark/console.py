"""The controller's place in the driver: a thread that runs it, and what the driver asks of it.

Responsible for: wishes from any thread, answers when they are there, the story of each move.
Not responsible for: seeing moves through (control/controller.py), starting processes (hosting.py).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any, Final, TypeVar

import msgspec
import uvloop

from tiercel.control.controller import Controller, Recovery, Scale, TrackedMove
from tiercel.control.plans import Plan
from tiercel.core import messages as m
from tiercel.core.effects import Effect
from tiercel.core.events import Event, Received
from tiercel.core.faults import InvalidRequest
from tiercel.core.records import Key, Route
from tiercel.core.topology import operator_of
from tiercel.errors import UserError
from tiercel.runtime.host import Host
from tiercel.runtime.place import Place
from tiercel.runtime.storing import open_storage

log = logging.getLogger(__name__)

NAME: Final = "controller"
ANSWER_S_MAX = 30.0
AGAIN_S = 0.5  # before a controller that failed is started again
LOOK_S = 0.005

TABLES: Final[dict[str, Any]] = {
    "move": TrackedMove,
    "scale": Scale,
    "next_id": int,
    "retiring": bool,
    "recovery": Recovery,
}


T = TypeVar("T")
Routes = tuple[dict[int, Route], dict[Key, Route]]


class Stage(msgspec.Struct, frozen=True):
    """A phase that a move was seen in, and when, by the driver's monotonic clock."""

    phase: str
    at_s: float
    keys: int = 0
    size_bytes: int = 0


class Watched(Controller):
    """The controller, with a memory of how each move went."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stories: dict[str, list[Stage]] = {}

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        if isinstance(event, Received):
            if isinstance(event.message, m.MoveStatus):
                self._remember(event.message)
            elif isinstance(event.message, m.StatusReply):
                for status in event.message.statuses:
                    self._remember(status)
        return super().on_event(event, now_ms)

    def _remember(self, status: m.MoveStatus) -> None:
        story = self.stories.setdefault(status.move, [])
        if not story or story[-1].phase != status.phase:
            story.append(Stage(status.phase, time.monotonic(), status.keys, status.size_bytes))


class Console:
    """One thread with the controller in it."""

    def __init__(
        self, place: Place, on_launch: Callable[[str], object], on_retire: Callable[[str], object]
    ) -> None:
        self._place, self._hooks = place, (on_launch, on_retire)
        self._registry = place.registry
        self._topology = place.manifest().topology
        self._stories: dict[str, list[Stage]] = {}
        self._ending = threading.Event()
        self._failure = ""  # why the controller is away
        self.lives = 0  # of the controller: a wish that it had not stored ends with one
        self._begin()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiercel-controller", daemon=True)
        atexit.register(self.end)  # a loop that still runs while the interpreter goes can crash it
        self._thread.start()
        self._ready.wait()

    def _begin(self) -> None:
        """A controller that knows what the storage holds, and asks the routers for the rest."""
        manifest = self._place.manifest()
        on_launch, on_retire = self._hooks
        store, backup = open_storage(self._place.process(NAME), manifest, NAME, TABLES)
        self._controller = Watched(manifest.topology, manifest.settings, store.items())
        self._controller.stories = self._stories
        self.lives += 1
        self._host = Host(
            NAME,
            self._controller,
            self._place.registry,
            self._place.secret,
            dials=list(manifest.topology.sites),
            store=store,
            backup=backup,
            bind=manifest.bind,
            advertise=manifest.address_of(NAME),
            tls=manifest.tls,
            on_launch=on_launch,
            on_retire=on_retire,
        )

    def _run(self) -> None:
        """One life of the controller after the other, until the deployment ends: a disk may be full."""
        while not self._ending.is_set():
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(self._serve())
            except Exception as error:
                self._note_failure(error)
                self._ready.set()
                self._begin_again()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._failure = ""
        self._ready.set()
        await self._host.run()

    def _begin_again(self) -> None:
        """As soon as the storage can be opened and written."""
        while not self._ending.wait(AGAIN_S):
            try:
                self._begin()
                return
            except Exception as error:
                self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        self._failure = str(error.__context__ or error)  # the first one; what failed behind it only hides it
        log.warning("the controller failed and starts again: %s", self._failure)

    def end(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it is between two lives
                self._loop.call_soon_threadsafe(self._host.end, "the deployment ends")
            self._thread.join(10.0)
        self._registry.withdraw(NAME)
        atexit.unregister(self.end)

    # -- asking --------------------------------------------------------------------------------

    def check_runs(self) -> None:
        """Who waits for something is told when it cannot come any more."""
        if not self._thread.is_alive():
            raise UserError("the controller has ended: the deployment was stopped")

    def _ask(self, question: Callable[[Controller, float], tuple[T, Sequence[Effect]]]) -> T:
        """Put a question to the controller in its own thread, and perform what it wants done."""

        async def put() -> T:
            answer, effects = question(self._controller, self._host.now_ms())
            self._host.perform(effects)
            return answer

        self.check_runs()
        coroutine = put()
        try:
            if self._failure:
                raise RuntimeError(self._failure)
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(ANSWER_S_MAX)
        except (RuntimeError, TimeoutError, CancelledError) as error:  # the question was lost with its life
            coroutine.close()
            what = f"the controller does not answer: {self._failure or error}"
            raise UserError(what, hint="it starts again by itself; ask again") from error
        except InvalidRequest as refusal:
            raise UserError.of(refusal) from refusal

    def request(self, plan: Plan, retries: int, deadline_ms: float | None) -> list[str]:
        """Names of the moves that were taken on."""
        return self._ask(lambda controller, now: controller.request(plan, now, retries, deadline_ms))

    def scale(self, wish: Scale) -> None:
        self._ask(lambda controller, now: (None, controller.scale(wish, now)))

    def recover(self, instance: str, heirs: tuple[str, ...]) -> str:
        """The name of the recovery that was taken on."""
        return self._ask(lambda controller, now: controller.recover(instance, heirs, now))

    def recovering(self, recovery: str) -> bool:
        """Whether it is still being carried out; an error if its router refused."""
        reason = self._controller.refused.get(recovery)
        if reason is not None:
            what, expected = (
                f"it cannot be taken over: {reason}",
                "a dead instance that nothing else waits for",
            )
            raise UserError(what, expected=expected, hint="Spark starts it again by itself")
        return recovery in self._controller.recoveries

    def scaling(self, operator: str) -> bool:
        """Whether a wish is still being carried out."""
        controller = self._controller
        return operator in controller.scales or any(operator_of(i) == operator for i in controller.retiring)

    def wish(self, operator: str) -> tuple[Scale | None, set[str]]:
        """What is being carried out, and who of it is only waiting for its router to let it go."""

        def read(controller: Controller, _: float) -> tuple[tuple[Scale | None, set[str]], Sequence[Effect]]:
            retiring = {i for i in controller.retiring if operator_of(i) == operator}
            return (controller.scales.get(operator), retiring), ()

        return self._ask(read)

    def moves(self) -> dict[str, TrackedMove]:
        return dict(self._controller.moves)

    def story(self, move: str) -> list[Stage]:
        return list(self._controller.stories.get(move, ()))

    def running(self) -> set[str]:
        """Instances that are attached to their routers, as far as was told."""
        return set(self._controller.running)

    def refresh(self) -> None:
        """Ask every router for its tables, and wait for the answers."""
        first, asked_at = 0, 0.0
        give_up = time.monotonic() + ANSWER_S_MAX
        while time.monotonic() < give_up:
            if time.monotonic() - asked_at > 0.5:  # a router that was just started again has lost it
                question = self._ask(lambda controller, now: controller.ask_status(now))
                first, asked_at = first or question, time.monotonic()
            answered = dict(self._controller.answered)
            silent = [site for site in self._topology.sites if answered.get(site, 0) < first]
            if not silent:
                return
            time.sleep(LOOK_S)
        what = f"no answer from the router of {', '.join(silent)} within {ANSWER_S_MAX:g} s"
        raise UserError(what, hint="live.status() shows whether it runs")

    def routes(self, operator: str) -> Routes:
        """Slots and single keys with their owners, as the routers last told.

        Asked in the controller's thread: an answer that is being taken in is there whole or not at all.
        """

        def read(controller: Controller, _: float) -> tuple[Routes, Sequence[Effect]]:
            return (dict(controller.slots[operator]), dict(controller.overrides[operator])), ()

        return self._ask(read)
