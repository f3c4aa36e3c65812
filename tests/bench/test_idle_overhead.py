"""Turns of the two builds in the idle benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tiercel.bench.scenarios import idle_overhead as idle


@pytest.mark.parametrize(("swap", "order"), [(False, "ABBAAB"), (True, "BAABBA")])
def test_builds_take_turns_in_alternating_order(swap: bool, order: str) -> None:
    """A machine that becomes slower all the time is no reason to find one of them slower."""
    taken: list[str] = []

    def half(name: str) -> Callable[[float], dict[str, Any]]:
        def run(seconds: float) -> dict[str, Any]:
            taken.append(name)
            return {"events_per_s": 100 - len(taken), "seconds": seconds}

        return run

    a, b = idle.take_turns([half("A"), half("B")], 3 * idle.SLICE_S, swap=swap)
    assert "".join(taken) == order
    assert idle.total(a, "seconds") == idle.total(b, "seconds") == 3 * idle.SLICE_S
    assert abs(idle.mean_rate(a) - idle.mean_rate(b)) < 1


def test_time_shorter_than_a_slice_is_one_slice() -> None:
    taken = idle.take_turns([lambda seconds: {"seconds": seconds}] * 2, idle.SLICE_S / 4, swap=False)
    assert taken == [[{"seconds": idle.SLICE_S / 4}]] * 2
