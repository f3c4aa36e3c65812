"""Moves between sites whose clocks differ: no move waits, and the clock of a key never runs backwards."""

from __future__ import annotations

import pytest

from machines_in_memory import SmallDeployment, key_in
from tiercel.core import messages as m
from tiercel.core.model.keys import KeySet

A, B = "op@a#0", "op@b#0"
KEY = key_in(0)
MINUTES_10 = 600_000.0
STRATEGIES = ["live", "pause", "restart"]


def deployment(kind: str = "sessions") -> SmallDeployment:
    """Site `a` has slots 0 and 1, and a clock that is ten minutes ahead."""
    driver = SmallDeployment(kind=kind)
    driver.ahead_ms["a"] = MINUTES_10
    return driver.start()


def seen_times(driver: SmallDeployment, key: bytes = KEY) -> list[int]:
    """The processing times that the operator was called with for the key, in the order of its outputs."""
    rows = [output.row for output in driver.outputs() if output.key == key]
    return [payload[4] for _, _, payload in rows if payload[2] == "recent"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_move_does_not_wait_for_a_clock_that_is_ahead(strategy: str) -> None:
    driver = deployment()
    driver.produce("a", (KEY, 0, "x"))
    driver.move(KeySet(slots=frozenset({0})), A, B, strategy)
    driver.advance_ms(5_000)
    assert driver.statuses["m1"].outcome is m.MoveOutcome.DONE


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_key_that_leaves_a_clock_that_is_ahead_keeps_its_time(strategy: str) -> None:
    """Also behind a crash, and behind a second move to a site whose clock is right, too."""
    driver = deployment()
    driver.produce("a", (KEY, 0, 1))
    driver.move(KeySet(slots=frozenset({0})), A, B, strategy)
    driver.advance_ms(5_000)
    driver.produce("a", (KEY, 0, 2))
    driver.advance_ms(5_000)
    driver.restart(B)
    driver.produce("b", (KEY, 0, 3), producer="q")
    driver.ahead_ms["a"] = 0.0
    driver.restart("a")
    driver.move(KeySet(keys=frozenset({KEY})), B, A, strategy, name="m2")
    driver.advance_ms(5_000)
    assert driver.statuses["m2"].outcome is m.MoveOutcome.DONE
    driver.produce("b", (KEY, 0, 4), producer="q")
    times = seen_times(driver)
    assert len(times) == 4
    assert times == sorted(times), "the clock of the key ran backwards"
    assert times[0] > MINUTES_10


def test_other_keys_of_the_destination_keep_their_own_time() -> None:
    driver = deployment()
    driver.produce("a", (KEY, 0, 1))
    driver.move(KeySet(slots=frozenset({0})), A, B)
    driver.advance_ms(5_000)
    driver.produce("b", (key_in(2), 0, 1), producer="q")
    (time_ms,) = seen_times(driver, key_in(2))
    assert time_ms < MINUTES_10


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_timer_that_the_clock_of_a_moved_key_has_passed_fires_soon(strategy: str) -> None:
    """It was due at the source between its last tick and the flip."""
    driver = deployment()
    driver.produce("a", (KEY, 0, 1))  # its session ends 120 ms later
    driver.now_ms += 130
    driver.move(KeySet(slots=frozenset({0})), A, B, strategy)
    driver.advance_ms(5_000)
    payloads = [output.row[2] for output in driver.outputs()]
    assert [payload[2] for payload in payloads if payload[2] == "session"] == ["session"]
