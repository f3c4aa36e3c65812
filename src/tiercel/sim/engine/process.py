"""One simulated process: hosts a machine, performs its effects, dies and starts again.

Responsible for: turning effects into calls of the network, the disk and the clock, in order.
Not responsible for: decisions (the machine), when faults come and where processes run (scenario/).

    start --> one incarnation with one machine --Exit / crash / stop--> down --restart--> ...
                 |
                 +--fork_zombie--> runs on next to its successor, on a copy of the disk, then dies
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, assert_never, cast
from zlib import crc32

from tiercel.core.errors import CoreBug
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
    Durable,
    Event,
    LogRead,
    StateRead,
    TimerFired,
)
from tiercel.core.machine.names import TimerName
from tiercel.core.migration.parallel_recovery import is_of_share
from tiercel.core.model.log import Takeover
from tiercel.sim.engine.disk import Disk
from tiercel.sim.engine.network import Network
from tiercel.sim.engine.scheduler import Scheduler
from tiercel.sim.engine.state_reader import ReadDelays, read_versions, without_values


class Machine(Protocol):
    """The machine that a process hosts; the process also calls its `validate()` if it has one."""

    def on_event(self, event: Event, now_ms: float) -> Sequence[Effect]:
        """Take one event and return what to do about it."""
        ...


class TurnMachine(Machine, Protocol):
    """One that takes several events in a step, as many as it sees fit: the first ones of a queue."""

    def on_events(self, waiting: deque[Event], now_ms: float) -> Sequence[Effect]: ...


MakeMachine = Callable[[int, dict[StorageKey, Any]], Machine]
BeforeEffect = Callable[["Process", Event, Sequence[Effect]], int | None]


class MachineFailed(Exception):
    """A machine raised; the cause is what it raised. Without an event it failed to start."""

    def __init__(self, process: str, event: Event | None, seed: int, at_ms: float) -> None:
        what = "starting" if event is None else f"taking {event!r:.500}"
        super().__init__(f"seed {seed}, {at_ms:.3f} ms: {process} failed {what}")
        self.process = process
        self.event = event
        self.seed = seed
        self.at_ms = at_ms


class RunningProcess:
    """One incarnation of a process; nothing that was meant for it reaches another."""

    __slots__ = (
        "_asked",
        "_busy",
        "_missing_state",
        "_network",
        "_process",
        "_scheduler",
        "_state_read",
        "_timers",
        "_took_ms",
        "_unseen",
        "_validate",
        "_waiting",
        "alive",
        "disk",
        "endpoint",
        "incarnation",
        "machine",
        "reading",
        "zombie",
    )

    def __init__(self, process: Process, machine: Machine, incarnation: int) -> None:
        self._process = process
        self._scheduler = process.scheduler
        self._network = process.network
        self._timers: dict[TimerName, tuple[float, float]] = {}  # (due by its clock, when it is called)
        self._waiting: deque[Event] = deque()  # for the next turn
        self._unseen: Counter[str] = Counter()  # connections that the machine has not been told of yet
        self._validate = getattr(machine, "validate", None) if process.validate else None
        self._asked = 0  # number of its last question for a checkpoint
        self._missing_state = getattr(machine, "missing_state", None)
        self._state_read: StateRead | None = None  # for the first event that waits
        self._busy = False  # user code runs: its effects, and all other events, wait until it ends
        self._took_ms = 0.0  # the current step
        self.reading = False  # the first event that waits needs state that is being read
        self.machine = machine
        self.incarnation = incarnation
        self.disk = process.disk
        self.alive = True
        self.zombie = False
        self.endpoint = process.network.attach(process.name, self.take)

    def take(self, event: Event) -> None:
        """Give the machine one event and perform what it asks for; with turns, in the next one."""
        if not self.alive:
            return
        if type(event) is Connected:
            self._unseen[event.peer] += 1
        self._waiting.append(event)
        turns = self._process.turns
        if turns is None:
            self._turn()
        elif len(self._waiting) == 1:
            self._scheduler.call_after(turns.random() * self._process.turn_ms, self._turn)

    def _turn(self) -> None:
        """Handles all waiting events, several per step if the machine takes several, as the runtime does."""
        while self.alive and self._waiting and not self._busy and self._has_state():
            self._step()

    def _has_state(self) -> bool:
        """Whether the first event can be handled; if not, what it needs is read, and all others wait."""
        if self.reading:
            return False
        if self._missing_state is None or self._state_read is not None:
            return True
        missing: Sequence[StorageKey] = self._missing_state(self._waiting[0])
        if missing:
            self.reading = True
            self._scheduler.trace("reads", self._process.name, len(missing))
            self._scheduler.call_after(self._process.read_delays.draw_ms(), self._on_read, missing)
            if not self.zombie:
                self._process.on_read(self._process)
        return not missing

    def _on_read(self, missing: Sequence[StorageKey]) -> None:
        if not self.alive:
            return
        self.reading = False
        try:
            self._state_read = StateRead(read_versions(self.disk, missing))
        except KeyError as error:
            scheduler = self._scheduler
            raise MachineFailed(str(self), self._waiting[0], scheduler.seed, scheduler.now_ms) from error
        self._turn()

    def _step(self) -> None:
        scheduler, process, waiting = self._scheduler, self._process, self._waiting
        event, before = waiting[0], len(waiting)
        now_ms = process.clock_at(scheduler.now_ms)
        if scheduler.story is not None:
            scheduler.note(str(self), "<-", *(waiting if before > 1 else (event,)))
        if scheduler.hash_events:
            scheduler.trace("event", process.name, event)
        try:
            if self._state_read is not None:
                self.machine.on_event(self._state_read, now_ms)
                self._state_read = None
            if process.turns is None:
                effects = self.machine.on_event(waiting.popleft(), now_ms)
            else:
                effects = cast("TurnMachine", self.machine).on_events(waiting, now_ms)
            if self._validate is not None:
                self._validate()
        except Exception as error:
            raise MachineFailed(str(self), event, scheduler.seed, scheduler.now_ms) from error
        if type(event) is Connected:
            self._unseen -= Counter((event.peer,))
        taken = before - len(waiting)
        took_ms = 0.0 if process.service_ms is None else process.service_ms(self.machine)
        if took_ms:
            self._busy = True
            scheduler.call_after(took_ms, self._end_step, event, effects, taken, took_ms)
        else:
            self._took_ms = 0.0
            self._effect(event, effects, taken)

    def _end_step(self, event: Event, effects: Sequence[Effect], taken: int, took_ms: float) -> None:
        """User code has returned: perform what the step asked for, and go on."""
        if self.alive:
            self._busy = False
            self._took_ms = took_ms
            self._effect(event, effects, taken)
            self._turn()

    def _effect(self, event: Event, effects: Sequence[Effect], taken: int) -> None:
        scheduler, process = self._scheduler, self._process
        process.events_in_step = taken
        scheduler.mark(process.number + len(effects))
        if process.before_effect is not None and not self.zombie:
            crash_at = process.before_effect(process, event, effects)
            if crash_at is not None:
                self._perform(effects[:crash_at])
                if process.running is self:
                    process.crash()
                return
        if effects:
            self._perform(effects)

    def end(self) -> None:
        """Disconnect it from everything; its peers see the disconnect a little later."""
        self.alive = False
        self._network.detach(self.endpoint)

    def _perform(self, effects: Sequence[Effect]) -> None:
        scheduler = self._scheduler
        for effect in effects:
            if not self.alive:
                return
            if scheduler.story is not None:
                scheduler.note(str(self), "->", effect)
            match effect:
                case Send() if effect.to in self._unseen:
                    pass  # lost with the connection that the machine knows
                case Send():
                    self._network.send_from(self.endpoint, effect.to, effect.message)
                case Write():
                    self.disk.write(effect, self._on_durable)
                case SetTimer():
                    self._set_timer(effect.name, effect.at_ms)
                case Continue():
                    scheduler.call_after(0.0, self.take, Continued(self._took_ms))
                case ReadLog():
                    found = self.disk.read_log(effect.inbox, effect.after, effect.limit)
                    answer = LogRead(effect.inbox, effect.reader, found)
                    scheduler.call_after(self.disk.read_ms, self.take, answer)
                case LoadCheckpoint():
                    if not self.zombie:
                        self._process.take_over_newest()
                    self._asked = effect.number
                    if effect.adopt and self._process.coming_ms:
                        scheduler.call_after(self.disk.read_ms, self._adopt, effect)
                        continue
                    items = self._stored(effect.takeover)
                    if not effect.values:
                        items = without_values(items, effect)
                    loaded = CheckpointLoaded(items, effect.number)
                    scheduler.call_after(self.disk.read_ms, self.take, loaded)
                case Note():
                    scheduler.trace("note", self._process.name, effect.text)
                case Unexpected():
                    cause = CoreBug(f"unexpected message: {effect}")
                    raise MachineFailed(self._process.name, None, scheduler.seed, scheduler.now_ms) from cause
                case Launch():
                    self._process.on_launch(effect.instance)
                case Retire():
                    self._process.on_retire(effect.instance)
                case Exit():
                    self._exit(effect.reason)
                case _:
                    assert_never(effect)

    def _stored(self, takeover: Takeover | None) -> dict[StorageKey, Any]:
        """Our own checkpoint, or our share of the newest checkpoint of a dead instance."""
        if takeover is None:
            return self.disk.copy_durable()
        found = self._process.newest_of(takeover.of).copy_durable()
        return {place: value for place, value in found.items() if is_of_share(place, takeover)}

    def _adopt(self, effect: LoadCheckpoint) -> None:
        """Bring the share of a takeover into our own storage, unless the machine has asked again since."""
        if not self.alive or effect.number != self._asked:
            return
        items, process = self._stored(effect.takeover), self._process
        self.disk.replace_with_takeover(items, process.coming_ms)
        self.take(CheckpointLoaded(without_values(items, effect), effect.number, adopted=True))

    def _on_durable(self, seq: int) -> None:
        self.take(Durable(seq))

    def _exit(self, reason: str) -> None:
        process = self._process
        self._scheduler.trace("exit", process.name, self.incarnation, reason)
        if self.zombie:
            self.end()
        else:
            process._end_incarnation(lose_unsynced=False)
            process.on_exit(process, reason)

    def _set_timer(self, name: TimerName, at_ms: float) -> None:
        """Plan a call unless one comes early enough: that one will plan the rest of the wait."""
        call_ms = self._process.when_clock_shows(at_ms)
        timer = self._timers.get(name)
        if timer is not None and timer[1] <= call_ms:
            self._timers[name] = (at_ms, timer[1])
        else:
            self._plan_timer(name, at_ms)

    def _plan_timer(self, name: TimerName, at_ms: float) -> None:
        call_ms = max(self._process.when_clock_shows(at_ms), self._scheduler.now_ms)
        self._timers[name] = (at_ms, call_ms)
        if call_ms != math.inf:
            self._scheduler.call_at(call_ms, self._wake, name, call_ms)

    def _wake(self, name: TimerName, call_ms: float) -> None:
        timer = self._timers.get(name)
        if not self.alive or timer is None or timer[1] != call_ms:
            return  # replaced by an earlier one
        if self._process.when_clock_shows(timer[0]) > call_ms:
            self._plan_timer(name, timer[0])
        else:
            del self._timers[name]
            self.take(TimerFired(name))

    def on_clock_set(self) -> None:
        """Plan all timers anew: they are due by the clock, which has jumped."""
        for name, (at_ms, _) in list(self._timers.items()):
            self._plan_timer(name, at_ms)

    def __str__(self) -> str:
        return f"{self._process.name}#{self.incarnation}{' (zombie)' if self.zombie else ''}"


def _ignore_exit(process: Process, reason: str) -> None:
    """Leave the process down."""


def _ignore_crash(process: Process) -> None:
    """Leave the process down."""


def _ignore_read(process: Process) -> None:
    """Let it go on."""


def _no_other(name: str) -> Disk:
    """The default of `newest_of`: no other disks are known."""
    raise KeyError(name)


def _refuse(instance: str) -> None:
    message = f"asked to launch or retire {instance}, but this process was given no hook for it"
    raise RuntimeError(message)


class Process:
    """A process name with a disk and a clock; machines run under it, one incarnation at a time.

    Hooks are plain attributes: `on_exit(process, reason)` after a clean end, `on_crash(process)`
    after a crash, `on_launch(instance)` and `on_retire(instance)` when the machine asks for it,
    `on_read(process)` when a read of state has begun, and `before_effect(process, event, effects)`:
    if it returns i, only the first i effects are performed and the process crashes there. That is how a
    fault hits any step of a protocol.

    `service_ms(machine)` is how long user code took in the last step; the process does nothing else then.

    With `turn_ms` events wait for a turn, which comes within that time, and the machine takes several of
    them in one step; `events_in_step` is how many the last step took.

    A new process is down. Its clock shows `now * (1 + drift) + clock_offset_ms`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        network: Network,
        name: str,
        make_machine: MakeMachine,
        disk: Disk,
        *,
        clock_offset_ms: float = 0.0,
        drift: float = 0.0,
        validate: bool = False,
        on_exit: Callable[[Process, str], object] = _ignore_exit,
        on_crash: Callable[[Process], object] = _ignore_crash,
        on_launch: Callable[[str], object] = _refuse,
        on_retire: Callable[[str], object] = _refuse,
        before_effect: BeforeEffect | None = None,
        on_read: Callable[[Process], object] = _ignore_read,
        turn_ms: float = 0.0,
        newest_of: Callable[[str], Disk] = _no_other,
        coming_ms: float = 0.0,
        service_ms: Callable[[Any], float] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.network = network
        self.name = name
        self.number = crc32(name.encode())  # distinguishes the marks of processes
        self.make_machine = make_machine
        self.disk = disk
        self.clock_offset_ms = clock_offset_ms
        self.drift = drift
        self.validate = validate
        self.on_exit = on_exit
        self.on_crash = on_crash
        self.on_launch = on_launch
        self.on_retire = on_retire
        self.before_effect = before_effect
        self.on_read = on_read
        self.turn_ms = turn_ms
        self.newest_of = newest_of
        self.coming_ms = coming_ms  # until the values of a takeover have arrived; 0: at once
        self.service_ms = service_ms
        self.read_delays = ReadDelays(name, scheduler.seed)
        self.turns = random.Random(f"turns of {name} {scheduler.seed}") if turn_ms else None
        self.events_in_step = 1  # how many events the last step took
        self.incarnation = 0  # grows by one at each start
        self.running: RunningProcess | None = None
        self.zombies: list[RunningProcess] = []
        self.left_behind: list[Disk] = []  # disks that zombies were writing to
        self._stopped = False
        self._forbidden = False

    def clock_at(self, now_ms: float) -> float:
        """What its clock shows at that time."""
        return now_ms * (1.0 + self.drift) + self.clock_offset_ms

    def when_clock_shows(self, at_ms: float) -> float:
        """The first time at which its clock shows this, or later."""
        due_ms = (at_ms - self.clock_offset_ms) / (1.0 + self.drift)
        step_ms = math.ulp(at_ms)
        while self.clock_at(due_ms) < at_ms:  # rounding: never early
            due_ms += step_ms
            step_ms *= 2
        return due_ms

    def set_clock(self, by_ms: float) -> None:
        """The clock jumps, as when somebody corrects it."""
        self.scheduler.trace("clock", self.name, by_ms)
        self.clock_offset_ms += by_ms
        for running in [*self.zombies, *([self.running] if self.running is not None else [])]:
            running.on_clock_set()

    @property
    def up(self) -> bool:
        """Whether an incarnation other than a zombie runs."""
        return self.running is not None

    @property
    def machine(self) -> Machine | None:
        """The machine of the current incarnation."""
        return None if self.running is None else self.running.machine

    def start(self) -> None:
        """Start a new incarnation with the content of the disk."""
        if self.running is not None:
            message = f"{self.running} is up: it cannot be started again"
            raise ValueError(message)
        self._stopped = False
        self.incarnation += 1
        self.scheduler.trace("start", self.name, self.incarnation)
        try:
            machine = self.make_machine(self.incarnation, self.disk.items())
        except Exception as error:
            raise MachineFailed(self.name, None, self.scheduler.seed, self.scheduler.now_ms) from error
        self.running = RunningProcess(self, machine, self.incarnation)

    def deliver(self, event: Event) -> None:
        """Give the current machine an event from outside; it is lost while the process is down."""
        if self.running is not None:
            self.running.take(event)

    def perform(self, effects: Sequence[Effect]) -> None:
        """Perform effects that a caller of the current machine was given."""
        if self.running is not None:
            self.running._perform(effects)

    def crash(self, lose_unsynced: bool = True) -> None:
        """End the current incarnation at once; see `Disk.crash` for what is left. No-op when down."""
        if self.running is None:
            return
        self.scheduler.trace("crash", self.name, self.incarnation, lose_unsynced)
        self._end_incarnation(lose_unsynced)
        self.on_crash(self)

    def stop(self) -> None:
        """End the current incarnation cleanly and forget planned restarts."""
        self.scheduler.trace("stop", self.name, self.incarnation)
        self._stopped = True
        if self.running is not None:
            self._end_incarnation(lose_unsynced=False)

    def restart_after(self, delay_ms: float) -> None:
        """Start after that time, unless something else has started it by then or it was stopped."""
        self.scheduler.call_after(delay_ms, self._start_if_down)

    def forbid_restarts(self) -> None:
        """Once it has ended it stays down for good."""
        self._forbidden = True

    def allow_restarts(self) -> None:
        """Somebody starts it anew, perhaps on another machine."""
        self._forbidden = False

    def launch_after(self, delay_ms: float) -> None:
        """Start after that time, also if it was stopped before."""
        self._stopped = False
        self.restart_after(delay_ms)

    def fork_zombie(self, for_ms: float, *, fenced: bool = False) -> None:
        """Start a successor while the old machine runs on for a time and still believes that it is current.

        The zombie keeps its connections but makes no new ones. It writes to a copy of the disk;
        the successor finds what a power loss would have left. No-op when down.

        With `fenced` its storage refuses what it writes from now on, as a replica does that knows the
        successor, and a peer that is connected to the successor does not hear the zombie any more.
        """
        running = self.running
        if running is None:
            return
        self.scheduler.trace("zombie", self.name, self.incarnation, for_ms)
        running.zombie = True
        running.disk = self.disk.fork()
        if fenced:
            running.disk.full(2 * for_ms)
            running.endpoint.replaced = True
        else:
            self.left_behind.append(running.disk)
        self.network.disown(running.endpoint)
        self.disk.crash(lose_unsynced=True)
        self.zombies.append(running)
        self.scheduler.call_after(for_ms, self._end_zombie, running)
        self.running = None
        self.start()

    @property
    def newest_disk(self) -> Disk:
        """The newest disk of this process: its own, or one that a zombie was writing to."""
        return max([self.disk, *self.left_behind], key=lambda disk: disk.durable_batches)

    def take_over_newest(self) -> None:
        """A zombie may have stored a checkpoint before it was fenced; the successor copies the newest."""
        for disk in self.left_behind:
            if disk.durable_batches > self.disk.durable_batches:
                self.disk.adopt(disk)
        self.left_behind = []

    def _start_if_down(self) -> None:
        if self.running is None and not self._stopped and not self._forbidden:
            self.start()

    def _end_incarnation(self, lose_unsynced: bool) -> None:
        if self.running is not None:
            self.running.end()
            self.running = None
            self.disk.crash(lose_unsynced)

    def _end_zombie(self, running: RunningProcess) -> None:
        self.zombies.remove(running)
        if running.alive:
            running.end()
