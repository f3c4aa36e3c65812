"""The sequencer: numbers and marks that are forgotten, and the rows that come after."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines_in_memory import SmallDeployment, key_in, topology
from tiercel.control.plans import Plan, PlannedMove
from tiercel.core.logs.device_numbers import RefusedNumber
from tiercel.core.logs.sequencer import Sequencer
from tiercel.core.logs.site_outbox import FrameId, InboundFrame
from tiercel.core.machine.step import Step
from tiercel.core.model.keys import KeySet
from tiercel.core.model.log import Row
from tiercel.core.model.routing import RoutingTable
from tiercel.core.settings import Settings
from tiercel.testing.in_memory_driver import CONTROLLER

THERE = [key_in(3, number) for number in range(6)]  # owned by site b


def sequencer(site: str, held_rows_max: int = 100) -> Sequencer:
    table = RoutingTable.initial(topology().operators["op"])
    return Sequencer("op", site, table, held_rows_max, lambda key: None)


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


class LimitedHold:
    """Rows of one device, each in a frame of its own, where one row may be held; a gap lasts 60 ms."""

    def __init__(self) -> None:
        self.near = sequencer("b", held_rows_max=1)
        self.near.devices.gap_ms = {"~devices": 60.0}
        self.refused: list[RefusedNumber] = []
        self.near.devices.refused = lambda step, refused: self.refused.append(refused)
        self.frames = {n: InboundFrame(FrameId("a", "op", n, "a@1")) for n in range(1, 12)}

    def bring(self, n: int, at_ms: float) -> list[int]:
        rows: list[Row] = [(THERE[0], 0, n, "~devices", n, 1)]
        return numbers(self.near.sequence(Step(at_ms), rows, (self.frames[n],)).ready)

    def close_gaps(self, at_ms: float) -> list[int]:
        return numbers(self.near.close_gaps(Step(at_ms)))

    def wanted(self) -> list[int]:
        return [inbound.id.n for inbound in self.near.take_wanted()]


def test_a_row_that_is_next_and_under_way_again_is_no_gap_however_long_it_takes() -> None:
    hold = LimitedHold()
    hold.bring(9, at_ms=0)  # fills the hold
    hold.bring(5, at_ms=1)
    assert hold.close_gaps(at_ms=70) == []
    assert [(refused.expected, refused.n) for refused in hold.refused] == [(1, 5)]
    assert hold.wanted() == [5]
    hold.bring(10, at_ms=80)  # the link is slow: later rows come first
    assert hold.close_gaps(at_ms=150) == []
    assert len(hold.refused) == 1, "nothing is missing in front of the fifth row"
    assert hold.wanted() == [], "its frame was asked for"
    assert hold.bring(5, at_ms=160) == [5]
    assert hold.close_gaps(at_ms=230) == [9]
    assert [(refused.expected, refused.n) for refused in hold.refused] == [(1, 5), (6, 9)]
    assert hold.wanted() == [10]


def test_a_gap_that_is_closed_behind_a_move_never_takes_a_mark_back() -> None:
    hold = LimitedHold()
    hold.bring(9, at_ms=0)
    hold.bring(5, at_ms=1)
    keys, step = KeySet(keys=frozenset({THERE[0]})), Step(2)
    hold.near.drop_held(keys, lambda key: True)
    hold.near.devices.give(step, keys, lambda key: True)
    assert hold.wanted() == [5]
    # the key returns before that frame does; elsewhere, rows up to the seventh were appended
    hold.near.install_marks(step, {THERE[0]: {"~devices": 7}}, keys, lambda key: True)
    hold.bring(9, at_ms=3)
    assert hold.close_gaps(at_ms=100) == [9]
    assert [(refused.expected, refused.n) for refused in hold.refused] == [(8, 9)]
    assert hold.near.marks[THERE[0]] == {"~devices": 9}


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
