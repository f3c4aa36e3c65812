"""The moves of one instance, as source and as destination.

Responsible for: the list of moves, passing each message and log record to its move, the effects of moves on
    the instance's own rows.
Not responsible for: one move (source_instance.py, destination_instance.py), the instance itself
    (core/instance, behind `InstancePort`).

An instance without this component processes rows and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tiercel.core import messages as m
from tiercel.core.errors import CoreBug, check_limit
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import StoredIncomingMove
from tiercel.core.migration.destination_instance import StateReceiver
from tiercel.core.migration.instance_port import InstancePort
from tiercel.core.migration.phases import INCOMPLETE, SourceInstancePhase, accepts_unknown
from tiercel.core.migration.source_instance import StateSender
from tiercel.core.migration.standby import StandbyCopies, StandbySender
from tiercel.core.migration.strategies import STRATEGIES
from tiercel.core.model.bundle import is_bundle, opened_for
from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.log import (
    OWN,
    SHADOW,
    Adopt,
    Compare,
    Done,
    Entry,
    Flip,
    Row,
    TakenOver,
    Tick,
    Watermark,
)
from tiercel.core.model.routing import overlap
from tiercel.core.model.topology import site_of


class InstanceMoves:
    """The senders and receivers of one instance, by the name of their move."""

    def __init__(self, instance: InstancePort) -> None:
        self.instance = instance
        self.senders: dict[str, StateSender] = {}
        self.receivers: dict[str, StateReceiver] = {}
        self.standby: StandbySender | None = None  # if this instance has one
        self.copies = StandbyCopies()  # of the instances whose standby this one is
        self._sessions = 0

    def forget(self) -> None:
        """Drop all moves: the instance restarts at its checkpoint, which holds its incoming moves."""
        self.senders, self.receivers = {}, {}
        self.standby, self.copies = None, StandbyCopies()

    # -- standby -----------------------------------------------------------------------------

    def on_standby_message(self, step: Step, message: m.Message) -> None:
        """Handle a message to this instance as a standby, or about its own."""
        match message:
            case m.Increment():
                self.copies.on_increment(step, message)
            case m.StandbyRole(standby=name):
                if self.standby is None or self.standby.standby != name:
                    self._begin_session(step, name)
            case m.IncrementReceipt() if self.standby is not None:
                self.standby.on_receipt(step, message)
                self._renew_session(step)
            case _:
                pass

    def _begin_session(self, step: Step, standby: str) -> None:
        self._sessions += 1
        self.standby = None
        if standby:
            self.standby = StandbySender(self.instance, standby, self._sessions, self._standby_is_used)
            self.standby.continue_soon(step)

    def _renew_session(self, step: Step) -> None:
        if self.standby is not None and self.standby.is_over and not self.standby.is_paused():
            self._begin_session(step, self.standby.standby)

    def _standby_is_used(self) -> bool:
        return any(sender.uses_copy for sender in self.senders.values())

    # -- messages ----------------------------------------------------------------------------

    def on_message(self, step: Step, message: Any) -> None:
        sender, receiver = self.senders.get(message.move), self.receivers.get(message.move)
        if sender is not None:
            if sender.accepts(step, message):
                self._on_sender_message(step, sender, message)
        elif receiver is not None:
            if receiver.accepts(step, message):
                self._on_receiver_message(step, receiver, message)
        elif accepts_unknown(step, message):
            self._on_first_message(step, message)

    def _on_first_message(self, step: Step, message: Any) -> None:
        """Handle a message about a move that has not begun here, or is over."""
        instance = self.instance
        match message:
            case m.Prepare() if not instance.halting:
                receiver = StateReceiver(
                    instance, message.move, message.keys, message.source, message.strategy, message.epochs
                )
                self.receivers[message.move] = receiver
                receiver.start(step)
                self._on_receiver_message(step, receiver, message)
            case m.Capture() if self._may_capture(message.keys):
                sender = StateSender(instance, message.move, message.keys, message.destination)
                self.senders[message.move] = sender
                if message.copies and self.standby is not None:
                    sender.use(self.standby)
                sender.start(step)
            case m.FlipToSource():
                self._sender_of(message.role).on_flip(step, message.role)
            case m.Forget():
                instance.after_next_checkpoint(step, m.Forgotten(message.move))
            case _:
                pass  # too early; the router repeats it

    def _on_sender_message(self, step: Step, sender: StateSender, message: Any) -> None:
        match message:
            case m.UnitReceipt():
                sender.on_receipt(step, message)
            case m.UnitRequest():
                sender.on_request(step, message)
            case m.Backlog():
                sender.on_backlog(message.waiting)
            case m.FlipToSource():
                sender.on_flip(step, message.role)
            case m.AbortNotice():
                sender.become(step, SourceInstancePhase.ABSENT)
                del self.senders[sender.move]
            case m.Forget():
                self._forget(step, sender)
            case _:
                raise CoreBug(f"{message} is in the table of the source, and not handled")

    def _on_receiver_message(self, step: Step, receiver: StateReceiver, message: Any) -> None:
        instance = self.instance
        match message:
            case m.Prepare():
                instance.tell(step, m.Prepared(receiver.move, instance.watermark_ms))
                receiver.look_later(step)
            case m.Shadow():
                for notice in message.entries:
                    receiver.cursor(
                        step, (SHADOW, notice.offset), notice.time_ms, notice.rows, notice.control
                    )
                instance.flush(step)
            case m.Chunk():
                whole = self.copies.completed(receiver.source, message)
                if whole is None:
                    receiver.refuse_copy(step, message)
                else:
                    receiver.on_chunk(step, whole)
                    instance.flush(step)
            case m.EmitFrom():
                receiver.on_emit_from(step, message.offset)
                instance.flush(step)
                instance.checkpoint_soon(step)
            case m.EmittedThrough():
                receiver.on_emitted_through(step, message.offset)
                instance.flush(step)
            case m.ServedBy():
                receiver.on_served_by(step, message.instance)
            case m.AbortNotice():
                self._end(step, receiver)
            case _:
                raise CoreBug(f"{message} is in the table of the destination, and not handled")

    def _may_capture(self, keys: KeySet) -> bool:
        """Whether keys can be captured now; if not, the router asks again."""
        return not (self._still_arriving(keys) or self.still_leaving(keys) or self.instance.is_taking_over())

    def _still_arriving(self, keys: KeySet) -> bool:
        """Whether some keys are still arriving: their state is not all here."""
        return any(overlap(keys, a.keys, self.instance.operator.slots) for a in self.receivers.values())

    def still_leaving(self, keys: KeySet) -> bool:
        """Whether an earlier move takes some of the keys away, and a replay has not reached its flip yet."""
        slots = self.instance.operator.slots
        waiting = [s for s in self.senders.values() if s.flip_offset >= 0 and s.last_offset is None]
        return any(overlap(keys, sender.keys, slots) for sender in waiting)

    def _forget(self, step: Step, sender: StateSender) -> None:
        if self.instance.applied < sender.flip_offset:
            return  # a replay still has rows of these keys; the router repeats Forget
        sender.become(step, SourceInstancePhase.ABSENT)
        del self.senders[sender.move]
        self._let_go(sender.retained_state)
        self.instance.after_next_checkpoint(step, m.Forgotten(sender.move))

    def _let_go(self, retained_state: Iterable[Key]) -> None:
        """Delete the stored versions of these keys with the next checkpoint, except for keys that are back.

        The stored version of a key that has returned may be its only one.
        """
        for key in retained_state:
            if not self.is_back(key):
                self.instance.space.dirty[key] = None

    def is_back(self, key: Key) -> bool:
        """Whether a key that left has returned, or has returned and is leaving again."""
        return self.instance.space.has(key) or any(key in s.retained_state for s in self.senders.values())

    def _end(self, step: Step, receiver: StateReceiver) -> None:
        """End an undone or merged move: drop its stored state."""
        del self.receivers[receiver.move]
        receiver.end(step)
        self.instance.drop_stored_move(receiver.move)

    # -- rows and records of the inbox ---------------------------------------------------------

    def not_cut(self, rows: list[Row], offset: int) -> list[Row]:
        """The rows without those of keys that left before this offset: their destination processes them."""
        rows = self.without_bundles_of_moves(rows)
        for sender in self.senders.values():
            if sender.skips(offset):
                rows = [r for r in rows if is_bundle(r[0]) or not sender.has(r[0])]
            elif sender.last_offset is None:
                sender.touched.update(r[0] for r in rows if not is_bundle(r[0]) and sender.has(r[0]))
        return rows

    def without_bundles_of_moves(self, rows: list[Row]) -> list[Row]:
        """Rule R46: bundles with a key that leaves are taken apart: it may stop, and others go on."""
        return opened_for(rows, [sender.keys for sender in self.senders.values()])

    def on_part(self, step: Step, move: str, rows: list[Row], entry: Entry) -> list[Row]:
        """Process the part of a move; returns the rows that this instance still has to process itself."""
        receiver = self.receivers.get(move)
        if receiver is not None and receiver.adopted_at >= 0:
            receiver.cursor(step, (OWN, entry.offset), entry.time_ms, rows, None)
            return []
        return self.not_cut(rows, entry.offset) if entry.offset > self.instance.applied else []

    def on_clock(self, step: Step, entry: Entry) -> None:
        """Pass ticks, watermarks and takeovers of our log to adopted keys that have not merged."""
        control = entry.control
        if self.receivers and isinstance(control, Tick | Watermark | TakenOver):
            for receiver in self.receivers.values():
                if 0 <= receiver.adopted_at < entry.offset:
                    receiver.cursor(step, (OWN, entry.offset), entry.time_ms, [], control)

    def on_timer_fired(self, key: Key) -> None:
        """A timer has changed an own key."""
        for sender in self.senders.values():
            if sender.has(key):
                sender.touched.add(key)

    def on_record(self, step: Step, entry: Entry) -> None:
        """Handle a record of a move in our log; many records are about moves of other instances."""
        match entry.control:
            case Compare(move=move) as compare if move in self.senders:
                if self.senders[move].accepts(step, compare):
                    self.senders[move].compare(step)
            case Adopt() as adopt:
                self._on_adopt(step, adopt, entry.offset)
            case Done(move=move) as done if move in self.receivers:
                if self.receivers[move].accepts(step, done):
                    self._merge(step, self.receivers[move], entry.offset)
            case Flip(source=self.instance.name) as flip:
                role = m.OutgoingRole(
                    flip.move,
                    flip.keys,
                    flip.destination,
                    flip.strategy,
                    flip.begin_offset,
                    entry.offset,
                    None,
                    flip.epochs,
                )
                sender = self._sender_of(role)
                if sender.accepts(step, flip):
                    sender.on_flip_record(step, role)
            case _:
                pass

    def before_entry(self, step: Step, offset: int) -> None:
        """Stop keys whose cut lies before this entry."""
        for sender in self.senders.values():
            sender.stop_if_reached(step, offset)

    def after_entry(self, step: Step) -> None:
        """Continue moves that wait for the offset of the processed entry."""
        for sender in self.senders.values():
            sender.stop_if_reached(step)

    def _sender_of(self, role: m.OutgoingRole) -> StateSender:
        """The state sender of a decided move; a new one if this incarnation has not begun the move."""
        sender = self.senders.get(role.move)
        if sender is None:
            sender = StateSender(self.instance, role.move, role.keys, role.destination)
            self.senders[role.move] = sender
        return sender

    def _on_adopt(self, step: Step, adopt: Adopt, offset: int) -> None:
        instance = self.instance
        instance.routes.take(adopt.update)
        if site_of(adopt.source) == instance.router and adopt.move in self.senders:
            return  # this instance is its source
        destinations = {r.instance for r in adopt.update.slots.values()} | {
            adopt.update.keys[k].instance for k in adopt.keys.keys if k in adopt.update.keys
        }
        receiver = self.receivers.get(adopt.move)  # that of a dead destination, which this instance replaces
        if instance.name not in destinations and receiver is None:
            return
        if receiver is None:
            receiver = StateReceiver(
                instance, adopt.move, adopt.keys, adopt.source, adopt.strategy, adopt.epochs
            )
            self.receivers[adopt.move] = receiver
        if receiver.accepts(step, adopt):
            receiver.on_adopt(step, adopt, offset)
        receiver.look_later(step)

    def _merge(self, step: Step, receiver: StateReceiver, offset: int) -> None:
        """Merge the keys of a move into the instance's own keys."""
        receiver.flush(step)
        receiver.check_merge()
        self.instance.space.absorb(receiver.space)
        for sender in self.senders.values():
            if sender.last_offset is not None and offset <= sender.flip_offset:
                sender.retain()  # a replay: these keys arrived before they left
        self._end(step, receiver)
        self.instance.tidy_soon(step)

    # -- events of the instance ----------------------------------------------------------------

    def on_timer(self, step: Step, timer: Timer) -> None:
        sender, receiver = self.senders.get(timer.of), self.receivers.get(timer.of)
        match timer.kind:
            case TimerKind.DIGESTS if sender is not None:
                sender.digest_some(step)
            case TimerKind.DIGESTS if receiver is not None:
                receiver.digest_some(step)
            case TimerKind.CAPTURE if sender is not None:
                sender.capture_some(step)
            case TimerKind.FETCH if receiver is not None:
                receiver.on_look(step)
            case TimerKind.STANDBY if self.standby is not None:
                self._renew_session(step)
                self.standby.send_some(step)
            case _:
                pass  # the move has ended

    def on_connected(self, step: Step, peer: str) -> None:
        for sender in self.senders.values():
            if sender.destination == peer:
                sender.resend(step)
        if self.standby is not None and self.standby.standby == peer:
            self.standby.is_over = True  # increments may be lost
            self.standby.continue_soon(step)

    def on_durable(self, step: Step) -> None:
        """Send images that waited for the log to be durable."""
        for sender in self.senders.values():
            sender.pump(step)

    def flush(self, step: Step) -> None:
        """Send the outputs of arriving keys that may be emitted, and the requests for their units."""
        for receiver in self.receivers.values():
            receiver.flush(step)
            receiver.ask(step)

    def emitted(self) -> dict[str, int]:
        """The moves of which every output is emitted, each with its position in our log."""
        return {move: r.position[1] for move, r in self.receivers.items() if r.has_emitted_all()}

    def on_reset(self, step: Step) -> None:
        """End captures: the instance falls back to its checkpoint, and captured images are lost."""
        for move in self.senders:
            self.instance.tell(step, m.Refused(move, "the source fell back to its checkpoint"))

    def restore(self, step: Step, stored: StoredIncomingMove) -> None:
        """Restore an incoming move from the checkpoint."""
        self.receivers[stored.move] = StateReceiver.restored(step, self.instance, stored)

    def take_roles(self, step: Step, reply: m.AttachReply) -> None:
        """Take the roles from the router's reply. Every other move that this instance remembers is over."""
        listed = {role.move for role in reply.incoming_moves}
        for receiver in [r for move, r in self.receivers.items() if move not in listed]:
            self._end(step, receiver)
        for role in reply.incoming_moves:
            self._take_incoming(step, role)
        decided = {role.move for role in reply.outgoing_moves}
        for sender in list(self.senders.values()):
            if sender.move not in decided and sender.last_offset is not None:
                sender.become(step, SourceInstancePhase.ABSENT)
                del self.senders[sender.move]
        for sender in self.senders.values():
            if sender.begun is not None and sender.move not in decided:
                self.instance.tell(step, sender.begun)  # the router answers AbortNotice if it was undone
        # keys may have left, returned and left again: the move that flipped first takes its keys first
        for outgoing in sorted(reply.outgoing_moves, key=lambda role: role.flip_offset):
            self._sender_of(outgoing).on_decided(step, outgoing)

    def _take_incoming(self, step: Step, role: m.IncomingRole) -> None:
        instance = self.instance
        if 0 <= role.merged <= instance.applied:
            return  # its keys have merged
        receiver = self.receivers.get(role.move)
        if receiver is not None:
            receiver.source = role.source
        if receiver is None:
            to_come = role.adopt is None or role.adopted > instance.applied
            if to_come and not STRATEGIES[role.strategy].freezes:
                return  # Adopt is still to come, with all facts
            receiver = StateReceiver(instance, role.move, role.keys, role.source, role.strategy, role.epochs)
            self.receivers[role.move] = receiver
            if role.adopt is None or to_come:
                receiver.start(step)  # the shadow and units may come before Adopt
            else:
                receiver.on_adopt(step, role.adopt, role.adopted)
        if role.emit_from is not None and receiver.emit_from is None:
            receiver.on_emit_from(step, role.emit_from)
        if receiver.phase not in INCOMPLETE:
            instance.tell(step, m.StateComplete(role.move))
        receiver.look_later(step)

    # -- rows that waited ----------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether rows that waited for state, or for room, can be processed now."""
        return bool(self.receivers) and any(receiver.has_work() for receiver in self.receivers.values())

    def work(self, step: Step, rows_max: float) -> int:
        """Process about this many of the rows that waited, those of the oldest move first."""
        receiver = next(receiver for receiver in self.receivers.values() if receiver.has_work())
        return receiver.work(step, rows_max)

    # -- questions -----------------------------------------------------------------------------

    @property
    def blocked(self) -> bool:
        """Whether the instance must not process rows now: a strategy makes it wait for a missing unit.

        An instance that still replays up to a cut goes on: another one may wait for its units.
        """
        if not self.receivers or any(s.phase is SourceInstancePhase.WAITING for s in self.senders.values()):
            return False
        return any(receiver.blocks_instance for receiver in self.receivers.values())

    @property
    def has_timers(self) -> bool:
        return any(receiver.space.has_timers for receiver in self.receivers.values())

    def validate(self) -> None:
        """Every queue is within its limit; the simulator asks after each event."""
        limits = self.instance.settings
        for sender in self.senders.values():
            in_flight = len(sender.in_flight)
            check_limit(f"chunks of {sender.move} in flight", in_flight, limits.chunks_unacked_max)
        for receiver in self.receivers.values():
            largest = 8 * limits.dispatch_rows_max  # one entry's outputs may pass the limit
            withheld = len(receiver.withheld)
            check_limit(f"outputs withheld for {receiver.move}", withheld, limits.withheld_max + largest)
