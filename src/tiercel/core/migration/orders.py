"""Orders: in which order a source sends the units of a move.

Responsible for: one function for each order, from the facts of a transfer to a sort key.
Not responsible for: units (units.py), who collects the facts (source_router.py, destination_instance.py).

Orders and requests are hints. They change when a key goes on, and never what is right: every unit is sent.

    pam      many waiting rows and little state first, then the first arrival (PAM)
    fifo     in the order in which the waiting rows arrived
    skew     the unit with most waiting rows first
    random   an order that depends on nothing but the names of move and unit
    sorted   by number: the order-unaware baseline of Meces
    asked    what the destination asks for, then the smallest (Meces, DRRS)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import xxhash


class Waiting(NamedTuple):
    """Rows of one unit that wait for its state."""

    first: int  # offset of the first one
    rows: int


class TransferFacts:
    """What a source knows about the units that it still has to send."""

    def __init__(self, move: str) -> None:
        self.move = move
        self.waiting: dict[int, Waiting] = {}
        self.sizes: dict[int, int] = {}  # keys of each unit: their number stands for their bytes
        self.asked: dict[int, int] = {}  # unit -> its place among the requests

    def ask(self, units: list[int]) -> None:
        """Record a request of the destination; an earlier request of the same unit keeps its place."""
        for unit in units:
            self.asked.setdefault(unit, len(self.asked))


SortKey = tuple[float, ...]
NONE_WAITING = float("inf")


def by_number(unit: int, facts: TransferFacts) -> SortKey:
    return (unit,)


def by_arrival(unit: int, facts: TransferFacts) -> SortKey:
    waiting = facts.waiting.get(unit)
    return (waiting.first if waiting is not None else NONE_WAITING, unit)


def by_skew(unit: int, facts: TransferFacts) -> SortKey:
    waiting = facts.waiting.get(unit)
    return (-waiting.rows if waiting is not None else 0, *by_arrival(unit, facts))


def by_weight(unit: int, facts: TransferFacts) -> SortKey:
    """Smith's rule: state to send for each waiting row, least first; it minimises the sum of the waits."""
    waiting = facts.waiting.get(unit)
    cost = facts.sizes.get(unit, 0) / waiting.rows if waiting is not None else NONE_WAITING
    return (cost, *by_arrival(unit, facts))


def by_chance(unit: int, facts: TransferFacts) -> SortKey:
    return (xxhash.xxh3_64_intdigest(f"{facts.move} {unit}".encode()), unit)


def by_request(unit: int, facts: TransferFacts) -> SortKey:
    return (facts.asked.get(unit, NONE_WAITING), facts.sizes.get(unit, 0), unit)


ORDERS: dict[str, Callable[[int, TransferFacts], SortKey]] = {
    "pam": by_weight,
    "fifo": by_arrival,
    "skew": by_skew,
    "random": by_chance,
    "sorted": by_number,
    "asked": by_request,
}
NEEDS_BACKLOG = frozenset(("pam", "fifo", "skew"))
