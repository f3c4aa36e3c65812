"""`tiercel bench orders`: the orders of a transfer beside the best of all orders, on drawn cases.

Responsible for: drawing units and their rows, the ratio of each order's wait to the optimum.
Not responsible for: the theory (control/transfer_theory.py), real moves (reconfigure.py).
"""

from __future__ import annotations

import random
from typing import NamedTuple

from tiercel.bench.report import Line
from tiercel.control.transfer_theory import UnitLoad, best_order, order_by, total_wait
from tiercel.core.migration.orders import ORDERS


def draw_units(count: int, zipf: float, seed: int, rows: int = 40) -> list[UnitLoad]:
    """Units of different sizes whose rows follow a Zipf distribution, in a random order of ranks."""
    rng = random.Random(f"units {seed}")
    weights = [1.0 / rank**zipf for rank in range(1, count + 1)]
    rng.shuffle(weights)
    chosen = rng.choices(range(count), weights, k=rows)
    arrivals: dict[int, list[float]] = {unit: [] for unit in range(count)}
    span = float(count)
    for unit in chosen:
        arrivals[unit].append(rng.uniform(-span, span))  # some wait since before the cut
    return [UnitLoad(rng.choice((1, 1, 2, 4)), tuple(sorted(arrivals[unit]))) for unit in range(count)]


class OrderCost(NamedTuple):
    """How an order compares with the optimum, over many cases."""

    order: str
    mean: float  # times the optimum's wait
    worst: float
    optimal: float  # share of the cases in which it is the optimum


def compare_orders(count: int, zipf: float, cases: int, seed: int = 1) -> list[OrderCost]:
    """Each order beside the brute-force optimum, on drawn cases. Cases without any wait do not count."""
    ratios: dict[str, list[float]] = {name: [] for name in ORDERS}
    for case in range(cases):
        units = draw_units(count, zipf, seed * 1_000_003 + case)
        _, least = best_order(units)
        if least > 0:
            for name, found in ratios.items():
                found.append(total_wait(order_by(name, units), units) / least)
    return [
        OrderCost(name, sum(r) / len(r), max(r), sum(x < 1 + 1e-9 for x in r) / len(r))
        for name, r in ratios.items()
        if r
    ]


def measure(counts: list[int], zipfs: list[float], cases: int, seed: int) -> list[Line]:
    """One row for each number of units, skew and order."""
    return [
        {
            "units": count,
            "zipf": zipf,
            "order": cost.order,
            "mean_ratio": round(cost.mean, 3),
            "worst_ratio": round(cost.worst, 3),
            "optimal_share": round(cost.optimal, 3),
        }
        for count in counts
        for zipf in zipfs
        for cost in compare_orders(count, zipf, cases, seed)
    ]
