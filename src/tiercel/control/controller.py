"""The controller: accepts requests for moves, scaling and recovery, and sees each one through to its end.

Responsible for: queueing moves that overlap, repeating requests, scale-out and scale-in, its own restart.
Not responsible for: deciding a move (the log of the source router does), making requests (policies).

The controller stores only that a request exists; the routers know its progress. A restarted controller
queries every router and continues from their answers. No row passes through the controller.
"""

from __future__ import annotations

import enum
from typing import Any, TypeVar

import msgspec

from tiercel.control.load_planner import rebalance_by_load
from tiercel.control.planner import hand_over, rebalance, split_move
from tiercel.control.plans import Plan, PlannedMove, check_limits, check_plan, check_standby, check_standbys
from tiercel.core import messages as m
from tiercel.core.errors import InvalidRequest
from tiercel.core.machine.effects import Effect, Launch, Retire, StorageKey
from tiercel.core.machine.events import Connected, Disconnected, Durable, Event, Received, TimerFired
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.machine.step import Journal, Step
from tiercel.core.migration.strategies import STRATEGIES
from tiercel.core.model.keys import Key
from tiercel.core.model.routing import Route, overlap
from tiercel.core.model.topology import Topology, operator_of, site_of
from tiercel.core.settings import Settings

T = TypeVar("T")


class MoveState(enum.Enum):
    """The progress of a move as the controller sees it."""

    QUEUED = "queued"  # it overlaps a move that is running
    ASKED = "asked"  # the controller has asked the source router, which may have started
    DONE = "done"
    UNDONE = "undone"  # aborted or refused; the keys are where they were


class TrackedMove(msgspec.Struct):
    """A requested move and its progress."""

    move: str
    wanted: PlannedMove
    state: str = MoveState.QUEUED.value
    reason: str = ""
    retries_left: int = 0
    deadline_ms: float = 0.0
    again: tuple[str, ...] = ()  # names of the moves that retry this undone one


class MeasuredLoad(msgspec.Struct, frozen=True):
    """The load of an operator when a scaling was requested."""

    total: float  # rows per second
    slots: dict[int, float] = {}  # heaviest slots -> rows per second
    keys: dict[Key, float] = {}  # heaviest keys -> rows per second
    speeds: dict[str, float] = {}  # instance -> rows per second that it can process


class ScaleRequest(msgspec.Struct, frozen=True):
    """A request to run these instances of an operator, evenly loaded or some in place of others."""

    operator: str
    instances: tuple[str, ...]
    strategy: str = "live"
    replacing: dict[str, str] = {}  # old instance -> new one; these moves come first
    even: bool = True  # False: instances that are not replaced retain their keys
    emptied: tuple[str, ...] = ()  # this request moved all of their keys; they are retired even if down
    load: MeasuredLoad | None = None  # even by load; None: by the number of slots
    spares: tuple[str, ...] = ()  # own nothing, and stay for the next scale-out


MOVES_KEPT_MAX = 1_000  # ended moves that the controller still knows; it may have twice as many for a while


class RecoveryRequest(msgspec.Struct, frozen=True):
    """A request to give everything that a dead instance owned to new instances."""

    recovery: str
    instance: str
    successors: tuple[str, ...]
    given: bool = False  # its router has reassigned the slots; only the successors are left to start


class Controller:
    """Runs moves. `items` are the contents of its storage at the start."""

    def __init__(self, topology: Topology, settings: Settings, items: dict[StorageKey, Any]) -> None:
        self.topology = topology
        self.settings = settings
        self.journal = Journal()
        self.moves: dict[str, TrackedMove] = {}
        self.scales: dict[str, ScaleRequest] = {}
        self.slots: dict[str, dict[int, Route]] = {name: {} for name in topology.operators}
        self.overrides: dict[str, dict[Key, Route]] = {name: {} for name in topology.operators}
        self._questions = 0
        self._versions: dict[str, dict[str, tuple[int, int]]] = {}  # site -> versions of its last tables
        self.answered: dict[str, int] = {}  # site -> the newest query whose answer is in the tables
        self.running: dict[str, int] = {}  # instance -> the number of keys that it last reported
        self.sites_reported: set[str] = set()
        self.next_id = 1
        self.retiring: dict[str, int] = {}  # instance -> number of its retirement, which the answer repeats
        self.recoveries: dict[str, RecoveryRequest] = {}
        self.replaced: set[str] = set()  # taken over while a move to them was under way
        self.standbys: dict[str, str] = {}  # instance -> its standby
        self.refused: dict[str, str] = {}  # recovery -> why its router refused it
        for key, value in items.items():
            match key:
                case ("move", move):
                    self.moves[move] = msgspec.structs.replace(value)
                case ("scale", operator):
                    self.scales[operator] = value
                case ("next_id",):
                    self.next_id = value
                case ("retiring", instance):
                    self.retiring[instance] = value
                case ("recovery", recovery):
                    self.recoveries[recovery] = value
                case ("standby", instance):
                    self.standbys[instance] = value
                case _:
                    raise KeyError(key)
        self.moves = dict(sorted(self.moves.items(), key=lambda item: _turn(item[0])))

    # -- requests ----------------------------------------------------------------------------

    def request(
        self, plan: Plan, now_ms: float, retries: int = 0, deadline_ms: float | None = None
    ) -> tuple[list[str], list[Effect]]:
        """Accept a plan. Raises `InvalidRequest` and changes nothing if the plan has a fault."""
        check_plan(plan, self.topology)
        check_standbys(plan, self.standbys)
        check_limits(deadline_ms, retries)
        step = Step(now_ms)
        names = [name for move in plan.moves for name in self._add(step, move, retries, deadline_ms)]
        self._start_what_can(step)
        return names, self.journal.commit(step)

    def set_standby(self, instance: str, standby: str, now_ms: float) -> list[Effect]:
        """Let an instance hold a copy of another one's keys from now on; an empty name ends that."""
        check_standby(instance, standby, self.topology)
        step = Step(now_ms)
        if standby:
            self.standbys[instance] = standby
            step.put(("standby", instance), standby)
        elif self.standbys.pop(instance, None) is not None:
            step.delete(("standby", instance))
        step.send_durable(site_of(instance), m.SetStandby(instance, standby))
        return self.journal.commit(step)

    def scale(self, request: ScaleRequest, now_ms: float) -> list[Effect]:
        """Launch missing instances, then rebalance the slots, then retire instances that are not wanted."""
        self.topology.operator(request.operator)
        if request.strategy not in STRATEGIES:
            raise InvalidRequest.unknown("strategy", request.strategy, sorted(STRATEGIES))
        if STRATEGIES[request.strategy].copies:
            what = f"a scaling with strategy {request.strategy!r}: new instances are nobody's standby"
            raise InvalidRequest(what, "expected another strategy")
        if not request.instances:
            raise InvalidRequest("no instances were named", "expected at least one")
        for instance in request.instances:
            if operator_of(instance) != request.operator:
                what = f"{instance!r} is not an instance of {request.operator!r}"
                raise InvalidRequest(what)
            self.topology.site(site_of(instance))
        for gone, instead in request.replacing.items():
            if gone in request.instances or instead not in request.instances:
                what = f"{instead!r} in place of {gone!r}"
                raise InvalidRequest(what, "expected the new instance in the request, and not the old one")
        step = Step(now_ms)
        for instance in request.instances:
            self._end_retirement(step, instance)
        self.scales[request.operator] = request
        step.put(("scale", request.operator), request)
        self._ask_status(step)
        return self.journal.commit(step)

    def recover(self, instance: str, successors: tuple[str, ...], now_ms: float) -> tuple[str, list[Effect]]:
        """Let successors take over a dead instance, each a share of its slots; returns the recovery name."""
        self.topology.operator(operator_of(instance))
        if any(known.instance == instance for known in self.recoveries.values()):
            what = f"{instance!r} is being recovered"
            raise InvalidRequest(what, "expected one recovery at a time", "wait until that has ended")
        step = Step(now_ms)
        name = f"r{self._number(step)}"
        for successor in successors:
            self._end_retirement(step, successor)
        self._keep(step, RecoveryRequest(name, instance, successors))
        self._pursue(step)
        step.timer(Timer(TimerKind.RETRY), now_ms + self.settings.retry_ms)
        return name, self.journal.commit(step)

    def _number(self, step: Step) -> int:
        number = self.next_id
        self.next_id += 1
        step.put(("next_id",), self.next_id)
        return number

    def _keep(self, step: Step, request: RecoveryRequest) -> None:
        self.recoveries[request.recovery] = request
        step.put(("recovery", request.recovery), request)

    def _pursue(self, step: Step) -> None:
        """Repeat takeover requests without an answer; launch successors that do not run."""
        for request in list(self.recoveries.values()):
            if not request.given:
                takeover = m.TakeoverRequest(request.recovery, request.instance, request.successors)
                step.send_durable(site_of(request.instance), takeover)
                continue
            missing = [successor for successor in request.successors if successor not in self.running]
            for successor in missing:
                step.effects.append(Launch(successor))
            if not missing:
                self._end_recovery(step, request)

    def _end_recovery(self, step: Step, request: RecoveryRequest) -> None:
        del self.recoveries[request.recovery]
        step.delete(("recovery", request.recovery))

    def _on_takeover_status(self, step: Step, request: RecoveryRequest, status: m.MoveStatus) -> None:
        step.note(f"{request.recovery} {status.phase} {status.reason}")
        if status.outcome is not m.MoveOutcome.DONE:
            self.refused[request.recovery] = status.reason
            self._end_recovery(step, request)
        elif not request.given:
            self._keep(step, msgspec.structs.replace(request, given=True))
            self._scale_without(step, operator_of(request.instance), request.instance, request.successors)
            for other in list(self.recoveries.values()):  # whose successor it was: it need not run any more
                if request.instance in other.successors:
                    left = tuple(name for name in other.successors if name != request.instance)
                    self._keep(step, msgspec.structs.replace(other, successors=left))
            # it owns nothing now: a process that returns would restore state that it no longer owns
            self._retire(step, request.instance)
            if request.instance not in self.retiring:
                self.replaced.add(request.instance)
            number = self.retiring.get(request.instance, 0)
            step.send(site_of(request.instance), m.Retirement(request.instance, number))
            self._pursue(step)

    def ask_status(self, now_ms: float) -> tuple[int, list[Effect]]:
        """Query every router for its tables and moves.

        Returns the number of the query; a router has answered once `answered` has reached it.
        """
        step = Step(now_ms)
        self._ask_status(step)
        return self._questions, self.journal.commit(step)

    def _add(self, step: Step, wanted: PlannedMove, retries: int, deadline_ms: float | None) -> list[str]:
        """Queue a move as m7. A large one whose keys need not stop together becomes m7.1, m7.2, ..."""
        whole = f"m{self._number(step)}"
        parts = [wanted.keys]
        if STRATEGIES[wanted.strategy].splits:
            parts = split_move(wanted.keys, self.settings.flip_keys_max, self._keys_per_slot(wanted))
        limit = deadline_ms if deadline_ms is not None else self.settings.move_deadline_ms
        names = [whole] if len(parts) == 1 else [f"{whole}.{n}" for n in range(1, len(parts) + 1)]
        for name, keys in zip(names, parts, strict=True):
            part = msgspec.structs.replace(wanted, keys=keys)
            self.moves[name] = TrackedMove(name, part, retries_left=retries, deadline_ms=limit)
            self._save(step, self.moves[name])
        return names

    def _keys_per_slot(self, wanted: PlannedMove) -> float:
        owned = sum(1 for route in self.slots[wanted.operator].values() if route.instance == wanted.source)
        return self.running.get(wanted.source, 0) / owned if owned else 0.0

    def _save(self, step: Step, tracked: TrackedMove) -> None:
        step.put(("move", tracked.move), msgspec.structs.replace(tracked))

    # -- events ------------------------------------------------------------------------------

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        step = Step(now_ms)
        released: list[Effect] = []
        match event:
            case Connected(peer=peer) if peer in self.topology.sites:
                step.send(peer, m.StatusQuery())
                for instance, standby in self.standbys.items():
                    if site_of(instance) == peer:
                        step.send(peer, m.SetStandby(instance, standby))
                step.timer(Timer(TimerKind.RETRY), now_ms + self.settings.retry_ms)
            case Disconnected():
                pass
            case Durable(seq=seq):
                released = self.journal.durable_through(seq)
            case TimerFired():
                self._retry(step)
            case Received(sender=sender, message=m.StatusReply() as reply):
                self._on_status_reply(step, sender, reply)
            case Received(message=m.RetirementReply() as answer):
                self._on_retirement_reply(step, answer)
            case Received(sender=sender, message=m.MoveStatus() as status):
                self._on_status(step, sender, status)
            case _:
                pass
        return released + self.journal.commit(step)

    def _retry(self, step: Step) -> None:
        for tracked in self.moves.values():
            if tracked.state == MoveState.ASKED.value:
                self._ask(step, tracked)
        self._pursue(step)
        if self.scales or self.retiring or self.recoveries:
            self._ask_status(step)
        if self.active or self.scales or self.retiring or self.recoveries:
            step.timer(Timer(TimerKind.RETRY), step.now_ms + self.settings.retry_ms)

    @property
    def active(self) -> list[TrackedMove]:
        return [t for t in self.moves.values() if t.state in (MoveState.ASKED.value, MoveState.QUEUED.value)]

    def _ask_status(self, step: Step) -> None:
        self._questions += 1
        for site in self.topology.sites:
            step.send(site, m.StatusQuery(self._questions, self._versions.get(site, {})))
        step.timer(Timer(TimerKind.RETRY), step.now_ms + self.settings.retry_ms)

    # -- moves -------------------------------------------------------------------------------

    def _start_what_can(self, step: Step) -> None:
        """Start queued moves: disjoint ones run in parallel, a few per source; an overlapping one waits."""
        busy = [t for t in self.moves.values() if t.state == MoveState.ASKED.value]
        for tracked in self.moves.values():
            if tracked.state != MoveState.QUEUED.value:
                continue
            beside = sum(1 for other in busy if other.wanted.source == tracked.wanted.source)
            most = max(self.settings.moves_at_once_max, STRATEGIES[tracked.wanted.strategy].parallel)
            if beside >= most:
                continue
            if any(self._overlap(tracked.wanted, other.wanted) for other in busy):
                continue
            tracked.state = MoveState.ASKED.value
            self._end_retirement(step, tracked.wanted.destination)
            self._save(step, tracked)
            busy.append(tracked)
            self._ask(step, tracked)
            step.timer(Timer(TimerKind.RETRY), step.now_ms + self.settings.retry_ms)

    def _overlap(self, a: PlannedMove, b: PlannedMove) -> bool:
        if a.operator != b.operator:
            return False
        alone = STRATEGIES[a.strategy].restarts or STRATEGIES[b.strategy].restarts
        return alone or overlap(a.keys, b.keys, self.topology.operators[a.operator].slots)

    def _ask(self, step: Step, tracked: TrackedMove) -> None:
        w = tracked.wanted
        step.send_durable(
            site_of(w.source),
            m.MoveRequest(
                tracked.move, w.operator, w.keys, w.source, w.destination, w.strategy, tracked.deadline_ms
            ),
        )

    def _on_status(self, step: Step, sender: str, status: m.MoveStatus) -> None:
        if status.move in self.recoveries:
            self._on_takeover_status(step, self.recoveries[status.move], status)
            return
        tracked = self.moves.get(status.move)
        if tracked is None or tracked.state not in (MoveState.ASKED.value, MoveState.QUEUED.value):
            if status.outcome is not None:
                step.send_durable(sender, m.OutcomeStored(status.move))
            return
        if status.outcome is m.MoveOutcome.DONE:
            tracked.state = MoveState.DONE.value
        elif status.outcome is not None:
            tracked.reason = status.reason
            if tracked.retries_left > 0:
                again = self._add(step, tracked.wanted, tracked.retries_left - 1, tracked.deadline_ms)
                tracked.again = tuple(again)
            tracked.state = MoveState.UNDONE.value  # last: a watcher must see the retry before it sees this
        else:
            return
        step.note(f"{tracked.move} {tracked.state} {tracked.reason}")
        self._save(step, tracked)
        self._end_replaced(step, tracked)
        step.send_durable(sender, m.OutcomeStored(status.move))
        self._forget_moves(step)
        self._start_what_can(step)

    def _forget_moves(self, step: Step) -> None:
        """Forget the oldest ended moves, once they are too many."""
        if len(self.moves) < 2 * MOVES_KEPT_MAX:
            return
        running = (MoveState.ASKED.value, MoveState.QUEUED.value)
        ended = [name for name, tracked in self.moves.items() if tracked.state not in running]
        for name in ended[:-MOVES_KEPT_MAX]:
            del self.moves[name]
            step.delete(("move", name))

    def _on_status_reply(self, step: Step, site: str, reply: m.StatusReply) -> None:
        self.sites_reported.add(site)
        self.running = {i: n for i, n in self.running.items() if site_of(i) != site} | reply.attached
        for operator, update in reply.tables.items():  # one assignment per table: other threads read them
            slots, overrides = self.slots[operator], self.overrides[operator]
            self.slots[operator] = _newest(slots, site, update.slots)
            self.overrides[operator] = _newest(overrides, site, update.keys)
        for status in reply.statuses:
            self._on_status(step, site, status)
        self._versions[site] = reply.versions
        self.answered[site] = max(reply.n, self.answered.get(site, 0))
        self._pursue(step)
        self._scale_on(step)

    # -- scaling -----------------------------------------------------------------------------

    def _scale_on(self, step: Step) -> None:
        for request in list(self.scales.values()):
            taken_over = [r for r in self.recoveries.values() if operator_of(r.instance) == request.operator]
            waits = any(not r.given for r in taken_over)  # else it would start the successors too early
            if waits or not self.sites_concerned(request) <= self.sites_reported:
                continue
            missing = [i for i in request.instances if i not in self.running]
            for instance in missing:
                step.effects.append(Launch(instance))
            busy = any(t.wanted.operator == request.operator for t in self.active)
            slots = self.slots[request.operator]
            if missing or busy or len(slots) < self.topology.operators[request.operator].slots:
                continue
            overrides = self.overrides[request.operator]
            planned = hand_over(request.operator, slots, overrides, request.replacing, request.strategy)
            if not planned and request.even:
                planned = _even_moves(request, slots, overrides)
            for wanted in planned:
                self._add(step, wanted, 0, None)
            if planned:
                emptied = {*request.emptied, *(move.source for move in planned)}.difference(request.instances)
                request = msgspec.structs.replace(request, emptied=tuple(sorted(emptied)))
                self.scales[request.operator] = request
                step.put(("scale", request.operator), request)
                self._start_what_can(step)
                self.sites_reported.clear()  # decide the next round on fresh tables
                continue
            running = {i for i in self.running if operator_of(i) == request.operator}
            wanted_here = {*request.instances, *request.spares}
            for instance in sorted((running | {*request.emptied}).difference(wanted_here)):
                self._retire(step, instance)
            del self.scales[request.operator]
            step.delete(("scale", request.operator))
        for instance, number in sorted(self.retiring.items()):
            step.send(site_of(instance), m.Retirement(instance, number))

    def sites_concerned(self, request: ScaleRequest) -> set[str]:
        """The sites whose routers must have answered before the next step of a scaling.

        A site that neither has keys of the operator nor is to have an instance may be silent.
        """
        owners = {route.instance for route in self.slots[request.operator].values()}
        owners |= {route.instance for route in self.overrides[request.operator].values()}
        first = self.topology.operators[request.operator].instances
        return {site_of(instance) for instance in (*request.instances, *(owners or first))}

    def _scale_without(self, step: Step, operator: str, dead: str, successors: tuple[str, ...]) -> None:
        """The successors of a dead instance take its place in a scaling, which would wait for it for ever.

        Where the scaling wanted to get rid of it, the successors are emptied and retired like any other.
        """
        request = self.scales.get(operator)
        if request is None:
            return
        instances = [name for name in request.instances if name != dead]
        replacing = {gone: new for gone, new in request.replacing.items() if dead not in (gone, new)}
        if dead in request.instances:
            instances += [name for name in successors if name not in instances]
            replacing |= {gone: successors[0] for gone, new in request.replacing.items() if new == dead}
        elif dead in request.replacing:
            replacing |= dict.fromkeys(successors, request.replacing[dead])
        spares = tuple(name for name in request.spares if name != dead)
        emptied = tuple(name for name in request.emptied if name != dead)
        changed = msgspec.structs.replace(
            request, instances=tuple(instances), replacing=replacing, spares=spares, emptied=emptied
        )
        self.scales[operator] = changed
        step.put(("scale", operator), changed)

    # -- retirement --------------------------------------------------------------------------

    def _retire(self, step: Step, instance: str) -> None:
        """Begin a retirement, unless a move may still bring keys to the instance."""
        if not any(tracked.wanted.destination == instance for tracked in self.active):
            self.retiring[instance] = self._number(step)
            step.put(("retiring", instance), self.retiring[instance])

    def _end_replaced(self, step: Step, ended: TrackedMove) -> None:
        """Retire an instance that was taken over, once no move brings it keys any more.

        Its successors have the keys of a move that is done. If it owns some nevertheless, its router refuses.
        """
        instance = ended.wanted.destination
        if instance in self.replaced:
            self._retire(step, instance)
            if instance in self.retiring:
                self.replaced.discard(instance)

    def _end_retirement(self, step: Step, instance: str) -> None:
        """The instance is wanted: no answer to its retirement, however late, ends it from now on.

        Its router may have let it go already; then it attaches as a new instance.
        """
        if self.retiring.pop(instance, None) is not None:
            step.delete(("retiring", instance))

    def _on_retirement_reply(self, step: Step, reply: m.RetirementReply) -> None:
        """Retire an instance that its router lets go. An instance that owns keys again stays."""
        if self.answers_retirement(reply):
            self._end_retirement(step, reply.instance)
            if reply.accepted:
                step.effects.append(Retire(reply.instance))

    def answers_retirement(self, reply: m.RetirementReply) -> bool:
        """Rule: since the retirement that the router answers, no request has named the instance.

        An earlier answer may be late: the instance may own keys by now.
        """
        return self.retiring.get(reply.instance) == reply.retirement


def _turn(move: str) -> list[int]:
    """The order in which moves were requested: m9 before m10, whatever order the store returns."""
    return [int(number) for number in move.removeprefix("m").split(".")]


def _even_moves(
    request: ScaleRequest, slots: dict[int, Route], overrides: dict[Key, Route]
) -> list[PlannedMove]:
    """Moves to an even load, as measured when the request was made; without a measure, to an even number."""
    load = request.load
    if load is None:
        return rebalance(request.operator, slots, overrides, request.instances, request.strategy)
    return rebalance_by_load(
        request.operator,
        slots,
        overrides,
        request.instances,
        load.slots,
        total=load.total,
        key_rates=load.keys,
        speeds=load.speeds,
        strategy=request.strategy,
    )


def _newest(known: dict[T, Route], site: str, reported: dict[T, Route]) -> dict[T, Route]:
    """The known routes with a site's report merged in. The report may be older than the new owner's."""
    others = {what: route for what, route in known.items() if route.site != site}
    return others | {w: r for w, r in reported.items() if w not in others or others[w].epoch < r.epoch}
