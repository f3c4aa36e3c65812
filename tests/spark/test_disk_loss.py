"""A killed process that has lost its disk is restored from its backup, exactly where it stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from pyspark.sql import SparkSession

import tiercel
import tiercel.admin
from tiercel.chaos.outages import check_ours
from tiercel.chaos.steady_traffic import OPERATOR, Traffic, declare
from tiercel.runtime.net.registry import Address
from tiercel.runtime.storage.directory import directory_of
from tiercel.spark.api.deployment import Live

INSTANCES = [f"{OPERATOR}@cloud#1", f"{OPERATOR}@cloud#2"]


def test_each_row_is_output_once_in_order_after_a_crash_with_disk_loss(
    spark: SparkSession, tmp_path: Path
) -> None:
    backup = {"location": (tmp_path / "backup").as_uri(), "every_s": 0.05, "strict": True}
    local = str(tmp_path / "disks" / "{executor}")
    with tiercel.start(spark, ["cloud"], tmp_path / "storage", backup=backup, local=local) as live:
        traffic = Traffic(*declare(live, instances={"cloud": 2}))
        traffic.go_on()
        assert list((tmp_path / "storage" / "processes").iterdir()) == [
            tmp_path / "storage/processes/controller"
        ]
        for name in (INSTANCES[0], "cloud"):
            before = next(found for found in live.status().processes if found.name == name)
            disk = directory_of(live.deployment, live.deployment.manifest(), name, before.executor)
            os.kill(check_ours(before.pid, [os.getpid()]), signal.SIGKILL)
            disk.rename(tmp_path / f"gone {name}")
            again = _next_life(live, name, before.incarnation)
            assert disk.exists()
            if name in INSTANCES:  # at once: some of its values may still be in the backup
                os.kill(check_ours(again.pid, [os.getpid()]), signal.SIGKILL)
                _next_life(live, name, again.incarnation)
            traffic.go_on()
        traffic.finish()
    kept = {line.process for line in tiercel.admin.show(tmp_path / "storage")}
    assert {*INSTANCES, "cloud"} <= kept


def _next_life(live: Live, name: str, incarnation: int) -> Address:
    while (found := live.deployment.registry.find(name)) is None or found.incarnation <= incarnation:
        assert name not in live.failures
        time.sleep(0.005)
    return found
