"""The cost of a tuple in the core alone: microseconds in Router and Instance, without any IO.

Responsible for: driving both machines with the events of a driver, and timing only the machines.
Not responsible for: sockets, disks and encodings (the commands of `tiercel bench` measure the whole path).

    python -m tiercel.bench.scenarios.core_cost [--json] [--out DIR] [--profile router|instance]

A real router and real instances exchange messages in memory, and each machine's time is counted by
the kind of event: for the router `Produce` (append and dispatch), `Outputs` (admit, log) and
`Durable` (acknowledge, publish). Goals: router below 3 us a tuple, instance below 6 us.

The machines are driven as the runtime's host does it: all that has arrived for a machine is one turn, which
ends with one commit and one `Durable`. With `frames at once` 1 a frame is sent when the last one is done;
with 8 as many are under way as a producer under load has.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import msgspec

from tiercel.bench.report import Line, document, print_results
from tiercel.core import messages as m
from tiercel.core.instance.instance import Instance
from tiercel.core.instance.user_code import Fold
from tiercel.core.machine.effects import Continue, Effect, LoadCheckpoint, ReadLog, Send, Write
from tiercel.core.machine.events import (
    CheckpointLoaded,
    Connected,
    Continued,
    Durable,
    Event,
    LogRead,
    Received,
)
from tiercel.core.model.keys import Key
from tiercel.core.model.log import Row
from tiercel.core.model.topology import Operator, Stream, Topology
from tiercel.core.router.router import Router
from tiercel.core.settings import Settings
from tiercel.core.state.handle import Codec, kept_as_given

SITE = "cloud"
CLIENT = "client"  # produces and subscribes
INSTANCES = ("average@cloud#1", "average@cloud#2")
OPERATOR = Operator("average", ("readings",), "averages", INSTANCES)
TOPOLOGY = Topology({SITE: None}, {"averages": Stream("averages", SITE)}, {"average": OPERATOR})

KEYS = 1_000
TUPLES = 300_000  # a second or two per case; more changes nothing but the wait
REPEATS = 3  # the best one counts: the others measured the neighbours
AT_ONCE = 8  # frames that a producer under load has under way
GOALS_US = {"router": 3.0, "instance": 6.0}


class Reading(NamedTuple):
    """An input row as user code sees it: like a Row of PySpark, a tuple with names."""

    sensor: int
    value: float


class RunningAverage:
    """A processor as people write it for PySpark: one output per tuple."""

    def init(self, handle: Any) -> None:
        self.average = handle.getValueState("average", "count long, total double")

    def handleInputRows(self, key: tuple[int], rows: Iterator[Reading], timerValues: Any) -> Iterator[Any]:
        count, total = self.average.get() or (0, 0.0)
        for row in rows:
            count += 1
            total += row.value
            yield (key[0], total / count)
        self.average.update((count, total))


class PlainAdapter:
    """The minimum of a processor adapter: decodes each key once, wraps rows, passes outputs on."""

    fold: Fold | None = None
    bundles = None

    def __init__(self) -> None:
        self.processor = RunningAverage()

    def state_codec(self, name: str, schema: Any) -> Codec:
        return kept_as_given(name, schema)

    def user_key(self, key: Key) -> Any:
        return (int.from_bytes(key),)

    def timer_key(self, user_key: Any) -> Any:
        return user_key

    def user_rows(self, rows: list[Row]) -> Iterator[Reading]:
        return (Reading._make(row[2]) for row in rows)

    def output_row(self, key: Key, output: Any) -> Row:
        return (key, 0, output)

    def output_rows(self, key: Key, outputs: Iterator[Any]) -> Iterator[Row]:
        return ((key, 0, output) for output in outputs)

    def timer_values(self, time_ms: int, watermark_ms: int) -> Any:
        return (time_ms, watermark_ms)

    def expired_timer(self, expiry_ms: int) -> Any:
        return expiry_ms


class Timed:
    """Calls a machine and adds up the time inside it, by kind of event."""

    def __init__(self, machine: Router | Instance) -> None:
        self.machine = machine
        self.spent_ns: dict[str, int] = {}
        self.clock_ms = 1e6
        self.last_ms = 0.0  # the last step
        self.steps = self.events = 0

    def take(self, waiting: deque[Event]) -> list[Effect]:
        """Take the first of these events, and those that may share its step."""
        self.clock_ms += 0.01
        first, before = waiting[0], len(waiting)
        begun = perf_counter_ns()
        effects = self.machine.on_events(waiting, self.clock_ms)
        took_ns = perf_counter_ns() - begun
        kind = type(first.message if isinstance(first, Received) else first).__name__
        self.spent_ns[kind] = self.spent_ns.get(kind, 0) + took_ns
        self.last_ms = took_ns / 1e6
        self.steps += 1
        self.events += before - len(waiting)
        return effects


def frames_of(size: int) -> list[list[Row]]:
    """Frames of rows over all keys, the same in every run."""
    rng = random.Random(1)
    keys = [n.to_bytes(8) for n in range(KEYS)]
    numbers = [rng.randrange(KEYS) for _ in range(TUPLES)]
    rows = [(keys[n], 0, (n, float(n % 97))) for n in numbers]
    return [rows[i : i + size] for i in range(0, TUPLES, size)]


class Site:
    """A router and its instances in memory: messages arrive at once, writes are durable at once."""

    def __init__(self, instances: int) -> None:
        names = INSTANCES[:instances]
        operator = msgspec.structs.replace(OPERATOR, instances=names)
        topology = msgspec.structs.replace(TOPOLOGY, operators={"average": operator})
        self.published = 0
        self.router = Timed(Router(SITE, topology, Settings(), 1, {}))
        self.machines = {SITE: self.router}
        for name in names:
            self.machines[name] = Timed(Instance(name, operator, PlainAdapter(), Settings(), 1))
        self._waiting: dict[str, deque[Event]] = {name: deque() for name in self.machines}
        for name in names:
            self.give(SITE, Connected(name))
            self.give(name, Connected(SITE))
        self.give(SITE, Connected(CLIENT))
        self.give(SITE, Received(CLIENT, m.Subscribe("averages", 0)))
        for timed in self.machines.values():
            timed.spent_ns.clear()
            timed.steps = timed.events = 0

    def give(self, name: str, *events: Event) -> None:
        """Hand over events that arrive together, and go on until everyone is quiet."""
        self._waiting[name].extend(events)
        while any(self._waiting.values()):
            for at, waiting in self._waiting.items():
                if waiting:
                    self._turn(at, waiting)

    def _turn(self, at: str, waiting: deque[Event]) -> None:
        """All that waits for a machine, and one commit."""
        written = 0
        while waiting:
            for effect in self.machines[at].take(waiting):
                if isinstance(effect, Write):
                    written = effect.seq
                else:
                    self._perform(at, effect)
        if written:
            for effect in self.machines[at].take(deque([Durable(written)])):
                self._perform(at, effect)

    def _perform(self, at: str, effect: Effect) -> None:
        match effect:
            case Send(to=to, message=message):
                if to in self.machines:
                    self._waiting[to].append(Received(at, message))
                elif isinstance(message, m.Publish):
                    self.published += sum(len(entry.outputs) for entry in message.entries)
                    consumed = m.Consumed(message.stream, message.entries[-1].offset)
                    self._waiting[SITE].append(Received(CLIENT, consumed))
            case Write(seq=seq):
                self._waiting[at].append(Durable(seq))
            case Continue():
                self._waiting[at].append(Continued(self.machines[at].last_ms))
            case ReadLog(inbox=inbox, reader=reader):
                self._waiting[at].append(LogRead(inbox, reader, []))
            case LoadCheckpoint(number=number):
                self._waiting[at].append(CheckpointLoaded({}, number=number))
            case _:
                pass  # timers: the run is over before one is due


def run(machine: str, size: int, at_once: int = 1) -> dict[str, float]:
    """Microseconds per tuple by kind of event. One instance gets whole frames, two share them."""
    site = Site(2 if machine == "router" else 1)
    frames = [
        Received(CLIENT, m.Produce(CLIENT, seq, "readings", rows))
        for seq, rows in enumerate(frames_of(size), 1)
    ]
    for n in range(0, len(frames), at_once):
        site.give(SITE, *frames[n : n + at_once])
    if site.published != TUPLES:
        message = (
            f"{site.published} outputs published of {TUPLES}: the machines were not driven as they should be"
        )
        raise AssertionError(message)
    timed = site.router if machine == "router" else site.machines[INSTANCES[0]]
    return {kind: ns / 1e3 / TUPLES for kind, ns in timed.spent_ns.items()}


# -- telling ----------------------------------------------------------------------------------


def measure(machine: str, size: int, at_once: int) -> Line:
    runs = []
    for _ in range(REPEATS):
        gc.collect()
        gc.disable()  # a host hardly ever collects either (runtime/host.py)
        runs.append(run(machine, size, at_once))
        gc.enable()
    best = min(runs, key=lambda parts: sum(parts.values()))
    total = sum(best.values())
    return {
        "machine": machine,
        "rows a frame": size,
        "frames at once": at_once,
        "us a tuple": round(total, 3),
        "us a frame": round(total * size, 1),
        "goal us": GOALS_US[machine],
        **{f"{kind} us": round(us, 3) for kind, us in best.items()},
    }


def profile(machine: str) -> None:
    for size in (500, 10):
        profiler = cProfile.Profile()
        profiler.runcall(run, machine, size)
        pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(22)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the JSON into this directory")
    parser.add_argument("--profile", choices=sorted(GOALS_US), help="print where the time goes, and end")
    given = parser.parse_args()
    if given.profile:
        profile(given.profile)
        return
    cases = ((500, 1), (10, 1), (10, AT_ONCE))
    lines = [measure(machine, size, at_once) for machine in GOALS_US for size, at_once in cases]
    settings = msgspec.to_builtins(Settings()) | {"keys": KEYS, "tuples": TUPLES, "repeats": REPEATS}
    print_results(document("core", lines, settings), as_json=given.json, out=given.out)


if __name__ == "__main__":
    main()
