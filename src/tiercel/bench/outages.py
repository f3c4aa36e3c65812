"""Outages under load, on whatever cluster Spark runs: all rows come out once and in order.

Responsible for: killing workers and executors of a deployment of this program, one after the other and
    while rows flow; saying how long it took until rows flowed again. On a cluster also: executors that
    come when tasks wait for them, and one that is decommissioned.
Not responsible for: the rows and their judge (traffic.py), starting a cluster (standalone.py).

    python -m tiercel.bench.outages --master 'local[8]'
    python -m tiercel.bench.outages --master 'local-cluster[2,4,1024]'

Only processes that descend from this program, or from `roots`, are killed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tiercel.bench.processes import check_ours, executor_of
from tiercel.bench.steady import OPERATOR, Traffic, TrafficFault, declare
from tiercel.errors import UserError
from tiercel.spark.decommission import Handover
from tiercel.spark.live import Live, start
from tiercel.spark.session import open_session
from tiercel.spark.status import ProcessStatus

SITES = ("cloud", "edge")
INSTANCES = {"cloud": 2, "edge": 1}
ALLOCATION = {  # on a cluster: one executor to begin with, and more when tasks wait
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.initialExecutors": "1",
    "spark.dynamicAllocation.minExecutors": "1",
}
BACK_S_MAX = 120.0  # an executor that was killed must be noticed and allocated again first


class Outage(msgspec.Struct):
    """What was killed, and when all was well again."""

    what: str
    lost: list[str]  # routers and instances that were in it
    back_s: float  # until rows of every key flow, and everything that was lost lives again


class Departure(msgspec.Struct):
    """An executor that was decommissioned, and how everyone left it."""

    handover: Handover
    restarted: list[str]  # instances that lost their task: they had not left when the executor went
    retried: list[str]  # routers whose task failed there, instead of being started anew elsewhere
    took_s: float


class Report(msgspec.Struct):
    """What a run has seen; that it ended at all says that no row was lost, doubled or out of order."""

    master: str
    executors: dict[str, list[str]]  # who ran where at first
    rounds: int
    outages: list[Outage]
    suspected: list[str] = []  # executors that were taken for leaving, although they were killed
    departure: Departure | None = None
    scaled_s: float = 0.0  # instances for which an executor had to come first


# -- processes of this machine ----------------------------------------------------------------------


def spark_home() -> Path:
    """Where the package is, with Spark's programs and jars in it."""
    found = importlib.util.find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


# -- the run ------------------------------------------------------------------------------------------


def outages(live: Live, traffic: Traffic, roots: Collection[int], *, executor: bool) -> Iterator[Outage]:
    """One after the other, each when the one before is over."""
    for name in (f"{OPERATOR}@cloud#1", "cloud"):
        pid = check_ours(_processes(live)[name].pid, roots)
        yield _outage(live, traffic, f"worker of {name}", [name], pid)
    if executor:
        everyone = _processes(live)
        victim = executor_of(everyone["cloud"].pid, roots)
        lost = [name for name, found in everyone.items() if executor_of(found.pid, roots) == victim]
        yield _outage(live, traffic, "executor", lost, victim)


def decommission(live: Live, traffic: Traffic, roots: Collection[int]) -> Departure:
    """Spark is told that the executor of a router will go; it waits for our tasks, not for our keys."""
    before = _processes(live)
    executor = before["cloud"].executor
    there = [found for found in before.values() if found.executor == executor]
    begun = time.monotonic()
    os.kill(executor_of(before["cloud"].pid, roots), signal.SIGPWR)
    _until(
        lambda: any(h.executor == executor and h.state in ("gone", "lost") for h in live.handovers),
        f"{executor} is there",
        live,
    )
    traffic.go_on()
    took_s = round(time.monotonic() - begun, 1)
    handover = next(h for h in live.handovers if h.executor == executor)
    routers = [found.name for found in there if found.kind == "router"]
    return Departure(
        handover,
        [f.name for f in there if f.kind == "instance" and _life(live, f.name) > f.life],
        [name for name in routers if _processes(live)[name].attempt > 0],
        took_s,
    )


def _outage(live: Live, traffic: Traffic, what: str, lost: list[str], pid: int) -> Outage:
    lives = {name: found.life for name, found in _processes(live).items() if name in lost}
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    _until(lambda: all(_life(live, name) > life for name, life in lives.items()), f"{what} is not back", live)
    traffic.go_on()
    return Outage(what, lost, round(time.monotonic() - begun, 1))


def _processes(live: Live) -> dict[str, ProcessStatus]:
    return {found.name: found for found in live.status().processes}


def _life(live: Live, name: str) -> int:
    found = live.place.registry.find(name)
    return 0 if found is None else found.life


def _until(done: Callable[[], bool], what: str, live: Live) -> None:
    give_up = time.monotonic() + BACK_S_MAX
    while not done():
        if live.failures:
            raise UserError("; ".join(f"{name}: {reason}" for name, reason in live.failures.items()))
        if time.monotonic() > give_up:
            raise UserError(f"{what} after {BACK_S_MAX:g} s", hint="the log of Spark's executors")
        time.sleep(0.05)


def run(spark: Any, storage: Path, roots: Collection[int]) -> Report:
    """All outages that this kind of cluster can have."""
    master = spark.sparkContext.master
    with start(spark, SITES, storage) as live:
        traffic = Traffic(*declare(live, instances=INSTANCES))
        traffic.go_on()
        where: dict[str, list[str]] = {}
        for found in live.status().processes:
            where.setdefault(found.executor, []).append(found.name)
        cluster = not master.startswith("local[")
        seen = list(outages(live, traffic, roots, executor=cluster))
        if not cluster:
            return Report(master, where, traffic.finish(), seen)
        suspected = [handover.executor for handover in live.handovers]
        live.scale(OPERATOR, {"cloud": 1, "edge": 1}).wait()  # what is left has room on one executor
        departure = decommission(live, traffic, roots)
        scaled_s = round(live.scale(OPERATOR, {"cloud": 4, "edge": 1}).wait(), 1)
        return Report(master, where, traffic.finish(), seen, suspected, departure, scaled_s)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tiercel.bench.outages", description=__doc__)
    parser.add_argument("--master", default="local[8]", help="Spark's: local[8], local-cluster[2,4,1024]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tiercel-outages-") as directory:
        spark = open_session("tiercel-outages", master=options.master, config=ALLOCATION)
        work = spark_home() / "work" / spark.sparkContext.applicationId
        try:
            report = run(spark, Path(directory) / "storage", [os.getpid()])
        except (UserError, TrafficFault) as error:
            sys.exit(f"error: {error}")
        finally:
            spark.stop()
            shutil.rmtree(work, ignore_errors=True)  # where a local-cluster's executors have worked
    print(msgspec.json.encode(report).decode())


if __name__ == "__main__":
    main()
