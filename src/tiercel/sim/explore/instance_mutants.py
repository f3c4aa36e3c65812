"""The patches of the planted bugs that break rules of the instance.

Responsible for: one patch per planted bug, of the method that states the rule.
Not responsible for: planting it (planting.py), the rule that it breaks (mutants.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tiercel.core.instance import checkpoint_loader
from tiercel.core.instance.checkpoint_writer import CheckpointWriter
from tiercel.core.instance.instance import Instance
from tiercel.core.instance.processing import Processing
from tiercel.core.instance.row_queue import RowQueue
from tiercel.core.instance.user_code import ProcessorRunner
from tiercel.core.migration.destination_instance import StateReceiver
from tiercel.core.migration.instance_moves import InstanceMoves
from tiercel.core.migration.phases import SourceInstancePhase
from tiercel.core.migration.source_instance import StateSender
from tiercel.core.migration.standby import StandbyCopy, StandbySender
from tiercel.core.model.log import OWN, Entry
from tiercel.core.state.eviction import MemoryLimit
from tiercel.sim.engine.disk import Disk
from tiercel.sim.explore.planting import Patch, instead

EVERYTHING = 1 << 60  # above every offset
EARLY_MS = 40


def _shifted(by: int) -> Callable[[Any], Any]:
    """A method that returns a number that is `by` too high."""
    return lambda original: lambda *args: original(*args) + by


def _without_timers(original: Any) -> Any:
    return lambda self, key: msgspec.structs.replace(original(self, key), timers=())


def _without_deleted(original: Any) -> Any:
    def broken(self: StateSender, queue: Any) -> Any:
        chunk = original(self, queue)
        images = [image for image in chunk.images if image.values is not None]
        return msgspec.structs.replace(chunk, images=images)

    return broken


def _forgets_after(original: Any) -> Any:
    """The source stops, and deletes the keys at once."""

    def broken(self: StateSender, *args: Any) -> None:
        original(self, *args)
        self.instance.space.dirty.update(dict.fromkeys(self.retained_state))
        self.retained_state = {}

    return broken


def _sends_when_stopped(original: Any) -> Any:
    return lambda self: original(self) or self.phase is SourceInstancePhase.DRAINED


def _stops_anywhere(original: Any) -> Any:
    return lambda self, role: original(self, role) if role.last_offset is not None else -1


def _fires_early(original: Any) -> Any:
    def broken(self: Any, step: Any, entry: Entry) -> None:
        self.fire_due(entry.time_ms + EARLY_MS, entry)
        original(self, step, entry)

    return broken


def _merged(original: Any) -> Any:
    """Neighbouring entries become one, so that a replay groups rows differently."""

    def broken(self: Any, step: Any, entries: list[Entry]) -> None:
        out: list[Entry] = []
        for entry in entries:
            last = out[-1] if out else None
            mergeable = last is not None and not (
                entry.control or entry.moving or last.control or last.moving
            )
            if last is not None and mergeable and entry.parts.keys() == last.parts.keys():
                parts = {name: last.parts[name] + rows for name, rows in entry.parts.items()}
                out[-1] = Entry(entry.offset, entry.time_ms, parts)
            else:
                out.append(entry)
        original(self, step, out)

    return broken


def _older_arrivals(*, stored: bool) -> Callable[[Any], Any]:
    """Of the incoming moves that the last checkpoint holds, only those (not) stored under their name now."""
    return lambda original: (
        lambda self, now: [
            image for image in original(self, now) if (image.move in self._stored_moves) == stored
        ]
    )


def _unwatched(original: Any) -> Any:
    return lambda self, taken, watch, pending, look: original(self, taken, lambda _: None, pending, look)


def _flattened(original: Any) -> Any:
    return lambda self, cursor: dict.fromkeys(original(self, cursor), (OWN, cursor.applied))


def _adopted_is_enough(original: Any) -> Any:
    return lambda self: original(self) or self.adopt is not None


def _all_positions(original: Any) -> Any:
    return lambda self, cursor: {image.move: image.position for image in cursor.incoming_moves}


def _forgets_released(original: Any) -> Any:
    """The source forgets units that an incarnation of the destination has reported as durable."""

    def broken(self: StateSender, units: Any) -> None:
        original(self, units)
        if self.queue is not None:
            for unit in units:
                self.queue.keys[unit] = []

    return broken


PATCHES: dict[str, tuple[Patch, ...]] = {
    "changed-keys-from-the-copy": (Patch(StandbySender, "is_unchanged", instead(True)),),
    "copy-of-another-session": (Patch(StandbyCopy, "is_of", instead(True)),),
    "lost-increments-ignored": (Patch(StandbyCopy, "has_all_before", instead(True)),),
    # checkpoints
    "checkpoint-with-holes": (
        Patch(StateReceiver, "checkpoint_position", lambda _: lambda self: self.position),
    ),
    "missing-units-claimed": (Patch(StateReceiver, "uncovered_units", lambda _: lambda self: set()),),
    "covered-rows-again": (Patch(StateReceiver, "is_covered", instead(False)),),
    "rows-of-missing-units-deleted": (Patch(CheckpointWriter, "covered_positions", _all_positions),),
    "released-units-forgotten": (Patch(StateSender, "release", _forgets_released),),
    "checkpoint-ahead-of-log": (Patch(CheckpointWriter, "may_store", instead(True)),),
    "checkpoint-of-changed-keys": (Patch(CheckpointWriter, "_watch", _unwatched),),
    "unfinished-checkpoint-counts": (Patch(checkpoint_loader, "is_covered", instead(True)),),
    "builds-upon-unfinished": (Patch(CheckpointWriter, "may_build_upon_stored", instead(True)),),
    "positions-flattened": (Patch(CheckpointWriter, "covered_positions", _flattened),),
    "merged-arrivals-left-out": (Patch(CheckpointWriter, "_older_arrivals", _older_arrivals(stored=True)),),
    "stalled-arrivals-left-out": (Patch(CheckpointWriter, "_older_arrivals", _older_arrivals(stored=False)),),
    "evicts-dirty-keys": (Patch(MemoryLimit, "is_dirty", instead(False)),),
    "evicts-older-version": (Patch(MemoryLimit, "unwritten", lambda _: lambda self: []),),
    # attach and resume
    "rollback-skipped": (Patch(Instance, "router_has_lost_entries", instead(False)),),
    "retired-goes-on": (Patch(Instance, "was_retired", instead(False)),),
    "stale-copies-kept": (Patch(InstanceMoves, "take_roles", instead(None)),),
    "taken-over-epochs-kept": (Patch(Processing, "override_stored_epochs", instead(None)),),
    "successors-durable-too-early": (Patch(Disk, "hold_durability", instead(None)),),
    # processing
    "entries-merged": (Patch(Processing, "process_entries", _merged),),
    "tick-delivered-twice": (Patch(Processing, "on_tick", _fires_early),),
    "call-not-atomic": (Patch(ProcessorRunner, "undo_call", instead(None)),),
    "row-batches-refused-whole": (
        Patch(ProcessorRunner, "rows_to_retry", lambda _: lambda self, rows: rows),
    ),
    "attributes-survive": (Patch(ProcessorRunner, "reset_attributes", instead(None)),),
    "adoption-overtakes-shadow": (Patch(RowQueue, "must_wait", instead(False)),),
    # the source of a move
    "capture-offset-too-low": (Patch(StateSender, "captured_offset", _shifted(-1)),),
    "capture-offset-too-high": (Patch(StateSender, "captured_offset", _shifted(1)),),
    "digests-not-compared": (Patch(StateSender, "captured_offset", _shifted(-1)),),  # they would differ
    "deleted-keys-not-sent": (Patch(StateSender, "_next_chunk", _without_deleted),),
    "timers-not-moved": (Patch(StateSender, "capture", _without_timers),),
    "source-forgets-early": (Patch(StateSender, "stop_at", _forgets_after),),
    "forgets-returned-keys": (Patch(InstanceMoves, "is_back", instead(False)),),
    "units-before-the-cut": (Patch(StateSender, "may_send", _sends_when_stopped),),
    "stops-before-its-outputs": (Patch(StateSender, "earliest_stop", _stops_anywhere),),
    # the destination of a move
    "unit-without-its-beginning": (Patch(StateReceiver, "has_beginning", instead(True)),),
    "own-rows-overtake-the-cut": (Patch(StateReceiver, "shadow_ended", lambda _: True),),
    "ticks-not-held": (Patch(StateReceiver, "hold_control", instead(None)),),
    "emit-filter-off-by-one": (Patch(StateReceiver, "emit_bound", _shifted(-1)),),
    "suppressed-not-released": (
        Patch(StateReceiver, "release_withheld", lambda _: lambda self: self._drop_withheld(EVERYTHING)),
    ),
    "emits-before-cut": (Patch(StateReceiver, "may_emit", _adopted_is_enough),),
    "passed-timers-not-fired": (Patch(StateReceiver, "fire_passed", instead(None)),),
}
