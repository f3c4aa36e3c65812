"""The sequencer: numbers and marks that are forgotten, and the rows that come after."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines_in_memory import SmallDeployment, key_in, topology
from tiercel.control.plans import Plan, PlannedMove
from tiercel.core.logs.sequencer import Sequencer
from tiercel.core.machine.step import Step
from tiercel.core.model.keys import KeySet
from tiercel.core.model.log import Row
from tiercel.core.model.routing import RoutingTable
from tiercel.core.settings import Settings
from tiercel.testing.in_memory_driver import CONTROLLER

THERE = [key_in(3, number) for number in range(6)]  # owned by site b


def sequencer(site: str) -> Sequencer:
    return Sequencer("op", site, RoutingTable.initial(topology().operators["op"]), 100, lambda key: None)


def numbers(rows: list[Row]) -> list[int]:
    return [row[4] for row in rows]


def test_the_first_row_after_forgotten_numbers_has_a_number_above_them_and_is_taken_at_once() -> None:
    near, far, step = sequencer("a"), sequencer("b"), Step(0.0)
    sent = [near.number(step, (THERE[0], 0, n)) for n in range(3)]
    assert numbers(far.sequence(step, sent, ()).ready) == [1, 2, 3]
    near.number(step, (THERE[1], 0, 0))
    forgotten = near.forget_numbers(step, unsettled={THERE[1]})
    assert forgotten == {THERE[0]: 3}
    far.forget_marks(step, "a", forgotten)
    assert not far.marks
    again = [near.number(step, (THERE[0], 0, n)) for n in range(3, 6)]
    assert [abs(n) for n in numbers(again)] == [4, 5, 6]
    late_first = far.sequence(step, again[1:], ()).ready + far.sequence(step, again[:1], ()).ready
    assert [row[2] for row in late_first] == [3, 4, 5], "rows behind the first one wait for it"
    assert far.sequence(step, again, ()).ready == [], "repeats are dropped as before"


def test_an_owner_that_was_not_told_takes_the_first_row_too() -> None:
    near, far, step = sequencer("a"), sequencer("b"), Step(0.0)
    far.sequence(step, [near.number(step, (THERE[0], 0, 0))], ())
    near.number(step, (THERE[1], 0, 0))
    near.forget_numbers(step, unsettled={THERE[1]})
    row = near.number(step, (THERE[0], 0, 1))
    assert far.sequence(step, [row], ()).ready == [row]


def test_marks_of_newer_rows_are_not_forgotten() -> None:
    near, far, step = sequencer("a"), sequencer("b"), Step(0.0)
    rows = [near.number(step, (THERE[0], 0, n)) for n in range(2)]
    far.sequence(step, rows, ())
    far.forget_marks(step, "a", {THERE[0]: 1})
    assert far.marks[THERE[0]] == {"a": 2}


@given(st.lists(st.integers(0, 5), min_size=10, max_size=60), st.integers(1, 3))
def test_numbers_and_marks_stay_few_and_every_row_comes_once(keys: list[int], limit: int) -> None:
    driver = SmallDeployment(topology(instances=("op@b#0",)), Settings(numbered_keys_max=limit))
    driver.start("a", "b", "op@b#0")
    for n, number in enumerate(keys):
        driver.produce("a", (THERE[number], n, n))
    counted = [output.row[2][2] for output in driver.outputs()]
    assert sorted(counted) == sorted(keys[: n + 1].count(k) for n, k in enumerate(keys))
    assert len(driver.machines["a"].inboxes["op"].sequencer.counts) <= limit + 2
    assert len(driver.machines["b"].inboxes["op"].sequencer.marks) <= limit + 2


@pytest.mark.parametrize("strategy", ["live", "pause"])
def test_tables_stay_as_small_as_they_were_over_many_moves(strategy: str) -> None:
    """Ended moves are forgotten by router and controller, and repeats of a flip are known by their epochs."""
    driver = SmallDeployment()
    driver.start().start(CONTROLLER)
    sizes = []
    for n in range(12):
        source, to = ("op@a#0", "op@b#0") if n % 2 == 0 else ("op@b#0", "op@a#0")
        keys = KeySet(keys=frozenset({key_in(0)}))
        plan = Plan((PlannedMove("op", keys, source, to, strategy),), "a test")
        names, effects = driver.machines[CONTROLLER].request(plan, driver.now_ms)
        driver.perform(CONTROLLER, effects)
        driver.run()
        driver.produce("a", (key_in(0), n, n))
        driver.finish_moves()
        driver.advance_ms(3_000)
        assert driver.machines[CONTROLLER].moves[names[0]].state == "done"
        stored = [len([k for k in driver.disks[site] if k[0] != "inbox"]) for site in ("a", "b")]
        sizes.append(stored)
        assert not driver.machines["a"].migration.ended
        assert not driver.machines["b"].migration.ended
    assert sizes[3] == sizes[-1]
