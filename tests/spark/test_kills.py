"""Workers that are killed, jobs that are cancelled, a clean end: what comes out is exactly what went in."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tiercel
from tiercel.bench.outages import check_ours
from tiercel.bench.steady import OPERATOR, Traffic, declare
from tiercel.spark.live import Live
from tiercel.spark.status import ProcessStatus

INSTANCES = [f"{OPERATOR}@cloud#1", f"{OPERATOR}@cloud#2"]


def process(live: Live, name: str) -> ProcessStatus:
    return next(found for found in live.status().processes if found.name == name)


def is_alive(pid: int) -> bool:
    """A worker of Spark; one that has ended and waits for its parent is not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False


def until_reborn(live: Live, before: ProcessStatus) -> None:
    """A worker whose job was cancelled works on for up to two seconds; then Spark kills it."""
    while True:
        found = live.place.registry.find(before.name)
        if found is not None and found.life > before.life:
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
    live.spark.sparkContext.cancelJobsWithTag(f"tiercel:{name}")


@pytest.mark.parametrize("strike", [kill_worker, cancel_job])
def test_what_is_struck_down_comes_back_and_every_row_comes_out_once_and_in_order(
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


def test_a_clean_end_leaves_no_worker_and_no_lock_and_the_same_storage_goes_on(
    spark: SparkSession, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    rounds, pids = 0, set()
    for _ in range(2):
        with tiercel.start(spark, ["cloud"], storage) as live:
            traffic = Traffic(*declare(live, instances={"cloud": 2}), begin=rounds)
            traffic.go_on()
            processes = live.status().processes
            rounds = traffic.finish()
        assert not list((storage / "registry").glob("*.address"))
        tasks = spark.sparkContext.statusTracker()
        assert tasks.getActiveStageIds() == []
        pids |= {found.pid for found in processes}
    assert rounds > 40
    assert {found.life for found in processes} == {2}
