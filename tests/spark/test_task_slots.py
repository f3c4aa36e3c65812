"""Task slots: counted, bounded or unknown. An error names the limit that a process without a slot has hit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tiercel
from tiercel.chaos.steady_traffic import OPERATOR, declare
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.cluster import supervisor
from tiercel.spark.cluster.backend import Backend, ThroughContext
from tiercel.spark.cluster.task_slots import check_slots, slots_at_most
from tiercel.spark.pyspark_internals import ExecutorState

GROWING = {"spark.master": "yarn", "spark.dynamicAllocation.enabled": "true", "spark.executor.cores": "4"}


class Application(Backend):
    """One that exists on paper: so many slots, these settings, and jobs that never get a task."""

    def __init__(self, slots: int | None, **settings: str) -> None:
        self._slots, self._settings = slots, {"spark.master": "local[1]"} | settings
        self.application = "paper"

    def setting(self, name: str, default: str = "") -> str:
        return self._settings.get(name, default)

    def is_stopped(self) -> bool:
        return False

    def slots(self) -> int | None:
        return self._slots

    def thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(name=name, daemon=True)

    def enter(self, name: str, description: str = "") -> None:
        raise AssertionError(name)

    def cancel(self, name: str) -> None:
        raise AssertionError(name)

    def executor(self, executor: str) -> ExecutorState:
        raise AssertionError(executor)

    @property
    def decommissions(self) -> bool:
        return False


def test_start_is_refused_with_too_few_slots_and_allowed_with_an_unknown_number() -> None:
    check_slots(Application(6), 3, running=1)
    check_slots(Application(None), 3, running=1)
    with pytest.raises(UserError, match=r"6 in all, but this Spark application has 5\n.*at least 6"):
        check_slots(Application(5), 3, running=1)


def test_dynamic_allocation_counts_executors_up_to_its_limit() -> None:
    check_slots(Application(1, **GROWING), 30, running=0)  # no limit
    bounded = GROWING | {"spark.dynamicAllocation.maxExecutors": "2"}
    check_slots(Application(1, **bounded), 6, running=0)
    with pytest.raises(UserError, match=r"may grow to 8\n(.*\n)*.*maxExecutors"):
        check_slots(Application(1, **bounded), 7, running=0)
    assert slots_at_most(Application(1, **bounded, **{"spark.task.cpus": "2"})) == 4
    with pytest.raises(UserError, match="has 1"):  # one process: no executor will come
        check_slots(Application(1, **GROWING | {"spark.master": "local[1]"}), 1, running=0)
    assert slots_at_most(Application(1, **{"spark.dynamicAllocation.maxExecutors": "2"})) is None


def test_deployment_that_fills_all_slots_can_be_restarted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by chaos: a scale-out reserves one slot, and a start reserved two."""
    monkeypatch.setattr(ThroughContext, "slots", lambda _: 4)
    for grow in (True, False):
        with tiercel.start(spark, ["cloud"], tmp_path) as live:
            declare(live, instances={"cloud": 1})
            live.deploy()
            if grow:
                live.scale(OPERATOR, {"cloud": 2}).wait()
            assert len(live.status().operators[OPERATOR]) == 2


@pytest.mark.parametrize(("settings", "limit"), [({}, "START_S_MAX"), (GROWING, "ALLOCATION_S_MAX")])
def test_process_without_a_task_slot_fails_with_the_name_of_the_limit(
    settings: dict[str, str], limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, limit, 0.1)
    host = supervisor.Supervisor(Application(1, **settings), DeploymentDir(tmp_path))
    host.start("cloud")
    assert host.waiting == ["cloud"]
    with pytest.raises(UserError, match=rf"cloud did not start within 0.1 s \({limit}\)"):
        host.wait("cloud")
