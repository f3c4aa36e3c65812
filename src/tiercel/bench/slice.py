"""The whole path on Spark, thin but real: throughput, latency, and one live move under load.

Responsible for: a router task, two instance tasks, the phases of the run, the figures.
Not responsible for: the load (load.py), the operator (averages.py), hosting (spark/).

    python -m tiercel.bench.slice [--json] [--out DIR] [--seconds N] [--durability os|disk]

Phases: closed loop with frames of 500 (throughput); open loop at 10,000 tuples/s (latency); the
same with 20 probe keys fed every 5 ms, and in the midst of it a live move of 100 keys (stoppage,
as design.md defines it: the largest excess over the steady median of a key's tuples that were due
between request and end).
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns

import msgspec
import uvloop

from tiercel.bench.averages import SITE, plan, topology
from tiercel.bench.load import PRODUCER, TICK_NS, Load
from tiercel.bench.report import Line, options, percentile, tell
from tiercel.core.events import TimerFired
from tiercel.core.messages import MoveRequest
from tiercel.core.records import KeySet
from tiercel.core.routing import RoutingTable
from tiercel.core.settings import Settings
from tiercel.runtime.host import Host
from tiercel.runtime.place import Manifest, Place
from tiercel.spark.hosting import Hosting
from tiercel.spark.session import open_session

KEYS, MOVED_KEYS, PROBE_KEYS = 1_000, 100, 20
RATE = 10_000
UNDER_WAY_MAX = 20_000  # closed loop: 40 frames of 500
STARTUP_S = 3.0  # thrown away: imports, first allocations, caches
WAIT_S_MAX = 30.0
TOPOLOGY = topology(2)


class Stuck(Exception):
    """Something that had to happen did not."""


class Pacer(threading.Thread):
    """Wakes the load every millisecond; an event loop's own timers are only that exact."""

    def __init__(self, host: Host, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        self._host, self._loop = host, loop
        self.running = True

    def run(self) -> None:
        due = monotonic_ns()
        while self.running:
            due += TICK_NS
            wait = due - monotonic_ns()
            if wait > 0:
                time.sleep(wait / 1e9)
            self._loop.call_soon_threadsafe(self._host.take, TimerFired("tick"))


def cpu_s(pids: dict[str, int]) -> dict[str, float]:
    """CPU seconds of each process, to the nanosecond: sampled ticks are blind to work in step with them."""
    used = {}
    for name, pid in pids.items():
        threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
        used[name] = sum(int(t.read_text(encoding="ascii").split()[0]) for t in threads) / 1e9
    return used


async def until(happened: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + WAIT_S_MAX
    while not happened():
        if time.monotonic() > give_up:
            raise Stuck(what)
        await asyncio.sleep(0.005)


async def until_quiet(load: Load) -> None:
    await until(lambda: load.quiet, "outputs are missing long after the last input")


def machine_cpu_s() -> float:
    """CPU seconds that anyone on this machine has used."""
    user, nice, system, _, _, irq, softirq = (
        int(field) for field in Path("/proc/stat").read_text(encoding="ascii").split()[1:8]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class Cpu:
    """What each process, and everyone else on the machine, uses between two moments."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids, self._before, self._began = pids, cpu_s(pids), time.monotonic()
        self._all_before = machine_cpu_s()

    def line(self, tuples: int) -> Line:
        took = time.monotonic() - self._began
        used = {name: cpu - self._before[name] for name, cpu in cpu_s(self._pids).items()}
        ours = sum(used.values())
        return {
            "tuples/s": round(tuples / took),
            **{f"{name} us": round(s * 1e6 / tuples, 2) for name, s in used.items()},
            "cores": round(ours / took, 2),
            "others' cores": round(max(0.0, machine_cpu_s() - self._all_before - ours) / took, 2),
        }


async def throughput(load: Load, host: Host, pids: dict[str, int], seconds: float) -> Line:
    load.closed_loop_max = UNDER_WAY_MAX
    host.take(TimerFired("fill"))
    await asyncio.sleep(STARTUP_S)
    cpu, before = Cpu(pids), load.received
    await asyncio.sleep(seconds)
    line = {"phase": f"closed loop, frames of {load.frame_rows}", **cpu.line(load.received - before)}
    load.stop()
    await until_quiet(load)
    return line


def latencies(load: Load, since_ns: int, until_ns: int) -> list[float]:
    """Milliseconds, sorted, of the tuples due in between."""
    both = zip(load.due_ns, load.late_ns, strict=True)
    return sorted(late / 1e6 for due, late in both if since_ns <= due < until_ns)


def spread(values: list[float], digits: int = 3) -> Line:
    return {
        "p50 ms": round(percentile(values, 0.5), digits),
        "p99 ms": round(percentile(values, 0.99), digits),
        "max ms": round(values[-1], digits) if values else None,
    }


async def latency(load: Load, pids: dict[str, int], seconds: float) -> Line:
    load.start_open_loop(RATE)
    await asyncio.sleep(STARTUP_S)
    began, cpu, before = monotonic_ns(), Cpu(pids), load.received
    await asyncio.sleep(seconds)
    line = {"phase": f"open loop, {RATE:,}/s", **cpu.line(load.received - before)}
    ended = monotonic_ns()
    load.stop()
    await until_quiet(load)
    return line | spread(latencies(load, began, ended))


async def move(load: Load, seconds: float) -> list[Line]:
    operator = TOPOLOGY.operators["average"]
    table = RoutingTable.initial(operator)
    source, destination = operator.instances
    moved = [s for s, key in enumerate(load.keys) if table.route(key).instance == source][:MOVED_KEYS]
    probes = moved[:: MOVED_KEYS // PROBE_KEYS]
    load.start_open_loop(RATE, probes)
    await asyncio.sleep(STARTUP_S + seconds)
    asked = monotonic_ns()
    keys = KeySet(keys=frozenset(load.keys[s] for s in moved))
    load.request(MoveRequest("move-1", operator.name, keys, source, destination, "live", 20_000.0))
    await until(lambda: load.move_ended, "the move does not end")
    ended = load.statuses[-1][0]
    await asyncio.sleep(2.0)
    load.stop()
    await until_quiet(load)
    steady = latencies(load, asked - int(seconds * 1e9), asked)
    median = percentile(steady, 0.5)
    lines: list[Line] = [{"phase": "steady before the move", "keys": KEYS, **spread(steady)}]
    groups = {
        "probe keys": set(probes),
        "moved keys": set(moved),
        "other keys": set(range(KEYS)) - set(moved),
    }
    for name, members in groups.items():
        worst = stoppages(load, members, asked, ended, median)
        lines.append({"phase": f"stoppage, {name}", "keys": len(worst), **spread(worst)})
    phases: dict[str, float] = {}
    for at, status in load.statuses:
        phases.setdefault(f"{status.phase} {status.reason}".strip(), round((at - asked) / 1e6, 1))
    lines.append({"phase": "move, ms after the request: " + ", ".join(f"{p} {t}" for p, t in phases.items())})
    return lines


def stoppages(load: Load, members: set[int], since_ns: int, until_ns: int, median_ms: float) -> list[float]:
    worst: dict[int, float] = {}
    for sensor, due, late in zip(load.sensors, load.due_ns, load.late_ns, strict=True):
        if since_ns <= due <= until_ns and sensor in members:
            worst[sensor] = max(worst.get(sensor, 0.0), late / 1e6 - median_ms)
    return sorted(worst.values())


async def run(hosting: Hosting, place: Place, seconds: float) -> list[Line]:
    load = Load(KEYS)
    host = Host(PRODUCER, load, place.registry, place.secret, dials=[SITE])
    running = asyncio.create_task(host.run())
    instances = TOPOLOGY.operators["average"].instances
    addresses = [await asyncio.to_thread(hosting.wait, name) for name in (SITE, *instances)]
    pids = {a.name.partition("@")[2] or "router": a.pid for a in addresses} | {"load": os.getpid()}
    await until(lambda: load.connected, "no connection with the router")
    pacer = Pacer(host, asyncio.get_running_loop())
    pacer.start()
    lines = [await throughput(load, host, pids, seconds), await latency(load, pids, seconds)]
    lines += await move(load, seconds)
    verdict = {"phase": f"checked {load.received:,} outputs: {load.faults}", "faults": load.faults.total}
    tasks = ", ".join(f"{a.name} pid {a.pid} stage {a.stage} attempt {a.attempt}" for a in addresses)
    pacer.running = False
    pacer.join()
    host.end("measured")
    await running
    return [*lines, verdict, {"phase": "Spark tasks: " + tasks}]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measured phase")
    parser.add_argument("--durability", choices=("os", "disk"), default="os")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tiercel-slice-", ignore_cleanup_errors=True) as directory:
        place = Place(directory)
        place.write(Manifest("slice", TOPOLOGY, {}, Settings(), given.durability))
        spark = open_session("tiercel-slice", slots=4, attempts=3)
        hosting = Hosting(spark, place)
        try:
            hosting.start(SITE)
            for name in TOPOLOGY.operators["average"].instances:
                hosting.start(name, plan())
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                lines = runner.run(run(hosting, place, given.seconds))
        finally:
            hosting.end()
            spark.stop()
    settings = msgspec.to_builtins(Settings()) | {
        "durability": given.durability,
        "keys": KEYS,
        "rate": RATE,
        "under_way_max": UNDER_WAY_MAX,
        "seconds": given.seconds,
    }
    tell("slice", lines, settings, given)


if __name__ == "__main__":
    main()
