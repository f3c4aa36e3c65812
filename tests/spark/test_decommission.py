"""Who takes the place of instances whose executor is to go. The real thing: test_cluster.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiercel.bench.averages import topology
from tiercel.control.controller import Scale
from tiercel.runtime.place import Place
from tiercel.runtime.registry import Address
from tiercel.spark.decommission import Handover, Watch, replaced
from tiercel.spark.seam import ExecutorState

ONE, TWO, THREE, EDGE = "op@cloud#1", "op@cloud#2", "op@cloud#3", "op@edge#1"


def test_each_that_leaves_gets_a_new_one_at_its_site_and_nobody_else_moves() -> None:
    wish = replaced(
        Scale("op", (ONE, TWO, EDGE), even=False), [ONE, EDGE], [ONE, TWO, EDGE, "cloud", "x@cloud#9"]
    )
    assert wish == Scale("op", (THREE, TWO, "op@edge#2"), "live", {ONE: THREE, EDGE: "op@edge#2"}, even=False)


def test_a_replacement_whose_executor_leaves_too_is_replaced_for_the_first_one_as_well() -> None:
    first = replaced(Scale("op", (ONE,)), [ONE], [ONE])
    second = replaced(first, [TWO], [ONE, TWO])
    assert second == Scale("op", (THREE,), "live", {ONE: THREE, TWO: THREE})


def test_what_is_to_go_anyway_is_not_replaced() -> None:
    wish = Scale("op", (TWO,))
    assert replaced(wish, [ONE], [ONE, TWO]) == wish


def test_a_handover_says_who_left_for_where() -> None:
    handover = Handover("7", "moving", {ONE: THREE}, ["cloud"])
    assert str(handover) == f"executor 7 leaves, moving: {ONE} -> {THREE}, cloud"
    assert str(Handover("7")) == "executor 7 leaves, moving"


@pytest.mark.parametrize(("leaves", "state"), [(True, "gone"), (False, "lost")])
def test_who_was_just_leaving_when_its_executor_went_is_not_taken_for_lost(
    tmp_path: Path, leaves: bool, state: str
) -> None:
    """A router left, its task ended, the executor went; the driver had not forgotten its address yet."""
    place = Place(tmp_path)
    place.registry.publish(Address("cloud", "127.0.0.1", 1, 1, life=3, executor="7"))

    def executor(_: str) -> ExecutorState:
        """By the time that Spark says so, the router has ended; its driver's thread has not run yet."""
        if leaves:
            place.registry.leave("cloud", 3)
        return ExecutorState.GONE

    backend: Any = SimpleNamespace(
        executor=executor, decommissions=False, thread=lambda work, name: None, is_stopped=lambda: False
    )
    hosting: Any = SimpleNamespace(names=["cloud"])
    console: Any = SimpleNamespace()
    watch = Watch(backend, place, topology(2), hosting, console)
    watch.handovers["7"] = Handover("7", routers=["cloud"])
    watch._look(0.0)
    assert watch.handovers["7"].state == state
