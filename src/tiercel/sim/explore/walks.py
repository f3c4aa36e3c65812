"""Rare paths of the protocol, and how often seeds walk them.

Responsible for: the list of rare paths, each as a method of the core and what its result says; counting them
    in a run; which of them a campaign has missed.
Not responsible for: drawing scenarios that walk them (scenario/), showing the report (cli/sim.py).

A path that no seed walks is not tested, whatever the number of seeds.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tiercel.control.controller import Controller
from tiercel.core.errors import InvalidRequest
from tiercel.core.instance.instance import Instance
from tiercel.core.instance.row_queue import RowQueue
from tiercel.core.logs.dispatch import DispatchCursor
from tiercel.core.logs.inbox import Inbox
from tiercel.core.logs.output_log import OutputLog
from tiercel.core.logs.producers import ProducerTable
from tiercel.core.logs.sequencer import Sequencer
from tiercel.core.logs.site_outbox import SiteOutbox
from tiercel.core.migration import parallel_recovery
from tiercel.core.migration.coordinator import MoveCoordinator
from tiercel.core.migration.destination_instance import StateReceiver
from tiercel.core.migration.instance_moves import InstanceMoves
from tiercel.core.migration.source_instance import StateSender
from tiercel.core.migration.source_router import OutgoingMove
from tiercel.core.router.forwarding import Forwarding
from tiercel.core.router.intake import Intake
from tiercel.core.router.watermarks import Watermarks
from tiercel.sim.explore.planting import Patch, patched

When = Callable[[tuple[Any, ...], Any], bool]


class Walk(NamedTuple):
    """A rare path: the method that takes it, and whether a call of it did, by its arguments and result."""

    owner: Any
    method: str
    when: When
    by_seeds: bool = True  # False: too rare for them; a transcript in tests/ walks it


def _called(args: tuple[Any, ...], result: Any) -> bool:
    return True


def _true(args: tuple[Any, ...], result: Any) -> bool:
    return bool(result)


def _false(args: tuple[Any, ...], result: Any) -> bool:
    return not result


def _refused(args: tuple[Any, ...], result: Any) -> bool:
    return isinstance(result, InvalidRequest)


def _aborts(words: str) -> When:
    return lambda args, result: words in args[2]


def _compares(args: tuple[Any, ...], result: Any) -> bool:
    mine, vote = args[0].source_digests, args[0].vote
    return bool(mine and vote is not None and mine.keys() & vote.digests.keys())


def _compares_nothing(args: tuple[Any, ...], result: Any) -> bool:
    return args[0].strategy.votes and not _compares(args, result)


def _is_full(args: tuple[Any, ...], result: Any) -> bool:
    return bool(result) and len(args[0].withheld) >= args[0].instance.settings.withheld_max


WALKS: dict[str, Walk] = {
    # rows
    "producers wait for a backlog": Walk(Intake, "congested", _true),
    "a producer sends a frame again": Walk(ProducerTable, "is_next", _false, False),
    "a row waits for an earlier one of its source": Walk(Sequencer, "must_hold", _true),
    "a row waits for the routing table": Walk(Sequencer, "release_waiting", _true),
    "a key is home before its own rows are": Walk(
        Sequencer, "await_own_rows", lambda args, _: bool(args[0].awaiting_own_rows)
    ),
    "rows are held while their key leaves": Walk(Sequencer, "drop_held", _true),
    "a sender learns of a newer owner": Walk(Forwarding, "on_owner_changed", _called),
    "frames are sent again": Walk(SiteOutbox, "replay", lambda args, _: bool(args[0].frames)),
    "a row is late": Walk(Watermarks, "left_out", _true),
    "a site is idle": Walk(Watermarks, "on_idle_timer", _called),
    "a subscriber reads entries that are not in memory": Walk(OutputLog, "on_read", _called),
    # instances
    "an older incarnation is fenced": Walk(DispatchCursor, "is_fenced", _true),
    "an instance is ahead of its log": Walk(Instance, "router_has_lost_entries", _true),
    "a retired instance begins anew": Walk(Instance, "was_retired", _true),
    "state is read back": Walk(Instance, "missing_state", _true),
    "rows wait for the next slice": Walk(
        RowQueue, "must_continue", lambda args, more: more and bool(args[0])
    ),
    # requests
    "a move is refused": Walk(MoveCoordinator, "check_request", _refused),
    "a move waits for the notice that the last one is done": Walk(
        MoveCoordinator, "done_is_on_its_way", _true
    ),
    "a move waits for the notice that the last one is undone": Walk(
        MoveCoordinator, "abort_is_on_its_way", _true, False
    ),
    "a retirement is answered too late": Walk(Controller, "answers_retirement", _false),
    "a takeover": Walk(parallel_recovery, "_give", _called),
    "a takeover is refused": Walk(parallel_recovery, "_check", _refused),
    "a dead instance waits for its successors": Walk(Inbox, "defer_or_fence_attach", _called),
    # moves before the flip
    "the flip waits for the source's watermark": Walk(OutgoingMove, "source_watermark_reached", _false),
    "the flip waits for the shadow": Walk(
        OutgoingMove, "shadow_complete", lambda args, ready: args[0].strategy.shadows and not ready, False
    ),
    "the flip waits for a source that is away": Walk(OutgoingMove, "source_attached", _false),
    "a live flip has compared keys": Walk(OutgoingMove, "flip", _compares),
    "a live flip has compared no key": Walk(OutgoingMove, "flip", _compares_nothing),
    "a flip does not wait for an overloaded source": Walk(OutgoingMove, "may_flip_uncompared", _true),
    "undone: the source restarted": Walk(OutgoingMove, "abort", _aborts("the source was restarted")),
    "undone: the destination restarted": Walk(OutgoingMove, "abort", _aborts("destination was restarted")),
    "undone: a router restarted": Walk(OutgoingMove, "abort", _aborts("the router of")),
    "undone: the deadline passed": Walk(OutgoingMove, "abort", _aborts("not decided within")),
    "undone: the shadow is full": Walk(OutgoingMove, "abort", _aborts("shadow outbox is full"), False),
    "undone: the destination does not run": Walk(OutgoingMove, "abort", _aborts("is not running")),
    "chunks are sent again": Walk(StateSender, "resend", _called),
    "the destination withholds all it may": Walk(StateReceiver, "_must_stall", _is_full),
    # moves behind the flip
    "a silent source is cut off": Walk(OutgoingMove, "take_over", _called),
    "outputs behind the cut are refused": Walk(OutgoingMove, "refuses_output", _true),
    "a destination asks for its state once more": Walk(StateSender, "on_request", _called),
    "ticks wait for the state of their keys": Walk(StateReceiver, "hold_control", _called),
    "a vote survives a restart of its router": Walk(MoveCoordinator, "recover_incoming", _called),
    "keys are back before they are forgotten": Walk(InstanceMoves, "is_back", _true, False),
}


@contextlib.contextmanager
def walking(counts: Counter[str]) -> Iterator[None]:
    """Count the paths that the body walks."""
    with patched([Patch(w.owner, w.method, _counted(name, w.when, counts)) for name, w in WALKS.items()]):
        yield


def _counted(name: str, when: When, counts: Counter[str]) -> Callable[[Any], Any]:
    def watch(original: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                result = original(*args, **kwargs)
            except InvalidRequest as refusal:
                if when(args, refusal):
                    counts[name] += 1
                raise
            if when(args, result):
                counts[name] += 1
            return result

        return watched

    return watch


def missed(walked: Counter[str]) -> list[str]:
    """The paths that seeds should walk and have not."""
    return [name for name, walk in WALKS.items() if walk.by_seeds and not walked[name]]
