"""The controller thread: answers appear whole, and a controller whose disk was full resumes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tiercel.bench.operators import SITE, topology
from tiercel.chaos.full_disk import limited
from tiercel.control.controller import ScaleRequest
from tiercel.control.plans import Plan, PlannedMove
from tiercel.core import messages as m
from tiercel.core.machine.events import Received
from tiercel.core.model.keys import KeySet
from tiercel.core.settings import Settings
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir, Manifest
from tiercel.spark.api.moves import MoveHandle
from tiercel.spark.cluster.controller_thread import ControllerThread, RecordingController
from waiting import until


class Observed(RecordingController):
    """Notes what a waiting thread would see while an answer is being taken in."""

    seen: dict[str, int] | None = None

    def _on_status_reply(self, step: Any, site: str, reply: m.StatusReply) -> None:
        self.seen = dict(self.answered)
        super()._on_status_reply(step, site, reply)


def test_status_reply_counts_only_when_its_tables_are_there() -> None:
    """Who waited for the count read empty tables, and a move of keys divided by zero slots."""
    controller = Observed(topology(2), Settings(), {})
    controller.on_event(Received(SITE, m.StatusReply([], [], {}, {}, 1)), 0.0)
    assert controller.seen == {}
    assert controller.answered == {SITE: 1}


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerThread]:
    """Of a deployment whose router does not run: what is asked of it stays open."""
    deployment = DeploymentDir(tmp_path / "storage")
    deployment.write(Manifest("test", topology(2), {}, Settings()))
    controller = ControllerThread(deployment, lambda _: None, lambda _: None)
    yield controller
    controller.end()


def asked(controller: ControllerThread, slot: int) -> MoveHandle:
    wanted = PlannedMove("average", KeySet(slots=frozenset([slot])), "average@cloud#1", "average@cloud#2")
    return MoveHandle(controller, controller.request(Plan((wanted,), "a test"), 0, None))


def answers(controller: ControllerThread) -> bool:
    try:
        controller.scale_request("average")
    except UserError:
        return False
    return True


def test_controller_resumes_with_its_stored_requests_after_a_full_disk(
    controller: ControllerThread,
) -> None:
    """It was gone until the driver was started again: no move and no scaling, while all rows flowed."""
    before = asked(controller, 1)
    controller.scale(ScaleRequest("average", ("average@cloud#1",)))
    until(lambda: controller.scale_request("average")[0] is not None)
    with limited([os.getpid()]):
        meanwhile = asked(controller, 2)
        until(lambda: not answers(controller), "it could write")
        with pytest.raises(UserError, match="does not answer"):
            controller.scale(ScaleRequest("average", ("average@cloud#2",)))
    until(lambda: answers(controller), "it has not come back")
    assert controller.scale_request("average")[0] == ScaleRequest("average", ("average@cloud#1",))
    assert "queued" in before.progress() or "asked" in before.progress()
    assert meanwhile.progress()  # stored in the end or lost: its progress is known
    assert asked(controller, 3).names


def test_move_that_the_controller_never_stored_is_reported_as_undone(controller: ControllerThread) -> None:
    (report,) = MoveHandle(controller, ["m99"]).reports()
    assert (report.state, report.reason) == (
        "undone",
        "the controller failed before it stored the request",
    )
