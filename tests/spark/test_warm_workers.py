"""Warm workers: warmed again when one was taken, and before Spark ends it; none where Spark keeps none."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
from pyspark.sql import SparkSession

import tiercel
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.net.registry import Address
from tiercel.spark.cluster import warm_workers
from tiercel.spark.cluster.backend import Backend, backend_of
from tiercel.spark.pyspark_internals import ExecutorState


class Job:
    """So many tasks of a pool."""

    def __init__(self, pool: Pool, tasks: int) -> None:
        self.pool, self.tasks = pool, tasks

    def collect(self) -> None:
        self.pool.run(self.tasks)


class Pool(Backend):
    """An application on paper that counts the tasks it is given, and what they are tagged with."""

    def __init__(self, **settings: str) -> None:
        self._settings = {"spark.master": "local[2]"} | settings
        self.application = f"app-{id(self)}"
        self.tasks: list[int] = []
        self.fails = False
        self.tags: set[str] = set()
        self.cancelled: list[str] = []

    def job(self, work: object, tasks: int = 1) -> Any:
        self.work = work
        return Job(self, tasks)

    def run(self, tasks: int) -> None:
        self.tasks.append(tasks)
        if self.fails:
            raise RuntimeError("the executor is gone")

    def setting(self, name: str, default: str = "") -> str:
        return self._settings.get(name, default)

    def is_stopped(self) -> bool:
        return False

    def slots(self) -> int | None:
        return None

    def thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=work, name=name, daemon=True)

    def enter(self, name: str) -> None:
        self.tags.add(name)

    def cancel(self, name: str) -> None:
        self.cancelled.append(name)

    def executor(self, executor: str) -> ExecutorState:
        raise AssertionError(executor)

    @property
    def decommissions(self) -> bool:
        return False

    def wait_for(self, tasks: list[int]) -> None:
        give_up = time.monotonic() + 20
        while self.tasks != tasks and time.monotonic() < give_up:
            time.sleep(0.005)
        assert self.tasks == tasks


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeploymentDir:
    monkeypatch.setattr(warm_workers, "POLL_S", 0.005)
    return DeploymentDir(tmp_path)


def announce(deployment: DeploymentDir, name: str, pid: int, executor: str) -> None:
    deployment.registry.publish(Address(name, "127.0.0.1", 1, pid, 1, executor=executor))


def test_workers_are_warmed_again_when_a_process_was_started(deployment: DeploymentDir) -> None:
    announce(deployment, "a", 1, "0")
    pool = Pool()
    workers = warm_workers.WarmWorkers(pool, deployment)
    pool.wait_for([1])
    time.sleep(0.05)
    pool.wait_for([1])  # no process took it
    announce(deployment, "a", 2, "0")
    pool.wait_for([1, 1])
    pool.fails = True
    announce(deployment, "b", 3, "1")
    pool.wait_for([1, 1, 2])  # one on each executor
    pool.fails = False
    announce(deployment, "b", 4, "1")
    pool.wait_for([1, 1, 2, 2])  # a failure ends nothing
    workers.end()
    assert (pool.tags, pool.cancelled) == ({warm_workers.NAME}, [warm_workers.NAME])


def test_on_a_cluster_a_second_executor_has_a_warm_worker(deployment: DeploymentDir) -> None:
    """An executor that died with everything took the only warm worker along."""
    announce(deployment, "a", 1, "0")
    pool = Pool(**{"spark.master": "spark://one:7077"})
    workers = warm_workers.WarmWorkers(pool, deployment, 2)
    pool.wait_for([4])
    announce(deployment, "b", 2, "1")
    announce(deployment, "c", 3, "2")
    pool.wait_for([4, 6])
    workers.end()


def test_workers_are_warmed_again_before_spark_ends_them(
    deployment: DeploymentDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_workers, "KEEP_S", 0.02)
    pool = Pool()
    workers = warm_workers.WarmWorkers(pool, deployment)
    pool.wait_for([1, 1, 1])
    workers.end()


def test_deployments_of_one_application_share_its_workers(deployment: DeploymentDir, tmp_path: Path) -> None:
    first, second = Pool(), Pool()
    second.application = first.application
    other = DeploymentDir(tmp_path / "other")
    workers = [warm_workers.WarmWorkers(first, deployment)]
    first.wait_for([1])
    workers.append(warm_workers.WarmWorkers(second, other))
    time.sleep(0.05)
    second.wait_for([])  # kept already
    announce(other, "a", 1, "")
    second.wait_for([1])  # a process took it
    first.wait_for([1])
    for each in workers:
        each.end()


@pytest.mark.parametrize(("reuse", "count"), [("false", 1), ("true", 0)])
def test_no_worker_is_warmed_without_worker_reuse_or_with_count_zero(
    deployment: DeploymentDir, reuse: str, count: int
) -> None:
    pool = Pool(**{"spark.python.worker.reuse": reuse})
    workers = warm_workers.WarmWorkers(pool, deployment, count)
    time.sleep(0.05)
    workers.end()
    assert pool.tasks == pool.cancelled == []


@pytest.mark.parametrize("count", [-1, 65])
def test_invalid_number_of_warm_workers_is_refused_before_anything_starts(count: int) -> None:
    with pytest.raises(UserError, match=f"warm_workers={count}"):
        tiercel.start(warm_workers=count)


def test_several_workers_are_warmed_on_each_executor_at_once(
    deployment: DeploymentDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(deployment, "a", 1, "0")
    announce(deployment, "b", 2, "1")
    pool = Pool()
    workers = warm_workers.WarmWorkers(pool, deployment, 3)
    pool.wait_for([6])
    workers.end()
    assert pool.work is warm_workers.warm_one_of_several
    slept: list[float] = []
    monkeypatch.setattr(
        warm_workers, "time", SimpleNamespace(sleep=slept.append)
    )  # other threads sleep as well
    assert list(warm_workers.warm_one_of_several(iter(["row"]))) == ["row"]  # type: ignore[list-item]
    assert slept == [warm_workers.HOLD_S]


def test_spark_runs_one_task_per_warm_worker_at_the_same_time(spark: SparkSession) -> None:
    """A union of jobs of one task each is one task, as Spark plans it."""

    def who(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for _ in warm_workers.warm_one_of_several(batches):
            yield pyarrow.RecordBatch.from_pydict({"id": [os.getpid()]})

    rows = backend_of(spark).job(who, 3).collect()
    assert len({row.id for row in rows}) == 3


def test_warm_up_task_imports_what_a_process_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(importlib, "import_module", loaded.append)
    rows: Iterator[Any] = iter(["row"])
    assert list(warm_workers.warm(rows)) == ["row"]
    assert loaded == list(warm_workers.LOADED)
    monkeypatch.undo()
    for module in warm_workers.LOADED:
        importlib.import_module(module)
        assert module in sys.modules
