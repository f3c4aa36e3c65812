"""Outputs of this site's instances: the router admits each once and passes it to operators and output logs.

Responsible for: admitting and forwarding each output in one write per event; ticks of the log clock.
Not responsible for: rows that enter the system (intake.py), subscribers (output_log.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from tiercel.core import messages as m
from tiercel.core.logs.inbox import Inbox
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import HeldOutputs
from tiercel.core.model.bundle import entries_of, open_outputs
from tiercel.core.model.log import INITIAL, Output, OutputFence, Row
from tiercel.core.model.row_batch import count_rows, split
from tiercel.core.model.topology import operator_of
from tiercel.core.router.forwarding import Forwarding
from tiercel.core.router.moves import Moves
from tiercel.core.router.state import RouterState
from tiercel.core.router.watermarks import FOREVER, Watermarks

NO_FENCES: Mapping[str, OutputFence] = MappingProxyType({})


class FanOut:
    """Passes the rows of a stream to its operators and its output log."""

    def __init__(self, state: RouterState, watermarks: Watermarks, forwarding: Forwarding) -> None:
        self.state = state
        self._watermarks = watermarks
        self._forwarding = forwarding

    def route_rows(self, step: Step, stream: str, rows: list[Row], *, initial: bool = False) -> None:
        """Pass rows of a stream to every operator that reads it, except for rows that are late for it.

        For an operator of several inputs, each row carries the number of its input; for one with a broadcast
        stream also the last row of that stream which this site has taken.
        """
        for name in self.state.broadcast_to(stream):
            self.state.inboxes[name].set_broadcast(step, split(rows[-1][2])[-1])
        count = count_rows(rows)
        self.state.rows += count
        for name in self.state.consumers(stream):
            inbox, operator = self.state.inboxes[name], self.state.topology.operators[name]
            self.state.entering[name].count(rows, count)
            mine = [(r[0], INITIAL, r[2]) for r in rows] if initial else rows
            n = operator.inputs.index(stream)
            if operator.broadcast:
                mine = [(r[0], r[1], (n, r[2], inbox.broadcast)) for r in mine]
            elif operator.numbers_inputs:
                mine = [(r[0], r[1], (n, r[2])) for r in mine]
            if n in inbox.timed and not initial:
                mine = self._watermarks.in_time(name, mine)
            if mine:
                for site, stamped in inbox.append_or_forward(step, mine).items():
                    self.state.entering[name].count_sent_on(stamped)
                    self._forwarding.forward(step, site, inbox, stamped)

    def log_outputs(
        self, step: Step, stream: str, outputs: Sequence[Output], after: OutputFence | None = None
    ) -> None:
        """Append outputs to the stream's logs: that of this site, and here or by frame that of its home.

        At the home they come behind `after`. Logs of two sites have no order between them.
        """
        facts = self.state.topology.streams.get(stream)
        if facts is None or not facts.logged:
            return
        if facts.outputs_at != "home":
            self.state.streams[facts.own_log_at(self.state.site)].append(step, outputs)
        if facts.outputs_at != "site":
            if facts.home != self.state.site:
                self.state.outbox(facts.home, stream).add(step, FOREVER, [], outputs=outputs, after=after)
            elif after is None:
                self.state.streams[stream].append(step, outputs)
            else:
                self.state.streams[stream].append_or_hold(step, HeldOutputs(after, outputs))


class DeferredAcks(Protocol):
    """Acknowledgements that wait for slow readers."""

    def release(self, step: Step) -> None:
        """Send acknowledgements that need not wait any longer."""


class TimerOutputs(Protocol):
    """Where outputs that no row has caused are noted."""

    def emitted(self, step: Step, operator: str, outputs: Sequence[Output], after: int, through: int) -> None:
        """Outputs of the inbox entries (after, through] are in the output log."""


class OutputAdmission:
    """Admits the outputs of instances."""

    def __init__(
        self, state: RouterState, fan_out: FanOut, acks: DeferredAcks, moves: Moves, timers: TimerOutputs
    ) -> None:
        self.state = state
        self._timers = timers
        self._fan_out = fan_out
        self._acks = acks
        self._moves = moves
        self._ticking: set[str] = set()  # inboxes whose tick timer is set

    def on_outputs(self, step: Step, message: m.Outputs) -> None:
        state, instance = self.state, message.instance
        inbox = state.inboxes[operator_of(instance)]
        cursor = inbox.cursors.get(instance)
        if cursor is None or cursor.is_fenced(message.incarnation):
            return
        mark = inbox.emitted.get(instance, 0)
        if message.through > mark:
            outputs = message.outputs
            if state.consumers(state.topology.operators[inbox.name].output):
                outputs = list(outputs)  # before anything changes: this refuses a malformed list
            if outputs and (message.first <= mark or self._moves.leaves(instance)):
                outputs = self._not_admitted(instance, mark, outputs)
            inbox.emitted[instance] = message.through
            step.put(("emitted", inbox.name, instance), message.through)
            self.emit(step, inbox.name, outputs, message.rows if outputs is message.outputs else None)
            self._timers.emitted(step, inbox.name, outputs, mark, message.through)
            if message.dead_letters:
                self.emit_dead(step, inbox.name, self._not_admitted(instance, mark, message.dead_letters))
        cursor.flush_no = message.flush
        cursor.measured(message.service_us)
        cursor.processed(message.through)
        confirmed = m.Confirmed(message.incarnation, message.flush, inbox.offset, cursor.lag_rows)
        step.send_durable(instance, confirmed)
        cursor.watermark_ms = max(cursor.watermark_ms, message.watermark_ms)
        cursor.timers = message.timers
        cursor.moves = message.moves
        if message.timers:
            self.keep_ticking(step, inbox)
        inbox.passed(inbox.slowest_through())
        if state.deferred_acks:
            self._acks.release(step)
        self._moves.outputs_admitted(step, instance)

    def _not_admitted(self, instance: str, mark: int, outputs: Sequence[Output]) -> list[Output]:
        """Rule R8: admit an output once, from one instance."""
        refuses = self._moves.refuses_output
        fresh = [o for o in outputs if o.offset > mark]
        if self._moves.leaves(instance):
            fresh = self.each_alone(fresh)
        return [o for o in fresh if not refuses(instance, o)]

    def each_alone(self, outputs: list[Output]) -> list[Output]:
        """Rule R46: while keys leave an instance, bundles are taken apart: some keys may be refused."""
        return open_outputs(outputs)

    def on_move_outputs(self, step: Step, message: m.MoveOutputs) -> None:
        inbox = self.state.inboxes[operator_of(message.instance)]
        cursor = inbox.cursors.get(message.instance)
        if cursor is None or cursor.incarnation != message.incarnation:
            return
        every = self._moves.admit(step, message)
        dead = {id(o) for o in message.dead_letters}
        fences = self._moves.fences_of(message.move)
        emitted = [o for o in every if id(o) not in dead]
        self.emit(step, inbox.name, emitted, fences=fences)
        self._timers.emitted(step, inbox.name, emitted, 0, inbox.offset)
        self.emit_dead(step, inbox.name, [o for o in every if id(o) in dead], fences)

    def emit(
        self,
        step: Step,
        operator: str,
        outputs: Sequence[Output],
        count: int | None = None,
        fences: Mapping[str, OutputFence] = NO_FENCES,
    ) -> None:
        """Write admitted outputs to the next operators' inboxes and the output log, in one write."""
        if outputs:
            self.state.outputs += count_rows([o.row for o in outputs]) if count is None else count
            stream = self.state.topology.operators[operator].output
            if self.state.consumers(stream):
                for rows in entries_of([o.row for o in outputs]):
                    self._fan_out.route_rows(step, stream, rows)
            self._fan_out.log_outputs(step, stream, outputs, fences.get(stream))

    def emit_dead(
        self,
        step: Step,
        operator: str,
        outputs: list[Output],
        fences: Mapping[str, OutputFence] = NO_FENCES,
    ) -> None:
        if outputs:
            stream = self.state.topology.operators[operator].dead_letters
            self._fan_out.log_outputs(step, stream, outputs, fences.get(stream))

    def keep_ticking(self, step: Step, inbox: Inbox) -> None:
        if inbox.name not in self._ticking:
            self._ticking.add(inbox.name)
            step.timer(Timer(TimerKind.TICK, inbox.name), step.now_ms + self.state.settings.tick_ms)

    def on_tick(self, step: Step, name: str) -> None:
        inbox = self.state.inboxes[name]
        self._ticking.discard(name)
        if any(cursor.timers for cursor in inbox.cursors.values()):
            inbox.tick(step)
            self.keep_ticking(step, inbox)
