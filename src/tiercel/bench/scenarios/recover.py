"""`tiercel bench recover`: from `kill -9` until outputs flow again, next to Spark's transformWithState.

Responsible for: the cases, the load, first output and back to normal, rows.
Not responsible for: the systems (recover_systems.py), the checkpoint interval (recover_sweep.py).

    fill the state | warm-up | steady | kill ... first output ... normal for 5 s | steady | kill ...

For one size, all deaths of workers happen in one deployment: with the disk, without it, and without it with
several successors. Each death of an executor has a deployment of its own: after it everything runs on the
last executor, and a second death would kill the router too. Spark dies once: its state store is in the JVM
and its checkpoint elsewhere, so a lost local disk or the number of instances makes no difference.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np

from tiercel.bench.metrics import STABLE_LATENCY, STABLE_WINDOWS, WINDOW_NS, Outputs, window_p99
from tiercel.bench.report import Line, percentile
from tiercel.bench.scenarios.recover_apps import Setup
from tiercel.bench.scenarios.recover_systems import Reading, Spark, System, Tiercel
from tiercel.errors import UserError

ShowProgress = Callable[[str], None]

WHATS = ("worker", "executor", "application")
STATE_BYTES = 10_000  # of each key
MB = 1_000_000
TICK_S = 0.01
FILL_ROWS = 2_000  # in one go, while the state is filled
FILL_S_MAX = 300.0
WARM_S = 6.0
TIMES_MIN = 4  # outputs needed in the warm-up and in the steady time
RUN_S_MAX = 120.0
STEADY_S = 15.0  # long enough to see what the machine does by itself
NORMAL_S_MAX = 120.0
LOOK_S = 0.25


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    sizes_mb: Sequence[int]
    whats: Sequence[str]
    instances: Sequence[int]  # that take over where the local disk is lost
    local_disk: Sequence[bool]
    rate: int
    read_mb_s: float  # of each reader of the backup; 0: no limit
    spark: bool
    seed: int


# -- load ---------------------------------------------------------------------------------------------


class Load:
    """Rows of every key in turn, each with the time it is due; a late source counts as latency."""

    def __init__(self, system: System, keys: int, rate: int) -> None:
        self._system, self._keys, self._rate = system, keys, rate
        self._sent = [0] * keys
        self._next = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._failure: BaseException | None = None
        self._instead: System | None = None

    def fill(self) -> None:
        """Each key once, so that all of the state exists."""
        began, before = time.monotonic(), self._system.received
        for first in range(0, self._keys, FILL_ROWS):
            self._system.send(self._take(min(FILL_ROWS, self._keys - first), 0))
        while self._system.received < before + self._keys:
            if time.monotonic() - began > FILL_S_MAX:
                raise UserError(f"the state was not there within {FILL_S_MAX:g} s")
            time.sleep(0.05)
            self._system.send([])  # flush what waits for a fuller frame

    def start(self) -> None:
        self._thread.start()

    def begin_again(self, system: System) -> None:
        """Feed another system, from the first row on; what is due later follows when it is due."""
        self._instead = system

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()

    def check(self) -> None:
        if self._failure is not None:
            raise UserError(f"the load has ended: {self._failure}") from self._failure

    def _take(self, count: int, due_ns: int) -> list[Reading]:
        rows = []
        for _ in range(count):
            sensor = self._next
            self._next = (sensor + 1) % self._keys
            self._sent[sensor] += 1
            rows.append((sensor, self._sent[sensor], due_ns, float(self._sent[sensor])))
        return rows

    def _run(self) -> None:
        try:
            begun_ns, sent, behind = monotonic_ns(), 0, False
            while not self._ending.is_set():
                if not behind:
                    time.sleep(TICK_S)
                if self._instead is not None:
                    self._system, self._instead = self._instead, None
                    self._sent, self._next, sent = [0] * self._keys, 0, 0
                    self._system.send(self._take(self._keys, 0))
                rows: list[Reading] = []
                while (
                    len(rows) < FILL_ROWS
                    and (due_ns := begun_ns + sent * 1_000_000_000 // self._rate) <= monotonic_ns()
                ):
                    rows += self._take(1, due_ns)
                    sent += 1
                behind = len(rows) == FILL_ROWS
                self._system.send(rows)
        except BaseException as failure:
            self._failure = failure


# -- what a death cost ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steady:
    """The normal latency before the death."""

    p50_ms: float
    p99_ms: float
    worst_ms: float  # of its windows: the noise of the machine

    @classmethod
    def of(cls, outputs: Outputs, begin_ns: int, end_ns: int) -> Steady:
        due = outputs.due_ns
        latency = np.sort(outputs.latency_ms[(begin_ns <= due) & (due < end_ns)])
        windows = [p99 for p99 in window_p99(outputs, begin_ns, end_ns, WINDOW_NS) if p99 is not None]
        return cls(percentile(latency, 0.5), percentile(latency, 0.99), max(windows, default=0.0))

    @property
    def normal_ms(self) -> float:
        return max(STABLE_LATENCY * self.p99_ms, self.worst_ms)


def first_output_s(outputs: Outputs, killed_ns: int) -> float | None:
    """Seconds until the first output of a tuple that was due after the death."""
    came = outputs.emitted_ns[outputs.due_ns >= killed_ns]
    return round((int(came.min()) - killed_ns) / 1e9, 3) if len(came) else None


def normal_s(outputs: Outputs, killed_ns: int, normal_ms: float) -> float | None:
    """Seconds until the start of five seconds in which all outputs have normal latency.

    As `stabilise` in metrics.py, by windows of due time. The rate needs no check: everything due in a good
    window has come out. (Micro-batches emit in bursts, so a rate in windows of 250 ms has no meaning.)
    """
    until_ns = monotonic_ns() - int(normal_ms * 1e6)  # later tuples may still come out in time
    windows = window_p99(outputs, killed_ns, until_ns, WINDOW_NS)
    good = 0
    for n, p99 in enumerate(windows):
        good = good + 1 if p99 is not None and p99 <= normal_ms else 0
        if good == STABLE_WINDOWS:
            return round((n + 1 - STABLE_WINDOWS) * WINDOW_NS / 1e9, 3)
    return None


def death(system: System, load: Load, kill: Callable[[], int]) -> Line:
    """Steady, then a death, then until all is normal again."""
    begin_ns = monotonic_ns()
    let_run(system, STEADY_S)
    killed_ns = kill()
    steady = Steady.of(system.outputs(), begin_ns, killed_ns)
    return until_normal(system, load, killed_ns, steady)


def let_run(system: System, seconds: float) -> None:
    """Run for this time, and until some of its tuples have come out: a micro-batch may take long."""
    begun, begun_ns = time.monotonic(), monotonic_ns()
    time.sleep(seconds)
    while True:
        outputs = system.outputs()
        if len(np.unique(outputs.emitted_ns[outputs.due_ns >= begun_ns])) >= TIMES_MIN:
            return
        if time.monotonic() - begun > RUN_S_MAX:
            what = f"{system.kind} does not get through its load"
            raise UserError(what, hint="a lower --rate, or a machine that is less busy")
        time.sleep(LOOK_S)


def until_normal(system: System, load: Load, killed_ns: int, steady: Steady) -> Line:
    """The figures of a death, measured until latency is normal."""
    give_up = time.monotonic() + NORMAL_S_MAX
    back: float | None = None
    while back is None and time.monotonic() < give_up:
        time.sleep(LOOK_S)
        load.check()
        back = normal_s(_settled(system.outputs()), killed_ns, steady.normal_ms)
    first = first_output_s(system.outputs(), killed_ns)
    return {
        "first_output_s": first,
        "normal_s": None if back is None else max(back, first or 0.0),
        "steady_p50_ms": round(steady.p50_ms, 1),
        "steady_p99_ms": round(steady.p99_ms, 1),
    }


def _settled(outputs: Outputs) -> Outputs:
    """The first output of each tuple: Spark's sink may show a tuple twice."""
    order = np.lexsort((outputs.emitted_ns, outputs.due_ns, outputs.sensor))
    sensor, due, emitted = (c[order] for c in (outputs.sensor, outputs.due_ns, outputs.emitted_ns))
    first = np.ones(len(order), dtype=bool)
    first[1:] = (sensor[1:] != sensor[:-1]) | (due[1:] != due[:-1])
    return Outputs(sensor[first], due[first], emitted[first])


# -- the cases -------------------------------------------------------------------------------------------


def measure(options: Options, show_progress: ShowProgress) -> tuple[list[Line], Line]:
    """One row for each size, kind of death, disk and number of instances, and all measurements."""
    rows: list[Line] = []
    every: list[Line] = []
    for what in options.whats:
        for size_mb in options.sizes_mb:
            ours = list(_tiercels(options, what, size_mb, show_progress))
            theirs = _sparks(options, what, size_mb, show_progress) if options.spark else None
            every += ours + ([theirs] if theirs is not None else [])
            rows += [_row(line, theirs) for line in ours]
    return rows, {"measured": every}


def _row(ours: Line, theirs: Line | None) -> Line:
    spark = theirs or {}
    return {
        **{name: ours[name] for name in ("size_mb", "what", "local_disk", "instances")},
        "tiercel_s": ours["first_output_s"],
        "spark_s": spark.get("first_output_s"),
        "ratio": _ratio(spark.get("first_output_s"), ours["first_output_s"]),
        "tiercel_normal_s": ours["normal_s"],
        "spark_normal_s": spark.get("normal_s"),
        "normal_ratio": _ratio(spark.get("normal_s"), ours["normal_s"]),
    }


def _ratio(spark_s: float | None, tiercel_s: float | None) -> float | None:
    return round(spark_s / tiercel_s, 1) if spark_s and tiercel_s else None


@contextlib.contextmanager
def started(kind: type[System], **facts: Any) -> Iterator[System]:
    """An application that waits for rows, in a directory that is gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix=f"tiercel-recover-{kind.kind}-"))
    try:
        system = kind(Setup(str(directory), STATE_BYTES, **facts))
        try:
            yield system
        finally:
            system.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def running(kind: type[System], size_mb: int, rate: int, **facts: Any) -> Iterator[tuple[System, Load]]:
    """An application with its state, warm and under load."""
    with started(kind, **facts) as system:
        load = Load(system, max(1, size_mb * MB // STATE_BYTES), rate)
        load.fill()
        load.start()
        try:
            let_run(system, WARM_S)
            yield system, load
        finally:
            load.stop()


def warm_workers(options: Options, what: str) -> int:
    """One for each that takes over; of an executor, the router may have to as well."""
    return {"worker": max(options.instances), "executor": 2, "application": 1}[what]


def _tiercels(options: Options, what: str, size_mb: int, show_progress: ShowProgress) -> Iterator[Line]:
    facts: dict[str, Any] = {
        "cluster": what == "executor",
        "read_mb_s": options.read_mb_s,
        "warm_workers": warm_workers(options, what),
    }
    cases = [
        (local_disk, instances)
        for local_disk in sorted(options.local_disk, reverse=True)
        for instances in sorted(options.instances)
        if instances == 1 or not (local_disk or what == "application")
    ]  # a disk is opened, not read; an application restarts without successors
    for together in [[case] for case in cases] if what == "executor" else [cases]:
        with running(Tiercel, size_mb, options.rate, **facts) as (system, load):
            assert isinstance(system, Tiercel)
            for local_disk, instances in together:
                yield _tiercel(system, load, what, size_mb, local_disk, instances, show_progress)


def _tiercel(
    system: Tiercel,
    load: Load,
    what: str,
    size_mb: int,
    local_disk: bool,
    instances: int,
    show_progress: ShowProgress,
) -> Line:
    disk = "" if local_disk else ", its disk lost"
    show_progress(f"Tiercel: death of the {what}, {size_mb} MB{disk}, {instances} recover")
    line = death(system, load, lambda: _kill(system, what, local_disk, instances))
    show_progress(f"    first output after {line['first_output_s']} s, normal after {line['normal_s']} s")
    return {
        "system": "tiercel",
        "size_mb": size_mb,
        "what": what,
        "local_disk": local_disk,
        "instances": instances,
        "died": system.died,
        **line,
    }


def _kill(system: Tiercel, what: str, local_disk: bool, instances: int) -> int:
    killed_ns = system.kill_application() if what == "application" else system.kill(what)
    if not local_disk:
        system.lose_disk()
    if what == "application":
        system.launch()
        threading.Thread(target=system.wait_ready, daemon=True).start()
    elif instances > 1:
        system.recover_over(instances)
    return killed_ns


def _sparks(options: Options, what: str, size_mb: int, show_progress: ShowProgress) -> Line:
    show_progress(f"Spark: death of the {what}, {size_mb} MB")
    with running(Spark, size_mb, options.rate, cluster=what == "executor") as (system, load):
        assert isinstance(system, Spark)

        def kill() -> int:
            if what != "application":
                return system.kill(what)
            killed_ns = system.kill_application()
            system.launch()
            return killed_ns

        line = death(system, load, kill)
        show_progress(f"    first output after {line['first_output_s']} s, normal after {line['normal_s']} s")
        return {"system": "spark", "size_mb": size_mb, "what": what, **line}
