"""The load in a process of its own with one thread, so that it does not disturb what it measures.

Responsible for: driving the machine of load.py on request; latencies of a run; its record as parquet.
Not responsible for: the definition of faults (load.py) and figures (metrics.py).

    python -m tiercel.bench.loadgen.process STORAGE KEYS OUTPUT-STREAM      (started by `LoadProcess`)
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic_ns
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import uvloop

from tiercel.bench.loadgen.child import Answer, ChildProcess, serve
from tiercel.bench.loadgen.load import PRODUCER, TICK_NS, Faults, Load, Record
from tiercel.bench.loadgen.timer import TickTimer
from tiercel.bench.operators import SITE
from tiercel.bench.report import percentile
from tiercel.core.machine.events import TimerFired
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.process.host import Host, HostConfig
from tiercel.runtime.process.machine import tame_collector

WAIT_S_MAX = 120.0


class LoadStuck(Exception):
    """Something that had to happen did not."""


async def until(happened: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + WAIT_S_MAX
    while not happened():
        if time.monotonic() > give_up:
            raise LoadStuck(what)
        await asyncio.sleep(0.005)


async def until_quiet(load: Load) -> None:
    await until(lambda: load.quiet, "outputs are missing long after the last input")


def spread(latencies_ns: Any) -> Answer:
    """Percentiles in ms."""
    ordered = np.sort(latencies_ns) / 1e6
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999, "max_ms": 1.0}
    return {name: round(percentile(ordered, share), 3) for name, share in shares.items()}


def write_record(record: Record, inputs: Path, outputs: Path) -> None:
    """Outputs in the order they came: `at` is their place in it."""
    sent = {"sensor": record.in_sensor, "n": record.in_n, "due_ns": record.in_due_ns}
    came = {"sensor": record.sensor, "n": record.n, "due_ns": record.due_ns, "emitted_ns": record.emitted_ns}
    came_at = {"at": np.arange(len(record.sensor), dtype=np.int64)}
    for path, columns in ((inputs, sent), (outputs, came_at | came)):
        arrays = {name: pa.array(np.asarray(column, dtype=np.int64)) for name, column in columns.items()}
        pq.write_table(pa.table(arrays), path)


# -- in the driver ----------------------------------------------------------------------------


class LoadProcess(ChildProcess):
    """The driver's hold on the process."""

    def __init__(self, place: DeploymentDir, keys: int, output: str) -> None:
        super().__init__(__name__, place.directory, keys, output)

    def open_loop(self, rate: int, seconds: float, warm_s: float) -> Answer:
        """Latencies of the tuples due in these seconds, after some that do not count."""
        return self.ask("open", rate=rate, seconds=seconds, warm_s=warm_s)

    def closed_loop(self, seconds: float, warm_s: float, under_way: int) -> Answer:
        return self.ask("closed", seconds=seconds, warm_s=warm_s, under_way=under_way)

    def fill(self, under_way: int) -> Answer:
        """Every key gets a tuple, as fast as that goes."""
        return self.ask("fill", under_way=under_way)

    def favour(self, keys: int) -> None:
        """From now on the first so many keys get nine of ten tuples; 0: all get as many."""
        self.ask("favour", keys=keys)

    def heat(self, sensors: Sequence[int]) -> None:
        """From now on these keys get every second tuple, in turn."""
        self.ask("heat", sensors=list(sensors))

    def focus(self, keys: int) -> None:
        """From now on only so many keys get tuples."""
        self.ask("focus", keys=keys)

    def draw(self, sensors: Sequence[int], zipf: float, seed: int) -> None:
        """From now on only these keys get tuples, in proportion to 1 / rank**zipf."""
        self.ask("draw", sensors=list(sensors), zipf=zipf, seed=seed)

    def start(self, rate: int, probes: Sequence[int]) -> None:
        self.ask("start", rate=rate, probes=list(probes))

    def change_rate(self, rate: int) -> None:
        """Continue the open loop with another rate."""
        self.ask("rate", rate=rate)

    def stop(self, inputs: Path, outputs: Path) -> Answer:
        """End the load, wait for what is under way, keep the record."""
        return self.ask("stop", inputs=str(inputs), outputs=str(outputs))


# -- the process ------------------------------------------------------------------------------


class LoadServer:
    """Questions to the load, answered."""

    def __init__(self, load: Load, host: Host) -> None:
        self._load, self._host = load, host
        self._ticks: TickTimer | None = None  # only while the load runs: a timer costs CPU

    async def handle(self, question: Answer) -> Answer:
        load = self._load
        match question:
            case {"do": "open", "rate": rate, "seconds": seconds, "warm_s": warm_s}:
                load.record = Record()
                self._start(rate)
                await asyncio.sleep(warm_s)
                began_ns = monotonic_ns()
                await asyncio.sleep(seconds)
                ended_ns = monotonic_ns()
                self._stop()
                await until_quiet(load)
                due, emitted = np.asarray(load.record.due_ns), np.asarray(load.record.emitted_ns)
                counted = (began_ns <= due) & (due < ended_ns)
                return {**spread((emitted - due)[counted]), "tuples": int(counted.sum()), **self._faults()}
            case {"do": "closed", "seconds": seconds, "warm_s": warm_s, "under_way": under_way}:
                load.closed_loop_max = under_way
                self._host.deliver(TimerFired("fill"))
                at_first = load.received
                await asyncio.sleep(warm_s)
                began_s, before = time.monotonic(), load.received
                await asyncio.sleep(seconds)
                rate = (load.received - before) / (time.monotonic() - began_s)
                self._stop()
                await until_quiet(load)
                return {"events_per_s": round(rate), "tuples": load.received - at_first, **self._faults()}
            case {"do": "fill", "under_way": under_way}:
                load.closed_loop_max = under_way
                self._host.deliver(TimerFired("fill"))
                while (before := load.received) < len(load.keys):
                    await until(lambda: load.received > before, "the keys cannot be filled")
                self._stop()
                await until_quiet(load)
                return self._faults()
            case {"do": "favour", "keys": keys}:
                load.favoured = keys
                return {}
            case {"do": "heat", "sensors": sensors}:
                load.hot = sensors
                return {}
            case {"do": "focus", "keys": keys}:
                load.focus(keys)
                return {}
            case {"do": "draw", "sensors": sensors, "zipf": zipf, "seed": seed}:
                load.draw(sensors, zipf, seed)
                return {}
            case {"do": "start", "rate": rate, "probes": probes}:
                load.record = Record()
                self._start(rate, probes)
                return {}
            case {"do": "rate", "rate": rate}:
                load.change_rate(rate)
                return {}
            case {"do": "stop", "inputs": inputs, "outputs": outputs}:
                self._stop()
                await until_quiet(load)
                write_record(load.record, Path(inputs), Path(outputs))
                return {"tuples": len(load.record.sensor), **self._faults()}
            case _:
                raise ValueError(question)

    def _start(self, rate: int, probes: Sequence[int] = ()) -> None:
        first_ns = self._load.start_open_loop(rate, probes)
        self._ticks = TickTimer(first_ns, TICK_NS, lambda: self._host.deliver(TimerFired("tick")))

    def _stop(self) -> None:
        self._load.stop()
        if self._ticks is not None:
            self._ticks.close()
            self._ticks = None

    def _faults(self) -> Answer:
        """Those since the last answer, and their kinds."""
        faults, self._load.faults = self._load.faults, Faults()
        return {"faults": msgspec.to_builtins(faults), "fault_count": faults.total}


async def run(directory: str, keys: int, output: str) -> None:
    place = DeploymentDir(directory)
    load = Load(keys, output)
    links = place.manifest().links
    host = Host(PRODUCER, load, HostConfig.of(place, dials=[SITE], listens=False, site=SITE, links=links))
    running = asyncio.create_task(host.run())
    await until(lambda: load.connected, "no connection with the router")
    tame_collector()
    await serve(LoadServer(load, host).handle)
    host.end("measured")
    await running


def main() -> None:
    directory, keys, output = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(directory, int(keys), output))


if __name__ == "__main__":
    main()
