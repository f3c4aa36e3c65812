"""The patches of the planted bugs that long failures show: wrong clocks, the dead, lost disks.

Responsible for: one patch per planted bug, of the method that states the rule.
Not responsible for: planting it (planting.py), the rule that it breaks (mutants.py).
"""

from __future__ import annotations

from typing import Any

from tiercel.control.controller import Controller
from tiercel.core.logs.retention import Readers
from tiercel.core.migration import parallel_recovery
from tiercel.core.migration.destination_instance import StateReceiver
from tiercel.core.migration.destination_router import IncomingMove
from tiercel.core.model.routing import RoutingTable
from tiercel.sim.explore.planting import Patch, instead


def _waits_for_the_clock(original: Any) -> Any:
    """The keys settle once the clock of the log has reached theirs."""

    def say_settled(incoming: Any, step: Any) -> None:
        adopt = incoming.record.adopt
        if adopt is not None and incoming.inbox.time_ms >= adopt.time_ms:
            original(incoming, step)

    return say_settled


def _reads_only_its_share(original: Any) -> Any:
    """The first successor does not read the state that has left the dead instance, and that it must send."""
    return lambda share, served: share


def _keeps_its_epochs(original: Any) -> Any:
    return lambda self, offset, taken_over: None


PATCHES: dict[str, tuple[Patch, ...]] = {
    "moves-wait-for-clocks": (Patch(IncomingMove, "say_settled", _waits_for_the_clock),),
    "server-not-announced": (Patch(parallel_recovery, "announce_server", instead(None)),),
    "server-without-the-state": (Patch(parallel_recovery, "with_served", _reads_only_its_share),),
    "replacement-not-announced": (Patch(IncomingMove, "announce_replacement", instead(None)),),
    "replaced-destination-keeps-epochs": (Patch(StateReceiver, "renew", _keeps_its_epochs),),
    "dead-relaunch-awaited": (Patch(Readers, "await_no_more", instead(None)),),
    "scaling-waits-for-the-dead": (Patch(Controller, "_scale_without", instead(None)),),
    "clock-floor-ignored": (
        Patch(RoutingTable, "clock_ms", lambda original: lambda table, key, time_ms: time_ms),
    ),
}
