"""Requests that the controller has lost, or that outlive their deployment: never reported as done."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiercel.bench.operators import topology
from tiercel.control.plans import Plan, PlannedMove
from tiercel.core.model.keys import KeySet
from tiercel.core.settings import Settings
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir, Manifest
from tiercel.spark.api import requests
from tiercel.spark.api.moves import MoveHandle
from tiercel.spark.api.requests import DeploymentRequests
from tiercel.spark.cluster.controller_thread import ControllerThread
from waiting import until

FIRST = "average@cloud#1"


class Host:
    """The processes of a deployment, on paper."""

    def __init__(self) -> None:
        self.names = [FIRST]
        self.failures: dict[str, str] = {}
        self.submissions: dict[str, int] = {}
        self.waiting: list[str] = []
        self.start_s_max = ("START_S_MAX", 90.0)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerThread]:
    """Of a deployment whose router does not run: what is asked of it stays open."""
    deployment = DeploymentDir(tmp_path / "storage")
    deployment.write(Manifest("test", topology(2), {}, Settings()))
    controller = ControllerThread(deployment, lambda _: None, lambda _: None)
    yield controller
    controller.end()


@pytest.fixture
def asking(controller: ControllerThread, monkeypatch: pytest.MonkeyPatch) -> DeploymentRequests:
    monkeypatch.setattr(requests, "check_slots", lambda *_, **__: None)
    graph: Any = SimpleNamespace(
        operators={"average": None},
        instances=lambda operator, wanted: tuple(f"{operator}@cloud#{n + 1}" for n in range(wanted["cloud"])),
    )
    backend: Any = SimpleNamespace(application="paper")
    host: Any = Host()
    return DeploymentRequests(backend, graph, controller, host, lambda _: None)


def begin_again(controller: ControllerThread) -> None:
    """The controller fails, and starts again."""
    incarnations = controller.incarnations
    controller._loop.call_soon_threadsafe(controller._host._fail, OSError("no space left on device"))
    until(lambda: controller.incarnations > incarnations and not controller._failure)


def test_recovery_that_the_controller_never_stored_is_not_reported_as_done(
    asking: DeploymentRequests, controller: ControllerThread
) -> None:
    """`recover` returned the names of instances that nobody had started."""
    controller.recover = lambda *_: "r99"  # type: ignore[method-assign]
    with pytest.raises(UserError, match="was not taken over"):
        asking.recover(FIRST, 2)


def test_scaling_that_the_controller_never_stored_is_not_reported_as_done(
    asking: DeploymentRequests, controller: ControllerThread
) -> None:
    controller.scale = lambda *_: None  # type: ignore[method-assign]
    scaling = asking.scale("average", {"cloud": 2}, "live")
    begin_again(controller)
    with pytest.raises(UserError, match="the controller failed"):
        scaling.wait(5.0)


def test_scaling_that_ended_before_the_controller_failed_is_done(
    asking: DeploymentRequests, controller: ControllerThread
) -> None:
    controller.scale = lambda *_: None  # type: ignore[method-assign]
    scaling = asking.scale("average", {"cloud": 1}, "live")
    begin_again(controller)
    assert scaling.wait(5.0) >= 0


@pytest.mark.parametrize("kind", ["recover", "scale", "move"])
def test_waiting_for_a_request_fails_when_the_deployment_stops(
    kind: str, asking: DeploymentRequests, controller: ControllerThread
) -> None:
    """`recover` waited for ever."""
    errors: list[BaseException] = []
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        try:
            if kind == "recover":
                asking.recover(FIRST, 2)
            elif kind == "scale":
                asking.scale("average", {"cloud": 2}, "live").wait()
            else:
                asked(controller).wait()
        except UserError as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    begun.wait()
    until(controller.has_open_requests)
    controller.end()
    thread.join(5.0)
    assert not thread.is_alive()
    assert "the deployment was stopped" in str(errors[0])


def asked(controller: ControllerThread) -> MoveHandle:
    wanted = PlannedMove("average", KeySet(slots=frozenset([1])), FIRST, "average@cloud#2")
    return MoveHandle(controller, controller.request(Plan((wanted,), "a test"), 0, None))
