"""Rows that wait for the state of their key, and the watermarks that they see when they are processed.

Responsible for: merging the waiting rows of a key with the ticks and watermarks, in the order of the logs;
    the figures and routes that follow from what has arrived.
Not responsible for: which rows wait, and when they are processed (destination_instance.py).
"""

from __future__ import annotations

from collections import deque

from tiercel.core.model.keys import Key
from tiercel.core.model.log import OWN, SHADOW, Adopt, Control, Position, Row, Watermark
from tiercel.core.model.routing import Route, RouteUpdate

Item = tuple[Position, int, list[Row], Control | None]  # position, time, rows, control


class CatchUp:
    """The waiting rows of one key whose state is here, to be merged with the waiting ticks and watermarks."""

    __slots__ = ("items", "marks", "next_control")

    def __init__(self, held: list[Item]) -> None:
        self.items: deque[Item] = deque(held)
        self.marks = LogWatermarks(-1, -1)
        self.next_control = 0

    def next_item(self, controls: list[Item]) -> Item | None:
        """The next row or control in the order of the logs; None if there is none."""
        control = controls[self.next_control] if self.next_control < len(controls) else None
        if control is not None and (not self.items or control[0] < self.items[0][0]):
            self.next_control += 1
            return control
        return self.items.popleft() if self.items else None

    def is_over(self, controls: list[Item]) -> bool:
        return not self.items and self.next_control >= len(controls)


class LogWatermarks:
    """The watermarks of the source's log and of this site's log, at the current position."""

    __slots__ = ("own_ms", "shadow_ms")

    def __init__(self, shadow_ms: int, own_ms: int) -> None:
        self.shadow_ms, self.own_ms = shadow_ms, own_ms

    def pass_by(self, position: Position, control: Control | None) -> None:
        if isinstance(control, Watermark):
            if position[0] == SHADOW:
                self.shadow_ms = max(self.shadow_ms, control.value_ms)
            else:
                self.own_ms = max(self.own_ms, control.value_ms)


def passed_by(adopt: Adopt, offset: int) -> list[Item]:
    """The watermark of our log at the adoption, if it is ahead of that of the source's log."""
    if adopt.own_watermark_ms <= adopt.watermark_ms:
        return []
    return [((OWN, offset), adopt.time_ms, [], Watermark(adopt.own_watermark_ms))]


def first_route(updates: list[RouteUpdate], key: Key, slot: int) -> Route | None:
    """The route of a key in the first of these updates that has one."""
    return next((route for u in updates if (route := u.keys.get(key) or u.slots.get(slot))), None)


def overlap_of(arrivals_ms: list[tuple[float, int]]) -> float:
    """For how much of the transfer a unit was there already, on average: (time, number of units) each."""
    units = sum(count for _, count in arrivals_ms)
    took_ms = arrivals_ms[-1][0] - arrivals_ms[0][0] if arrivals_ms else 0.0
    if not units or not took_ms:
        return 0.0
    end_ms = arrivals_ms[-1][0]
    return sum(count * (end_ms - at_ms) for at_ms, count in arrivals_ms) / units / took_ms
