"""Whether there is room: counted, bounded, or not known. Who waits for a slot is told by a limit's name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tiercel
from tiercel.bench.steady import OPERATOR, declare
from tiercel.errors import UserError
from tiercel.runtime.place import Place
from tiercel.spark import hosting
from tiercel.spark.backend import Backend, ThroughContext
from tiercel.spark.seam import ExecutorState
from tiercel.spark.slots import check_slots, slots_at_most

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

    def enter(self, name: str) -> None:
        raise AssertionError(name)

    def cancel(self, name: str) -> None:
        raise AssertionError(name)

    def executor(self, executor: str) -> ExecutorState:
        raise AssertionError(executor)

    @property
    def decommissions(self) -> bool:
        return False


def test_too_few_slots_are_refused_and_unknown_ones_are_not() -> None:
    check_slots(Application(6), 3, running=1)
    check_slots(Application(None), 3, running=1)
    with pytest.raises(UserError, match=r"6 in all, but this Spark application has 5\n.*at least 6"):
        check_slots(Application(5), 3, running=1)


def test_executors_that_can_still_come_are_room_and_those_that_never_will_are_not() -> None:
    check_slots(Application(1, **GROWING), 30, running=0)  # no limit
    bounded = GROWING | {"spark.dynamicAllocation.maxExecutors": "2"}
    check_slots(Application(1, **bounded), 6, running=0)
    with pytest.raises(UserError, match=r"may grow to 8\n(.*\n)*.*maxExecutors"):
        check_slots(Application(1, **bounded), 7, running=0)
    assert slots_at_most(Application(1, **bounded, **{"spark.task.cpus": "2"})) == 4
    with pytest.raises(UserError, match="has 1"):  # one process: no executor will come
        check_slots(Application(1, **GROWING | {"spark.master": "local[1]"}), 1, running=0)
    assert slots_at_most(Application(1, **{"spark.dynamicAllocation.maxExecutors": "2"})) is None


def test_what_has_grown_to_the_last_slot_can_be_started_again_there(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by chaos: a scale-out wants one spare slot, and a start wanted two."""
    monkeypatch.setattr(ThroughContext, "slots", lambda _: 4)
    for grow in (True, False):
        with tiercel.start(spark, ["cloud"], tmp_path) as live:
            declare(live, instances={"cloud": 1})
            live.deploy()
            if grow:
                live.scale(OPERATOR, {"cloud": 2}).wait()
            assert len(live.status().operators[OPERATOR]) == 2
            if not grow:  # found by chaos too: asked for again while it ends, it was wanted three times
                monkeypatch.setattr(live._hosting, "start", lambda *_: None)
                for _ in range(3):
                    live._launch(f"{OPERATOR}@cloud#3")
                assert live.place.wanted() == [f"{OPERATOR}@cloud#{n}" for n in (1, 2, 3)]


@pytest.mark.parametrize(("settings", "limit"), [({}, "START_S_MAX"), (GROWING, "ALLOCATION_S_MAX")])
def test_a_process_that_gets_no_task_slot_is_told_after_the_limit_that_has_a_name(
    settings: dict[str, str], limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, limit, 0.1)
    host = hosting.Hosting(Application(1, **settings), Place(tmp_path))
    host.start("cloud")
    assert host.waiting == ["cloud"]
    with pytest.raises(UserError, match=rf"cloud did not start within 0.1 s \({limit}\)"):
        host.wait("cloud")
