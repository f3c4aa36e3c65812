"""The patches of the planted bugs in requests, takeovers, restarts, limits and event time.

Responsible for: one patch per planted bug, of the method that states or repeats what matters.
Not responsible for: planting it (planting.py), the rule that it breaks (mutants.py).
"""

from __future__ import annotations

from typing import Any

from tiercel.control.controller import Controller
from tiercel.core.instance.row_queue import RowQueue
from tiercel.core.logs.output_log import OutputLog
from tiercel.core.logs.retention import Readers
from tiercel.core.logs.sequencer import Sequencer
from tiercel.core.logs.site_outbox import SiteOutbox
from tiercel.core.migration import parallel_recovery
from tiercel.core.migration.coordinator import MoveCoordinator
from tiercel.core.migration.destination_instance import StateReceiver
from tiercel.core.migration.destination_router import IncomingMove
from tiercel.core.migration.source_instance import StateSender
from tiercel.core.migration.source_router import OutgoingMove
from tiercel.core.router.forwarding import Forwarding
from tiercel.core.router.intake import Intake
from tiercel.core.router.outputs import OutputAdmission
from tiercel.core.router.watermarks import Watermarks
from tiercel.sim.engine import process
from tiercel.sim.engine.process import Process
from tiercel.sim.explore.planting import Patch, instead


def _without_moves(original: Any) -> Any:
    return lambda place, takeover: place[0] != "move" and original(place, takeover)


def _first_slot_only(original: Any) -> Any:
    """The controller looks at the first slot of two moves only."""
    return lambda controller, a, b: a.keys.slots == b.keys.slots and original(controller, a, b)


PATCHES: dict[str, tuple[Patch, ...]] = {
    # requests
    "late-retirements-count": (Patch(Controller, "answers_retirement", instead(True)),),
    "overlapping-moves-requested": (Patch(Controller, "_overlap", instead(False)),),
    "overlap-by-first-slot": (Patch(Controller, "_overlap", _first_slot_only),),
    "done-notice-not-awaited": (Patch(MoveCoordinator, "done_is_on_its_way", instead(False)),),
    "source-flips-while-away": (Patch(OutgoingMove, "source_attached", instead(True)),),
    "successors-not-launched": (Patch(Controller, "_pursue", instead(None)),),
    "moves-not-asked-again": (Patch(Controller, "_retry", instead(None)),),
    "nobody-is-retired": (Patch(Controller, "_retire", instead(None)),),
    "scaling-stops-halfway": (Patch(Controller, "_scale_on", instead(None)),),
    # takeovers
    "ended-moves-not-taken-over": (
        Patch(parallel_recovery, "is_of_share", _without_moves),
        Patch(process, "is_of_share", _without_moves),
    ),
    "moves-of-the-dead-never-end": (Patch(MoveCoordinator, "taken_over", instead(None)),),
    "incoming-moves-of-the-dead-never-end": (Patch(IncomingMove, "taken_over", instead(None)),),
    "newest-checkpoint-not-used": (Patch(Process, "take_over_newest", instead(None)),),
    # restarts
    "restarted-instances-not-counted": (Patch(Readers, "relaunched", instead(None)),),
    "dispatch-stays-paused": (Patch(Readers, "unpause", instead(None)),),
    "retired-instances-awaited": (Patch(Readers, "_await_no_more", instead(None)),),
    # rows
    "rows-wait-for-the-table-forever": (Patch(Sequencer, "release_waiting", instead([])),),
    "outbox-forgotten": (Patch(SiteOutbox, "recover", instead(None)),),
    "receipts-not-repeated": (Patch(Forwarding, "receipt", instead(None)),),
    "rows-over-the-limit-not-wanted": (Patch(Sequencer, "take_wanted", instead([])),),
    "frames-not-sent-again": (Patch(SiteOutbox, "again", instead(None)),),
    "mobile-receipts-lost": (Patch(Forwarding, "_mobile_receipt", instead(None)),),
    "held-rows-not-forwarded": (Patch(Forwarding, "sequence_again", instead(None)),),
    "windows-never-open": (Patch(SiteOutbox, "taken", instead(None)),),
    "backlog-never-shrinks": (Patch(Readers, "passed", instead(None)),),
    "acknowledgements-not-released": (Patch(Intake, "release", instead(None)),),
    # outputs
    "subscribers-not-continued": (Patch(OutputLog, "consumed", instead(None)),),
    "old-entries-not-published": (Patch(OutputLog, "on_read", instead(None)),),
    "output-log-trimmed-under-readers": (
        Patch(OutputLog, "trim_point", lambda _: lambda log: log.offset - log.settings.stream_entries_max),
    ),
    "output-frames-repeated": (Patch(OutputLog, "is_next", instead(True)),),
    # moves
    "stalled-keys-never-go-on": (
        Patch(StateReceiver, "has_work", lambda _: lambda self: bool(self.catching_up)),
    ),
    "transfer-not-restarted": (Patch(StateSender, "on_request", instead(None)),),
    "shadow-overtaken-by-adoption": (Patch(RowQueue, "must_wait", instead(False)),),
    # event time
    "ticks-end": (Patch(OutputAdmission, "on_tick", instead(None)),),
    "watermark-reports-lost": (Patch(Watermarks, "repeat_promises", instead(None)),),
    "promises-forgotten": (Patch(Watermarks, "load", instead(None)),),
    "watermark-not-appended": (Patch(Watermarks, "on_report", instead(None)),),
}
