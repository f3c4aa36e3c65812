"""One simulated process: hosts a machine, performs its effects, dies and starts again.

Responsible for: turning effects into calls of the network, the disk and the clock, in order.
Not responsible for: deciding anything (the machine), when faults come, who runs where.

    start --> a life: one incarnation, one machine --Exit / crash / stop--> down --restart--> ...
                 |
                 +--fork_zombie--> goes on beside its successor, on a copy of the disk, then dies
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, assert_never, cast
from zlib import crc32

from tiercel.core.effects import (
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
    Write,
)
from tiercel.core.events import CheckpointLoaded, Durable, Event, LogRead, TimerFired
from tiercel.core.heirs import is_of_share
from tiercel.core.records import Inheritance
from tiercel.sim.disk import Disk
from tiercel.sim.network import Network
from tiercel.sim.shelf import LifeShelf, facts
from tiercel.sim.world import World


class Machine(Protocol):
    """What a process hosts; a `validate()` is called too if there is one."""

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


class Life:
    """One incarnation of a process; nothing that was meant for it reaches another."""

    __slots__ = (
        "_asked",
        "_clock_offset_ms",
        "_clock_rate",
        "_network",
        "_process",
        "_timers",
        "_validate",
        "_waiting",
        "_world",
        "alive",
        "disk",
        "endpoint",
        "incarnation",
        "machine",
        "zombie",
    )

    def __init__(self, process: Process, machine: Machine, incarnation: int) -> None:
        self._process = process
        self._world = process.world
        self._network = process.network
        self._clock_rate = 1.0 + process.drift
        self._clock_offset_ms = process.clock_offset_ms
        self._timers: dict[str, tuple[float, float]] = {}  # name -> (due, when the call comes)
        self._waiting: deque[Event] = deque()  # for the next turn
        self._validate = getattr(machine, "validate", None) if process.validate else None
        self._asked = 0  # number of its last question for a checkpoint
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
        self._waiting.append(event)
        turns = self._process.turns
        if turns is None:
            self._step()
        elif len(self._waiting) == 1:
            self._world.call_after(turns.random() * self._process.turn_ms, self._turn)

    def _turn(self) -> None:
        """As the runtime's host does: all that has come, in as few steps as the machine likes."""
        while self.alive and self._waiting:
            self._step()

    def _step(self) -> None:
        world, process, waiting = self._world, self._process, self._waiting
        event, before = waiting[0], len(waiting)
        now_ms = world.now_ms * self._clock_rate + self._clock_offset_ms
        if world.story is not None:
            world.tell(str(self), "<-", *(waiting if before > 1 else (event,)))
        if world.hash_events:
            world.trace("event", process.name, event)
        try:
            if process.turns is None:
                effects = self.machine.on_event(waiting.popleft(), now_ms)
            else:
                effects = cast("TurnMachine", self.machine).on_events(waiting, now_ms)
            if self._validate is not None:
                self._validate()
        except Exception as error:
            raise MachineFailed(str(self), event, world.seed, world.now_ms) from error
        process.together = before - len(waiting)
        world.mark(process.number + len(effects))
        if process.before_effect is not None and not self.zombie:
            crash_at = process.before_effect(process, event, effects)
            if crash_at is not None:
                self._perform(effects[:crash_at])
                if process.life is self:
                    process.crash()
                return
        if effects:
            self._perform(effects)

    def end(self) -> None:
        """Cut it off from everything; its peers are told a little later."""
        self.alive = False
        self._network.detach(self.endpoint)

    def _perform(self, effects: Sequence[Effect]) -> None:
        world = self._world
        for effect in effects:
            if not self.alive:
                return
            if world.story is not None:
                world.tell(str(self), "->", effect)
            match effect:
                case Send():
                    self._network.send_from(self.endpoint, effect.to, effect.message)
                case Write():
                    self.disk.write(effect, self._on_durable)
                case SetTimer():
                    self._set_timer(effect.name, effect.at_ms)
                case ReadLog():
                    found = self.disk.read_log(effect.inbox, effect.after, effect.limit)
                    answer = LogRead(effect.inbox, effect.reader, found)
                    world.call_after(self.disk.read_ms, self.take, answer)
                case LoadCheckpoint():
                    if not self.zombie:
                        self._process.take_over_newest()
                    self._asked = effect.number
                    if effect.adopt and self._process.coming_ms:
                        world.call_after(self.disk.read_ms, self._adopt, effect)
                        continue
                    items = self._stored(effect.inherited)
                    if not effect.values:
                        items = facts(items, effect)
                    loaded = CheckpointLoaded(items, LifeShelf(self), effect.number)
                    world.call_after(self.disk.read_ms, self.take, loaded)
                case Note():
                    world.trace("note", self._process.name, effect.text)
                case Launch():
                    self._process.on_launch(effect.instance)
                case Retire():
                    self._process.on_retire(effect.instance)
                case Exit():
                    self._exit(effect.reason)
                case _:
                    assert_never(effect)

    def _stored(self, inherited: Inheritance | None) -> dict[StorageKey, Any]:
        """Our own checkpoint, or our share of the newest one that a dead instance has left."""
        if inherited is None:
            return self.disk.copy_durable()
        found = self._process.newest_of(inherited.of).copy_durable()
        return {place: value for place, value in found.items() if is_of_share(place, inherited)}

    def _adopt(self, effect: LoadCheckpoint) -> None:
        """Our share comes into our own storage, its values bit by bit, unless it was asked for once more."""
        if not self.alive or effect.number != self._asked:
            return
        items, process = self._stored(effect.inherited), self._process
        self.disk.take_share(items, process.coming_ms, durable_early=process.durable_early)
        self.take(CheckpointLoaded(facts(items, effect), LifeShelf(self), effect.number, adopted=True))

    def _on_durable(self, seq: int) -> None:
        self.take(Durable(seq))

    def _exit(self, reason: str) -> None:
        process = self._process
        self._world.trace("exit", process.name, self.incarnation, reason)
        if self.zombie:
            self.end()
        else:
            process._end_life(lose_unsynced=False)
            process.on_exit(process, reason)

    def _set_timer(self, name: str, at_ms: float) -> None:
        """Plan a call unless one comes early enough: that one will plan the rest of the wait."""
        due_ms = (at_ms - self._clock_offset_ms) / self._clock_rate
        step_ms = math.ulp(at_ms)
        while due_ms * self._clock_rate + self._clock_offset_ms < at_ms:  # rounding: never early
            due_ms += step_ms
            step_ms *= 2
        timer = self._timers.get(name)
        if timer is not None and timer[1] <= due_ms:
            self._timers[name] = (due_ms, timer[1])
        else:
            self._plan_timer(name, max(due_ms, self._world.now_ms))

    def _plan_timer(self, name: str, due_ms: float) -> None:
        self._timers[name] = (due_ms, due_ms)
        if due_ms != math.inf:
            self._world.call_at(due_ms, self._wake, name, due_ms)

    def _wake(self, name: str, call_ms: float) -> None:
        timer = self._timers.get(name)
        if not self.alive or timer is None or timer[1] != call_ms:
            return  # replaced by an earlier one
        if timer[0] > call_ms:
            self._plan_timer(name, timer[0])
        else:
            del self._timers[name]
            self.take(TimerFired(name))

    def __str__(self) -> str:
        return f"{self._process.name}#{self.incarnation}{' (zombie)' if self.zombie else ''}"


def _ignore_exit(process: Process, reason: str) -> None:
    """Leave it down."""


def _ignore_crash(process: Process) -> None:
    """Leave it down."""


def _no_other(name: str) -> Disk:
    """Where another process stores; nobody knows here."""
    raise KeyError(name)


def _refuse(instance: str) -> None:
    message = f"asked to launch or retire {instance}, but this process was given no hook for it"
    raise RuntimeError(message)


class Process:
    """A name that machines run under, one life at a time, at a place with a disk and a clock.

    Hooks are plain attributes: `on_exit(process, reason)` after a clean end, `on_crash(process)`
    after a crash, `on_launch(instance)` and `on_retire(instance)` when the machine asks for it,
    and `before_effect(process, event, effects)`: if it returns i, only the first i effects are
    performed and the process crashes there. That is how a fault hits any step of a protocol.

    With `turn_ms` events wait for a turn, which comes within that time, and the machine takes as many of
    them in one step as its `on_events` likes; `together` is how many the last step took.

    A new process is down. Its clock shows `now * (1 + drift) + clock_offset_ms`.
    """

    def __init__(
        self,
        world: World,
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
        turn_ms: float = 0.0,
        newest_of: Callable[[str], Disk] = _no_other,
        coming_ms: float = 0.0,
        durable_early: bool = False,
    ) -> None:
        self.world = world
        self.network = network
        self.name = name
        self.number = crc32(name.encode())  # tells the marks of processes apart
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
        self.turn_ms = turn_ms
        self.newest_of = newest_of
        self.coming_ms = coming_ms  # how long values of a share take; 0: it is read as a whole, before
        self.durable_early = durable_early  # a planted bug
        self.turns = random.Random(f"turns of {name} {world.seed}") if turn_ms else None
        self.together = 1  # how many events the last step took
        self.incarnation = 0  # of the latest life; grows by one at each start
        self.life: Life | None = None
        self.zombies: list[Life] = []
        self.left_behind: list[Disk] = []  # where zombies went on writing
        self._stopped = False

    @property
    def up(self) -> bool:
        """Tell whether a life other than a zombie runs."""
        return self.life is not None

    @property
    def machine(self) -> Machine | None:
        """The machine of the current life."""
        return None if self.life is None else self.life.machine

    def start(self) -> None:
        """Begin a new life from what the disk holds."""
        if self.life is not None:
            message = f"{self.life} is up: it cannot be started again"
            raise ValueError(message)
        self._stopped = False
        self.incarnation += 1
        self.world.trace("start", self.name, self.incarnation)
        try:
            machine = self.make_machine(self.incarnation, self.disk.items())
        except Exception as error:
            raise MachineFailed(self.name, None, self.world.seed, self.world.now_ms) from error
        self.life = Life(self, machine, self.incarnation)

    def deliver(self, event: Event) -> None:
        """Give the current machine an event from outside; nobody gets it while the process is down."""
        if self.life is not None:
            self.life.take(event)

    def perform(self, effects: Sequence[Effect]) -> None:
        """Perform effects that a caller of the current machine was given."""
        if self.life is not None:
            self.life._perform(effects)

    def crash(self, lose_unsynced: bool = True) -> None:
        """End the current life at once; see `Disk.crash` for what is left. No-op when down."""
        if self.life is None:
            return
        self.world.trace("crash", self.name, self.incarnation, lose_unsynced)
        self._end_life(lose_unsynced)
        self.on_crash(self)

    def stop(self) -> None:
        """End the current life cleanly and forget planned restarts."""
        self.world.trace("stop", self.name, self.incarnation)
        self._stopped = True
        if self.life is not None:
            self._end_life(lose_unsynced=False)

    def restart_after(self, delay_ms: float) -> None:
        """Start after that time, unless something else has started it by then or it was stopped."""
        self.world.call_after(delay_ms, self._start_if_down)

    def launch_after(self, delay_ms: float) -> None:
        """Start after that time, also if it was stopped: somebody wants it again."""
        self._stopped = False
        self.restart_after(delay_ms)

    def fork_zombie(self, for_ms: float) -> None:
        """Start a successor while the old machine lives on for a time, believing it is the one.

        The zombie keeps its connections but makes no new ones. It writes to a copy of the disk;
        the successor finds what a power loss would have left. No-op when down.
        """
        life = self.life
        if life is None:
            return
        self.world.trace("zombie", self.name, self.incarnation, for_ms)
        life.zombie = True
        life.disk = self.disk.fork()
        self.left_behind.append(life.disk)
        self.network.disown(life.endpoint)
        self.disk.crash(lose_unsynced=True)
        self.zombies.append(life)
        self.world.call_after(for_ms, self._end_zombie, life)
        self.life = None
        self.start()

    @property
    def newest_disk(self) -> Disk:
        """Where this process got furthest: its own place, or one that a zombie was writing to."""
        return max([self.disk, *self.left_behind], key=lambda disk: disk.durable_batches)

    def take_over_newest(self) -> None:
        """A zombie may have stored a checkpoint before it was fenced; the successor copies the newest."""
        for disk in self.left_behind:
            if disk.durable_batches > self.disk.durable_batches:
                self.disk.adopt(disk)
        self.left_behind = []

    def _start_if_down(self) -> None:
        if self.life is None and not self._stopped:
            self.start()

    def _end_life(self, lose_unsynced: bool) -> None:
        if self.life is not None:
            self.life.end()
            self.life = None
            self.disk.crash(lose_unsynced)

    def _end_zombie(self, life: Life) -> None:
        self.zombies.remove(life)
        if life.alive:
            life.end()
