"""Move requests at a router: which are refused, and that a refusal is final."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from machines_in_memory import REQUESTER, SmallDeployment, key_in, topology
from tiercel.core import messages as m
from tiercel.core.model.keys import KeySet

A, B = "op@a#0", "op@b#0"


KEYS = KeySet(slots=frozenset({2}))
ALL_OF_A = KeySet(slots=frozenset((0, 1)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"operator": "nobody"}, "unknown operator 'nobody'; expected one of: op"),
        (
            {"strategy": "teleport"},
            "unknown strategy 'teleport'; expected one of: bins, fetch, live, meces, pause, predict",
        ),
        ({"keys": KeySet()}, "the key set is empty"),
        ({"keys": KeySet(slots=frozenset({9}))}, "slot 9 is out of range for op; expected 0 to 3"),
        ({"keys": KeySet(slots=frozenset({0}))}, "slot 0 is not owned by 'op@a#0'; its owner is 'op@b#0'"),
        ({"keys": KeySet(keys=frozenset({key_in(0)}))}, f"key {key_in(0)!r} is not owned by 'op@a#0'"),
        ({"destination": A}, "move from 'op@a#0' to itself"),
        ({"destination": "op@mars#0"}, "unknown site 'mars'; expected one of: a, b"),
        ({"destination": "other@b#0"}, "'other@b#0' is not an instance of 'op'"),
    ],
)
def test_an_invalid_request_is_refused_and_only_the_refusal_is_stored(
    change: dict[str, Any], reason: str
) -> None:
    driver = SmallDeployment(topology(("b", "a"))).start("a", A)
    before = copy.deepcopy(driver.disks["a"])
    wanted = {"operator": "op", "keys": KEYS, "source": A, "destination": B, "strategy": "live", **change}
    driver.send("a", m.MoveRequest("m1", **wanted, deadline_ms=1000.0))
    (status,) = driver.messages("a", REQUESTER, m.MoveStatus)
    assert status.phase == "refused"
    assert reason in status.reason
    assert driver.phase_of("m1", "source router") == ""
    refusal = {("ended", "m1"): ("refused", status.reason)}  # should the same request come again
    assert driver.disks["a"] == before | refusal


def test_a_repeated_request_of_a_refused_move_moves_nothing() -> None:
    """The requester repeats a request whose answer is slow, and then gets the refusal."""
    driver = SmallDeployment().start()
    driver.produce("a", (key_in(0), 0, 0))
    driver.withholds = lambda sender, to, message: isinstance(message, m.Chunk)
    driver.move(ALL_OF_A, A, B, name="m1")
    driver.move(ALL_OF_A, A, B, name="m2")
    assert driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "refused"
    driver.restart(A)  # m1 is undone
    driver.withheld.clear()
    driver.withholds = lambda sender, to, message: False
    driver.move(ALL_OF_A, A, B, name="m2")  # the same request, late
    driver.advance_ms(5_000)
    assert [driver.owner_of(key_in(slot), at="a") for slot in (0, 1)] == [A, A], "the keys did not move"


def test_a_retry_waits_for_the_notice_that_undoes_the_move_before_it() -> None:
    """The notice is in the site outbox behind rows; the retry asks the other router directly."""
    driver = SmallDeployment(topology(("b", "a"))).start()
    driver.produce("a", (key_in(2), 0, 0))
    driver.withholds = lambda sender, to, message: isinstance(message, m.Chunk)
    driver.move(KEYS, A, B, name="m1")
    driver.withholds = lambda sender, to, message: (
        isinstance(message, m.SiteFrame) and (sender, to) == ("a", "b")
    )
    driver.restart(A)
    assert driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "aborted"
    driver.move(KEYS, A, B, name="m2")
    assert driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "preparing", "not refused for good"
    driver.release_withheld()
    driver.advance_ms(5_000)
    assert driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "done"


@pytest.mark.parametrize("strategy", ["live", "pause", "restart"])
def test_a_move_of_keys_whose_last_move_is_done_waits_for_the_notice_of_it(strategy: str) -> None:
    """The controller knows that the first move is done; the destination's router does not know it yet."""
    driver = SmallDeployment().start("a", "b", "op@a#0", "op@b#0")
    keys = KeySet(slots=frozenset({0}))
    driver.withholds = lambda sender, to, message: (
        isinstance(message, m.SiteFrame) and isinstance(message.notice, m.DoneNotice)
    )
    driver.move(keys, "op@a#0", "op@b#0")
    driver.advance_ms(5_000)
    assert driver.statuses["m1"].outcome is m.MoveOutcome.DONE
    driver.move(keys, "op@b#0", "op@a#0", strategy, name="m2")
    driver.advance_ms(500)
    assert "m2" not in driver.statuses, "it is not refused"
    driver.release_withheld()
    driver.move(keys, "op@b#0", "op@a#0", strategy, name="m2")  # the controller asks again
    driver.advance_ms(5_000)
    assert driver.statuses["m2"].outcome is m.MoveOutcome.DONE
