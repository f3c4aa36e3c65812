"""A program of its own: a small cluster whose executors are killed one after the other, disks and all.

    python lost_executor.py DIRECTORY SITE

Each executor is killed while rows flow, its disk deleted; what comes out is judged row by row. Instances are
at the site; the copies of all are at the cloud.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow

import tiercel
from tiercel.chaos.outages import spark_home
from tiercel.chaos.processes import check_ours, executor_of
from tiercel.chaos.steady_traffic import Traffic, declare
from tiercel.core.settings import Settings
from tiercel.runtime.recovery.recover import has_replica_copy
from tiercel.spark.api.deployment import Live
from tiercel.spark.cluster.backend import backend_of
from tiercel.spark.cluster.warm_workers import EXECUTORS_MIN, warm_one_of_several

SLOTS = 6  # per executor
CONFIG = {"spark.decommission.enabled": "false"}  # what is killed is not replaced under another name


def lose(live: Live, name: str, disks: Path) -> list[str]:
    """The executor of a process, with everyone on it and its disk."""
    everyone = {found.name: found for found in live.status().processes}
    executor = everyone[name].executor
    lost = [found for found in everyone.values() if found.executor == executor]
    os.kill(executor_of(check_ours(everyone[name].pid, [os.getpid()]), [os.getpid()]), signal.SIGKILL)
    shutil.rmtree(disks / executor, ignore_errors=True)
    for before in lost:
        while (
            found := live.deployment.registry.find(before.name)
        ) is None or found.incarnation <= before.incarnation:
            assert live.failures == {}, live.failures
            time.sleep(0.05)
    holders = [found.name for found in everyone.values() if found.kind != "replica"]
    while not all(
        has_replica_copy(live.deployment, name) for name in holders
    ):  # a second loss now would be one too many
        assert live.failures == {}, live.failures
        time.sleep(0.1)
    return [found.name for found in lost]


def daemons(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Executors whose Python workers run the tasks of warm_workers.py: each has a daemon."""
    for _ in warm_one_of_several(batches):
        yield pyarrow.RecordBatch.from_pydict({"id": [os.getppid()]})


def main(directory: Path, site: str) -> None:
    spark = tiercel.session("lost-executor", master=f"local-cluster[2,{SLOTS},1024]", config=CONFIG)
    work = spark_home() / "work" / spark.sparkContext.applicationId
    disks = directory / "disks"
    settings = Settings(suspect_ms=60_000)
    try:
        with tiercel.start(
            spark,
            list(dict.fromkeys(["cloud", site])),
            directory / "storage",
            durability="replica",
            local=str(disks / "{executor}"),
            replicas_at={site: "cloud"},
            settings=settings,
        ) as live:
            traffic = Traffic(*declare(live, instances={site: 2}))
            traffic.go_on()
            print(live.status(), file=sys.stderr)
            lost = []
            for name in (site, "replica 1 of cloud", site):
                lost.append(lose(live, name, disks))
                traffic.go_on()
                print(live.status(), file=sys.stderr)
            warm = {row.id for row in backend_of(spark).job(daemons, EXECUTORS_MIN).collect()}
            everyone = live.status().processes
            report = {
                "rounds": traffic.finish(),
                "lost": lost,
                "warm_on": len(warm),
                "replicas": [found.name for found in everyone if found.kind == "replica"],
                "holders": [found.replica for found in everyone if found.kind != "replica"],
            }
            print(json.dumps(report))
    finally:
        spark.stop()
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
