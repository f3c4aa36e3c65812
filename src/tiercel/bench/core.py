"""What a tuple costs in the core alone: microseconds in Router and Instance, without any IO.

Responsible for: driving both machines by the events a driver would give them, and timing only them.
Not responsible for: sockets, disks and encodings (slice.py measures the whole path).

    python -m tiercel.bench.core [--json] [--out DIR] [--profile router|instance]

The router's figure has three parts: `produce` (append and dispatch), `outputs` (admit, log) and
`durable` (acknowledge, publish). Goals: router below 3 us a tuple, instance below 6 us.
"""

from __future__ import annotations

import cProfile
import gc
import itertools
import pstats
import random
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any, NamedTuple

import msgspec

from tiercel.bench.report import Line, options, tell
from tiercel.core import messages as m
from tiercel.core.effects import Effect, LoadCheckpoint, ReadLog, Send, Write
from tiercel.core.events import CheckpointLoaded, Connected, Durable, Event, LogRead, Received
from tiercel.core.instance import Instance
from tiercel.core.records import Entry, Key, Output, Row
from tiercel.core.router import Router
from tiercel.core.settings import Settings
from tiercel.core.topology import Operator, Stream, Topology

SITE = "cloud"
INSTANCES = ("average@cloud#1", "average@cloud#2")
OPERATOR = Operator("average", ("readings",), "averages", INSTANCES)
TOPOLOGY = Topology({SITE: None}, {"averages": Stream("averages", SITE)}, {"average": OPERATOR})

KEYS = 1_000
TUPLES = 300_000  # a second or two per case; more changes nothing but the wait
REPEATS = 3  # the best one counts: the others measured the neighbours
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


class Border:
    """The least a border has to do: decode a key once, wrap rows, hand outputs through."""

    def __init__(self) -> None:
        self.processor = RunningAverage()

    def user_key(self, key: Key) -> Any:
        return (int.from_bytes(key),)

    def user_rows(self, rows: list[Row]) -> Iterator[Reading]:
        return (Reading._make(row[2]) for row in rows)

    def output_row(self, key: Key, output: Any) -> Row:
        return (key, 0, output)

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

    def take(self, kind: str, event: Event) -> list[Effect]:
        self.clock_ms += 0.01
        begun = perf_counter_ns()
        effects = self.machine.on_event(event, self.clock_ms)
        self.spent_ns[kind] = self.spent_ns.get(kind, 0) + perf_counter_ns() - begun
        return effects


def frames_of(size: int) -> list[list[Row]]:
    """Frames of rows over all keys, the same in every run."""
    rng = random.Random(1)
    keys = [n.to_bytes(8) for n in range(KEYS)]
    numbers = [rng.randrange(KEYS) for _ in range(TUPLES)]
    rows = [(keys[n], 0, (n, float(n % 97))) for n in numbers]
    return [rows[i : i + size] for i in range(0, TUPLES, size)]


# -- router -----------------------------------------------------------------------------------


def router_ready() -> Timed:
    """A router with two live instances, a producer and a subscriber."""
    timed = Timed(Router(SITE, TOPOLOGY, Settings(), 1, {}))
    for peer in (*INSTANCES, "producer", "subscriber"):
        _settle(timed, "start", Connected(peer))
    for name in INSTANCES:
        _settle(timed, "start", Received(name, m.Attach(name, 1)))
        _settle(timed, "start", Received(name, m.Resume(name, 1, 0, {}, -1)))
    _settle(timed, "start", Received("subscriber", m.Subscribe("averages", 0)))
    return timed


def _settle(timed: Timed, kind: str, event: Event) -> list[Send]:
    """Performs writes at once and reads as empty; returns everything the machine said."""
    said: list[Send] = []
    waiting: list[tuple[str, Event]] = [(kind, event)]
    while waiting:
        for effect in timed.take(*waiting.pop(0)):
            match effect:
                case Send():
                    said.append(effect)
                case Write(seq=seq):
                    waiting.append(("durable" if kind != "start" else kind, Durable(seq)))
                case ReadLog(inbox=inbox, reader=reader):
                    waiting.append((kind, LogRead(inbox, reader, [])))
                case _:
                    pass
    return said


def run_router(size: int) -> dict[str, float]:
    """Microseconds per tuple by part; every produced tuple comes back as an output and is published."""
    timed = router_ready()
    timed.spent_ns.clear()
    flushes = dict.fromkeys(INSTANCES, 0)
    published = 0
    for seq, rows in enumerate(frames_of(size), 1):
        said = _settle(timed, "produce", Received("producer", m.Produce("producer", seq, "readings", rows)))
        for sent in [s for s in said if isinstance(s.message, m.Dispatch)]:
            flushes[sent.to] += 1
            answer = _answer(sent.to, flushes[sent.to], sent.message.entries)
            for told in _settle(timed, "outputs", Received(sent.to, answer)):
                if isinstance(told.message, m.Publish):
                    published += sum(len(e.outputs) for e in told.message.entries)
    if published != TUPLES:
        message = f"{published} outputs published of {TUPLES}: the machine was not driven as it should be"
        raise AssertionError(message)
    return {kind: ns / 1e3 / TUPLES for kind, ns in timed.spent_ns.items()}


def _answer(instance: str, flush: int, entries: list[Entry]) -> m.Outputs:
    outputs = [
        Output(entry.offset, row[0], 1, n, row)
        for entry in entries
        for n, row in enumerate(itertools.chain.from_iterable(entry.parts.values()))
    ]
    return m.Outputs(instance, 1, flush, entries[-1].offset, outputs, [], -1, False)


# -- instance ---------------------------------------------------------------------------------


def instance_ready() -> Timed:
    name = INSTANCES[0]
    timed = Timed(Instance(name, OPERATOR, Border(), Settings(), 1))
    timed.take("start", Connected(SITE))
    reply = m.AttachReply(1, 0, 0, [(1, 0)], [], [])
    effects = timed.take("start", Received(SITE, reply))
    assert any(isinstance(e, LoadCheckpoint) for e in effects)
    timed.take("start", CheckpointLoaded({}))
    return timed


def run_instance(size: int) -> dict[str, float]:
    """Microseconds per tuple; frames as the router makes them, one entry each."""
    timed = instance_ready()
    timed.spent_ns.clear()
    made = 0
    flush = 1
    for offset, rows in enumerate(frames_of(size), 1):
        dispatch = m.Dispatch([Entry(offset, int(timed.clock_ms), {INSTANCES[0]: rows})])
        for effect in timed.take("dispatch", Received(SITE, dispatch)):
            if isinstance(effect, Send) and isinstance(effect.message, m.Outputs):
                made += len(effect.message.outputs)
                flush = effect.message.flush
        timed.take("confirmed", Received(SITE, m.Confirmed(flush, offset)))
    if made != TUPLES:
        message = f"{made} outputs of {TUPLES} tuples: the machine was not driven as it should be"
        raise AssertionError(message)
    return {kind: ns / 1e3 / TUPLES for kind, ns in timed.spent_ns.items()}


# -- telling ----------------------------------------------------------------------------------

RUNS: dict[str, Callable[[int], dict[str, float]]] = {"router": run_router, "instance": run_instance}


def measure(machine: str, size: int) -> Line:
    runs = []
    for _ in range(REPEATS):
        gc.collect()
        runs.append(RUNS[machine](size))
    best = min(runs, key=lambda parts: sum(parts.values()))
    total = sum(best.values())
    return {
        "machine": machine,
        "rows a frame": size,
        "us a tuple": round(total, 3),
        "us a frame": round(total * size, 1),
        "goal us": GOALS_US[machine],
        **{f"{kind} us": round(us, 3) for kind, us in best.items()},
    }


def profile(machine: str) -> None:
    for size in (500, 10):
        profiler = cProfile.Profile()
        profiler.runcall(RUNS[machine], size)
        pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(22)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--profile", choices=sorted(RUNS), help="print where the time goes, and end")
    given = parser.parse_args()
    if given.profile:
        profile(given.profile)
        return
    lines = [measure(machine, size) for machine in RUNS for size in (500, 10)]
    settings = msgspec.to_builtins(Settings()) | {"keys": KEYS, "tuples": TUPLES, "repeats": REPEATS}
    tell("core", lines, settings, given)


if __name__ == "__main__":
    main()
