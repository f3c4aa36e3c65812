"""Replacements of instances on decommissioned executors. test_cluster.py runs it on a cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiercel.bench.operators import topology
from tiercel.control.controller import ScaleRequest
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.net.registry import Address
from tiercel.spark.cluster.decommission import DecommissionWatcher, Handover, with_replacements
from tiercel.spark.pyspark_internals import ExecutorState

ONE, TWO, THREE, EDGE = "op@cloud#1", "op@cloud#2", "op@cloud#3", "op@edge#1"


def test_each_leaving_instance_is_replaced_at_its_site_and_no_other_instance_moves() -> None:
    request = with_replacements(
        ScaleRequest("op", (ONE, TWO, EDGE), even=False), [ONE, EDGE], [ONE, TWO, EDGE, "cloud", "x@cloud#9"]
    )
    assert request == ScaleRequest(
        "op", (THREE, TWO, "op@edge#2"), "live", {ONE: THREE, EDGE: "op@edge#2"}, even=False
    )


def test_replacement_on_a_leaving_executor_is_replaced_for_the_first_instance_too() -> None:
    first = with_replacements(ScaleRequest("op", (ONE,)), [ONE], [ONE])
    second = with_replacements(first, [TWO], [ONE, TWO])
    assert second == ScaleRequest("op", (THREE,), "live", {ONE: THREE, TWO: THREE})


def test_retiring_instance_is_not_replaced() -> None:
    request = ScaleRequest("op", (TWO,))
    assert with_replacements(request, [ONE], [ONE, TWO]) == request


def test_handover_prints_each_instance_with_its_replacement() -> None:
    handover = Handover("7", "moving", {ONE: THREE}, ["cloud"])
    assert str(handover) == f"executor 7 leaves, moving: {ONE} -> {THREE}, cloud"
    assert str(Handover("7")) == "executor 7 leaves, moving"


@pytest.mark.parametrize(("leaves", "state"), [(True, "gone"), (False, "lost")])
def test_process_that_leaves_before_its_executor_is_gone_does_not_count_as_lost(
    tmp_path: Path, leaves: bool, state: str
) -> None:
    """A router left, its task ended, the executor went; the driver had not forgotten its address yet."""
    deployment = DeploymentDir(tmp_path)
    deployment.registry.publish(Address("cloud", "127.0.0.1", 1, 1, incarnation=3, executor="7"))

    def executor(_: str) -> ExecutorState:
        """By the time that Spark says so, the router has ended; its driver's thread has not run yet."""
        if leaves:
            deployment.registry.deregister_if_current("cloud", 3)
        return ExecutorState.GONE

    backend: Any = SimpleNamespace(
        executor=executor, decommissions=False, thread=lambda work, name: None, is_stopped=lambda: False
    )
    supervisor: Any = SimpleNamespace(names=["cloud"])
    controller: Any = SimpleNamespace()
    watch = DecommissionWatcher(backend, deployment, topology(2), supervisor, controller)
    watch.handovers["7"] = Handover("7", routers=["cloud"])
    watch._check(0.0)
    assert watch.handovers["7"].state == state
