"""The incoming move: the destination router's side of a move, from Prepare to Done.

Responsible for: storing the shadow for the destination, the durable vote, adopting and merging the keys.
Not responsible for: deciding the move (source_router.py), state (destination_instance.py).

    PREPARING --Prepared--> SHADOWING --Ready--> ADOPTABLE --flip--> ADOPTED --DoneNotice--> MERGED
        |                       |                    | (only the source router ends it)        |
        +-----------------------+--------------------+--AbortNotice--> FORGOTTEN <--checkpoint--+

A flip-first move goes from PREPARING to ADOPTED. A router that restarts before ADOPTABLE has forgotten the
move. It answers the next message with Refused, and the source router undoes the move. The transitions are
DESTINATION_ROUTER in phases.py.
"""

from __future__ import annotations

import msgspec

from tiercel.core import messages as m
from tiercel.core.errors import CoreBug
from tiercel.core.logs.dispatch import DispatchPhase
from tiercel.core.logs.inbox import Inbox, MovingKeys
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import IncomingMoveRecord
from tiercel.core.migration.phases import DESTINATION_ROUTER, DURABLE, DestinationRouterPhase, MovePhase
from tiercel.core.migration.ports import IncomingPort, RouterPort
from tiercel.core.migration.strategies import STRATEGIES
from tiercel.core.model.keys import Key
from tiercel.core.model.log import OWN, SHADOW, Adopt, Done, Output, Position, Watermark
from tiercel.core.model.routing import slot_of
from tiercel.core.model.topology import site_of


class IncomingMove:
    """One move whose destination is an instance of this site."""

    def __init__(
        self,
        router: RouterPort,
        moves: IncomingPort,
        inbox: Inbox,
        record: IncomingMoveRecord,
    ) -> None:
        self.router = router
        self._moves = moves
        self.inbox = inbox
        self.record = record
        prepare = self.prepare = record.prepare
        self.move = prepare.move
        self.keys = prepare.keys
        self.strategy_name = prepare.strategy
        phase = DestinationRouterPhase(record.phase)
        self._phase = MovePhase(DESTINATION_ROUTER, prepare.move, phase, self._changed)
        self.from_site = site_of(prepare.source)
        if phase is not DestinationRouterPhase.MERGED:  # until then the keys may emit below its watermark
            inbox.frozen_ms[prepare.move] = record.frozen_ms
        self.shadow: dict[
            int, m.ShadowNotice
        ] = {}  # entries that the destination's checkpoint does not cover
        self.marks: dict[Key, Position] = {}  # outputs of each key are admitted up to here
        self.settled = False
        self.installed = False
        self.overlap = 0.0
        self.incarnation = 0
        self.position: Position = (SHADOW, -1)  # covered by the destination's checkpoint

    @property
    def destination(self) -> str:
        return self.prepare.destination

    @property
    def holders(self) -> tuple[str, ...]:
        """The instances that receive the keys: the destination, or its successors once it is dead."""
        return self.record.successors or (self.destination,)

    def taken_over(self, step: Step, dead: str, successors: tuple[str, ...]) -> None:
        """The keys have merged and the destination is dead: its successors replay up to Done in its place."""
        others = tuple(holder for holder in self.holders if holder != dead)
        self.record.successors = (*others, *successors)
        self.save(step)

    def replaced_by(self, step: Step, successor: str) -> None:
        """Rule R36: the destination of a decided move is dead, and a successor receives the keys."""
        self.prepare = self.record.prepare = msgspec.structs.replace(self.prepare, destination=successor)
        self.record.successors, self.record.replaced = (), True
        self.settled = self.installed = False
        self.save(step)
        self.own_part()
        self.announce_replacement(step)

    def announce_replacement(self, step: Step) -> None:
        self.tell(step, m.DestinationReplaced(self.move, self.destination))

    def covered_but_for(self, instance: str) -> bool:
        """Whether the checkpoints of all other holders cover Done."""
        readers = self.inbox.readers
        others = [readers.get(holder) for holder in self.holders if holder != instance]
        return all(reader is None or reader.applied >= self.record.merged for reader in others)

    def member(self, key: Key) -> bool:
        return key in self.keys.keys or slot_of(key, self.inbox.table.count) in self.keys.slots

    @property
    def phase(self) -> DestinationRouterPhase:
        return self._phase.now

    def become(self, step: Step, phase: DestinationRouterPhase) -> None:
        """Change the phase; from the vote on the phase is durable."""
        self._phase.become(step, phase)

    def _changed(self, step: Step, phase: DestinationRouterPhase) -> None:
        self.record.phase = phase.value
        if phase in (DestinationRouterPhase.MERGED, DestinationRouterPhase.FORGOTTEN):
            self.inbox.frozen_ms.pop(self.move, None)
        if phase in DURABLE:
            self.save(step)
        elif phase is DestinationRouterPhase.FORGOTTEN:
            self._delete(step)

    def save(self, step: Step) -> None:
        step.put(("incoming", self.move), msgspec.structs.replace(self.record))

    def tell(self, step: Step, message: m.Message) -> None:
        """Send a message to the source router; `retry` repeats it until it is answered."""
        self.router.send_router(step, self.from_site, message, durable=True)

    def to_destination(self, step: Step, message: m.Message) -> None:
        """Send a message to the destination. A detached destination gets the same facts when it resumes."""
        cursor = self.inbox.cursors.get(self.destination)
        if cursor is not None and cursor.phase in (DispatchPhase.LIVE, DispatchPhase.CATCHING_UP):
            step.send(self.destination, message)

    def retry(self, step: Step) -> None:
        match self.phase:
            case DestinationRouterPhase.PREPARING:
                step.send(self.destination, self.prepare)
            case DestinationRouterPhase.ADOPTABLE if self.record.vote is not None:
                self.tell(step, self.record.vote)
            case DestinationRouterPhase.SHADOWING | DestinationRouterPhase.ADOPTABLE:
                self.tell(step, m.Prepared(self.move, self.record.frozen_ms))
            case DestinationRouterPhase.ADOPTED:
                if self.record.replaced:
                    self.announce_replacement(step)
                if self.record.emit_from >= 0:
                    step.send_durable(self.destination, m.EmitFrom(self.move, self.record.emit_from))
                if self.settled:
                    self.say_settled(step)
                if STRATEGIES[self.prepare.strategy].restarts and self.move in self.inbox.pauses:
                    self.inbox.request_restarts(step, self.move)
                    if self.installed:
                        self.tell(step, m.StateComplete(self.move, self.overlap))
            case _:
                pass

    def on_message(self, step: Step, message: m.Message | m.AnyNotice) -> None:
        """A message or notice about this move. The table says in which phases it is expected."""
        if not self._phase.accepts(step, message):
            return
        match message:
            case m.Prepare():
                self.on_prepare_again(step)
            case m.Prepared():
                self.on_prepared(step)
            case m.Ready():
                self.on_ready(step, message)
            case m.StateComplete():
                self.on_installed(step, message)
            case m.DestinationCheckpointed():
                self.on_settled(step)
            case m.ShadowNotice() | m.EmittedNotice() if self.phase is DestinationRouterPhase.PREPARING:
                self.refuse_after_restart(step)
            case m.ShadowNotice():
                self.on_shadow(step, message)
            case m.EmittedNotice():
                step.send(self.destination, m.EmittedThrough(self.move, message.offset))
            case m.FlipToDestination():
                self.on_flipped(step, message)
            case m.EmitFromNotice():
                self.on_emit_from(step, message)
            case m.ResumeNotice():
                self.inbox.unpause(step, self.move)
            case m.ServedByNotice():
                self.on_served_by(step, message)
            case m.DoneNotice():
                self.on_done(step)
            case m.AbortNotice() | m.AbortedNotice():
                self._moves.drop_incoming(step, self.move)
            case _:
                raise CoreBug(f"destination router: no handler for {type(message).__name__}")

    # -- messages of the destination ---------------------------------------------------------

    def on_prepare_again(self, step: Step) -> None:
        """Repeat the answer to Prepare: the source router asks again, so the answer may be lost."""
        self.retry(step)
        if self.phase in (DestinationRouterPhase.SHADOWING, DestinationRouterPhase.ADOPTABLE):
            self.tell(step, m.Prepared(self.move, self.record.frozen_ms))

    def on_prepared(self, step: Step) -> None:
        if self.phase is DestinationRouterPhase.PREPARING:
            flips_first = STRATEGIES[self.prepare.strategy].flips_first  # then the flip is the next message
            self.become(
                step, DestinationRouterPhase.ADOPTABLE if flips_first else DestinationRouterPhase.SHADOWING
            )
        self.tell(step, m.Prepared(self.move, self.record.frozen_ms))

    def on_ready(self, step: Step, message: m.Ready) -> None:
        self.record.vote = message
        self.become(step, DestinationRouterPhase.ADOPTABLE)
        self.tell(step, message)

    def on_installed(self, step: Step, message: m.StateComplete) -> None:
        self.installed, self.overlap = True, max(self.overlap, message.overlap)
        self.tell(step, m.StateComplete(self.move, self.overlap))

    def on_settled(self, step: Step) -> None:
        self.settled = True
        self.say_settled(step)

    def say_settled(self, step: Step) -> None:
        """Report that the keys are settled. Their clock may be ahead: their routes have its floor."""
        inbox = self.inbox
        if inbox.watermark_ms >= self.record.watermark_ms and inbox.all_relaunched(self.move):
            self.tell(step, m.DestinationCheckpointed(self.move))

    # -- notices of the source router ---------------------------------------------------------

    def refuse_after_restart(self, step: Step) -> None:
        """Undo a move that was prepared before this router restarted, and again by a late Prepare.

        Shadow entries of the time in between are lost, so the destination could not be in step.
        """
        self._moves.drop_incoming(step, self.move)
        self.tell(step, m.Refused(self.move, f"{self.router.site} was restarted and forgot it"))

    def on_shadow(self, step: Step, notice: m.ShadowNotice) -> None:
        covered = self.phase is DestinationRouterPhase.ADOPTED and (
            self.position[0] == OWN or not STRATEGIES[self.prepare.strategy].freezes
        )
        if covered or notice.offset in self.shadow:
            return
        self.store_shadow(step, notice)
        self.to_destination(step, m.Shadow(self.move, [notice]))

    def store_shadow(self, step: Step, notice: m.ShadowNotice) -> None:
        """Rule R24: store a shadow entry until a checkpoint of the destination covers it."""
        self.shadow[notice.offset] = notice
        step.put(("shadow", self.move, notice.offset), notice)

    def on_flipped(self, step: Step, notice: m.FlipToDestination) -> None:
        inbox = self.inbox
        self.record.watermark_ms = notice.watermark_ms
        inbox.update_table(step, notice.update)
        self.own_part()
        if self.from_site != self.router.site:
            inbox.sequencer.devices.install(step, notice.recent)
            inbox.sequencer.install_marks(step, notice.marks, self.keys, self.member)
        self.log_carried_watermark(step, notice.watermark_ms)
        p = self.prepare
        adopt = Adopt(
            p.move,
            p.keys,
            p.source,
            p.strategy,
            notice.update,
            notice.time_ms,
            notice.watermark_ms,
            inbox.watermark_ms,
            p.epochs,
            notice.flip_offset,
        )
        entry = inbox.append(step, {}, adopt)
        self.record.adopt, self.record.adopted = adopt, entry.offset
        self.become(step, DestinationRouterPhase.ADOPTED)
        if STRATEGIES[self.prepare.strategy].restarts and self.from_site != self.router.site:
            inbox.pause(step, self.move)
        if self.from_site != self.router.site:
            self.router.sequence_again(step, inbox, inbox.sequencer.release_waiting())

    def own_part(self) -> None:
        """Make the rows of the keys a part of their own for the destination, until the move is done."""
        self.inbox.set_moving(self.move, MovingKeys(self.keys, self.destination, outgoing=False))

    def log_carried_watermark(self, step: Step, watermark_ms: int) -> None:
        """Rule R17: append the watermark of the source's log, because it also holds for this log."""
        if self.inbox.watermark_ms < watermark_ms:
            self.inbox.append(step, {}, Watermark(watermark_ms))

    def on_emit_from(self, step: Step, notice: m.EmitFromNotice) -> None:
        if self.record.emit_from < 0:
            self.record.emit_from, self.record.fences = notice.offset, notice.fences
            self.save(step)
            step.send_durable(self.destination, m.EmitFrom(self.move, notice.offset))

    def on_served_by(self, step: Step, notice: m.ServedByNotice) -> None:
        """Rule R36: the destination asks whom the source router names, never whom it remembers."""
        self.prepare = self.record.prepare = msgspec.structs.replace(self.prepare, source=notice.instance)
        self.save(step)
        self.to_destination(step, m.ServedBy(self.move, notice.instance))

    def on_done(self, step: Step) -> None:
        self.inbox.unpause(step, self.move)
        entry = self.inbox.append(step, {}, Done(self.move))
        self.record.merged = entry.offset
        self.inbox.clear_moving(self.move)
        self.become(step, DestinationRouterPhase.MERGED)

    def _delete(self, step: Step) -> None:
        for offset in self.shadow:
            step.delete(("shadow", self.move, offset))
        for key in self.marks:
            step.delete(("move_mark", self.move, key))
        step.delete(("incoming", self.move))

    # -- attach and checkpoints of the destination -------------------------------------------

    def role(self) -> m.IncomingRole:
        r = self.record
        return m.IncomingRole(
            self.move,
            self.keys,
            self.prepare.source,
            self.prepare.strategy,
            self.prepare.epochs,
            r.adopt,
            r.adopted,
            r.merged,
            r.emit_from if r.emit_from >= 0 else None,
        )

    def feed_shadow(self, step: Step, position: Position) -> None:
        """Send the destination, after it attached, the shadow entries that it does not have."""
        stage, offset = position
        if stage == SHADOW or STRATEGIES[self.prepare.strategy].freezes:
            missing = [n for o, n in sorted(self.shadow.items()) if stage == OWN or o > offset]
            if missing:
                step.send(self.destination, m.Shadow(self.move, missing))

    def checkpointed(self, step: Step, position: Position, instance: str, applied: int) -> bool:
        """Drop shadow entries that a checkpoint covers. True: the router can forget the move."""
        self.position = max(self.position, position)
        stage, offset = self.position
        for covered in [o for o in self.shadow if stage == OWN or o <= offset]:
            del self.shadow[covered]
            step.delete(("shadow", self.move, covered))
        merged = self.phase is DestinationRouterPhase.MERGED and applied >= self.record.merged
        return merged and self.covered_but_for(instance)

    def has_emitted(self, offset: int) -> bool:
        """Whether the destination has emitted what the entries up to this offset cause for the keys."""
        cursor = self.inbox.cursors.get(self.destination)
        emitted = None if cursor is None else cursor.moves.get(self.move)
        return cursor is not None and emitted is not None and (emitted >= offset or cursor.idle)

    def may_admit(self, key: Key, position: Position) -> bool:
        """Rule R8: admit an output of a key once, also if a restarted destination emits it again."""
        return position > self.marks.get(key, (SHADOW, -1))

    def admit(self, step: Step, stage: int, outputs: list[Output]) -> list[Output]:
        """The outputs of moving keys that were not admitted before, in order per key."""
        admitted = []
        fresh: dict[Key, Position] = {}
        for output in outputs:
            position = (stage, output.offset)
            if self.may_admit(output.key, position):
                admitted.append(output)
                fresh[output.key] = max(position, fresh.get(output.key, (SHADOW, -1)))
        for key, position in fresh.items():
            self.marks[key] = position
            step.put(("move_mark", self.move, key), position)
        return admitted
