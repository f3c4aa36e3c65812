"""The patches of the planted bugs that long failures show: wrong clocks, the dead, lost disks.

Responsible for: one patch per planted bug, of the method that states the rule.
Not responsible for: planting it (planting.py), the rule that it breaks (mutants.py).
"""

from __future__ import annotations

from typing import Any

from tiercel.core.migration.destination_router import IncomingMove
from tiercel.core.model.routing import RoutingTable
from tiercel.sim.explore.planting import Patch


def _waits_for_the_clock(original: Any) -> Any:
    """The keys settle once the clock of the log has reached theirs."""

    def say_settled(incoming: Any, step: Any) -> None:
        adopt = incoming.record.adopt
        if adopt is not None and incoming.inbox.time_ms >= adopt.time_ms:
            original(incoming, step)

    return say_settled


PATCHES: dict[str, tuple[Patch, ...]] = {
    "moves-wait-for-clocks": (Patch(IncomingMove, "say_settled", _waits_for_the_clock),),
    "clock-floor-ignored": (
        Patch(RoutingTable, "clock_ms", lambda original: lambda table, key, time_ms: time_ms),
    ),
}
