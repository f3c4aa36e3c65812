"""The in-memory driver of the core: every machine in one thread, dicts for disks, a clock that a test moves.

Responsible for: performing effects in order, and holding back what a test wants held back.
Not responsible for: random faults and schedules (tiercel.sim), user code, rows and schemas (trial.py).

    handle(event) --> machine.on_event --> effects --> queue of events --> run() until the queue is empty

Every message crosses the real wire format, so no two machines share an object.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Literal, Self, assert_never

import msgspec

from tiercel.control.controller import Controller
from tiercel.core import messages as m
from tiercel.core.errors import CoreBug
from tiercel.core.instance.instance import Instance
from tiercel.core.instance.user_code import OperatorCode
from tiercel.core.machine.effects import (
    Continue,
    Effect,
    Exit,
    Launch,
    LoadCheckpoint,
    Note,
    ReadLog,
    Retire,
    Send,
    SetTimer,
    StorageKey,
    Unexpected,
    Write,
)
from tiercel.core.machine.events import (
    CheckpointLoaded,
    Connected,
    Continued,
    Disconnected,
    Durable,
    Event,
    LogRead,
    Received,
    StateRead,
    TimerFired,
)
from tiercel.core.machine.names import Timer, TimerKind, TimerName
from tiercel.core.migration.parallel_recovery import is_of_share
from tiercel.core.model.bundle import open_outputs
from tiercel.core.model.keys import Key, KeySet, StateImage, StoredKeyInfo
from tiercel.core.model.log import Output, Row, Takeover
from tiercel.core.model.routing import Route
from tiercel.core.model.topology import Topology, operator_of, site_of
from tiercel.core.router.router import Router
from tiercel.core.settings import Settings
from tiercel.core.state.handle import KeyState
from tiercel.core.state.table import StateTable
from tiercel.runtime.net.wire import LENGTH_BYTES, decode_message, encode_frame

CONTROLLER = "controller"
REQUESTER = "requester"  # sends move requests; no machine has this name, `sent` records the replies to it
TimerKey = tuple[str, TimerName]  # machine and timer

EVENTS_MAX = 1_000_000  # more events than this without a pause are an endless loop
ROUNDS_MAX = 1_000  # rounds of timers until a move has ended; about ten are usual

MoveRole = Literal["source router", "destination router", "source instance", "destination instance"]


def is_tick(timer: TimerName) -> bool:
    return isinstance(timer, Timer) and timer.kind is TimerKind.TICK


class InMemoryDriver:
    """All machines of a small deployment. A message arrives at once and in order; a write is durable at once.

    `make_code(instance)` gives the operator's code for a new process. `withholds(sender, to, message)`,
    `slow_readers` and `unsynced` are the test's: what they select waits until `release_withheld`,
    `answer_read` or `sync`. Without `transcript` the driver does not record messages, writes and notes.
    """

    def __init__(
        self,
        topology: Topology,
        make_code: Callable[[str], OperatorCode],
        settings: Settings | None = None,
        *,
        now_ms: float = 1000.0,
        transcript: bool = True,
    ) -> None:
        self.topology = topology
        self.settings = settings or Settings()
        self.now_ms = now_ms
        self.ahead_ms: dict[str, float] = defaultdict(float)  # machine -> how much its clock is ahead
        self.took_ms = 0.0  # every event, as `Continued` reports it
        self.machines: dict[str, Any] = {}
        self.disks: dict[str, dict[StorageKey, Any]] = defaultdict(dict)
        self.incarnations: dict[str, int] = defaultdict(int)
        self.timers: dict[TimerKey, float] = {}
        self.statuses: dict[str, m.MoveStatus] = {}  # the last report about each move
        self.sent: list[tuple[str, str, Any]] = []
        self.writes: dict[str, list[Write]] = defaultdict(list)
        self.notes: list[str] = []
        self.launched: list[str] = []
        self.retired: list[str] = []
        self.exits: list[str] = []  # processes that ended themselves and are not restarted yet
        self.withholds: Callable[[str, str, Any], bool] = lambda sender, to, message: False
        self.withheld: list[tuple[str, str, Any]] = []
        self.slow_readers: set[str] = set()
        self.reads: deque[tuple[str, Event]] = deque()  # answers for `slow_readers`
        self.unsynced: set[str] = set()  # machines whose writes are not durable yet
        self._make_code = make_code
        self._transcript = transcript
        self._undurable: dict[str, int] = {}
        self._queue: deque[tuple[str, Event]] = deque()
        self._last_seq: dict[str, int] = defaultdict(int)

    # -- processes ---------------------------------------------------------------------------

    def start(self, *names: str) -> Self:
        """Starts a new incarnation of each process, by default of all, and connects it with the others."""
        instances = [name for operator in self.topology.operators.values() for name in operator.instances]
        for name in names or (*self.topology.sites, *instances):
            self._start(name)
        self.run()
        return self

    def _start(self, name: str) -> None:
        self.incarnations[name] += 1
        machine = self._make(name)
        for other in self.machines:
            self._queue.append((name, Connected(other)))
            self._queue.append((other, Connected(name)))
        self.machines[name] = machine

    def _make(self, name: str) -> Any:
        items = copy.deepcopy(self.disks[name])
        if name in self.topology.sites:
            return Router(name, self.topology, self.settings, self.incarnations[name], items)
        if name == CONTROLLER:
            return Controller(self.topology, self.settings, items)
        operator = self.topology.operators[operator_of(name)]
        return Instance(name, operator, self._make_code(name), self.settings, self.incarnations[name])

    def kill_unnoticed(self, name: str) -> None:
        """Ends a process; the others do not see a disconnect."""
        del self.machines[name]
        self._queue = deque((to, event) for to, event in self._queue if to != name)
        self.timers = {key: at_ms for key, at_ms in self.timers.items() if key[0] != name}

    def stop(self, name: str) -> None:
        self._disconnect(name)
        self.run()

    def _disconnect(self, name: str) -> None:
        self.kill_unnoticed(name)
        self._queue.extend((other, Disconnected(name)) for other in self.machines)

    def restart(self, name: str) -> None:
        self.stop(name)
        self.start(name)

    def restart_exited(self) -> None:
        """Starts every process again that ended itself."""
        while self.exits:
            self.restart(self.exits.pop(0))

    def crash(self) -> None:
        """Kills all processes at once and starts them again with what they had stored."""
        names = list(self.machines)
        for queue in (self.machines, self._queue, self.timers, self.exits):
            queue.clear()
        self.start(*names)

    # -- events ------------------------------------------------------------------------------

    def handle(self, name: str, event: Event) -> list[Effect]:
        """Gives one event to a machine and runs until nothing is left to do; returns its own effects."""
        self.read_state(name, event)
        effects = self.machines[name].on_event(event, self.now_ms + self.ahead_ms[name])
        self.perform(name, effects)
        self.run()
        return list(effects)

    def send(self, to: str, message: Any, sender: str = REQUESTER) -> list[Effect]:
        return self.handle(to, Received(sender, message))

    def produce(
        self, site: str, *rows: Row, producer: str = "p", stream: str = "in", **options: Any
    ) -> list[Effect]:
        self._last_seq[producer] += 1
        message = m.Produce(producer, self._last_seq[producer], stream, list(rows), **options)
        return self.send(site, message, producer)

    def move(
        self,
        keys: KeySet,
        source: str,
        to: str,
        strategy: str = "live",
        name: str = "m1",
        deadline_ms: float | None = None,
    ) -> None:
        """Requests a move, and performs what needs no time."""
        if deadline_ms is None:
            deadline_ms = self.now_ms + self.settings.move_deadline_ms
        request = m.MoveRequest(name, operator_of(source), keys, source, to, strategy, deadline_ms)
        self.send(site_of(source), request)

    def finish_moves(self) -> None:
        """Fires all timers except the clock ticks, round by round, until no move is left."""
        for _ in range(ROUNDS_MAX):
            self.restart_exited()
            routers = [self.machines[site] for site in self.topology.sites]
            if not any(router.outgoing_moves or router.incoming_moves for router in routers):
                return
            self.fire_timers([key for key in self.timers if not is_tick(key[1])])
        raise CoreBug(f"a move does not end: {self.statuses}")

    def checkpoint(self) -> None:
        """Makes every instance take a checkpoint now."""
        self.fire_timers([key for key in self.timers if key[1] == Timer(TimerKind.CHECKPOINT)])

    def advance_ms(self, duration_ms: float) -> None:
        """Lets time pass: timers fire when they are due, and processes that ended are started again."""
        end_ms = self.now_ms + duration_ms
        while True:
            self.restart_exited()
            key = min(self.timers, key=lambda key: (self.timers[key], key[0], str(key[1])), default=None)
            if key is None or self.timers[key] > end_ms:
                break
            at_ms = self.timers[key]
            self.now_ms = max(self.now_ms, at_ms)
            self.fire_timers([key])
        self.now_ms = end_ms

    def jump_to_ms(self, now_ms: float) -> None:
        """Sets the clock: timers that are due, and the log's clock ticks, fire once at the new time."""
        self.now_ms = now_ms
        timers = self.timers.items()
        self.fire_timers([key for key, at_ms in timers if at_ms <= now_ms or is_tick(key[1])])

    def fire_timers(self, timers: Iterable[TimerKey]) -> None:
        """Fires those of the timers that are still set, whether or not they are due."""
        for name, timer in timers:
            if self.timers.pop((name, timer), None) is not None:
                self.handle(name, TimerFired(timer))

    def run(self) -> None:
        for _ in range(EVENTS_MAX):
            if not self._queue:
                return
            name, event = self._queue.popleft()
            if name in self.machines:
                self.read_state(name, event)
                self.perform(name, self.machines[name].on_event(event, self.now_ms + self.ahead_ms[name]))
                validate = getattr(self.machines.get(name), "validate", None)
                if validate is not None:
                    validate()
        raise CoreBug(f"the machines do not come to rest within {EVENTS_MAX} events")

    # -- effects -----------------------------------------------------------------------------

    def perform(self, name: str, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(to=to, message=message):
                    self._send(name, to, message)
                case Write():
                    if self._transcript:
                        self.writes[name].append(effect)
                    self.write(name, effect)
                    if name in self.unsynced:
                        self._undurable[name] = effect.seq
                    else:
                        self._queue.append((name, Durable(effect.seq)))
                case ReadLog():
                    answer = (name, LogRead(effect.inbox, effect.reader, self.read(name, effect)))
                    (self.reads if effect.reader in self.slow_readers else self._queue).append(answer)
                case LoadCheckpoint(takeover=Takeover() as takeover):
                    self._answer_load(name, self.loaded_share(takeover), effect.number)
                case LoadCheckpoint(values=values):
                    self._answer_load(name, self.loaded(name, values), effect.number)
                case Continue():
                    self._queue.append((name, Continued(self.took_ms)))
                case SetTimer():
                    self.timers[name, effect.name] = effect.at_ms - self.ahead_ms[name]
                case Note():
                    if self._transcript:
                        self.notes.append(effect.text)
                case Launch():
                    self.launched.append(effect.instance)
                case Retire():
                    self.retired.append(effect.instance)
                case Exit():
                    self.exits.append(name)
                case Unexpected():
                    raise CoreBug(f"{name}: unexpected message: {effect}")
                case _:
                    assert_never(effect)

    def _send(self, sender: str, to: str, message: Any) -> None:
        if self._transcript:
            self.sent.append((sender, to, message))
        if isinstance(message, m.MoveStatus):
            self.statuses[message.move] = message
        if self.withholds(sender, to, message):
            self.withheld.append((sender, to, message))
        elif to in self.machines:
            self._queue.append((to, Received(sender, _over_the_wire(message))))

    def release_withheld(self) -> None:
        """Delivers the withheld messages in order, and withholds nothing from now on."""
        self.withholds = lambda sender, to, message: False
        released, self.withheld = self.withheld, []
        for sender, to, message in released:
            if to in self.machines:
                self._queue.append((to, Received(sender, _over_the_wire(message))))
        self.run()

    def answer_read(self) -> None:
        """Delivers the oldest answer that waits in `reads`."""
        self._queue.append(self.reads.popleft())
        self.run()

    def sync(self, name: str) -> None:
        """Makes everything durable that this machine has written."""
        self.unsynced.discard(name)
        if name in self._undurable:
            self.handle(name, Durable(self._undurable.pop(name)))

    # -- storage; a test may put something else in its place ---------------------------------

    def read(self, name: str, effect: ReadLog) -> list[Any]:
        log = {k[2]: v for k, v in self.disks[name].items() if k[:2] == ("inbox", effect.inbox)}
        return [log[o] for o in sorted(log) if o > effect.after][: effect.limit]

    def write(self, name: str, effect: Write) -> None:
        self.disks[name].update(copy.deepcopy(effect.puts))
        for key in effect.deletes:
            self.disks[name].pop(key, None)

    def read_state(self, name: str, event: Event) -> None:
        """Hands the machine the stored versions of evicted keys that the event needs, before the event."""
        machine = self.machines[name]
        if isinstance(machine, Instance) and (missing := machine.missing_state(event)):
            machine.on_event(StateRead(self.versions(name, missing)), self.now_ms + self.ahead_ms[name])

    def versions(self, name: str, places: Iterable[StorageKey]) -> dict[StorageKey, tuple[StateImage, int]]:
        found = {place: copy.deepcopy(self.disks[name][place]) for place in places}
        return {place: (image, image.size_bytes) for place, image in found.items()}

    def loaded(self, name: str, values: bool) -> CheckpointLoaded:
        items = copy.deepcopy(self.disks[name])
        if not values:
            items = {k: StoredKeyInfo(v.timers) if k[0] == "state" else v for k, v in items.items()}
        return CheckpointLoaded(items)

    def loaded_share(self, takeover: Takeover) -> CheckpointLoaded:
        of_dead = self.disks[takeover.of]
        items = {k: v for k, v in of_dead.items() if is_of_share(k, takeover)}
        return CheckpointLoaded(copy.deepcopy(items))

    def _answer_load(self, name: str, answer: CheckpointLoaded, number: int) -> None:
        self._queue.append((name, msgspec.structs.replace(answer, number=number)))

    # -- questions ---------------------------------------------------------------------------

    def messages(self, sender: str, to: str, kind: type) -> list[Any]:
        """The messages of one kind that were sent from one machine to another."""
        return [x for s, t, x in self.sent if s == sender and t == to and isinstance(x, kind)]

    def outputs(self, stream: str = "out") -> list[Output]:
        """The outputs in a stream's log, each alone."""
        disk = self.disks[self.topology.streams[stream].home]
        offsets = sorted(k[2] for k in disk if k[:2] == ("inbox", stream))
        return open_outputs([output for o in offsets for output in disk["inbox", stream, o].outputs])

    def log(self, site: str, inbox: str = "op") -> list[Any]:
        """The entries of an inbox at a site that are not trimmed."""
        disk = self.disks[site]
        return [disk[k] for k in sorted(k for k in disk if k[:2] == ("inbox", inbox))]

    def route_of(self, key: Key, at: str | None = None, operator: str | None = None) -> Route:
        """The route that a router, by default the first site's, uses for the key."""
        return self._inbox(at, operator).table.route(key)  # type: ignore[no-any-return]

    def owner_of(self, key: Key, at: str | None = None, operator: str | None = None) -> str:
        """The instance that owns the key as a router, by default the first site's, sees it."""
        return self.route_of(key, at, operator).instance

    def backlog_rows(self, site: str, operator: str | None = None) -> int:
        """Rows in the site's inbox that the instances have not processed."""
        return self._inbox(site, operator).backlog_rows  # type: ignore[no-any-return]

    def watermark_ms(self, site: str, operator: str | None = None) -> int:
        return self._inbox(site, operator).watermark_ms  # type: ignore[no-any-return]

    def has_state(self, instance: str, key: Key) -> bool:
        """Whether the instance holds state of the key, in memory or evicted."""
        return self.machines[instance].space.has(key)  # type: ignore[no-any-return]

    def state_of(self, key: Key) -> KeyState | None:
        """The state of the key at its owner."""
        owner = self.owner_of(key)
        space: StateTable = self.machines[owner].space
        if key not in space.evicted:
            return space.peek(key)
        stored = space.stored_at(key)
        image, _ = self.versions(owner, (stored,))[stored]
        state = space.restored(image, space.evicted[key])
        return None if state.empty else state

    def keys_with_state(self) -> list[Key]:
        """Every key of which some instance holds state, in memory or evicted."""
        spaces = [machine.space for machine in self.machines.values() if isinstance(machine, Instance)]
        return sorted({key for space in spaces for key in (*space.keys, *space.evicted)})

    def phase_of(self, move: str, role: MoveRole) -> str:
        """The phase of a move in the eyes of one role; empty if no machine in this role knows the move."""
        attribute = {
            "source router": "outgoing_moves",
            "destination router": "incoming_moves",
            "source instance": "senders",
            "destination instance": "receivers",
        }[role]
        for machine in self.machines.values():
            known = getattr(machine, attribute, {})
            if move in known:
                return str(known[move].phase.value)
        return ""

    def _inbox(self, site: str | None, operator: str | None) -> Any:
        router = self.machines[site or next(iter(self.topology.sites))]
        return router.inboxes[operator or next(iter(self.topology.operators))]


def _over_the_wire(message: m.Message) -> m.Message:
    return decode_message(encode_frame(message)[LENGTH_BYTES:])
