"""The controller: takes wishes, sees each move through, and starts over from what routers say.

Responsible for: queueing moves that overlap, asking again, scale-out and scale-in, its own restart.
Not responsible for: deciding a move (the source's router's log does), making wishes (policies).

Of each wish only that it exists is stored here; where it stands, the routers know. A controller
that was restarted asks every router and goes on. It is never in the path of a tuple.
"""

from __future__ import annotations

import enum
from typing import Any, TypeVar

import msgspec

from tiercel.control.planner import hand_over, pieces, rebalance
from tiercel.control.plans import Plan, WantedMove, check_limits, check_plan
from tiercel.core import messages as m
from tiercel.core.effects import Effect, Launch, Retire, StorageKey
from tiercel.core.events import Connected, Disconnected, Durable, Event, Received, TimerFired
from tiercel.core.faults import InvalidRequest
from tiercel.core.records import Key, Route
from tiercel.core.routing import overlap
from tiercel.core.settings import Settings
from tiercel.core.step import Journal, Step
from tiercel.core.strategies import STRATEGIES
from tiercel.core.topology import Topology, operator_of, site_of

T = TypeVar("T")


class MoveState(enum.Enum):
    """Where it is; what each phase means stands beside it."""

    QUEUED = "queued"  # overlaps one that is running
    ASKED = "asked"  # the source's router was asked, or is at it
    DONE = "done"
    UNDONE = "undone"  # aborted or refused; the keys are where they were


class TrackedMove(msgspec.Struct):
    """A move that somebody wants, and where it stands."""

    move: str
    wanted: WantedMove
    state: str = MoveState.QUEUED.value
    reason: str = ""
    retries_left: int = 0
    deadline_ms: float = 0.0
    again: tuple[str, ...] = ()  # undone, and tried again under these names


class Scale(msgspec.Struct, frozen=True):
    """A wish: these instances of an operator, evenly loaded; or some in place of others."""

    operator: str
    instances: tuple[str, ...]
    strategy: str = "live"
    replacing: dict[str, str] = {}  # who goes -> who gets all that it owns, before anything else moves
    even: bool = True  # False: who is not replaced keeps what it has
    emptied: tuple[str, ...] = ()  # whose keys were moved away for this wish: they go even if they are down


class Recovery(msgspec.Struct, frozen=True):
    """A wish: an instance is dead, and these new ones shall have all that it owned."""

    recovery: str
    instance: str
    heirs: tuple[str, ...]
    given: bool = False  # its router has given the slots away: what is left is to start the heirs


class Controller:
    """Runs moves. `items` is what its storage held when it started."""

    def __init__(self, topology: Topology, settings: Settings, items: dict[StorageKey, Any]) -> None:
        self.topology = topology
        self.settings = settings
        self.journal = Journal()
        self.moves: dict[str, TrackedMove] = {}
        self.scales: dict[str, Scale] = {}
        self.slots: dict[str, dict[int, Route]] = {name: {} for name in topology.operators}
        self.overrides: dict[str, dict[Key, Route]] = {name: {} for name in topology.operators}
        self._questions = 0
        self._versions: dict[str, dict[str, tuple[int, int]]] = {}  # site -> versions of the tables it told
        self.answered: dict[str, int] = {}  # site -> the newest question whose answer is in the tables
        self.running: dict[str, int] = {}  # instance -> how many keys it has, as it last told
        self.heard: set[str] = set()
        self.next_id = 1
        self.retiring: set[str] = set()
        self.recoveries: dict[str, Recovery] = {}
        self.refused: dict[str, str] = {}  # recoveries that could not be, and why
        for key, value in items.items():
            match key:
                case ("move", move):
                    self.moves[move] = msgspec.structs.replace(value)
                case ("scale", operator):
                    self.scales[operator] = value
                case ("next_id",):
                    self.next_id = value
                case ("retiring", instance):
                    self.retiring.add(instance)
                case ("recovery", recovery):
                    self.recoveries[recovery] = value
                case _:
                    raise KeyError(key)
        self.moves = dict(sorted(self.moves.items(), key=lambda item: _turn(item[0])))

    # -- wishes ------------------------------------------------------------------------------

    def request(
        self, plan: Plan, now_ms: float, retries: int = 0, deadline_ms: float | None = None
    ) -> tuple[list[str], list[Effect]]:
        """Take a plan. Raises `InvalidRequest` and changes nothing if it has a fault."""
        check_plan(plan, self.topology)
        check_limits(deadline_ms, retries)
        step = Step(now_ms)
        names = [name for move in plan.moves for name in self._add(step, move, retries, deadline_ms)]
        self._start_what_can(step)
        return names, self.journal.commit(step)

    def scale(self, wish: Scale, now_ms: float) -> list[Effect]:
        """Launch what is missing, then even the load out, then retire what is not wanted."""
        self.topology.operator(wish.operator)
        if wish.strategy not in STRATEGIES:
            raise InvalidRequest.unknown("strategy", wish.strategy, sorted(STRATEGIES))
        if not wish.instances:
            raise InvalidRequest("no instances were named", "expected at least one")
        for instance in wish.instances:
            if operator_of(instance) != wish.operator:
                what = f"{instance!r} is not an instance of {wish.operator!r}"
                raise InvalidRequest(what)
            self.topology.site(site_of(instance))
        for gone, instead in wish.replacing.items():
            if gone in wish.instances or instead not in wish.instances:
                what = f"{instead!r} in place of {gone!r}"
                raise InvalidRequest(what, "expected the second to be wanted, and the first not")
        step = Step(now_ms)
        self.scales[wish.operator] = wish
        step.put(("scale", wish.operator), wish)
        self._ask_status(step)
        return self.journal.commit(step)

    def recover(self, instance: str, heirs: tuple[str, ...], now_ms: float) -> tuple[str, list[Effect]]:
        """New instances take over from one that died, each a share of its slots; returns the wish's name."""
        operator = self.topology.operator(operator_of(instance))
        if operator.name in self.scales:
            what = f"{operator.name!r} is being scaled"
            raise InvalidRequest(what, "expected an operator at rest", "wait until that has ended")
        if any(known.instance == instance for known in self.recoveries.values()):
            what = f"{instance!r} is being recovered"
            raise InvalidRequest(what, "expected one recovery at a time", "wait until that has ended")
        step = Step(now_ms)
        name = f"r{self.next_id}"
        self.next_id += 1
        step.put(("next_id",), self.next_id)
        self._keep(step, Recovery(name, instance, heirs))
        self._pursue(step)
        step.timer("retry", now_ms + self.settings.retry_ms)
        return name, self.journal.commit(step)

    def _keep(self, step: Step, wish: Recovery) -> None:
        self.recoveries[wish.recovery] = wish
        step.put(("recovery", wish.recovery), wish)

    def _pursue(self, step: Step) -> None:
        """Ask again for what was not answered; start the heirs that do not run."""
        for wish in list(self.recoveries.values()):
            if not wish.given:
                request = m.Succession(wish.recovery, wish.instance, wish.heirs)
                step.send_durable(site_of(wish.instance), request)
                continue
            missing = [heir for heir in wish.heirs if heir not in self.running]
            for heir in missing:
                step.effects.append(Launch(heir))
            if not missing:
                self._end_recovery(step, wish)

    def _end_recovery(self, step: Step, wish: Recovery) -> None:
        del self.recoveries[wish.recovery]
        step.delete(("recovery", wish.recovery))

    def _on_succession(self, step: Step, wish: Recovery, status: m.MoveStatus) -> None:
        step.note(f"{wish.recovery} {status.phase} {status.reason}")
        if status.phase != "done":
            self.refused[wish.recovery] = status.reason
            self._end_recovery(step, wish)
        elif not wish.given:
            self._keep(step, msgspec.structs.replace(wish, given=True))
            self.retiring.add(wish.instance)  # it owns nothing now; should it come back, it is let go
            step.put(("retiring", wish.instance), True)
            step.send(
                site_of(wish.instance), m.Retirement(wish.instance)
            )  # or it would restore it all for nobody
            self._pursue(step)

    def ask_status(self, now_ms: float) -> tuple[int, list[Effect]]:
        """Ask every router for its tables and moves; `answered` has reached this number once they told."""
        step = Step(now_ms)
        self._ask_status(step)
        return self._questions, self.journal.commit(step)

    def _add(self, step: Step, wanted: WantedMove, retries: int, deadline_ms: float | None) -> list[str]:
        """Take on a move: m7 or, if it is large and its keys need not stop together, m7.1, m7.2, ..."""
        whole = f"m{self.next_id}"
        self.next_id += 1
        step.put(("next_id",), self.next_id)
        parts = [wanted.keys]
        if not STRATEGIES[wanted.strategy].flips_first:
            parts = pieces(wanted.keys, self.settings.piece_keys, self._keys_per_slot(wanted))
        limit = deadline_ms if deadline_ms is not None else self.settings.move_deadline_ms
        names = [whole] if len(parts) == 1 else [f"{whole}.{n}" for n in range(1, len(parts) + 1)]
        for name, keys in zip(names, parts, strict=True):
            part = msgspec.structs.replace(wanted, keys=keys)
            self.moves[name] = TrackedMove(name, part, retries_left=retries, deadline_ms=limit)
            self._save(step, self.moves[name])
        return names

    def _keys_per_slot(self, wanted: WantedMove) -> float:
        owned = sum(1 for route in self.slots[wanted.operator].values() if route.instance == wanted.source)
        return self.running.get(wanted.source, 0) / owned if owned else 0.0

    def _save(self, step: Step, tracked: TrackedMove) -> None:
        step.put(("move", tracked.move), msgspec.structs.replace(tracked))

    # -- the one entry -----------------------------------------------------------------------

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        step = Step(now_ms)
        released: list[Effect] = []
        match event:
            case Connected(peer=peer) if peer in self.topology.sites:
                step.send(peer, m.StatusQuery())
                step.timer("retry", now_ms + self.settings.retry_ms)
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
            case Received(message=m.MoveStatus() as status):
                self._on_status(step, status)
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
            step.timer("retry", step.now_ms + self.settings.retry_ms)

    @property
    def active(self) -> list[TrackedMove]:
        return [t for t in self.moves.values() if t.state in (MoveState.ASKED.value, MoveState.QUEUED.value)]

    def _ask_status(self, step: Step) -> None:
        self._questions += 1
        for site in self.topology.sites:
            step.send(site, m.StatusQuery(self._questions, self._versions.get(site, {})))
        step.timer("retry", step.now_ms + self.settings.retry_ms)

    # -- moves -------------------------------------------------------------------------------

    def _start_what_can(self, step: Step) -> None:
        """Disjoint moves run side by side, a few of each instance; one that overlaps waits its turn."""
        busy = [t for t in self.moves.values() if t.state == MoveState.ASKED.value]
        for tracked in self.moves.values():
            if tracked.state != MoveState.QUEUED.value:
                continue
            beside = sum(1 for other in busy if other.wanted.source == tracked.wanted.source)
            if beside >= self.settings.moves_at_once_max:
                continue
            if any(self._overlap(tracked.wanted, other.wanted) for other in busy):
                continue
            tracked.state = MoveState.ASKED.value
            self._save(step, tracked)
            busy.append(tracked)
            self._ask(step, tracked)
            step.timer("retry", step.now_ms + self.settings.retry_ms)

    def _overlap(self, a: WantedMove, b: WantedMove) -> bool:
        if a.operator != b.operator:
            return False
        alone = STRATEGIES[a.strategy].halts or STRATEGIES[b.strategy].halts
        return alone or overlap(a.keys, b.keys, self.topology.operators[a.operator].slots)

    def _ask(self, step: Step, tracked: TrackedMove) -> None:
        w = tracked.wanted
        step.send_durable(
            site_of(w.source),
            m.MoveRequest(
                tracked.move, w.operator, w.keys, w.source, w.destination, w.strategy, tracked.deadline_ms
            ),
        )

    def _on_status(self, step: Step, status: m.MoveStatus) -> None:
        if status.move in self.recoveries:
            self._on_succession(step, self.recoveries[status.move], status)
            return
        tracked = self.moves.get(status.move)
        if tracked is None or tracked.state not in (MoveState.ASKED.value, MoveState.QUEUED.value):
            return
        if status.phase == "done":
            tracked.state = MoveState.DONE.value
        elif status.phase in ("aborted", "refused"):
            tracked.reason = status.reason
            if tracked.retries_left > 0:
                again = self._add(step, tracked.wanted, tracked.retries_left - 1, tracked.deadline_ms)
                tracked.again = tuple(again)
            tracked.state = MoveState.UNDONE.value  # last: whoever looks on must not miss the next try
        else:
            return
        step.note(f"{tracked.move} {tracked.state} {tracked.reason}")
        self._save(step, tracked)
        self._start_what_can(step)

    def _on_status_reply(self, step: Step, site: str, reply: m.StatusReply) -> None:
        self.heard.add(site)
        self.running = {i: n for i, n in self.running.items() if site_of(i) != site} | reply.attached
        for operator, update in reply.tables.items():  # each in one go: others look at them meanwhile
            slots, overrides = self.slots[operator], self.overrides[operator]
            self.slots[operator] = _newest(slots, site, update.slots)
            self.overrides[operator] = _newest(overrides, site, update.keys)
        for status in reply.statuses:
            self._on_status(step, status)
        self._versions[site] = reply.versions
        self.answered[site] = max(reply.n, self.answered.get(site, 0))
        self._pursue(step)
        self._scale_on(step)

    # -- scaling -----------------------------------------------------------------------------

    def _scale_on(self, step: Step) -> None:
        if self.heard != set(self.topology.sites):
            return
        for wish in list(self.scales.values()):
            missing = [i for i in wish.instances if i not in self.running]
            for instance in missing:
                step.effects.append(Launch(instance))
            busy = any(t.wanted.operator == wish.operator for t in self.active)
            slots = self.slots[wish.operator]
            if missing or busy or len(slots) < self.topology.operators[wish.operator].slots:
                continue
            overrides = self.overrides[wish.operator]
            planned = hand_over(wish.operator, slots, overrides, wish.replacing, wish.strategy)
            if not planned and wish.even:
                planned = rebalance(wish.operator, slots, overrides, wish.instances, wish.strategy)
            for wanted in planned:
                self._add(step, wanted, 0, None)
            if planned:
                emptied = {*wish.emptied, *(move.source for move in planned)}.difference(wish.instances)
                wish = msgspec.structs.replace(wish, emptied=tuple(sorted(emptied)))
                self.scales[wish.operator] = wish
                step.put(("scale", wish.operator), wish)
                self._start_what_can(step)
                self.heard.clear()  # decide the next round on fresh tables
                continue
            running = {i for i in self.running if operator_of(i) == wish.operator}
            for instance in sorted((running | {*wish.emptied}).difference(wish.instances)):
                self.retiring.add(instance)
                step.put(("retiring", instance), True)
            del self.scales[wish.operator]
            step.delete(("scale", wish.operator))
        for instance in sorted(self.retiring):
            step.send(site_of(instance), m.Retirement(instance))

    def _on_retirement_reply(self, step: Step, reply: m.RetirementReply) -> None:
        """Its router lets it go; or someone gave it keys again, then it stays."""
        if reply.instance in self.retiring:
            self.retiring.discard(reply.instance)
            step.delete(("retiring", reply.instance))
            if reply.accepted:
                step.effects.append(Retire(reply.instance))


def _turn(move: str) -> list[int]:
    """m9 was asked for before m10, whichever a store gives first."""
    return [int(number) for number in move.removeprefix("m").split(".")]


def _newest(known: dict[T, Route], site: str, told: dict[T, Route]) -> dict[T, Route]:
    """With what a site tells of its own; its answer may be older than that of who owns it now."""
    others = {what: route for what, route in known.items() if route.site != site}
    return others | {w: r for w, r in told.items() if w not in others or others[w].epoch < r.epoch}
