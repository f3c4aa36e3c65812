"""What a policy is, and the checks of the numbers that users give to one.

Responsible for: the interface of policies, the shipped ones by name, errors that name the option.
Not responsible for: the decisions (the other modules here), what is allowed (governor.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tiercel.control.proposals import Proposal
from tiercel.control.view import InstanceView, View
from tiercel.core.errors import InvalidRequest

Memory = Any  # whatever a policy returned last; None at first
Decide = Callable[[View, Memory], tuple[Sequence[Proposal], Memory]]


class Policy(Protocol):
    """A shipped policy: options, and a pure function."""

    @property
    def operator(self) -> str: ...

    def decide(self, view: View, memory: Memory) -> tuple[Sequence[Proposal], Memory]: ...


def check_share(name: str, value: object) -> None:
    """Refuse a share of a core that is not above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise InvalidRequest(f"{name} = {value!r}", "expected a share above 0 and at most 1, as in 0.7")


def check_above(name: str, value: object, low: float = 0.0) -> None:
    """Refuse a number that is not above `low`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > low:
        raise InvalidRequest(f"{name} = {value!r}", f"expected a number above {low:g}")


SKEW = 0.7  # part of the busiest one's work that the others do on average; below it the load is uneven


def skewed(here: Sequence[InstanceView], threshold: float) -> InstanceView | None:
    """The busiest of several instances, if it is busier than a threshold and the others are much less so."""
    if len(here) < 2:
        return None
    busiest = max(here, key=lambda i: (i.work, i.name))
    others = (sum(i.work for i in here) - busiest.work) / (len(here) - 1)
    return busiest if busiest.work > threshold and others < SKEW * busiest.work else None


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"
