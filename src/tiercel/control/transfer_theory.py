"""The theory of the order of a transfer (PAM): what each order costs, beside the best of all orders.

Responsible for: the wait that an order causes, the optimum by trying all orders of a few units.
Not responsible for: the orders themselves (core/migration/orders.py), drawn cases (bench/), real moves.

Units travel one after the other. A row of a unit waits until its unit is there:

    wait of a row = max(0, end of its unit's transfer - arrival of the row)

The best order is NP-hard to find in general (rows arrive at different times), so it is found by trying all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tiercel.core.errors import InvalidRequest
from tiercel.core.migration.orders import ORDERS, TransferFacts, Waiting

UNITS_MAX = 9  # 362,880 orders


class UnitLoad(NamedTuple):
    """A unit that is to be sent: its size, and when its rows arrive after the cut."""

    size: int
    arrivals: tuple[float, ...]


def total_wait(order: Sequence[int], units: Sequence[UnitLoad], per_size: float = 1.0) -> float:
    """The sum of the waits of all rows, if the units are sent in this order."""
    end = waited = 0.0
    for unit in order:
        end += units[unit].size * per_size
        waited += sum(max(0.0, end - arrival) for arrival in units[unit].arrivals)
    return waited


def best_order(units: Sequence[UnitLoad], per_size: float = 1.0) -> tuple[tuple[int, ...], float]:
    """The order with the least wait, of all orders."""
    if len(units) > UNITS_MAX:
        raise InvalidRequest(f"{len(units)} units", f"expected at most {UNITS_MAX}: all orders are tried")
    every = itertools.permutations(range(len(units)))
    best = min(every, key=lambda order: total_wait(order, units, per_size))
    return best, total_wait(best, units, per_size)


def order_by(name: str, units: Sequence[UnitLoad]) -> tuple[int, ...]:
    """The order in which a source sends these units, of which it knows the rows that wait."""
    facts = TransferFacts(name)
    facts.sizes = {n: unit.size for n, unit in enumerate(units)}
    facts.waiting = {
        n: Waiting(round(1e3 * min(unit.arrivals)), len(unit.arrivals))
        for n, unit in enumerate(units)
        if unit.arrivals
    }
    arrived = sorted((min(unit.arrivals), n) for n, unit in enumerate(units) if unit.arrivals)
    facts.ask([n for _, n in arrived])  # the destination asks for a unit when its first row comes
    return tuple(sorted(range(len(units)), key=lambda unit: ORDERS[name](unit, facts)))
