"""A running scenario: its processes, links and supervisor, and the moves and faults of its script.

Responsible for: starting everything, restarting what dies, carrying out the scenario's actions.
Not responsible for: what the machines do (core/, control/), whether it was right (checkers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiercel.control.controller import Controller, ScaleRequest
from tiercel.control.plans import Plan, PlannedMove
from tiercel.core import messages as m
from tiercel.core.errors import InvalidRequest
from tiercel.core.instance.instance import Instance
from tiercel.core.machine.effects import Effect, Send, StorageKey
from tiercel.core.machine.events import Event
from tiercel.core.migration.strategies import STRATEGIES
from tiercel.core.model.keys import KeySet
from tiercel.core.model.routing import Route
from tiercel.core.model.topology import operator_of, site_of
from tiercel.core.router.router import Router
from tiercel.sim.check.recorder import Recorder, WatchedRouter, steps_of
from tiercel.sim.engine.disk import Disk
from tiercel.sim.engine.network import Network
from tiercel.sim.engine.process import Machine, Process
from tiercel.sim.engine.scheduler import Scheduler
from tiercel.sim.scenario import site_faults
from tiercel.sim.scenario.scenario import Action, Scenario
from tiercel.sim.scenario.scripted_clients import Listener, ScriptedMobile, ScriptedProducer
from tiercel.sim.workload import KINDS, PlainCode

LOCAL_MS = 0.15  # between processes of one site
STANDBY_MS = (0.0, 60.0, 250.0)  # between the naming of a standby and a move to it
RESTART_MS = 8.0  # an instance that ended cleanly is started again after this


class Deployment:
    """All processes of one run."""

    def __init__(self, scenario: Scenario, *, keep_story: bool = False) -> None:
        self.scenario = scenario
        self.topology = scenario.topology
        self.scheduler = Scheduler(scenario.seed, keep_story=keep_story)
        self.network = Network(self.scheduler)
        self.recorder = Recorder()
        self.processes: dict[str, Process] = {}
        self.listeners: dict[str, Listener] = {}
        self.instances: set[str] = set()
        self.retired: set[str] = set()
        self.ended: set[str] = set()  # processes of which an incarnation has ended
        self.scaled: dict[str, set[str]] = {}  # operator -> the instances of its last scaling
        self.dead: dict[str, str] = {}  # instance that died for good -> its successors
        self.named: dict[str, int] = {}  # instance -> its takeovers before the last request that names it
        self.step_crashes: list[Action] = [a for a in scenario.actions if a.kind == "step"]
        self.points_hit: set[tuple[str, str, str, bool]] = set()
        self.steps_seen: set[tuple[str, str, str]] = set()
        self.moves: dict[str, PlannedMove] = {}
        self.faults = 0
        self.deaths_in_reads = 0
        self.read_deaths: dict[str, float] = {}  # instances that die while their next read is under way
        self.turn_deaths: dict[str, float] = {}  # routers that die in their next step with several events
        self.shared_steps = 0  # steps that took several events
        self.refusals: list[str] = []
        self.owner_breaches: list[str] = []
        self._build()
        for action in scenario.actions:
            if action.kind != "step":
                self.scheduler.call_at(action.at_ms, self._act, action)

    # -- building ----------------------------------------------------------------------------

    def _build(self) -> None:
        sites = list(self.topology.sites)
        for site in sites:
            self._add(site, lambda incarnation, items, site=site: self._router(site, incarnation, items))
        for i, a in enumerate(sites):
            for b in sites[i + 1 :]:
                pair = f"{a} {b}"
                self.network.declare(
                    a, b, self.scenario.latency_ms[pair], self.scenario.bytes_per_ms.get(pair)
                )
        self._add(
            "controller", lambda incarnation, items: Controller(self.topology, self.scenario.settings, items)
        )
        for site in sites:
            self.network.declare("controller", site, 1.0)
        for operator in self.topology.operators.values():
            for instance in operator.instances:
                self._add_instance(instance)
        for spare in self.scenario.spares:
            self._add_instance(spare)
        encodes = self.scenario.encoded
        for script in self.scenario.traffic:
            self._add(
                script.name,
                lambda incarnation, items, script=script: ScriptedProducer(
                    script, encodes, incarnation, self._bundles_of(script.stream)
                ),
            )
            self.network.declare(script.name, script.site, LOCAL_MS)
        for journey in self.scenario.journeys:
            self._add(
                journey.name, lambda incarnation, items, journey=journey: ScriptedMobile(journey, encodes)
            )
            for site in sorted({site for _, site in journey.stops}):
                self.network.declare(journey.name, site, 2.0)
        for stream in self.topology.streams.values():
            for log, site in self.topology.logs_of(stream.name).items():
                listener = self.listeners[log] = Listener(log, site)
                self._add("listener " + log, lambda incarnation, items, listener=listener: listener)
                self.network.declare("listener " + log, site, LOCAL_MS)
        for process in list(self.processes.values()):
            process.start()

    def _bundles_of(self, stream: str) -> tuple[str, int] | None:
        """The form of a producer's bundles, and the number of slots of the first operator that reads them."""
        readers = [each for each in self.topology.operators.values() if stream in each.inputs]
        return (self.scenario.bundles, readers[0].slots) if self.scenario.bundles and readers else None

    def _add(self, name: str, make: Any) -> Process:
        scenario = self.scenario
        disk = Disk(self.scheduler, sync_ms=scenario.sync_ms, durability=scenario.durability, name=name)  # type: ignore[arg-type]
        process = self.processes[name] = Process(
            self.scheduler,
            self.network,
            name,
            make,
            disk,
            clock_offset_ms=scenario.clock_ms.get(name, 0.0),
            drift=scenario.drift.get(name, 0.0),
            on_exit=self._on_exit,
            on_crash=lambda process: self.ended.add(process.name),
            on_launch=self._launch,
            on_retire=self._retire,
            before_effect=self._before_effect,
            on_read=self._on_read,
            validate=True,
            turn_ms=scenario.turn_ms.get(name, 0.0),
            newest_of=lambda other: self.processes[other].newest_disk,
            coming_ms=scenario.coming_ms,
        )
        return process

    def _add_instance(self, name: str) -> None:
        operator = self.topology.operators[operator_of(name)]
        kind = KINDS[self.scenario.kinds[operator.name]]
        coarser = self.scenario.coarser[operator.name]
        row_ms = self.scenario.service_ms.get(name, self.scenario.service_ms.get(operator.name, 0.0))

        def make(incarnation: int, items: dict[StorageKey, Any]) -> Machine:
            made = kind(operator.name, coarser)
            code = PlainCode(
                made,
                folded=True,
                encodes=self.scenario.encoded,
                row_ms=row_ms,
                joins=self.scenario.joins,
                bundles=bool(self.scenario.bundles),
            )  # the reference calls processors
            return Instance(name, operator, code, self.scenario.settings, incarnation)

        process = self._add(name, make)
        if row_ms:
            process.service_ms = lambda machine: machine.runner.code.take_spent_ms()
        self.network.declare(name, site_of(name), LOCAL_MS)
        for other in sorted(self.instances):
            if operator_of(other) == operator.name:
                a, b = site_of(name), site_of(other)
                latency = LOCAL_MS if a == b else self._latency(a, b)
                self.network.declare(name, other, latency)
        self.instances.add(name)

    def _latency(self, a: str, b: str) -> float:
        return self.scenario.latency_ms.get(f"{a} {b}") or self.scenario.latency_ms[f"{b} {a}"]

    def _router(self, site: str, incarnation: int, items: dict[StorageKey, Any]) -> Router:
        self.recorder.recovered(site, items)
        return WatchedRouter(
            site, self.topology, self.scenario.settings, incarnation, items, recorder=self.recorder
        )

    def _launch(self, instance: str) -> None:
        if instance in self.dead:
            asked = self.named.get(instance, 0) == self.recorder.takeovers_of(instance)
            if instance not in self.retired or not asked:
                return  # a machine that is gone; nobody has asked for another one since the takeover
            del self.dead[instance]
            self.processes[instance].allow_restarts()
        self.retired.discard(instance)
        if instance not in self.processes:
            self._add_instance(instance)
        if not self.processes[instance].up:
            self.processes[instance].launch_after(30.0)

    def _on_exit(self, process: Process, reason: str) -> None:
        self.ended.add(process.name)
        if process.name not in self.dead:
            process.restart_after(RESTART_MS)

    def _retire(self, instance: str) -> None:
        self.ended.add(instance)
        self.retired.add(instance)
        self.processes[instance].stop()

    # -- watching ----------------------------------------------------------------------------

    def _before_effect(self, process: Process, event: Event, effects: Sequence[Effect]) -> int | None:
        """Sees every event and its effects; may let the process die before or after them."""
        crash_at = None
        steps = steps_of(event, effects)
        if process.events_in_step > 1:
            self.shared_steps += 1
            if process.name in self.turn_deaths:
                crash_at = self.scheduler.rng.randint(0, len(effects))
                process.restart_after(self.turn_deaths.pop(process.name))
        for move, step in steps:
            crash_at = self._crash_here(process, move, step, len(effects))
            if crash_at is not None:
                break
        done = effects if crash_at is None else effects[:crash_at]
        if process.name in self.topology.sites:
            self.recorder.wrote(process.name, done)
        elif process.name in self.instances:
            self._watch_emission(process, done)
        if steps:
            self.recorder.move_messages += 1
        return crash_at

    def _on_read(self, process: Process) -> None:
        """A read of state has begun; the process may die before it ends."""
        down_ms = self.read_deaths.pop(process.name, None)
        if down_ms is not None:
            self.deaths_in_reads += 1
            self.scheduler.call_after(0.0, process.crash)
            process.restart_after(down_ms)

    def _roles(self, process: Process, move: str) -> list[str]:
        if move not in self.moves:
            self.learn_moves()
        request = self.moves.get(move)
        if request is None:
            return []
        names = {
            "source": request.source,
            "destination": request.destination,
            "origin": site_of(request.source),
            "target": site_of(request.destination),
            "controller": "controller",
        }
        return [role for role, name in names.items() if name == process.name]

    def _crash_here(self, process: Process, move: str, step: str, effects: int) -> int | None:
        for role in self._roles(process, move):
            strategy = self.moves[move].strategy
            self.steps_seen.add((strategy, role, step))
            for action in list(self.step_crashes):
                if (action.strategy, action.target, action.point) == (strategy, role, step):
                    self.step_crashes.remove(action)
                    if action.other == "mute":
                        self.faults += 1
                        self.network.clog(process.name, site_of(process.name), action.for_ms, one_way=True)
                        continue
                    if action.other in site_faults.KINDS:
                        self.faults += 1
                        site_faults.at_step(self, process.name, action)
                        continue
                    if action.other == "slow":
                        self.faults += 1
                        process.disk.slow(20.0, action.for_ms)
                        continue
                    if action.other == "die":
                        self.faults += 1
                        self._let_die(process.name, f"{process.name.rpartition('#')[0]}#71")
                        return effects if action.after else 0
                    self.points_hit.add((strategy, role, step, action.after))
                    self.faults += 1
                    process.restart_after(action.for_ms)
                    return effects if action.after else 0
        return None

    def _watch_emission(self, process: Process, effects: Sequence[Effect]) -> None:
        """One owner: when a destination emits for a move, its source must have stopped."""
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, m.MoveOutputs):
                move = effect.message.move
                request = self.moves.get(move)
                origin = self.router(site_of(request.source)) if request is not None else None
                departure = origin.outgoing_moves.get(move) if origin is not None else None
                if departure is not None and departure.record.last_offset < 0:
                    text = f"{process.name} emits for {move} before {departure.source} was cut"
                    self.owner_breaches.append(text)

    # -- acting ------------------------------------------------------------------------------

    def router(self, site: str) -> Router | None:
        machine = self.processes[site].machine
        return machine if isinstance(machine, Router) else None

    def owner(self, operator: str, *, slot: int | None = None, key: bytes | None = None) -> Route:
        """The newest route anyone knows."""
        best: Route | None = None
        for site in self.topology.sites:
            router = self.router(site)
            if router is not None:
                table = router.inboxes[operator].table
                route = table.slots[slot] if slot is not None else table.route(key or b"")
                if best is None or route.epoch > best.epoch:
                    best = route
        return best or Route(self.topology.operators[operator].instances[0], 1)

    def _act(self, action: Action) -> None:
        match action.kind:
            case "move":
                self._ask_move(action)
            case "standby":
                self._set_standby(action.target, action.other)
            case "scale":
                self._ask_scale(action)
            case "recover" | "suspect":
                self._recover(action)
            case "replace":
                self._ask_replacement(action)
            case "die" if self._takes_part_in_a_move(action.target):
                self.scheduler.call_after(15.0, self._act, action)
            case "die" if self._owned(action.target) > 0:
                self.faults += 1
                self._let_die(action.target, action.other)
                self.processes[action.target].crash()
            case "die":
                pass  # nobody needs to take over
            case _:
                self._fault(action)

    def _ask_move(self, action: Action) -> None:
        controller = self.processes["controller"]
        if not isinstance(controller.machine, Controller):
            self.scheduler.call_after(15.0, self._act, action)
            return
        if action.slots:
            source = self.owner(action.target, slot=action.slots[0]).instance
            owned = [s for s in action.slots if self.owner(action.target, slot=s).instance == source]
            keys = KeySet(slots=frozenset(owned))
        else:
            source = self.owner(action.target, key=action.keys[0]).instance
            own_keys = [k for k in action.keys if self.owner(action.target, key=k).instance == source]
            keys = KeySet(keys=frozenset(own_keys))
        destination = action.other
        if destination == source:
            others = sorted(i for i in self.instances if operator_of(i) == action.target and i != source)
            destination = others[action.slots[0] % len(others)] if action.slots else others[0]
        if STRATEGIES[action.strategy].copies and controller.machine.standbys.get(source) != destination:
            self._set_standby(source, destination)
            if wait_ms := STANDBY_MS[int(action.at_ms) % len(STANDBY_MS)]:  # until some of the copy is there
                self.scheduler.call_after(wait_ms, self._act, action)
                return
        request = PlannedMove(action.target, keys, source, destination, action.strategy)
        self.ask(Plan((request,), "the scenario wants it"))

    def _set_standby(self, instance: str, standby: str) -> None:
        controller = self.processes["controller"]
        if isinstance(controller.machine, Controller):
            controller.perform(controller.machine.set_standby(instance, standby, self.scheduler.now_ms))

    def ask(self, plan: Plan) -> list[str]:
        """Give the controller a plan, as a user would; returns the moves' names."""
        controller = self.processes["controller"]
        assert isinstance(controller.machine, Controller)
        try:
            names, effects = controller.machine.request(plan, self.scheduler.now_ms, retries=1)
        except InvalidRequest as refusal:
            self.refusals.append(str(refusal))
            return []
        controller.perform(effects)
        self.learn_moves()
        return names

    def learn_moves(self) -> None:
        machine = self.processes["controller"].machine
        if isinstance(machine, Controller):
            self.moves.update({name: tracked.wanted for name, tracked in machine.moves.items()})

    def _ask_scale(self, action: Action) -> None:
        controller = self.processes["controller"]
        if not isinstance(controller.machine, Controller):
            self.scheduler.call_after(15.0, self._act, action)
            return
        request = ScaleRequest(action.target, tuple(action.other.split()), action.strategy or "live")
        self.scaled[action.target] = set(request.instances)
        self._name(request.instances)
        controller.perform(controller.machine.scale(request, self.scheduler.now_ms))

    def _name(self, instances: tuple[str, ...]) -> None:
        """A request names them: one that was taken over before is wanted again."""
        self.named.update({name: self.recorder.takeovers_of(name) for name in instances})

    def _ask_replacement(self, action: Action) -> None:
        controller = self.processes["controller"]
        if not isinstance(controller.machine, Controller):
            self.scheduler.call_after(15.0, self._act, action)
            return
        gone, new = action.point.split()
        request = ScaleRequest(
            action.target, tuple(action.other.split()), action.strategy, {gone: new}, even=False
        )
        self.scaled[action.target] = set(request.instances)
        self._name(request.instances)
        try:
            controller.perform(controller.machine.scale(request, self.scheduler.now_ms))
        except InvalidRequest as refusal:
            self.refusals.append(str(refusal))

    def _owned(self, instance: str) -> int:
        """How many slots and single keys its router has given to it."""
        router = self.router(site_of(instance))
        table = router.inboxes[operator_of(instance)].table if router is not None else None
        routes = [*table.slots, *table.overrides.values()] if table is not None else []
        return sum(route.instance == instance for route in routes)

    def _is_party(self, router: Router, instance: str) -> bool:
        """Whether its router waits for it in a move, decided or not."""
        return router.migration is not None and router.migration.concern(instance)

    def _takes_part_in_a_move(self, instance: str) -> bool:
        """Whether a router has a move of this instance that has neither ended nor merged."""
        for site in self.topology.sites:
            router = self.router(site)
            if router is None:
                return True
            leaving = [move for move in router.outgoing_moves.values() if move.phase.value != "done"]
            coming = [move for move in router.incoming_moves.values() if move.phase.value != "merged"]
            named = {move.destination for move in coming}
            named.update(name for move in leaving for name in (move.source, move.request.destination))
            if instance in named:
                return True
        return False

    def _let_die(self, instance: str, successors: str) -> None:
        """It does not return; somebody asks for a takeover until one is accepted."""
        self.dead[instance] = successors
        self.processes[instance].forbid_restarts()
        self.scheduler.call_after(40.0, self._ask_takeover, instance, "")

    def _ask_takeover(self, instance: str, asked: str) -> None:
        """Ask for a takeover, and again if its router refused it (a move was under way, say).

        An instance that was launched anew in the meantime is not dead: it may own nothing yet, and is wanted.
        """
        if instance not in self.dead:
            return
        controller = self.processes["controller"].machine
        if isinstance(controller, Controller) and instance not in self.retired:
            router = self.router(site_of(instance))
            if router is not None and not self._owned(instance) and not self._is_party(router, instance):
                self.retired.add(instance)  # accepted
                return
            if asked not in controller.recoveries:
                successors = self.dead[instance].split()
                if "a slot for each" in controller.refused.get(asked, ""):
                    successors = successors[:1]
                asked = ""
                self._name(tuple(successors))
                try:
                    asked, effects = controller.recover(instance, tuple(successors), self.scheduler.now_ms)
                    self.processes["controller"].perform(effects)
                except InvalidRequest as refusal:
                    self.refusals.append(str(refusal))
        if instance not in self.retired:
            self.scheduler.call_after(120.0, self._ask_takeover, instance, asked)

    def _recover(self, action: Action) -> None:
        """An instance dies, or is believed dead; successors take over before it is back."""
        controller = self.processes["controller"]
        process = self.processes[action.target]
        if not isinstance(controller.machine, Controller) or not process.up:
            return
        self.faults += 1
        if action.kind == "suspect":
            self.network.partition([action.target], [site_of(action.target)], action.for_ms)
        else:
            process.crash()
            process.restart_after(action.for_ms)
        try:
            _, effects = controller.machine.recover(
                action.target, tuple(action.other.split()), self.scheduler.now_ms
            )
        except InvalidRequest as refusal:
            self.refusals.append(str(refusal))
            return
        controller.perform(effects)

    def _fault(self, action: Action) -> None:
        self.faults += 1
        process = self.processes.get(action.target)
        match action.kind:
            case kind if kind in site_faults.KINDS:
                site_faults.carry_out(self, action)
            case "late":
                self.network.clog(action.target, action.other, action.for_ms, one_way=True)
            case "clock" if process is not None:
                process.set_clock(action.for_ms)
            case "zombie-router" if process is not None:
                self.ended.add(action.target)
                process.fork_zombie(action.for_ms, fenced=True)
            case "crash" if process is not None:
                process.crash()
                process.restart_after(action.for_ms)
            case "crash":
                self.faults -= 1  # a successor that was not needed
            case "in-read":
                self.read_deaths[action.target] = action.for_ms
            case "in-turn":
                self.turn_deaths[action.target] = action.for_ms
            case "zombie" if process is not None:
                self.ended.add(action.target)
                process.fork_zombie(action.for_ms)
            case "slow-disk" if process is not None:
                process.disk.slow(20.0, action.for_ms)
            case "full-disk" if process is not None:
                process.disk.full(action.for_ms)
            case "break":
                self.network.break_connection(*self._pair(action))
            case "partition" | "one-way":
                a, b = self._pair(action)
                self.network.partition([a], [b], action.for_ms, one_way=action.kind == "one-way")
            case "mute":  # its outputs and answers do not get through: it looks overloaded
                self.network.clog(action.target, site_of(action.target), action.for_ms, one_way=True)
            case "clog":
                self.network.clog(*self._pair(action), action.for_ms)
            case "swizzle":
                self.network.swizzle(sorted(self.processes), action.for_ms)
            case _:
                raise ValueError(action.kind)

    def _pair(self, action: Action) -> tuple[str, str]:
        """A link that exists: an instance talks to its own site."""
        if action.other.startswith("listener"):
            return action.target, action.other
        if action.target in self.instances:
            return action.target, site_of(action.target)
        if action.target == action.other:
            others = [s for s in self.topology.sites if s != action.target]
            return action.target, others[0] if others else "controller"
        return action.target, action.other
