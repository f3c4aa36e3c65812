"""Killed workers, cancelled jobs and a clean stop: each row is output once in order."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tiercel
from tiercel.chaos.outages import check_ours
from tiercel.chaos.steady_traffic import OPERATOR, Traffic, declare
from tiercel.runtime.deployment import DeploymentDir, DriverLock
from tiercel.runtime.process.host import Host
from tiercel.spark.api.deployment import Live
from tiercel.spark.api.status import ProcessStatus
from tiercel.spark.cluster.supervisor import FAILURES_MAX
from tiercel.spark.cluster.task import build_host
from tiercel.spark.operators.plans import OperatorPlan
from waiting import until

INSTANCES = [f"{OPERATOR}@cloud#1", f"{OPERATOR}@cloud#2"]


def process(live: Live, name: str) -> ProcessStatus:
    return next(found for found in live.status().processes if found.name == name)


def until_reborn(live: Live, before: ProcessStatus) -> None:
    """A worker whose job was cancelled works on for up to two seconds; then Spark kills it."""
    while True:
        found = live.deployment.registry.find(before.name)
        if found is not None and found.incarnation > before.incarnation:
            assert found.pid != before.pid
            return
        assert before.name not in live.failures
        time.sleep(0.05)


@pytest.fixture
def deployment(spark: SparkSession, tmp_path: Path) -> Iterator[tuple[Live, Traffic]]:
    with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
        traffic = Traffic(*declare(live, instances={"cloud": 2}))
        traffic.go_on()
        yield live, traffic


def kill_worker(live: Live, name: str) -> None:
    os.kill(check_ours(process(live, name).pid, [os.getpid()]), signal.SIGKILL)


def cancel_job(live: Live, name: str) -> None:
    live.cancel(name)


@pytest.mark.parametrize("strike", [kill_worker, cancel_job])
def test_crashed_process_restarts_and_each_row_is_output_once_in_order(
    deployment: tuple[Live, Traffic], strike: Callable[[Live, str], None]
) -> None:
    live, traffic = deployment
    for name in (INSTANCES[0], "cloud"):
        before = process(live, name)
        strike(live, name)
        until_reborn(live, before)
        traffic.go_on()
    everyone = [process(live, name) for name in (*INSTANCES, "cloud")]
    for before in everyone:  # all at once
        strike(live, before.name)
    for before in everyone:
        until_reborn(live, before)
    traffic.go_on()
    traffic.finish()


@pytest.mark.long
def test_process_that_cannot_start_on_a_full_disk_is_not_given_up(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Four jobs that failed within seconds, and the process was gone for good, although room came later."""
    full = tmp_path / "full"

    def build(place: DeploymentDir, name: str, plan: OperatorPlan | None) -> Host:
        if full.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return build_host(place, name, plan)

    with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
        live.build = build
        traffic = Traffic(*declare(live, instances={"cloud": 2}))
        traffic.go_on()
        before = process(live, INSTANCES[0])
        full.touch()
        kill_worker(live, before.name)
        while process(live, before.name).submissions < before.submissions + FAILURES_MAX + 1:
            assert live.failures == {}
            time.sleep(0.05)
        full.unlink()
        until_reborn(live, before)
        traffic.go_on()
        traffic.finish()


def test_drain_moves_single_keys_from_slots_of_other_instances_too(
    deployment: tuple[Live, Traffic],
) -> None:
    live, traffic = deployment
    first, second = INSTANCES
    guest = next(key for key, owner in live.owners(OPERATOR, range(20)).items() if owner == first)
    live.move(OPERATOR, keys=[guest], to=second).wait()
    assert live.owners(OPERATOR, [guest]) == {guest: second}
    live.drain(second).wait()
    assert set(live.owners(OPERATOR, range(20)).values()) == {first}
    traffic.finish()


def test_stop_leaves_no_task_and_no_lock_and_the_storage_resumes(spark: SparkSession, tmp_path: Path) -> None:
    rounds = 0
    tracker = spark.sparkContext.statusTracker()
    for incarnation in (1, 2):
        with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
            traffic = Traffic(*declare(live, instances={"cloud": 2}), begin=rounds)
            traffic.go_on()
            assert {found.incarnation for found in live.status().processes} == {incarnation}
            rounds = traffic.finish()  # it judges all rows from the first on: counts go on
            ports = [
                found.port for name in (*INSTANCES, "cloud") if (found := live.deployment.registry.find(name))
            ]
        assert len(ports) == 3
        for port in ports:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
        assert live.deployment.registry.names() == []
        until(lambda: not tracker.getActiveStageIds(), "a stage is left")  # Spark tells of its end later
        DriverLock(live.deployment).release()
