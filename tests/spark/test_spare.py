"""A worker is kept warm: again when one was taken, and before Spark would end it; not where none is kept."""

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
from tiercel.runtime.place import Place
from tiercel.runtime.registry import Address
from tiercel.spark import spare
from tiercel.spark.backend import Backend, backend_of
from tiercel.spark.seam import ExecutorState


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
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(spare, "LOOK_S", 0.005)
    return Place(tmp_path)


def announce(place: Place, name: str, pid: int, executor: str) -> None:
    place.registry.publish(Address(name, "127.0.0.1", 1, pid, 1, executor=executor))


def test_a_worker_is_kept_again_as_soon_as_somebody_was_started(place: Place) -> None:
    announce(place, "a", 1, "0")
    pool = Pool()
    keeping = spare.Spare(pool, place)
    pool.wait_for([1])
    time.sleep(0.05)
    pool.wait_for([1])  # nobody took it
    announce(place, "a", 2, "0")
    pool.wait_for([1, 1])
    pool.fails = True
    announce(place, "b", 3, "1")
    pool.wait_for([1, 1, 2])  # one on each executor
    pool.fails = False
    announce(place, "b", 4, "1")
    pool.wait_for([1, 1, 2, 2])  # a failure ends nothing
    keeping.end()
    assert (pool.tags, pool.cancelled) == ({spare.NAME}, [spare.NAME])


def test_on_a_cluster_a_worker_is_kept_where_nothing_of_ours_runs_too(place: Place) -> None:
    """An executor that died with everything took the only warm worker along."""
    announce(place, "a", 1, "0")
    pool = Pool(**{"spark.master": "spark://one:7077"})
    keeping = spare.Spare(pool, place, 2)
    pool.wait_for([4])
    announce(place, "b", 2, "1")
    announce(place, "c", 3, "2")
    pool.wait_for([4, 6])
    keeping.end()


def test_a_worker_is_kept_again_before_spark_ends_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare, "KEEP_S", 0.02)
    pool = Pool()
    keeping = spare.Spare(pool, place)
    pool.wait_for([1, 1, 1])
    keeping.end()


def test_deployments_of_one_application_share_its_workers(place: Place, tmp_path: Path) -> None:
    first, second = Pool(), Pool()
    second.application = first.application
    other = Place(tmp_path / "other")
    keeping = [spare.Spare(first, place)]
    first.wait_for([1])
    keeping.append(spare.Spare(second, other))
    time.sleep(0.05)
    second.wait_for([])  # kept already
    announce(other, "a", 1, "")
    second.wait_for([1])  # somebody took it
    first.wait_for([1])
    for each in keeping:
        each.end()


@pytest.mark.parametrize(("reuse", "count"), [("false", 1), ("true", 0)])
def test_no_worker_is_kept_where_spark_keeps_none_or_none_is_wanted(
    place: Place, reuse: str, count: int
) -> None:
    pool = Pool(**{"spark.python.worker.reuse": reuse})
    keeping = spare.Spare(pool, place, count)
    time.sleep(0.05)
    keeping.end()
    assert pool.tasks == pool.cancelled == []


@pytest.mark.parametrize("count", [-1, 65])
def test_a_number_of_workers_that_makes_no_sense_is_refused_before_anything_starts(count: int) -> None:
    with pytest.raises(UserError, match=f"spare_workers={count}"):
        tiercel.start(spare_workers=count)


def test_several_are_kept_on_each_executor_and_none_takes_another_s_place(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(place, "a", 1, "0")
    announce(place, "b", 2, "1")
    pool = Pool()
    keeping = spare.Spare(pool, place, 3)
    pool.wait_for([6])
    keeping.end()
    assert pool.work is spare.warm_one_of_several
    slept: list[float] = []
    monkeypatch.setattr(spare, "time", SimpleNamespace(sleep=slept.append))  # other threads sleep as well
    assert list(spare.warm_one_of_several(iter(["row"]))) == ["row"]  # type: ignore[list-item]
    assert slept == [spare.HOLD_S]


def test_spark_runs_as_many_tasks_at_once_as_workers_are_wanted(spark: SparkSession) -> None:
    """A union of jobs of one task each is one task, as Spark plans it."""

    def who(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for _ in spare.warm_one_of_several(batches):
            yield pyarrow.RecordBatch.from_pydict({"id": [os.getpid()]})

    rows = backend_of(spark).job(who, 3).collect()
    assert len({row.id for row in rows}) == 3


def test_the_task_loads_what_a_process_needs_and_hands_its_row_on(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(importlib, "import_module", loaded.append)
    rows: Iterator[Any] = iter(["row"])
    assert list(spare.warm(rows)) == ["row"]
    assert loaded == list(spare.LOADED)
    monkeypatch.undo()
    for module in spare.LOADED:
        importlib.import_module(module)
        assert module in sys.modules
