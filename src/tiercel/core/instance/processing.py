"""The processing of inbox entries by an instance: calls, timers, outputs.

Responsible for: processing own keys, ticks and watermarks in log order, and passing the rows of moving keys
    to core/migration at their place in the log.
Not responsible for: attaching, loading and messages (instance.py), user code (user_code.py).
"""

from __future__ import annotations

from itertools import takewhile
from typing import Protocol

import msgspec

from tiercel.core import messages as m
from tiercel.core.instance.bundle_calls import BundleCalls
from tiercel.core.instance.checkpoint_writer import CheckpointWriter
from tiercel.core.instance.row_queue import RowQueue
from tiercel.core.instance.user_code import ProcessorRunner
from tiercel.core.machine.step import Step
from tiercel.core.migration.instance_moves import InstanceMoves
from tiercel.core.model.bundle import MalformedBundle, are_apart, is_bundle, opened
from tiercel.core.model.keys import Key
from tiercel.core.model.log import Entry, EpochOverride, Output, Row, TakenOver, Tick, Watermark
from tiercel.core.model.routing import RouteUpdate, RoutingTable
from tiercel.core.model.row_batch import count_rows
from tiercel.core.state.handle import KeyState
from tiercel.core.state.table import StateTable


class ProcessingPort(Protocol):
    """The interface of an instance for its processing."""

    name: str
    router: str
    incarnation: int
    runner: ProcessorRunner
    space: StateTable
    routes: RoutingTable
    checkpointer: CheckpointWriter
    moves: InstanceMoves | None
    queue: RowQueue
    applied: int
    flushes: int
    time_ms: int
    watermark_ms: int

    def is_taking_over(self) -> bool: ...


class Processing:
    """Processes the entries of one instance."""

    def __init__(self, instance: ProcessingPort) -> None:
        self.instance = instance
        self.rows = self.outputs = 0  # of this incarnation
        self._out: list[Output] = []

    def forget(self) -> None:
        """Drop outputs that were not flushed; the replay produces them again."""
        self._out = []

    def process_entries(self, step: Step, entries: list[Entry]) -> None:
        """Process entries one by one, as they were logged, so that a replay makes the same calls."""
        for entry in entries:
            self.process(step, entry)

    def process(self, step: Step, entry: Entry) -> None:
        """Process one log entry: own keys, leaving keys, arriving keys; or a control record."""
        instance = self.instance
        moves, offset, control = instance.moves, entry.offset, entry.control
        if moves and moves.senders and offset > instance.applied:
            moves.before_entry(step, offset)
        instance.time_ms = entry.time_ms
        own = entry.parts.get(instance.name)
        if own is not None and offset > instance.applied:
            self.call_all(moves.not_cut(own, offset) if moves and moves.senders else own, entry)
        if entry.moving and moves:
            for part in entry.moving:
                ours = moves.on_part(step, part.move, part.rows, entry)
                if ours:
                    self.call_all(ours, entry)
        if control is not None:
            if offset > instance.applied:
                self._on_control(step, entry)
            elif moves:
                moves.on_clock(step, entry)
        if offset > instance.applied:
            instance.applied = offset
        if moves and moves.senders:
            moves.after_entry(step)

    def call_all(self, rows: list[Row], entry: Entry) -> None:
        """Call user code once per key, in the order of the keys' first rows."""
        instance = self.instance
        self.rows += count_rows(rows)
        if rows and is_bundle(rows[0][0]):
            rows = self._call_bundles(rows, entry)
        if instance.runner.folds:
            self._fold_all(rows, entry.offset)
            return
        by_key: dict[Key, list[Row]] = {}
        for row in rows:
            of_key = by_key.get(row[0])
            if of_key is None:
                by_key[row[0]] = [row]
            else:
                of_key.append(row)
        space, call, out = instance.space, instance.runner.call, self._out
        states, new_timers = space.keys, instance.runner.handle.new_timers
        time_ms, watermark_ms, offset = entry.time_ms, instance.watermark_ms, entry.offset
        floor_ms = instance.routes.floor_ms
        if space.snapshots:
            space.before_change(by_key)
        for key, of_key in by_key.items():
            state = states.get(key) or space.state(key)
            at_ms = time_ms if time_ms >= floor_ms else instance.routes.clock_ms(key, time_ms)
            call(state, key, of_key, at_ms, watermark_ms, offset, out)
            if new_timers or not state.values:
                space.touched(key, state, new_timers)
        space.dirty.update(dict.fromkeys(by_key))

    def _call_bundles(self, rows: list[Row], entry: Entry) -> list[Row]:
        """Process the bundles at the beginning of these rows; returns the rows that are left."""
        instance, runner = self.instance, self.instance.runner
        bundles = list(takewhile(lambda row: is_bundle(row[0]), rows))
        others = rows[len(bundles) :]
        if runner.bundles is None or not self.may_stay_whole(bundles, others, entry):
            return self._open(rows, entry)
        calls = BundleCalls(runner, runner.bundles, instance.space, instance.routes.count)
        closed: list[Row] = []
        for row in bundles:
            try:
                calls.call(row, entry.time_ms, instance.watermark_ms, entry.offset, self._out)
            except (msgspec.DecodeError, MalformedBundle):
                closed.append(row)  # some row of it does not fit, and becomes a dead letter
        calls.finish(entry.offset, self._out)
        return [*self._open(closed, entry), *others]

    def may_stay_whole(self, bundles: list[Row], others: list[Row], entry: Entry) -> bool:
        """Rule R12: each key has one call for an entry, so all of its rows must be in one bundle.

        Rule R17: the clock of some keys may be ahead.
        """
        routes = self.instance.routes
        return entry.time_ms >= routes.floor_ms and are_apart(bundles, others, routes.count)

    def _open(self, rows: list[Row], entry: Entry) -> list[Row]:
        """The single rows. A bundle that cannot be read becomes a dead letter."""
        found: list[Row] = []
        for row in rows:
            try:
                found += opened([row])
            except MalformedBundle as error:
                self.instance.runner.refuse(KeyState(0, None), b"", (b"", *row[1:]), entry.offset, error)
        return found

    def _fold_all(self, rows: list[Row], offset: int) -> None:
        space, runner = self.instance.space, self.instance.runner
        if space.snapshots:
            space.before_change(dict.fromkeys(row[0] for row in rows))
        touched, emptied = runner.fold(space.keys, space.state, rows, offset, self._out)
        for key in emptied:
            if key in space.keys:
                space.touched(key, space.keys[key], runner.handle.new_timers)
        space.dirty.update(dict.fromkeys(touched))

    # -- control records -----------------------------------------------------------------------

    def _on_control(self, step: Step, entry: Entry) -> None:
        moves = self.instance.moves
        match entry.control:
            case Tick():
                self.on_tick(step, entry)
            case Watermark(value_ms=value):
                self.instance.watermark_ms = value
                if self.instance.runner.event_time:
                    self.fire_due(value, entry)
                if moves:
                    moves.on_clock(step, entry)
            case TakenOver(update=update):
                self._on_taken_over(update)
                if moves:
                    moves.on_clock(step, entry)
            case _ if moves:
                moves.on_record(step, entry)
            case _:
                pass

    def on_tick(self, step: Step, entry: Entry) -> None:
        """Fire timers up to the time of the log."""
        if not self.instance.runner.event_time:
            self.fire_due(entry.time_ms, entry)
        if self.instance.moves:
            self.instance.moves.on_clock(step, entry)

    def fire_due(self, due_ms: int, entry: Entry) -> None:
        """Fire the timers of own keys up to `due_ms`, or up to the clock of the key if it is ahead."""
        instance = self.instance
        space, runner, moves = instance.space, instance.runner, instance.moves
        for key in space.due(due_ms):
            space.before_change([key])
            state = space.keys[key]
            time_ms = instance.routes.clock_ms(key, entry.time_ms)
            until_ms = due_ms if runner.event_time else max(due_ms, time_ms)
            runner.fire(state, key, until_ms, time_ms, instance.watermark_ms, entry.offset, self._out)
            space.touched(key, state, runner.handle.new_timers)
            if moves:
                moves.on_timer_fired(key)

    def _on_taken_over(self, update: RouteUpdate) -> None:
        """Set the new epochs of taken-over keys, and mark the keys dirty so that a checkpoint stores them."""
        instance, space = self.instance, self.instance.space
        instance.routes.take(update)
        if update.names(instance.name) or instance.is_taking_over():
            self.override_stored_epochs(update)
            space.before_change(space.keys)
            for key, state in space.keys.items():
                state.epoch = instance.routes.route(key).epoch
            space.dirty.update(dict.fromkeys(space.keys))

    def override_stored_epochs(self, update: RouteUpdate) -> None:
        """Set the epochs that keys get when they are restored lazily."""
        self.instance.space.era = EpochOverride(self.instance.checkpointer.generation, update)

    # -- outputs -------------------------------------------------------------------------------

    def flush(self, step: Step) -> None:
        """Send all outputs of the processed entries in one message."""
        instance = self.instance
        runner, moves, applied = instance.runner, instance.moves, instance.applied
        if moves and moves.receivers:
            moves.flush(step)
        dead, runner.dead_letters = runner.dead_letters, []
        timers = runner.has_timers and not runner.event_time
        timers = timers and (instance.space.has_timers or (moves is not None and moves.has_timers))
        instance.flushes += 1
        outputs, self._out = self._out, []
        rows = count_rows([output.row for output in outputs])
        self.outputs += rows
        first = outputs[0].offset if outputs else applied
        step.send(
            instance.router,
            m.Outputs(
                instance.name,
                instance.incarnation,
                instance.flushes,
                applied,
                first,
                outputs,
                dead,
                instance.watermark_ms,
                timers,
                rows,
                instance.queue.service_us,
                moves.emitted() if moves and moves.receivers else {},
            ),
        )
