"""Single outages under load, on any cluster that Spark runs on: all rows must come out once and in order.

Responsible for: killing workers and executors of a deployment of this program, one after the other and
    while rows flow; measuring how long it takes until rows flow again. On a cluster also: executors that
    come when tasks wait for them, and one that is decommissioned.
Not responsible for: the rows and their checks (steady_traffic.py), starting a cluster
    (standalone_cluster.py).

    python -m tiercel.chaos.outages --master 'local[8]'
    python -m tiercel.chaos.outages --master 'local-cluster[2,4,1024]'

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

from tiercel.chaos.processes import check_ours, executor_of
from tiercel.chaos.steady_traffic import OPERATOR, Traffic, TrafficFault, declare
from tiercel.errors import UserError
from tiercel.spark.api.deployment import Live, start
from tiercel.spark.api.status import ProcessStatus
from tiercel.spark.cluster.decommission import Handover
from tiercel.spark.cluster.session import open_session

SITES = ("cloud", "edge")
INSTANCES = {"cloud": 2, "edge": 1}
ALLOCATION = {  # on a cluster: one executor at first, and more when tasks wait
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.initialExecutors": "1",
    "spark.dynamicAllocation.minExecutors": "1",
}
BACK_S_MAX = 120.0  # an executor that was killed must be noticed and allocated again first


class Outage(msgspec.Struct):
    """What was killed, and the time until everything worked again."""

    what: str
    lost: list[str]  # routers and instances that were in it
    back_s: float  # until rows of every key flow and all lost processes run again


class Decommission(msgspec.Struct):
    """A decommissioned executor, and how its processes left it."""

    handover: Handover
    restarted: list[str]  # instances that lost their task: they had not left when the executor went
    retried: list[str]  # routers whose task failed there instead of starting elsewhere
    took_s: float


class Report(msgspec.Struct):
    """The result of a run; a run that ends has lost, doubled and reordered no row."""

    master: str
    executors: dict[str, list[str]]  # executor -> processes, at first
    rounds: int
    outages: list[Outage]
    suspected: list[str] = []  # executors that were killed, but seemed to be decommissioned
    decommissioned: Decommission | None = None
    scaled_s: float = 0.0  # instances for which an executor had to come first


# -- processes of this machine ----------------------------------------------------------------------


def spark_home() -> Path:
    """The directory of the pyspark package, with Spark's programs and jars."""
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


def decommission(live: Live, traffic: Traffic, roots: Collection[int]) -> Decommission:
    """Decommission the executor of a router. Spark waits for our tasks, not for our keys."""
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
    return Decommission(
        handover,
        [f.name for f in there if f.kind == "instance" and _incarnation(live, f.name) > f.incarnation],
        [name for name in routers if _processes(live)[name].attempt > 0],
        took_s,
    )


def _outage(live: Live, traffic: Traffic, what: str, lost: list[str], pid: int) -> Outage:
    incarnations = {name: found.incarnation for name, found in _processes(live).items() if name in lost}
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    _until(
        lambda: all(_incarnation(live, name) > incarnation for name, incarnation in incarnations.items()),
        f"{what} is not back",
        live,
    )
    traffic.go_on()
    return Outage(what, lost, round(time.monotonic() - begun, 1))


def _processes(live: Live) -> dict[str, ProcessStatus]:
    return {found.name: found for found in live.status().processes}


def _incarnation(live: Live, name: str) -> int:
    found = live.deployment.registry.find(name)
    return 0 if found is None else found.incarnation


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
        live.scale(OPERATOR, {"cloud": 1, "edge": 1}).wait()  # the rest fits on one executor
        decommissioned = decommission(live, traffic, roots)
        scaled_s = round(live.scale(OPERATOR, {"cloud": 4, "edge": 1}).wait(), 1)
        return Report(master, where, traffic.finish(), seen, suspected, decommissioned, scaled_s)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tiercel.chaos.outages", description=__doc__)
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
            shutil.rmtree(work, ignore_errors=True)  # the work directory of a local-cluster's executors
    print(msgspec.json.encode(report).decode())


if __name__ == "__main__":
    main()
