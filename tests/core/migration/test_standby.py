"""Standbys: what a move sends to an instance that has a copy, and what becomes of a copy that is lost."""

from __future__ import annotations

import pytest

from machines_in_memory import SmallDeployment, key_in, topology
from tiercel.control.controller import Controller, ScaleRequest
from tiercel.control.plans import Plan, PlannedMove
from tiercel.core import messages as m
from tiercel.core.errors import InvalidRequest
from tiercel.core.model.keys import KeySet
from tiercel.core.settings import Settings

A, B = "op@a#0", "op@b#0"
SLOT_0 = KeySet(slots=frozenset({0}))
KEYS = [key_in(0, n) for n in range(6)]


def with_a_copy(**settings: float) -> SmallDeployment:
    """Six keys of slot 0 at A, all of them in the copy of its standby B."""
    driver = SmallDeployment(settings=Settings(checkpoint_ms=200.0, **settings)).start()  # type: ignore[arg-type]
    driver.send("a", m.SetStandby(A, B))
    driver.produce("a", *((key, 0, 0) for key in KEYS))
    driver.advance_ms(500)
    return driver


def last_counts(driver: SmallDeployment) -> dict[bytes, int]:
    return {output.key: output.row[2][2] for output in driver.outputs()}


def moved(driver: SmallDeployment, strategy: str = "standby") -> list[m.Chunk]:
    driver.move(SLOT_0, A, B, strategy)
    driver.advance_ms(5_000)
    assert driver.statuses["m1"].phase == "done"
    driver.produce("a", *((key, 0, 9) for key in KEYS))
    driver.advance_ms(100)
    return driver.messages(A, B, m.Chunk)


def test_a_move_to_a_standby_names_the_keys_that_the_standby_has() -> None:
    driver = with_a_copy()
    chunks = moved(driver)
    assert {key for chunk in chunks for key in chunk.kept} == set(KEYS)
    assert not any(image.values for chunk in chunks for image in chunk.images)
    assert last_counts(driver) == dict.fromkeys(KEYS, 2)


def test_a_key_that_has_changed_since_its_increment_is_sent() -> None:
    driver = with_a_copy()
    driver.produce("a", (KEYS[0], 0, 1))  # no checkpoint has this row
    chunks = moved(driver)
    assert [image.key for chunk in chunks for image in chunk.images if image.values] == [KEYS[0]]
    assert last_counts(driver) == dict.fromkeys(KEYS, 2) | {KEYS[0]: 3}


def test_a_standby_that_has_restarted_gets_everything_in_full() -> None:
    driver = with_a_copy()
    driver.withholds = lambda sender, to, message: isinstance(message, m.Increment)
    driver.restart(B)
    driver.advance_ms(50)
    moved(driver)
    assert last_counts(driver) == dict.fromkeys(KEYS, 2)


def test_other_strategies_send_everything_also_to_a_standby() -> None:
    chunks = moved(with_a_copy(), "live")
    assert not any(chunk.kept for chunk in chunks)


def test_increments_wait_for_their_receipts() -> None:
    driver = SmallDeployment(settings=Settings(chunk_keys_max=1, chunks_unacked_max=2)).start()
    driver.withholds = lambda sender, to, message: isinstance(message, m.IncrementReceipt)
    driver.produce("a", *((key, 0, 0) for key in KEYS))
    driver.send("a", m.SetStandby(A, B))
    driver.advance_ms(300)
    assert len(driver.messages(A, B, m.Increment)) == 2


def test_a_router_that_restarts_still_knows_the_standby() -> None:
    driver = with_a_copy()
    driver.restart("a")
    driver.restart(A)
    driver.advance_ms(500)
    assert driver.machines[A].moves.standby.standby == B


def test_an_instance_without_a_standby_sends_no_increments_any_more() -> None:
    driver = with_a_copy()
    driver.send("a", m.SetStandby(A, ""))
    before = len(driver.messages(A, B, m.Increment))
    driver.produce("a", (KEYS[0], 0, 1))
    driver.advance_ms(500)
    assert len(driver.messages(A, B, m.Increment)) == before


def test_a_move_to_an_instance_that_is_not_the_standby_is_refused_by_name() -> None:
    controller = Controller(topology(), Settings(), {})
    plan = Plan((PlannedMove("op", SLOT_0, A, B, "standby"),), "a test")
    with pytest.raises(InvalidRequest, match=r"not the standby of 'op@a#0'.*\n?.*has none"):
        controller.request(plan, 0.0)
    assert not controller.moves


@pytest.mark.parametrize(
    ("standby", "what"), [("other@b#0", "as the standby of"), (A, "as its own standby"), ("op@c#0", "site")]
)
def test_a_standby_that_cannot_be_one_is_refused(standby: str, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what):
        Controller(topology(), Settings(), {}).set_standby(A, standby, 0.0)


def test_a_non_deterministic_operator_has_no_standby() -> None:
    with pytest.raises(InvalidRequest, match="non-deterministic"):
        Controller(topology(deterministic=False), Settings(), {}).set_standby(A, B, 0.0)


def test_a_restarted_controller_still_knows_the_standbys() -> None:
    controller = Controller(topology(), Settings(), {("standby", A): B})
    assert controller.standbys == {A: B}


def test_a_scaling_with_standbys_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="scaling with strategy 'standby'"):
        Controller(topology(), Settings(), {}).scale(ScaleRequest("op", (A, B), "standby"), 0.0)
