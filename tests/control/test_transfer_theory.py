"""The theory of the order of a transfer: the optimum by brute force, and each order beside it."""

from __future__ import annotations

import pytest

from tiercel.bench.scenarios.transfer_orders import compare_orders, draw_units
from tiercel.control.transfer_theory import UnitLoad, best_order, order_by, total_wait
from tiercel.core.errors import InvalidRequest


def test_a_row_waits_from_its_arrival_until_its_unit_is_there() -> None:
    units = [UnitLoad(2, (0.0, 5.0)), UnitLoad(1, (1.0,))]
    assert total_wait((0, 1), units) == 2 + 0 + 2  # the second row of unit 0 comes when it is there
    assert total_wait((1, 0), units) == 0 + 3


def test_no_order_waits_less_than_the_optimum() -> None:
    for case in range(20):
        units = draw_units(5, 1.0, case)
        _, least = best_order(units)
        for name in ("pam", "fifo", "skew", "random", "sorted", "asked"):
            assert total_wait(order_by(name, units), units) >= least - 1e-9


def test_pam_is_optimal_if_all_rows_wait_from_the_start() -> None:
    """Smith's rule: size for each waiting row, least first, minimises the weighted sum of the ends."""
    for case in range(20):
        drawn = draw_units(6, 1.5, case)
        units = [UnitLoad(unit.size, (0.0,) * len(unit.arrivals)) for unit in drawn]
        _, least = best_order(units)
        assert total_wait(order_by("pam", units), units) == pytest.approx(least)


def test_with_skewed_keys_the_orders_that_know_the_rows_beat_those_that_do_not() -> None:
    found = {cost.order: cost.mean for cost in compare_orders(6, 1.5, 40)}
    assert found["pam"] < found["sorted"]
    assert found["pam"] < found["random"]


def test_too_many_units_for_brute_force_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="10 units"):
        best_order(draw_units(10, 1.0, 1))
