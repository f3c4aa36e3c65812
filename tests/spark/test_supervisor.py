"""The supervisor with jobs on paper: restarts, processes that are given up, jobs that Spark refuses."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.net.registry import Address
from tiercel.spark.api.moves import ScaleHandle
from tiercel.spark.cluster import supervisor
from tiercel.spark.cluster.backend import Backend
from tiercel.spark.cluster.supervisor import Supervisor
from tiercel.spark.pyspark_internals import ExecutorState
from waiting import until

NAME = "average@cloud#1"


class Job:
    """Runs until its process is asked to stop, and a moment longer: a worker has to end."""

    def __init__(self, application: Application) -> None:
        self.application = application

    def run(self) -> None:
        self.application.run()


class Application(Backend):
    """Its jobs do what a test says."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.application = f"paper-{id(self)}"
        self.cancelled: list[str] = []
        self.entered: list[str] = []

    def hosting_job(self, work: object, schema: str, profile: object = None) -> Any:
        return Job(self)

    def setting(self, name: str, default: str = "") -> str:
        return {"spark.master": "local[4]"}.get(name, default)

    def is_stopped(self) -> bool:
        return False

    def slots(self) -> int | None:
        return None

    def thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=work, name=name, daemon=True)

    def enter(self, name: str, description: str = "") -> None:
        self.entered.append(name)

    def cancel(self, name: str) -> None:
        self.cancelled.append(name)

    def executor(self, executor: str) -> ExecutorState:
        raise AssertionError(executor)

    @property
    def decommissions(self) -> bool:
        return False


def test_process_that_is_started_while_it_still_ends_is_started_again(tmp_path: Path) -> None:
    """A move to a site whose instance was just retired waited for 90 s, for a process that nobody started."""
    may_end, deployment = threading.Event(), DeploymentDir(tmp_path)
    runs: list[int] = []

    def run() -> None:
        runs.append(1)
        incarnation = len(runs)
        deployment.registry.publish(Address(NAME, "h", 1, 1, incarnation))
        until(lambda: deployment.registry.stop_reason(NAME, incarnation))
        may_end.wait(10.0)

    host = Supervisor(Application(run), deployment)
    host.start(NAME)
    first = host.wait(NAME).incarnation
    host.request_stop(NAME)
    host.start(NAME)  # as the controller may ask: its job has not ended yet
    assert NAME in host.names
    may_end.set()
    assert host.wait(NAME, after_incarnation=first).incarnation == 2
    host.end()
    assert len(runs) == 2


def test_process_that_was_given_up_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "PAUSE_S", 0.0)
    broken, deployment = [True], DeploymentDir(tmp_path)

    def run() -> None:
        if broken:
            raise RuntimeError("no model")
        deployment.registry.publish(Address(NAME, "h", 1, 1, 1))
        until(lambda: deployment.registry.is_stop_requested(NAME))

    host = Supervisor(Application(run), deployment)
    host.start(NAME)
    with pytest.raises(UserError, match="no model"):
        host.wait(NAME)
    host.request_stop(NAME)
    broken.clear()
    until(lambda: not host._threads[NAME].is_alive())
    host.start(NAME)
    assert host.wait(NAME).incarnation == 1
    assert host.failures == {}
    host.end()


def test_start_fails_at_once_with_sparks_reason_if_spark_refuses_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread ended unseen: a start waited for 90 s, and then asked for a free task slot."""
    monkeypatch.setattr(supervisor, "START_S_MAX", 2.0)
    application = Application(lambda: None)

    def enter(name: str, description: str) -> None:
        raise ValueError("Spark job tag cannot contain ','.")

    monkeypatch.setattr(application, "enter", enter)
    host = Supervisor(application, DeploymentDir(tmp_path))
    host.start("a,b@cloud#1")
    with pytest.raises(UserError, match="job tag cannot contain"):
        host.wait("a,b@cloud#1")


def test_one_deployment_does_not_cancel_jobs_of_another_in_the_same_application(tmp_path: Path) -> None:
    """Every drop-in operator has a router called 'local': a silent one took all others of that name along."""
    hosts = [Supervisor(Application(lambda: None), DeploymentDir(tmp_path / name)) for name in "ab"]
    tags = []
    for host in hosts:
        host.start("local")
        application: Any = host._backend
        until(functools.partial(len, application.entered))
        host.suspect("local", 1.0)
        assert application.cancelled == application.entered[:1]
        tags += application.cancelled
        host.request_stop("local")
    assert tags[0] != tags[1]
    assert not any("," in tag for tag in tags)


def test_no_process_is_started_after_the_deployment_was_stopped(tmp_path: Path) -> None:
    """A move to a site without an instance, asked for while the deployment ended, left a task running."""
    runs: list[int] = []
    host = Supervisor(Application(lambda: runs.append(1)), DeploymentDir(tmp_path))
    host.end()
    with pytest.raises(UserError, match="was stopped"):
        host.start(NAME)
    assert not runs


class Scaling:
    """A controller whose scaling never ends."""

    def scaling(self, operator: str) -> bool:
        return True

    def check_runs(self) -> None: ...


def test_scaling_reports_why_a_new_instance_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for START_S_MAX, and then said that there was no task slot."""
    monkeypatch.setattr(supervisor, "PAUSE_S", 0.0)
    monkeypatch.setattr(supervisor, "START_S_MAX", 2.0)

    def run() -> None:
        raise RuntimeError("no model on this executor")

    host = Supervisor(Application(run), DeploymentDir(tmp_path))
    host.start(NAME)
    scaling = ScaleHandle(Scaling(), host, "average")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no model on this executor"):
        scaling.wait(5.0)
