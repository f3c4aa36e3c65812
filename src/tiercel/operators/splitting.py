"""Side outputs: one stream per condition, each row in one of them.

Responsible for: the functions that choose a row's branch.
Not responsible for: the streams. A branch is a view of the stream, filtered where it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tiercel.errors import UserError

REST = "rest"  # the branch of rows for which no function is true

Predicate = Callable[[Any], bool]


def branches(given: Mapping[str, Predicate]) -> dict[str, Branch]:
    """A function for each branch, in their order, and one for the rest."""
    if not given:
        raise UserError("split without a branch", expected="split(fast=lambda row: row.speed > 100)")
    for name, function in given.items():
        if name == REST:
            raise UserError(f"a branch named {REST!r}", expected="another name: that is where other rows go")
        if not callable(function):
            raise UserError(f"split({name}={function!r:.80})", expected="a function of a row")
    functions = list(given.values())
    found = {name: Branch(functions[:n], functions[n]) for n, name in enumerate(given)}
    return {**found, REST: Branch(functions, None)}


class Branch:
    """Whether a row belongs to a branch: its function is true, and none before it is."""

    def __init__(self, earlier: list[Predicate], own: Predicate | None) -> None:
        self._earlier, self._own = earlier, own
        self.__name__ = "branch of a split"

    def __call__(self, row: Any) -> bool:
        if any(function(row) for function in self._earlier):
            return False
        return self._own is None or bool(self._own(row))
