"""A program of its own: a small cluster whose executors play machines.

    python several_machines.py DIRECTORY MACHINES

MACHINES has a character for each executor, in the order in which they are used first: those with the same one
are on one machine. So the two that replicas come to be on at first share one, with 112.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import tiercel
from tiercel.chaos.outages import spark_home
from tiercel.chaos.steady_traffic import Traffic, declare
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.net import addresses
from tiercel.runtime.process import host
from tiercel.runtime.process.host import Host
from tiercel.runtime.storage import replicated
from tiercel.spark.api.deployment import Live
from tiercel.spark.cluster import replica_placement as companions
from tiercel.spark.cluster.backend import Backend
from tiercel.spark.cluster.task import Build, build_host, executor_here
from tiercel.spark.operators.plans import OperatorPlan

SLOTS = 5  # per executor
PARTED_S_MAX = 60.0  # where Spark starts a task is chance: at the start it may be in vain


def machine_of_ours(place: DeploymentDir, machines: str) -> str:
    """Each executor takes the next seat that is free, and keeps it."""
    executor = executor_here()
    for seat, machine in enumerate(machines):
        taken = place.directory / f"seat {seat}"
        try:
            with taken.open("x", encoding="utf-8") as file:
                file.write(executor)
        except FileExistsError:
            while not (whose := taken.read_text(encoding="utf-8")):
                time.sleep(0.01)
            if whose != executor:
                continue
        return f"machine {machine}"
    raise AssertionError(machines)


def on_machines(machines: str) -> Build:
    """Processes that say that they are on the machine of their executor."""

    def build(place: DeploymentDir, name: str, plan: OperatorPlan | None) -> Host:
        machine = machine_of_ours(place, machines)
        for module in (addresses, host, replicated):
            module.machine_here = lambda: machine  # type: ignore[attr-defined]
        return build_host(place, name, plan)

    return build


def facts(live: Live) -> dict[str, object]:
    """Where the replicas are, and who has its copy on another machine than its own."""
    registry = live.deployment.registry
    where = {
        name: (found.executor, found.machine) for name in registry.names() if (found := registry.find(name))
    }
    processes = [found for found in live.status().processes if found.kind != "replica"]
    elsewhere = [p.name for p in processes if p.replica and where[p.replica][1] != where[p.name][1]]
    replicas = [where[found.name] for found in live.status().processes if found.kind == "replica"]
    return {"replicas": replicas, "with_copy_elsewhere": elsewhere, "processes": [p.name for p in processes]}


def crowded(live: Live, machines: str) -> bool:
    """Somebody's copy could be on another machine, and is not."""
    found = facts(live)
    return len(set(machines)) > 1 and found["with_copy_elsewhere"] != found["processes"]


def main(directory: Path, machines: str) -> None:
    def free(backend: Backend, tasks: int) -> set[str]:
        return {f"machine {machine}" for machine in machines}  # each has free slots

    companions.free_machines = free
    spark = tiercel.session("machines", master=f"local-cluster[{len(machines)},{SLOTS},1024]")
    work = spark_home() / "work" / spark.sparkContext.applicationId
    try:
        with tiercel.start(spark, ["cloud"], directory, durability="replica") as live:
            live.build = on_machines(machines)
            traffic = Traffic(*declare(live, instances={"cloud": 2}))
            traffic.go_on()
            give_up = time.monotonic() + PARTED_S_MAX
            while live.status().unreplicated or (crowded(live, machines) and time.monotonic() < give_up):
                time.sleep(0.1)
            traffic.go_on()
            report = facts(live)
            traffic.finish()
            print(json.dumps(report))
    finally:
        spark.stop()
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
