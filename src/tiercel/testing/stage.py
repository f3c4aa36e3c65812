"""A driver of the core for one thread: one router, two instances, memory for disks, time that stands still.

Responsible for: performing effects at once and in order; every message crosses the real wire format.
Not responsible for: faults other than a crash of everything (tiercel.sim has those), user code.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, assert_never

from tiercel.core import messages as m
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
from tiercel.core.engine import Code
from tiercel.core.events import (
    CheckpointLoaded,
    Connected,
    Disconnected,
    Durable,
    Event,
    LogRead,
    Received,
    TimerFired,
)
from tiercel.core.faults import CoreBug
from tiercel.core.instance import Instance
from tiercel.core.records import Key, KeySet, Output, Row
from tiercel.core.router import Router
from tiercel.core.settings import Settings
from tiercel.core.topology import Operator, Stream, Topology, instance_name
from tiercel.runtime.wire import LENGTH_BYTES, decode_message, encode_frame

SITE, INPUT, OUTPUT, DEAD = "site", "input", "output", "dead-letters"
OPERATOR = "operator"
INSTANCES = tuple(instance_name(OPERATOR, SITE, n) for n in range(2))
PRODUCER, ASKER = "producer", "asker"  # whom the router hears; what it answers nobody needs
EVENTS_MAX = 1_000_000  # without an end: a loop
ROUNDS_MAX = 1_000  # of timers until a move has ended; it takes about ten


class Stage:
    """The machines of one operator. Whatever is sent arrives at once; whatever is written is durable."""

    def __init__(
        self, make_code: Callable[[], Code], operator: Operator, settings: Settings, now_ms: int
    ) -> None:
        producers = {PRODUCER: SITE} if operator.time_mode == "eventTime" else {}
        streams = {
            INPUT: Stream(INPUT, SITE, logged=False, producers=producers),
            OUTPUT: Stream(OUTPUT, SITE),
            DEAD: Stream(DEAD, SITE),
        }
        self.topology = Topology({SITE: None}, streams, {OPERATOR: operator}).validate()
        self.settings = settings
        self.now_ms = now_ms
        self.statuses: dict[str, m.MoveStatus] = {}
        self._make_code = make_code
        self._machines: dict[str, Any] = {}
        self._disks: dict[str, dict[StorageKey, Any]] = defaultdict(dict)
        self._lives: dict[str, int] = defaultdict(int)
        self._timers: dict[tuple[str, str], float] = {}
        self._exits: list[str] = []
        self._queue: deque[tuple[str, Event]] = deque()
        self._produced = 0
        self._moves = 0
        self.start()

    # -- processes ---------------------------------------------------------------------------

    def start(self) -> None:
        for name in (SITE, *INSTANCES):
            self._start(name)
        self._run()

    def _start(self, name: str) -> None:
        self._lives[name] += 1
        if name == SITE:
            items = copy.deepcopy(self._disks[name])
            machine: Any = Router(name, self.topology, self.settings, self._lives[name], items)
        else:
            operator = self.topology.operators[OPERATOR]
            machine = Instance(name, operator, self._make_code(), self.settings, self._lives[name])
        for other in self._machines:
            self._queue.append((name, Connected(other)))
            self._queue.append((other, Connected(name)))
        self._machines[name] = machine

    def crash(self) -> None:
        """Every process dies at once, and begins again with what it had stored."""
        self._machines.clear()
        self._queue.clear()
        self._timers.clear()
        self.start()
        self.finish_moves()

    def checkpoint(self) -> None:
        self._fire([key for key in self._timers if key[1] == "checkpoint"])

    # -- events ------------------------------------------------------------------------------

    def produce(self, rows: list[Row], watermark_ms: int | None = None) -> None:
        self._produced += 1
        self._tell(PRODUCER, m.Produce(PRODUCER, self._produced, INPUT, rows, watermark_ms))

    def begin_move(self, key: Key, strategy: str) -> str:
        """Ask for the key to go to the other instance; what needs no time happens."""
        self._moves += 1
        name = f"move-{self._moves}"
        source = self.owner(key)
        destination = next(other for other in INSTANCES if other != source)
        keys = KeySet(keys=frozenset([key]))
        deadline_ms = self.now_ms + self.settings.move_deadline_ms
        self._tell(ASKER, m.MoveRequest(name, OPERATOR, keys, source, destination, strategy, deadline_ms))
        return name

    def finish_moves(self) -> None:
        """Let every timer but the clock's go off, round by round, until no move is under way."""
        router = self._machines[SITE]
        for _ in range(ROUNDS_MAX):
            if not (router.departures or router.arrivals):
                return
            self._fire([key for key in self._timers if not key[1].startswith("tick|")])
        raise CoreBug(f"a move does not end: {self.statuses}")

    def jump(self, now_ms: int) -> None:
        """It is later now, and the log hears of it at once. Nobody sees the time in between."""
        self.now_ms = now_ms
        due = [key for key, at_ms in self._timers.items() if at_ms <= now_ms or key[1].startswith("tick|")]
        self._fire(due)

    def _tell(self, sender: str, message: m.Message) -> None:
        self._queue.append((SITE, Received(sender, _over_the_wire(message))))
        self._run()

    def _fire(self, timers: Iterable[tuple[str, str]]) -> None:
        for name, timer in timers:
            if self._timers.pop((name, timer), None) is not None:
                self._queue.append((name, TimerFired(timer)))
                self._run()

    def _run(self) -> None:
        for _ in range(EVENTS_MAX):
            if not self._queue:
                return
            name, event = self._queue.popleft()
            if name in self._machines:
                for effect in self._machines[name].on_event(event, float(self.now_ms)):
                    self._perform(name, effect)
        raise CoreBug("the trial does not come to rest")

    def _perform(self, name: str, effect: Effect) -> None:
        match effect:
            case Send(to=to, message=message):
                if to in self._machines:
                    self._queue.append((to, Received(name, _over_the_wire(message))))
                elif isinstance(message, m.MoveStatus):
                    self.statuses[message.move] = message
            case Write():
                self._disks[name].update(copy.deepcopy(effect.puts))
                for key in effect.deletes:
                    self._disks[name].pop(key, None)
                self._queue.append((name, Durable(effect.seq)))
            case ReadLog():
                log = {k[2]: v for k, v in self._disks[name].items() if k[:2] == ("inbox", effect.inbox)}
                entries = [log[o] for o in sorted(log) if o > effect.after][: effect.limit]
                self._queue.append((name, LogRead(effect.inbox, effect.reader, entries)))
            case LoadCheckpoint():
                found = copy.deepcopy(self._disks[name])
                self._queue.append((name, CheckpointLoaded(found, number=effect.number)))
            case SetTimer():
                self._timers[name, effect.name] = effect.at_ms
            case Exit():
                self._restart(name)
            case Note() | Launch() | Retire():
                pass  # both instances are always there
            case _:
                assert_never(effect)

    def _restart(self, name: str) -> None:
        del self._machines[name]
        self._timers = {key: at_ms for key, at_ms in self._timers.items() if key[0] != name}
        for other in self._machines:
            self._queue.append((other, Disconnected(name)))
        self._start(name)

    # -- what can be seen --------------------------------------------------------------------

    def owner(self, key: Key) -> str:
        return str(self._machines[SITE].inboxes[OPERATOR].table.route(key).instance)

    def instance(self, name: str) -> Instance:
        found = self._machines[name]
        assert isinstance(found, Instance)
        return found

    def logged(self, stream: str) -> list[Output]:
        """What the stream's log holds."""
        disk = self._disks[SITE]
        offsets = sorted(k[2] for k in disk if k[:2] == ("inbox", stream))
        return [output for o in offsets for output in disk["inbox", stream, o].outputs]


def _over_the_wire(message: m.Message) -> m.Message:
    return decode_message(encode_frame(message)[LENGTH_BYTES:])
