"""The patches of the planted bugs in the numbers that devices give their rows.

Responsible for: one patch per planted bug, of the method that states the rule.
Not responsible for: planting it (planting.py), the rule that it breaks (mutants.py).
"""

from __future__ import annotations

from typing import Any

from tiercel.core.logs.device_numbers import DeviceNumbers
from tiercel.core.logs.sequencer import Sequencer
from tiercel.core.router.device_rows import DeviceRows
from tiercel.sim.explore.planting import Patch, instead


def _held_in_memory(original: Any) -> Any:
    """Early rows are held where they came in; only memory has them."""

    def take_or_defer(sequencer: Any, step: Any, rows: Any) -> Any:
        ready: list[Any] = []
        for row in rows:
            sequencer._sequence_here(step, row, (), ready)
        return ready, []

    return take_or_defer


def _numbered_by_sites(original: Any) -> Any:
    """The rows of devices are rows like others: each site numbers those that enter there."""
    return lambda devices, step, facts, rows, numbers: devices._fan_out.route_rows(step, facts.name, rows)


PATCHES: dict[str, tuple[Patch, ...]] = {
    "device-numbers-ignored": (Patch(DeviceRows, "route_rows", _numbered_by_sites),),
    "early-device-rows-in-memory": (Patch(Sequencer, "take_or_defer", _held_in_memory),),
    "device-repeats-refused": (Patch(DeviceNumbers, "is_repeat", instead(False)),),
    "reused-numbers-dropped": (Patch(DeviceNumbers, "is_repeat", instead(True)),),
    "gaps-never-close": (Patch(DeviceNumbers, "overdue", instead(())),),
    "gaps-close-in-silence": (Patch(DeviceRows, "_refuse", instead(None)),),
    "recent-rows-not-moved": (Patch(DeviceNumbers, "install", instead(None)),),
    "recent-rows-forgotten": (Patch(DeviceNumbers, "recover", instead(None)),),
}
