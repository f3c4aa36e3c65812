"""Speeds of instances: what each can process, from several views, so that one bad second says nothing.

Responsible for: the median of the last measured capacities of each instance.
Not responsible for: the capacity of one second (view.py), sharing the load by speed (load_planner.py).

An instance that was stopped for a moment, or has just taken over keys, looks very slow in a single view.
"""

from __future__ import annotations

from collections import deque

from tiercel.control.view import OperatorView, View

VIEWS = 9
VIEWS_MIN = 3  # fewer say nothing


class Speeds:
    """What was measured of every instance, view by view."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = {}

    def add(self, view: View) -> None:
        """Take the capacities of a view, and forget instances that are not in it."""
        seen: dict[str, deque[float]] = {}
        for operator in view.operators.values():
            for instance in operator.instances:
                known = seen[instance.name] = self._seen.get(instance.name, deque(maxlen=VIEWS))
                if instance.capacity is not None:
                    known.append(instance.capacity)
        self._seen = seen

    def of(self, operator: OperatorView) -> dict[str, float]:
        """Instance -> rows per second that it can process; without those of which too little is known."""
        found = {instance.name: self._seen.get(instance.name, ()) for instance in operator.instances}
        return {name: sorted(seen)[len(seen) // 2] for name, seen in found.items() if len(seen) >= VIEWS_MIN}
