"""A stage for transcripts: real machines, messages that arrive at once, disks that never lose anything.

Responsible for: performing effects in order, and withholding what a test wants withheld.
Not responsible for: faults and chance; the simulator (tiercel.sim) has those.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, assert_never

import msgspec

from tiercel.control.controller import Controller
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
from tiercel.core.heirs import is_of_share
from tiercel.core.instance import Instance
from tiercel.core.records import Inheritance, Key, KeyFacts, KeyImage, KeySet, Output, Row
from tiercel.core.router import Router
from tiercel.core.routing import slot_of
from tiercel.core.settings import Settings
from tiercel.core.topology import Operator, Stream, Topology, operator_of
from tiercel.workloads.processors import KINDS, PlainCode

SLOTS = 4
BOSS = "boss"  # who asks for moves; nobody is there, what it would be told is in `sent`
EVENTS_MAX = 100_000  # a transcript that goes on for ever has a loop in it


def key_in(slot: int, number: int = 0) -> Key:
    """The `number`-th key of a slot."""
    found = (b"k%d" % n for n in range(10_000))
    return [k for k, _ in zip((k for k in found if slot_of(k, SLOTS) == slot), range(number + 1))][-1]  # noqa: B905


def topology(sites: Iterable[str] = ("a", "b"), kind: str = "chained", **operator: Any) -> Topology:
    """Stream `in` -> operator `op`, one instance per site -> stream `out`, at home at the first site."""
    sites = tuple(sites)
    instances = operator.pop("instances", tuple(f"op@{site}#0" for site in sites))
    return Topology(
        dict.fromkeys(sites),
        {
            "in": Stream("in", sites[0], logged=False),
            "out": Stream("out", sites[0]),
            "dead": Stream("dead", sites[0]),
        },
        {
            "op": Operator(
                "op",
                ("in",),
                "out",
                instances,
                slots=SLOTS,
                dead_letters="dead",
                time_mode=KINDS[kind].time_mode,
                **operator,
            )
        },
    )


class DictShelf:
    """Reads back what lies in a dict."""

    def __init__(self, disk: dict[StorageKey, Any]) -> None:
        self._disk = disk

    def read(self, place: StorageKey) -> tuple[KeyImage, int]:
        image: KeyImage = copy.deepcopy(self._disk[place])
        return image, image.size_bytes


class Stage:
    """All machines of a small deployment. Whatever is sent arrives at once, and in order."""

    def __init__(
        self, facts: Topology | None = None, settings: Settings | None = None, kind: str = "chained"
    ) -> None:
        self.topology = facts or topology(kind=kind)
        self.settings = settings or Settings()
        self.kind = kind
        self.now_ms = 1000.0
        self.machines: dict[str, Any] = {}
        self.disks: dict[str, dict[StorageKey, Any]] = defaultdict(dict)
        self.lives: dict[str, int] = defaultdict(int)
        self.sent: list[tuple[str, str, Any]] = []
        self.writes: dict[str, list[Write]] = defaultdict(list)
        self.notes: list[str] = []
        self.launched: list[str] = []
        self.retired: list[str] = []
        self.exits: list[str] = []
        self.timers: dict[tuple[str, str], float] = {}
        self.withholds: Callable[[str, str, Any], bool] = lambda sender, to, message: False
        self.withheld: list[tuple[str, str, Any]] = []
        self.slow_readers: set[str] = set()  # whose answers wait in `reads`
        self.reads: deque[tuple[str, Event]] = deque()
        self.unsynced: set[str] = set()  # machines whose writes do not become durable for now
        self._undurable: dict[str, int] = {}
        self._queue: deque[tuple[str, Event]] = deque()
        self._seqs: dict[str, int] = defaultdict(int)

    # -- who is there ------------------------------------------------------------------------

    def start(self, *names: str) -> Stage:
        """Begin a new life of each and connect it with everyone, then let it settle."""
        for name in names or (*self.topology.sites, *self.topology.operators["op"].instances):
            self.lives[name] += 1
            self._add(name, self._make(name))
        self.run()
        return self

    def _make(self, name: str) -> Any:
        items = {k: copy.deepcopy(v) for k, v in self.disks[name].items()}
        if name in self.topology.sites:
            return Router(name, self.topology, self.settings, self.lives[name], items)
        if name == "controller":
            return Controller(self.topology, self.settings, items)
        operator = self.topology.operators[operator_of(name)]
        return Instance(
            name, operator, PlainCode(KINDS[self.kind](name[:2])), self.settings, self.lives[name]
        )

    def _add(self, name: str, machine: Any) -> None:
        others = list(self.machines)
        self.machines[name] = machine
        for other in others:
            self._queue.append((name, Connected(other)))
            self._queue.append((other, Connected(name)))

    def vanish(self, name: str) -> None:
        """It is gone, and nobody has heard of it."""
        del self.machines[name]
        self._queue = deque((to, event) for to, event in self._queue if to != name)
        self.timers = {key: at for key, at in self.timers.items() if key[0] != name}

    def stop(self, name: str) -> None:
        self.vanish(name)
        for other in self.machines:
            self._queue.append((other, Disconnected(name)))
        self.run()

    def restart(self, name: str) -> None:
        self.stop(name)
        self.start(name)

    # -- what happens ------------------------------------------------------------------------

    def give(self, name: str, event: Event) -> list[Effect]:
        """One event, and all that follows from it; returns the effects of the event itself."""
        effects = self.machines[name].on_event(event, self.now_ms)
        self.perform(name, effects)
        self.run()
        return list(effects)

    def tell(self, to: str, message: Any, sender: str = BOSS) -> list[Effect]:
        return self.give(to, Received(sender, message))

    def produce(self, site: str, *rows: Row, producer: str = "p", **options: Any) -> list[Effect]:
        self._seqs[producer] += 1
        return self.tell(
            site, m.Produce(producer, self._seqs[producer], "in", list(rows), **options), producer
        )

    def move(self, keys: KeySet, source: str, to: str, strategy: str = "live", name: str = "m1") -> None:
        site = source.partition("@")[2].partition("#")[0]
        self.tell(site, m.MoveRequest(name, "op", keys, source, to, strategy, 30_000.0))

    def run(self) -> None:
        for _ in range(EVENTS_MAX):
            if not self._queue:
                return
            name, event = self._queue.popleft()
            if name in self.machines:
                self.perform(name, self.machines[name].on_event(event, self.now_ms))
                validate = getattr(self.machines.get(name), "validate", None)
                if validate is not None:
                    validate()
        raise AssertionError("the transcript does not come to rest")

    def perform(self, name: str, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(to=to, message=message):
                    self.sent.append((name, to, message))
                    if self.withholds(name, to, message):
                        self.withheld.append((name, to, message))
                    elif to in self.machines:
                        self._queue.append((to, Received(name, message)))
                case Write():
                    self.writes[name].append(effect)
                    self.write(name, effect)
                    if name in self.unsynced:
                        self._undurable[name] = effect.seq
                    else:
                        self._queue.append((name, Durable(effect.seq)))
                case ReadLog():
                    answer = (name, LogRead(effect.inbox, effect.reader, self.read(name, effect)))
                    (self.reads if effect.reader in self.slow_readers else self._queue).append(answer)
                case LoadCheckpoint(inherited=Inheritance() as inherited):
                    answer = msgspec.structs.replace(self.loaded_share(inherited), number=effect.number)
                    self._queue.append((name, answer))
                case LoadCheckpoint(values=values):
                    answer = msgspec.structs.replace(self.loaded(name, values), number=effect.number)
                    self._queue.append((name, answer))
                case SetTimer():
                    self.timers[name, effect.name] = effect.at_ms
                case Note():
                    self.notes.append(effect.text)
                case Launch():
                    self.launched.append(effect.instance)
                case Retire():
                    self.retired.append(effect.instance)
                case Exit():
                    self.exits.append(name)
                case _:
                    assert_never(effect)

    def answer_read(self) -> None:
        """The oldest answer that waits arrives."""
        self._queue.append(self.reads.popleft())
        self.run()

    def read(self, name: str, effect: ReadLog) -> list[Any]:
        log = {k[2]: v for k, v in self.disks[name].items() if k[:2] == ("inbox", effect.inbox)}
        return [log[o] for o in sorted(log) if o > effect.after][: effect.limit]

    def write(self, name: str, effect: Write) -> None:
        self.disks[name].update(copy.deepcopy(effect.puts))
        for key in effect.deletes:
            self.disks[name].pop(key, None)

    def loaded(self, name: str, values: bool) -> CheckpointLoaded:
        items = copy.deepcopy(self.disks[name])
        if not values:
            items = {k: KeyFacts(v.timers) if k[0] == "state" else v for k, v in items.items()}
        return CheckpointLoaded(items, DictShelf(self.disks[name]))

    def loaded_share(self, inherited: Inheritance) -> CheckpointLoaded:
        of_dead = self.disks[inherited.of]
        return CheckpointLoaded(
            copy.deepcopy({k: v for k, v in of_dead.items() if is_of_share(k, inherited)}), DictShelf(of_dead)
        )

    def deliver(self) -> None:
        """What was withheld arrives now, in order; nothing is withheld any more."""
        self.withholds = lambda sender, to, message: False
        kept, self.withheld = self.withheld, []
        for sender, to, message in kept:
            if to in self.machines:
                self._queue.append((to, Received(sender, message)))
        self.run()

    def sync(self, name: str) -> None:
        """Everything this machine wrote is durable now."""
        self.unsynced.discard(name)
        if name in self._undurable:
            self.give(name, Durable(self._undurable.pop(name)))

    def pass_ms(self, duration_ms: float) -> None:
        """Time goes by; timers fire when they are due, and instances that ended are started again."""
        end = self.now_ms + duration_ms
        while True:
            for name in self.exits:
                self.restart(name)
            self.exits.clear()
            due = min(((at, key) for key, at in self.timers.items()), default=(end + 1, ("", "")))
            if due[0] > end:
                break
            self.now_ms = max(self.now_ms, due[0])
            del self.timers[due[1]]
            self.give(due[1][0], TimerFired(due[1][1]))
        self.now_ms = end

    # -- what can be seen --------------------------------------------------------------------

    def said(self, sender: str, to: str, kind: type) -> list[Any]:
        return [x for s, t, x in self.sent if s == sender and t == to and isinstance(x, kind)]

    def outputs(self, stream: str = "out") -> list[Output]:
        """The stream's output log, at its one home."""
        disk = self.disks[self.topology.streams[stream].home]
        offsets = sorted(k[2] for k in disk if k[:2] == ("inbox", stream))
        return [output for o in offsets for output in disk["inbox", stream, o].outputs]

    def log(self, site: str, inbox: str = "op") -> list[Any]:
        disk = self.disks[site]
        return [disk[k] for k in sorted(k for k in disk if k[:2] == ("inbox", inbox))]
