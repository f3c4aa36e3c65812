"""The patches of the planted bugs that break rules of the router.

Responsible for: one patch per planted bug, of the method that states the rule.
Not responsible for: planting it (planting.py), the rule that it breaks (mutants.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from tiercel.core import messages as m
from tiercel.core.logs.dispatch import DispatchCursor
from tiercel.core.logs.inbox import Inbox
from tiercel.core.logs.producers import ProducerTable
from tiercel.core.logs.retention import Readers
from tiercel.core.logs.sequencer import Sequencer
from tiercel.core.logs.site_outbox import SiteOutbox
from tiercel.core.machine.stored import LogReader
from tiercel.core.migration import parallel_recovery
from tiercel.core.migration.coordinator import MoveCoordinator
from tiercel.core.migration.destination_router import IncomingMove
from tiercel.core.migration.phases import Role
from tiercel.core.migration.source_router import OutgoingMove
from tiercel.core.model.keys import ABSENT_WATERMARK
from tiercel.core.model.routing import RoutingTable
from tiercel.core.router.forwarding import Forwarding
from tiercel.core.router.intake import Intake
from tiercel.core.router.watermarks import FOREVER, Watermarks
from tiercel.sim.explore.planting import Patch, instead


def _accepts_gaps(original: Any) -> Any:
    return lambda table, producer, seq: seq > table.marks.get(producer, 0)


def _acknowledges_at_once(original: Any) -> Any:
    def acknowledge(table: Any, step: Any, to: str, producer: str, *, greets: str | None = None) -> None:
        step.send(to, m.ProducerAck(producer, table.marks.get(producer, 0), greets))

    return acknowledge


def _sends_at_once(notices_only: bool) -> Any:
    def broken(original: Any) -> Any:
        def add(outbox: Any, step: Any, *args: Any, **facts: Any) -> int:
            n: int = original(outbox, step, *args, **facts)
            if facts.get("notice") is not None or not notices_only:
                outbox.durable_n = n
                outbox.pump(step)
            return n

        return add

    return broken


def _without_marks(original: Any) -> Any:
    return lambda sequencer, step, marks, keys, arrives: original(sequencer, step, {}, keys, arrives)


def _without_watermark(original: Any) -> Any:
    return lambda inbox, offset, time_ms, _: original(inbox, offset, time_ms, ABSENT_WATERMARK)


def _no_listed_overrides(original: Any) -> Any:
    return lambda table, key, route, update: not update.slots and original(table, key, route, update)


def _promises_before_routing(original: Any) -> Any:
    def take_produced(intake: Any, step: Any, message: m.Produce, source: str, mark: int | None) -> None:
        if mark is not None and source == message.stream:
            intake._watermarks.promise_source(step, message.stream, source, mark)
        original(intake, step, message, source, mark)

    return take_produced


def _held_rows_close_it(original: Any) -> Any:
    return lambda router, inbound: not inbound.held and original(router, inbound)


def _reports_at_once(original: Any) -> Any:
    return lambda router, step, site, report: step.send(site, report)


def _trims_what_was_processed(original: Any) -> Any:
    return lambda readers: min(readers.durable, max(original(readers), readers.slowest_through()))


def _without_clock(original: Any) -> Any:
    return lambda incoming, step, notice: original(
        incoming, step, msgspec.structs.replace(notice, time_ms=0, watermark_ms=-1)
    )


def _refusals_always(original: Any) -> Any:
    return lambda role, phase, event: event == "Refused" or original(role, phase, event)


PATCHES: dict[str, tuple[Patch, ...]] = {
    "cut-rows-not-shadowed": (Patch(OutgoingMove, "rows_in_source_parts", instead([])),),
    # rows
    "producer-dedup-lost": (
        Patch(ProducerTable, "is_next", _accepts_gaps),
        Patch(ProducerTable, "recover_mark", instead(None)),
    ),
    "early-rows-not-held": (Patch(Sequencer, "must_hold", instead(False)),),
    "marks-not-moved": (Patch(Sequencer, "install_marks", _without_marks),),
    "home-coming-not-held": (Patch(Sequencer, "await_own_rows", instead(None)),),
    "outbox-not-replayed": (Patch(SiteOutbox, "replay", instead(None)),),
    "sent-before-durable": (Patch(SiteOutbox, "add", _sends_at_once(notices_only=False)),),
    "flip-announced-too-early": (Patch(SiteOutbox, "add", _sends_at_once(notices_only=True)),),
    "held-rows-close-the-outbox": (Patch(Forwarding, "may_open_window", _held_rows_close_it),),
    "log-trimmed-too-early": (Patch(Readers, "trim_point", _trims_what_was_processed),),
    # clients and outputs
    "acknowledged-too-early": (Patch(ProducerTable, "acknowledge", _acknowledges_at_once),),
    "output-marks-forgotten": (Patch(Inbox, "recover_emitted", instead(None)),),
    "zombie-not-fenced": (
        Patch(DispatchCursor, "is_fenced", instead(False)),
        Patch(LogReader, "fences", instead(False)),
    ),
    # owners
    "stale-moved-believed": (
        Patch(RoutingTable, "is_newer", lambda original: lambda table, route, current: route != current),
        Patch(
            RoutingTable,
            "accepts_override",
            lambda original: lambda table, key, route, update: route != table.overrides.get(key),
        ),
        Patch(Forwarding, "may_believe", instead(True)),
    ),
    "epoch-not-compared": (
        Patch(RoutingTable, "is_swept", instead(True)),
        Patch(RoutingTable, "accepts_override", _no_listed_overrides),
    ),
    # event time
    "watermark-overtakes": (Patch(Watermarks, "promise_under_way", instead(FOREVER)),),
    "watermark-forgotten": (Patch(Inbox, "recover_head", _without_watermark),),
    "late-rows-taken": (Patch(Watermarks, "left_out", instead(False)),),
    "late-for-each-other": (Patch(Intake, "take_produced", _promises_before_routing),),
    "promised-before-durable": (Patch(Watermarks, "send_report", _reports_at_once),),
    # the source router of a move
    "shadow-from-begin": (
        Patch(
            OutgoingMove,
            "shadow_start",
            lambda original: lambda outgoing, offset: max(offset, outgoing.record.begin_offset),
        ),
    ),
    "flip-ignores-watermark": (Patch(OutgoingMove, "source_watermark_reached", instead(True)),),
    "flip-ahead-of-shadow": (Patch(OutgoingMove, "shadow_complete", instead(True)),),
    "digests-not-compared": (Patch(OutgoingMove, "differing_key", instead(None)),),
    "emit-before-arrival": (
        Patch(OutgoingMove, "must_arrive_first", lambda original: lambda outgoing: set()),
    ),
    "abort-after-flip": (
        Patch(OutgoingMove, "may_abort", instead(True)),
        Patch(Role, "handles", _refusals_always),
        Patch(Role, "may_follow", instead(True)),
    ),
    "cut-not-enforced": (
        Patch(OutgoingMove, "must_stop_at", instead(None)),
        Patch(OutgoingMove, "refuses_output", instead(False)),
    ),
    "overlapping-moves-accepted": (
        Patch(MoveCoordinator, "check_unlocked", instead(None)),
        Patch(MoveCoordinator, "abort_is_on_its_way", instead(False)),
        Patch(MoveCoordinator, "done_is_on_its_way", instead(False)),
    ),
    # the destination router of a move
    "vote-forgotten": (Patch(MoveCoordinator, "recover_incoming", instead(None)),),
    "shadow-not-stored": (Patch(IncomingMove, "store_shadow", instead(None)),),
    "clock-not-carried": (
        Patch(IncomingMove, "on_flipped", _without_clock),
        Patch(OutgoingMove, "clock_floor_ms", instead(0)),
    ),
    "carried-watermark-not-logged": (Patch(IncomingMove, "log_carried_watermark", instead(None)),),
    "move-marks-ignored": (Patch(IncomingMove, "may_admit", instead(True)),),
    # takeover
    "taken-over-log-skipped": (
        Patch(
            parallel_recovery,
            "reads_through",
            lambda original: lambda taken_over, before: before.applied,
        ),
    ),
    "successors-emit-again": (Patch(parallel_recovery, "take_output_mark", instead(None)),),
}
