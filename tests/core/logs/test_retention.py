"""Readers of an inbox log: backlog, back-pressure, trimming, and pauses of dispatch."""

from __future__ import annotations

import pytest

from machines_in_memory import REQUESTER, SLOTS, SmallDeployment, key_in, topology
from tiercel.core import messages as m
from tiercel.core.model.keys import KeySet
from tiercel.core.settings import Settings

ME = "op@a#0"
KEY = key_in(2)
KEYS = KeySet(slots=frozenset({2}))
UNUSED = "op@a#2"  # owns nothing


def test_lag_counts_unprocessed_rows_also_of_a_detached_instance() -> None:
    driver = SmallDeployment(topology(["a"], instances=(ME, "op@a#1"))).start()
    mine, other = slot_owned_by(driver, ME), slot_owned_by(driver, "op@a#1")
    driver.withholds = lambda sender, to, message: sender == ME and isinstance(message, m.Outputs)
    for count in (1, 2, 3):
        driver.produce("a", *[(key_in(mine), n, n) for n in range(count)], (key_in(other), 0, 0))
    cursors = driver.machines["a"].inboxes["op"].cursors
    assert (cursors[ME].lag_rows, cursors["op@a#1"].lag_rows) == (6, 0)
    lags = []
    for _, _, outputs in driver.withheld:
        driver.send("a", outputs, ME)
        lags.append(driver.machines[ME].gauges()["lag"])
    assert lags == [5, 3, 0]
    driver.withholds = lambda sender, to, message: False
    driver.stop(ME)
    driver.produce("a", (key_in(mine), 0, 0))
    assert cursors[ME].lag_rows == 1
    driver.start(ME)
    assert cursors[ME].lag_rows == driver.machines[ME].gauges()["lag"] == 0


def slot_owned_by(driver: SmallDeployment, instance: str) -> int:
    return next(slot for slot in range(SLOTS) if driver.owner_of(key_in(slot), at="a") == instance)


def test_entries_read_before_a_router_restart_are_not_trimmed_before_a_checkpoint_covers_them() -> None:
    """Found by seed 22839: the restarted router trimmed entries that a reader had applied and not stored."""
    driver = SmallDeployment(topology(("a",), instances=("op@a#0", "op@a#1"))).start()
    mine, other = key_in(0), key_in(SLOTS - 1)
    driver.produce("a", (mine, 0, 1))
    driver.restart("a")
    driver.produce("a", (other, 0, 2))
    inbox = driver.machines["a"].inboxes["op"]
    idle = driver.owner_of(mine, at="a")
    assert driver.owner_of(other, at="a") != idle, "each key has a reader of its own"
    assert inbox.cursors[idle].idle
    assert inbox.trim_point() <= inbox.readers[idle].applied < inbox.cursors[idle].last_sent


def restart_move_that_waits_for_the_unused() -> SmallDeployment:
    """A restart move that waits only for an instance without keys, which does not get the restart request."""
    driver = SmallDeployment(topology(("a",), instances=("op@a#0", "op@a#1"))).start()
    driver.start(UNUSED)
    driver.withholds = lambda sender, to, message: to == UNUSED and isinstance(message, m.RestartRequest)
    source = driver.owner_of(KEY, at="a")
    driver.move(KEYS, source, "op@a#1" if source == "op@a#0" else "op@a#0", "restart")
    driver.advance_ms(2_000)
    assert list(driver.machines["a"].inboxes["op"].pauses["m1"].awaited) == [UNUSED]
    return driver


def assert_the_restart_move_ends(driver: SmallDeployment) -> None:
    driver.advance_ms(2_000)
    assert driver.disks["a"]["ended", "m1"] == ("done", "")
    assert driver.machines["a"].inboxes["op"].pauses == {}
    assert not any(place[0] == "pause" for place in driver.disks["a"])


@pytest.mark.parametrize("router_restarts", [False, True])
def test_a_restart_move_does_not_wait_for_an_instance_retired_meanwhile(router_restarts: bool) -> None:
    """Found by seed 3881: no supervisor restarts a retired instance, and dispatch stayed paused."""
    driver = restart_move_that_waits_for_the_unused()
    driver.send("a", m.Retirement(UNUSED))
    assert driver.messages("a", REQUESTER, m.RetirementReply) == [m.RetirementReply(UNUSED, True)]
    driver.stop(UNUSED)
    if router_restarts:
        driver.restart("a")
    assert_the_restart_move_ends(driver)


def test_a_restart_move_does_not_wait_for_a_stopped_instance_without_keys() -> None:
    driver = restart_move_that_waits_for_the_unused()
    driver.stop(UNUSED)
    assert_the_restart_move_ends(driver)


def test_a_restarted_router_drops_a_retired_instance_whose_late_attach_it_took() -> None:
    """The router takes an Attach sent before the retirement, and restarts before it sees the disconnect."""
    driver = SmallDeployment(topology(("a",), instances=("op@a#0", "op@a#1"))).start()
    driver.start(UNUSED)
    driver.send("a", m.Retirement(UNUSED))
    driver.send("a", m.Attach(UNUSED, driver.incarnations[UNUSED], 1), UNUSED)
    assert UNUSED in driver.machines["a"].inboxes["op"].readers
    driver.kill_unnoticed(UNUSED)
    driver.restart("a")
    assert UNUSED not in driver.machines["a"].inboxes["op"].readers
    source = driver.owner_of(KEY, at="a")
    driver.move(KEYS, source, "op@a#1" if source == "op@a#0" else "op@a#0", "restart")
    assert_the_restart_move_ends(driver)


def test_a_stopped_instance_without_keys_causes_no_back_pressure() -> None:
    driver = SmallDeployment(topology(("a",), instances=(ME,)), Settings(backlog_rows_max=10)).start()
    unused = "op@a#1"
    driver.start(unused)
    driver.produce("a", (key_in(0), 0, 0))
    driver.stop(unused)
    for n in range(30):
        driver.produce("a", (key_in(0), 0, n + 1))
    driver.advance_ms(5_000)
    assert len(driver.outputs()) == 31, "every row was processed"
    assert driver.backlog_rows("a") == 0
    assert driver.messages("a", "p", m.ProducerAck)[-1].seq == 31


def test_retiring_the_slowest_reader_releases_deferred_acknowledgements() -> None:
    """The instance stops after its keys moved and before Forget: until it is retired it may return."""
    leaver = "op@a#1"
    driver = SmallDeployment(topology(("a",), instances=(ME, leaver)), Settings(backlog_rows_max=10)).start()
    driver.withholds = lambda sender, to, message: isinstance(message, m.Forget)
    driver.move(KeySet(slots=frozenset((2, 3))), leaver, ME, "pause")
    driver.advance_ms(3_000)
    assert driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "done"
    driver.stop(leaver)
    for n in range(15):
        driver.produce("a", (key_in(2), 0, n))
    driver.send("a", m.Retirement(leaver))
    assert driver.messages("a", REQUESTER, m.RetirementReply) == [m.RetirementReply(leaver, True)]
    driver.advance_ms(10_000)
    assert len(driver.outputs()) == 15
    assert driver.messages("a", "p", m.ProducerAck)[-1].seq == 15
