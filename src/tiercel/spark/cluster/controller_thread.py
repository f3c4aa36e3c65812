"""The thread of the driver that runs the controller, and the questions that other threads ask it.

Responsible for: requests from any thread, waiting for answers, restarting a controller that failed, the
    history of each move.
Not responsible for: carrying moves out (control/controller.py), starting processes (supervisor.py).
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

from tiercel.control.controller import Controller, MoveState, RecoveryRequest, ScaleRequest, TrackedMove
from tiercel.control.plans import Plan
from tiercel.control.predict import Prediction
from tiercel.core import messages as m
from tiercel.core.errors import InvalidRequest
from tiercel.core.machine.effects import Effect, Launch, Retire
from tiercel.core.machine.events import Event, Received
from tiercel.core.model.keys import Key
from tiercel.core.model.routing import Route
from tiercel.core.model.topology import operator_of, site_of
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.net.gauge_messages import SiteReport
from tiercel.runtime.net.site_messages import LaunchInstance, RetireInstance
from tiercel.runtime.process.gauges import CONTROLLER, GaugeBoard
from tiercel.runtime.process.host import Host, HostConfig
from tiercel.runtime.recovery.recover import open_storage
from tiercel.spark.cluster.waiting import wait_until
from tiercel.spark.move_history import MoveHistory, MoveReport

log = logging.getLogger(__name__)

ANSWER_S_MAX = 30.0
RESTART_S = 0.5  # before a failed controller is restarted
POLL_S = 0.005
REPORT_S = 1.0  # between two reports of an agent
STORIES_KEPT_MAX = 5_000  # phases of moves in memory; the history on disk has the others
SILENT_S = 2.0  # for the answer of a site that is an application of its own
ASK_AGAIN_S = 0.5  # a router that has just restarted lost the question

TABLES: Final[dict[str, Any]] = {
    "move": TrackedMove,
    "scale": ScaleRequest,
    "next_id": int,
    "retiring": int,
    "recovery": RecoveryRequest,
    "standby": str,
}


ENDED = (MoveState.DONE.value, MoveState.UNDONE.value)

T = TypeVar("T")
Routes = tuple[dict[int, Route], dict[Key, Route]]


class PhaseTime(msgspec.Struct, frozen=True):
    """A phase of a move, and when the driver saw it first, by its monotonic clock."""

    phase: str
    at_s: float
    keys: int = 0
    size_bytes: int = 0
    messages: int = 0
    overlap: float = 1.0


class MoveRequested(msgspec.Struct, frozen=True):
    """When a move was requested, and what was expected of it."""

    at_s: float
    wall_s: float
    prediction: Prediction | None


class RecordingController(Controller):
    """The controller, with a record of the phases of each move."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stories: dict[str, list[PhaseTime]] = {}
        self.on_end: Callable[[TrackedMove], object] = lambda tracked: None

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        named = [tracked for name in _named(event) if (tracked := self.moves.get(name)) is not None]
        running = [tracked for tracked in named if tracked.state not in ENDED]
        effects = self._on_event(event, now_ms)
        for tracked in running:
            if tracked.state in ENDED:
                self.on_end(tracked)
        return effects

    def _on_event(self, event: Event, now_ms: float) -> list[Effect]:
        if isinstance(event, Received):
            match event.message:
                case m.MoveStatus() as status:
                    self._record(status)
                case m.StatusReply(statuses=statuses):
                    for status in statuses:
                        self._record(status)
                case LaunchInstance(instance=instance):
                    return [Launch(instance)]
                case RetireInstance(instance=instance):
                    return [Retire(instance)]
                case _:
                    pass
        return super().on_event(event, now_ms)

    def _record(self, status: m.MoveStatus) -> None:
        story = self.stories.setdefault(status.move, [])
        if not story or story[-1].phase != status.phase:
            facts = (status.keys, status.size_bytes, status.messages, status.overlap)
            story.append(PhaseTime(status.phase, time.monotonic(), *facts))


def _named(event: Event) -> list[str]:
    """The moves that an event tells something about."""
    match event:
        case Received(message=m.MoveStatus(move=move)):
            return [move]
        case Received(message=m.StatusReply(statuses=statuses)):
            return [status.move for status in statuses]
        case _:
            return []


def agent_of(site: str) -> str:
    """The name of the agent of a site: its driver, where another application has the controller."""
    return f"agent@{site}"


class ControllerThread:
    """A thread that runs the controller and restarts it when it fails.

    In an application whose site is not the root it runs the agent of the site instead: the same machine,
    which no user asks for anything. It knows its own router, and starts and ends instances as the
    controller asks.
    """

    def __init__(
        self,
        deployment: DeploymentDir,
        on_launch: Callable[[str], object],
        on_retire: Callable[[str], object],
    ) -> None:
        self._deployment, self._hooks = deployment, (on_launch, on_retire)
        self._registry = deployment.registry
        manifest = deployment.manifest()
        self._topology = manifest.topology
        self._sites_here = manifest.sites_here
        self.is_agent = not manifest.is_root
        self.name = agent_of(self._sites_here[0]) if self.is_agent else CONTROLLER
        self.gauges = GaugeBoard()  # what all processes report; that of an agent stays empty
        self.report_site: Callable[[], SiteReport] | None = None  # what an agent reports, once it is set
        self._stories: dict[str, list[PhaseTime]] = {}
        self._requested: dict[str, MoveRequested] = {}
        self.history = MoveHistory(deployment.directory)
        self._last_answers: dict[str, tuple[int, float]] = {}  # site -> the last question answered, and when
        self._ending = threading.Event()
        self._failure = ""  # why the controller does not run
        self.incarnations = 0  # of the controller: a request that it has not stored is lost with one
        self._open()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiercel-controller", daemon=True)
        atexit.register(self.end)  # a loop that runs while the interpreter ends can crash it
        self._thread.start()
        self._ready.wait()

    def _open(self) -> None:
        """Open the storage and make a controller from it. It asks the routers for the rest."""
        manifest = self._deployment.manifest()
        storage = open_storage(self._deployment.process(self.name), manifest, self.name, TABLES)
        self._controller = RecordingController(manifest.topology, manifest.settings, storage.store.items())
        self._controller.stories = self._stories
        self._controller.on_end = self._on_end
        self.incarnations += 1
        elsewhere = [site for site in manifest.topology.sites if site not in self._sites_here]
        peers = [*manifest.topology.sites, *map(agent_of, elsewhere)]
        self._host = Host(
            self.name,
            self._controller,
            HostConfig.of(
                self._deployment,
                dials=list(self._sites_here) if self.is_agent else peers,
                bind=manifest.bind,
                advertise=manifest.address_of(self.name),
                tls=manifest.tls,
                site=self._sites_here[0],
                links=manifest.links,
                on_launch=self._on_launch,
                on_retire=self._on_retire,
                gauge_board=self.gauges,
                storage=storage,
            ),
        )

    @property
    def deployment(self) -> DeploymentDir:
        return self._deployment

    def is_elsewhere(self, instance: str) -> bool:
        """Whether an instance is to run in another application."""
        return site_of(instance) not in self._sites_here

    def _on_launch(self, instance: str) -> None:
        if self.is_elsewhere(instance):
            self._host.send_at_once(agent_of(site_of(instance)), LaunchInstance(instance))
        else:
            self._hooks[0](instance)

    def _on_retire(self, instance: str) -> None:
        if self.is_elsewhere(instance):
            self._host.send_at_once(agent_of(site_of(instance)), RetireInstance(instance))
        else:
            self._hooks[1](instance)

    def launch(self, instance: str) -> None:
        """Have an instance started, here or by the agent of its site; it attaches some time later."""
        self._ask(lambda controller, now: (None, [Launch(instance)]))

    def launch_elsewhere(self, instance: str, limit_s: float) -> None:
        """Have the agent of another site start an instance; returns when its router reports it."""
        asked_s = -ASK_AGAIN_S

        def attached() -> bool:
            nonlocal asked_s
            if time.monotonic() - asked_s > ASK_AGAIN_S:
                asked_s = time.monotonic()
                self.launch(instance)
                self.refresh()
            return instance in self.running()

        def failure() -> UserError:
            what = f"{instance} did not start within {limit_s:g} s"
            hint = f"does the application of site {site_of(instance)!r} run, and is it reached?"
            return UserError(what, expected="an answer of that site", hint=hint)

        wait_until(attached, limit_s, failure)

    def _run(self) -> None:
        """Runs the controller until the deployment ends. It fails, for example, when the disk is full."""
        while not self._ending.is_set():
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(self._serve())
            except Exception as error:
                self._note_failure(error)
                self._ready.set()
                self._reopen()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._failure = ""
        self._ready.set()
        reporting = asyncio.create_task(self._report()) if self.is_agent else None
        try:
            await self._host.run()
        finally:
            if reporting is not None:
                reporting.cancel()

    async def _report(self) -> None:
        """Tell the controller once a second what only the driver of a site knows."""
        while True:
            await asyncio.sleep(REPORT_S)
            if self.report_site is not None and self._host.is_connected(CONTROLLER):
                try:
                    report = await self._loop.run_in_executor(None, self.report_site)
                    self._host.send_at_once(CONTROLLER, report)
                except Exception as error:  # Spark ends, or does not answer now
                    log.info("%s cannot report: %s", self.name, error)

    def _reopen(self) -> None:
        """Waits until the storage can be opened and written."""
        while not self._ending.wait(RESTART_S):
            try:
                self._open()
                return
            except Exception as error:
                self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        self._failure = str(error.__context__ or error)  # the first error: later ones hide it
        log.warning("the controller failed and restarts: %s", self._failure)

    def end(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it is between two incarnations
                self._loop.call_soon_threadsafe(self._host.end, "the deployment ends")
            self._thread.join(10.0)
        self._registry.deregister(self.name)
        atexit.unregister(self.end)

    # -- asking --------------------------------------------------------------------------------

    def check_runs(self) -> None:
        """Raises if the controller has ended, for callers that wait for something."""
        if not self._thread.is_alive():
            raise UserError("the controller has ended: the deployment was stopped")

    def _ask(self, question: Callable[[Controller, float], tuple[T, Sequence[Effect]]]) -> T:
        """Call the controller in its own thread, and perform its effects."""

        async def ask() -> T:
            answer, effects = question(self._controller, self._host.now_ms())
            self._host.perform(effects)
            return answer

        self.check_runs()
        coroutine = ask()
        try:
            if self._failure:
                raise RuntimeError(self._failure)
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(ANSWER_S_MAX)
        except (
            RuntimeError,
            TimeoutError,
            CancelledError,
        ) as error:  # lost with the incarnation
            coroutine.close()
            what = f"the controller does not answer: {self._failure or error}"
            raise UserError(what, hint="it restarts by itself; ask again") from error
        except InvalidRequest as refusal:
            raise UserError.of(refusal) from refusal

    def request(
        self, plan: Plan, retries: int, deadline_ms: float | None, prediction: Prediction | None = None
    ) -> list[str]:
        """Request the moves of a plan; returns their names."""

        def request(controller: Controller, now: float) -> tuple[list[str], Sequence[Effect]]:
            names, effects = controller.request(plan, now, retries, deadline_ms)
            asked = MoveRequested(time.monotonic(), time.time(), prediction)
            self._requested.update(dict.fromkeys(names, asked))
            return names, effects

        return self._ask(request)

    def _on_end(self, tracked: TrackedMove) -> None:
        self.history.add(self.report(tracked))
        for known in (self._requested, self._stories):
            while len(known) > STORIES_KEPT_MAX:
                known.pop(next(iter(known)))

    def report(self, tracked: TrackedMove) -> MoveReport:
        """The report of one move, or of one part of a move, as it is now."""
        story = list(self._stories.get(tracked.move, ()))
        first_s = story[0].at_s if story else time.monotonic()
        at_once = MoveRequested(first_s, time.time() - (time.monotonic() - first_s), None)
        asked = self._requested.get(tracked.move, at_once)
        reached = {entry.phase: round((entry.at_s - asked.at_s) * 1e3, 3) for entry in reversed(story)}
        wanted = tracked.wanted
        return MoveReport(
            *(tracked.move, wanted.operator, wanted.source, wanted.destination, wanted.strategy),
            *(tracked.state, tracked.reason),
            max((entry.keys for entry in story), default=0),
            max((entry.size_bytes for entry in story), default=0),
            dict(sorted(reached.items(), key=lambda item: item[1])),
            messages=max((entry.messages for entry in story), default=0),
            overlap=round(story[-1].overlap, 4) if story else 1.0,
            prediction=asked.prediction,
            requested_at=round(asked.wall_s, 3),
        )

    def scale(self, request: ScaleRequest) -> None:
        self._ask(lambda controller, now: (None, controller.scale(request, now)))

    def set_standby(self, instance: str, standby: str) -> None:
        self._ask(lambda controller, now: (None, controller.set_standby(instance, standby, now)))

    def standbys(self) -> dict[str, str]:
        """Instance -> its standby."""
        return dict(self._controller.standbys)

    def recover(self, instance: str, successors: tuple[str, ...]) -> str:
        """Request a recovery by successors; returns its name."""
        return self._ask(lambda controller, now: controller.recover(instance, successors, now))

    def recovering(self, recovery: str) -> bool:
        """Whether a recovery still runs; UserError if its router refused it."""
        reason = self._controller.refused.get(recovery)
        if reason is not None:
            what, expected = (
                f"it cannot be taken over: {reason}",
                "a dead instance without moves",
            )
            raise UserError(what, expected=expected, hint="Spark restarts it by itself")
        return recovery in self._controller.recoveries

    def scaling(self, operator: str) -> bool:
        """Whether a scaling of the operator still runs."""
        controller = self._controller
        return operator in controller.scales or any(operator_of(i) == operator for i in controller.retiring)

    def scale_request(self, operator: str) -> tuple[ScaleRequest | None, set[str]]:
        """The scaling that runs, and the instances that only wait for their router to release them."""

        def read(
            controller: Controller, _: float
        ) -> tuple[tuple[ScaleRequest | None, set[str]], Sequence[Effect]]:
            retiring = {i for i in controller.retiring if operator_of(i) == operator}
            return (controller.scales.get(operator), retiring), ()

        return self._ask(read)

    def has_open_requests(self) -> bool:
        """Whether moves, scalings or recoveries are known that have not ended."""
        controller = self._controller
        return bool(controller.moves or controller.scales or controller.recoveries)

    def moves(self) -> dict[str, TrackedMove]:
        return dict(self._controller.moves)

    def story(self, move: str) -> list[PhaseTime]:
        return list(self._controller.stories.get(move, ()))

    def running(self) -> set[str]:
        """Instances that are attached to their routers, as last reported."""
        return set(self._controller.running)

    def refresh(self) -> None:
        """Ask every router for its tables, and wait for the answers.

        The router of another application is waited for only while it is connected, and not for long: its
        link may be heard one way only. What it said last is used then.
        """
        first, asked_s = 0, -ASK_AGAIN_S
        begun_s = time.monotonic()
        silent: list[str] = []

        def all_answered() -> bool:
            nonlocal first, asked_s, silent
            if time.monotonic() - asked_s > ASK_AGAIN_S:
                question = self._ask(lambda controller, now: controller.ask_status(now))
                first, asked_s = first or question, time.monotonic()
            answered = dict(self._controller.answered)
            silent = [site for site in self._topology.sites if answered.get(site, 0) < first]
            self._note_answers(answered)
            patient = time.monotonic() - begun_s < SILENT_S
            elsewhere = [site for site in silent if patient and self._host.is_connected(site)]
            silent = [site for site in silent if site in self._sites_here or site in elsewhere]
            return not silent

        def failure() -> UserError:
            what = f"no answer from the router of {', '.join(silent)} within {ANSWER_S_MAX:g} s"
            return UserError(what, hint="live.status() shows whether it runs")

        wait_until(all_answered, ANSWER_S_MAX, failure, poll_s=POLL_S)

    def _note_answers(self, answered: dict[str, int]) -> None:
        for site, question in answered.items():
            if self._last_answers.get(site, (0, 0.0))[0] != question:
                self._last_answers[site] = (question, time.monotonic())

    def silent_sites(self) -> dict[str, float]:
        """Sites of other applications that do not answer now, with the seconds since then; -1: never."""
        now_s = time.monotonic()
        newest = max((question for question, _ in self._last_answers.values()), default=0)
        found = {}
        for site in self._topology.sites if not self.is_agent else ():
            question, at_s = self._last_answers.get(site, (0, 0.0))
            if site not in self._sites_here and question < newest:
                found[site] = now_s - at_s if question else -1.0
        return found

    def ask_tables(self) -> None:
        """Ask every router for its tables, and do not wait: `routes` has them a moment later."""
        self._ask(lambda controller, now: controller.ask_status(now))

    def changing(self, operator: str) -> str:
        """The scaling, recovery or move of an operator that runs now; empty: none."""

        def read(controller: Controller, _: float) -> tuple[str, Sequence[Effect]]:
            if operator in controller.scales or any(operator_of(i) == operator for i in controller.retiring):
                return "a scaling runs", ()
            if any(operator_of(known.instance) == operator for known in controller.recoveries.values()):
                return "a recovery runs", ()
            moves = [t.move for t in controller.active if t.wanted.operator == operator]
            return f"move {moves[0]} runs" if moves else "", ()

        return self._ask(read)

    def routes(self, operator: str) -> Routes:
        """Slots and single keys with their owners, as the routers last reported.

        Read in the controller's thread, so that no half of an answer is seen.
        """

        def read(controller: Controller, _: float) -> tuple[Routes, Sequence[Effect]]:
            return (dict(controller.slots[operator]), dict(controller.overrides[operator])), ()

        return self._ask(read)
