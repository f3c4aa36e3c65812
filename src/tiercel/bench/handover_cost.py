"""The cost of one hand-over of one key in the core alone, with few and with many overrides, and a soak.

Responsible for: two sites and a controller in memory, which move one key to and fro; CPU time in the
    machines only.
Not responsible for: sockets, disks and encodings (`tiercel bench reconfigure` measures the whole path).

    python -m tiercel.bench.handover_cost [--overrides 100,124000] [--moves 100] [--soak 5000]

The tables of both routers and of both instances hold that many overrides, marks and counts of other keys.
The aim is a ratio below 2. `--soak` makes that many moves in a row, and counts what is stored and held at ten
points.
"""

from __future__ import annotations

import argparse
import gc
import heapq
from collections import deque
from pathlib import Path
from time import thread_time_ns
from typing import Any

from tiercel.bench.report import Line, document, print_results
from tiercel.bench.scenarios.core_cost import PlainAdapter
from tiercel.control.controller import Controller
from tiercel.control.plans import Plan, PlannedMove
from tiercel.core import messages as m
from tiercel.core.errors import CoreBug
from tiercel.core.instance.instance import Instance
from tiercel.core.machine.effects import (
    Continue,
    Effect,
    LoadCheckpoint,
    ReadLog,
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
    Received,
    TimerFired,
)
from tiercel.core.machine.names import TimerName
from tiercel.core.machine.stored import CheckpointHeader
from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.routing import Route, RouteUpdate, slot_of
from tiercel.core.model.topology import Operator, Stream, Topology
from tiercel.core.router.router import Router
from tiercel.core.settings import Settings

SITES = ("cloud", "edge")
INSTANCES = ("average@cloud#1", "average@edge#1")
OPERATOR = Operator("average", ("readings",), "averages", INSTANCES)
TOPOLOGY = Topology(
    {"cloud": None, "edge": "cloud"},
    {"readings": Stream("readings", "cloud", logged=False), "averages": Stream("averages", "cloud")},
    {"average": OPERATOR},
)
CONTROLLER, CLIENT = "controller", "client"
MOVED: Key = (1 << 60).to_bytes(8)
SETTINGS = Settings(checkpoint_ms=100.0, stream_entries_max=100)


def other_keys(count: int) -> list[Key]:
    return [n.to_bytes(8) for n in range(count)]


class TwoSites:
    """Two routers with an instance each, and a controller. Messages and writes take no time."""

    def __init__(self, overrides: int) -> None:
        self.now_ms = 1e6
        self.spent_ns = 0
        self.seq = 0
        self.outputs = 0
        self.disks: dict[str, dict[StorageKey, Any]] = {name: {} for name in (*SITES, *INSTANCES, CONTROLLER)}
        self.logs: dict[tuple[str, str], dict[int, Any]] = {}
        self._fill(other_keys(overrides))
        self.machines: dict[str, Router | Instance | Controller] = {}
        self._timers: list[tuple[float, int, str, TimerName]] = []
        self._set: dict[tuple[str, TimerName], int] = {}
        self._timer_count = 0
        self._waiting: deque[tuple[str, Event]] = deque()
        for site in SITES:
            self.machines[site] = Router(site, TOPOLOGY, SETTINGS, 1, self.disks[site])
        for name in INSTANCES:
            self.machines[name] = Instance(name, OPERATOR, PlainAdapter(), SETTINGS, 1)
        self.machines[CONTROLLER] = Controller(TOPOLOGY, SETTINGS, {})
        for name in self.machines:
            self._waiting += [(name, Connected(other)) for other in self.machines if other != name]
        self._waiting.append(("cloud", Connected(CLIENT)))
        self.run()

    def _fill(self, keys: list[Key]) -> None:
        by_slot: dict[int, dict[Key, Route]] = {}
        for n, key in enumerate(keys):
            route = Route(INSTANCES[n % 2], 2)
            by_slot.setdefault(slot_of(key, OPERATOR.slots), {})[key] = route
            for site in SITES:
                self.disks[site]["route_key", "average", key] = route
                self.disks[site]["mark", "average", key] = {"edge@1": 3}
                self.disks[site]["count", "average", key] = 3
        for site in SITES:
            self.disks[site]["storage",] = 1
        slots = {slot: Route(INSTANCES[slot * 2 // OPERATOR.slots], 1) for slot in by_slot}
        for name in INSTANCES:
            self.disks[name]["checkpoint",] = CheckpointHeader(1, 0, 1, 0, -1, [])
            for slot, of_slot in by_slot.items():
                self.disks[name]["routes", slot] = RouteUpdate({slot: slots[slot]}, of_slot)

    # -- the driver ------------------------------------------------------------------------------

    def take(self, name: str, event: Event) -> None:
        machine = self.machines[name]
        begun = thread_time_ns()
        effects = machine.on_event(event, self.now_ms)
        self.spent_ns += thread_time_ns() - begun
        self.perform(name, effects)

    def run(self) -> None:
        while self._waiting:
            self.take(*self._waiting.popleft())

    def perform(self, at: str, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(to=to, message=message):
                    if to in self.machines:
                        self._waiting.append((to, Received(at, message)))
                case Write(seq=seq, puts=puts, deletes=deletes):
                    self._write(at, puts, deletes)
                    self._waiting.append((at, Durable(seq)))
                case Continue():
                    self._waiting.append((at, Continued(0.01)))
                case ReadLog(inbox=inbox, after=after, limit=limit, reader=reader):
                    log = self.logs.get((at, inbox), {})
                    last = next(reversed(log), 0)
                    found = [log[n] for n in range(after + 1, min(last, after + limit) + 1) if n in log]
                    self._waiting.append((at, LogRead(inbox, reader, found)))
                case LoadCheckpoint(number=number):
                    self._waiting.append((at, CheckpointLoaded(dict(self.disks[at]), number=number)))
                case SetTimer(name=timer, at_ms=at_ms):
                    self._timer_count += 1
                    self._set[at, timer] = self._timer_count
                    heapq.heappush(self._timers, (at_ms, self._timer_count, at, timer))
                case Unexpected():
                    raise CoreBug(f"{at}: {effect}")
                case _:
                    pass

    def _write(self, at: str, puts: dict[StorageKey, Any], deletes: tuple[StorageKey, ...]) -> None:
        disk = self.disks[at]
        for key, value in puts.items():
            if key[0] == "inbox":
                self.logs.setdefault((at, key[1]), {})[key[2]] = value
            else:
                disk[key] = value
        for key in deletes:
            if key[0] == "inbox":
                self.logs.get((at, key[1]), {}).pop(key[2], None)
            else:
                disk.pop(key, None)

    def advance(self) -> None:
        """Let the next timer fire."""
        while self._timers:
            at_ms, number, name, timer = heapq.heappop(self._timers)
            if self._set.get((name, timer)) == number:
                del self._set[name, timer]
                self.now_ms = max(self.now_ms, at_ms)
                self._waiting.append((name, TimerFired(timer)))
                self.run()
                return

    # -- hand-overs ------------------------------------------------------------------------------

    def produce(self) -> None:
        self.seq += 1
        row = (MOVED, 0, (1, float(self.seq)))
        self._waiting.append(("cloud", Received(CLIENT, m.Produce(CLIENT, self.seq, "readings", [row]))))
        self.run()

    def hand_over(self, number: int) -> None:
        """Move the key to the other site, with a row before, during and after the move."""
        source, to = INSTANCES if number % 2 == 0 else reversed(INSTANCES)
        controller = self.machines[CONTROLLER]
        assert isinstance(controller, Controller)
        self.produce()
        move = PlannedMove("average", KeySet(keys=frozenset({MOVED})), source, to, "live")
        (name,), effects = controller.request(Plan((move,), "benchmark"), self.now_ms)
        self.perform(CONTROLLER, effects)
        self.run()
        self.produce()
        while self.is_busy(name):
            self.advance()
        self.produce()

    def is_busy(self, name: str) -> bool:
        controller = self.machines[CONTROLLER]
        assert isinstance(controller, Controller)
        if controller.moves[name].state == "undone":
            raise CoreBug(f"{name} was undone: {controller.moves[name].reason}")
        routers = [machine for machine in self.machines.values() if isinstance(machine, Router)]
        return controller.moves[name].state != "done" or any(r.moves.count for r in routers)

    def first_owner(self) -> int:
        """0 if the first instance owns the key at the start, else 1."""
        router = self.machines["cloud"]
        assert isinstance(router, Router)
        return INSTANCES.index(router.inboxes["average"].table.route(MOVED).instance)

    def stored(self) -> int:
        return sum(map(len, self.disks.values())) + sum(map(len, self.logs.values()))


def measure(overrides: int, moves: int) -> Line:
    sites = TwoSites(overrides)
    first = sites.first_owner()
    for n in range(first, first + 4):
        sites.hand_over(n)  # the first checkpoints store all routes
    gc.collect()
    gc.disable()
    sites.spent_ns = 0
    for n in range(first, first + moves):
        sites.hand_over(n)
    gc.enable()
    return {"overrides": overrides, "moves": moves, "ms a hand-over": round(sites.spent_ns / 1e6 / moves, 3)}


def soak(moves: int) -> list[Line]:
    """What is stored and held after each tenth of the moves."""
    sites, lines = TwoSites(100), list[Line]()
    first = sites.first_owner()
    for n in range(moves):
        sites.hand_over(first + n)
        if (n + 1) % max(1, moves // 10) == 0:
            gc.collect()
            lines.append({"moves": n + 1, "stored items": sites.stored(), "objects": len(gc.get_objects())})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--overrides", default="100,124000", help="numbers of overrides, comma-separated")
    parser.add_argument("--moves", type=int, default=100, help="hand-overs for each number of overrides")
    parser.add_argument("--soak", type=int, default=0, help="make this many moves in a row instead")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the JSON into this directory")
    given = parser.parse_args()
    if given.soak:
        lines = soak(given.soak)
    else:
        lines = [measure(int(count), given.moves) for count in given.overrides.split(",")]
        for line in lines:
            line["ratio"] = round(line["ms a hand-over"] / lines[0]["ms a hand-over"], 2)
    print_results(document("handover", lines, {"moves": given.moves}), as_json=given.json, out=given.out)


if __name__ == "__main__":
    main()
