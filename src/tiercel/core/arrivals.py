"""The destination's router side of a move: from Prepare to Done.

Responsible for: keeping the shadow feed for the destination, the promise to adopt, adopting, merging.
Not responsible for: deciding (departures.py at the source's router does), state (destination.py).

    PREPARING --> SHADOWING --Ready--> ADOPTABLE --Flipped--> ADOPTED --Done--> MERGED
        |             |                    | (only the source's router may end it now)
        +-------------+--------------------+--Aborted--> forgotten

Flip-first moves go from PREPARING to ADOPTED at once. If this router restarts before ADOPTABLE it
has forgotten the move, says so when it is addressed, and the move is undone.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from tiercel.core import messages as m
from tiercel.core.inbox import Group
from tiercel.core.records import OWN, SHADOW, Adopt, Done, Key, Output, Position, Watermark
from tiercel.core.routing import slot_of
from tiercel.core.step import Step
from tiercel.core.strategies import STRATEGIES

if TYPE_CHECKING:
    from tiercel.core.inbox import Inbox
    from tiercel.core.movedesk import MoveDesk


class Phase(enum.Enum):
    """Where it is; what each phase means stands beside it."""

    PREPARING = "preparing"  # the destination was asked to make room
    SHADOWING = "shadowing"  # it gets the shadow feed and state
    ADOPTABLE = "adoptable"  # it voted, durably; only the source's router ends this
    ADOPTED = "adopted"  # this log sequences the keys; they are a part of their own
    MERGED = "merged"  # the keys are ordinary again; kept until a checkpoint is past it


DURABLE = (Phase.ADOPTABLE, Phase.ADOPTED, Phase.MERGED)


class ArrivalRecord(msgspec.Struct):
    """What of an arrival is durable."""

    prepare: m.Prepare
    phase: str
    adopt: Adopt | None = None
    adopted: int = -1  # its offset
    emit_from: int = -1
    merged: int = -1  # offset of Done
    time_ms: int = 0
    watermark_ms: int = -1
    frozen_ms: int = -1  # the watermark this site had given for the operator's outputs; not raised meanwhile
    vote: m.Ready | None = None


class Arrival:
    """One move whose keys are coming to an instance of this site."""

    def __init__(
        self, router: MoveDesk, inbox: Inbox, prepare: m.Prepare, phase: Phase = Phase.PREPARING
    ) -> None:
        self.router = router
        self.inbox = inbox
        self.prepare = prepare
        self.move = prepare.move
        self.keys = prepare.keys
        self.strategy_name = prepare.strategy
        self.phase = phase
        self.record = ArrivalRecord(prepare, phase.value)
        self.from_site = router.site_of(prepare.source)
        self.shadow: dict[int, m.ShadowNotice] = {}  # what the destination's checkpoint does not cover
        self.marks: dict[Key, Position] = {}  # outputs of each key are admitted through here
        self.settled = False
        self.installed = False
        self.life = 0
        self.position: Position = (SHADOW, -1)  # what the destination's checkpoint covers

    @property
    def freezes(self) -> bool:
        """Whether the keys may still emit below this site's watermark."""
        return self.phase is not Phase.MERGED

    @property
    def destination(self) -> str:
        return self.prepare.destination

    def member(self, key: Key) -> bool:
        return key in self.keys.keys or slot_of(key, self.inbox.table.count) in self.keys.slots

    def save(self, step: Step, phase: Phase) -> None:
        self.router.trace_phase(step, self.move, "arrival", self.phase.value, phase.value)
        self.phase = phase
        self.record.phase = phase.value
        step.put(("arrival", self.move), msgspec.structs.replace(self.record))

    def tell(self, step: Step, message: m.Message) -> None:
        """Tell the source's router; repeated by `retry` until it is answered."""
        self.router.send_router(step, self.from_site, message, durable=True)

    def retry(self, step: Step) -> None:
        match self.phase:
            case Phase.PREPARING:
                step.send(self.destination, self.prepare)
            case Phase.ADOPTABLE if self.record.vote is not None:
                self.tell(step, self.record.vote)
            case Phase.SHADOWING | Phase.ADOPTABLE:
                self.tell(step, m.Prepared(self.move, self.record.frozen_ms))
            case Phase.ADOPTED:
                if self.record.emit_from >= 0:
                    step.send_durable(self.destination, m.EmitFrom(self.move, self.record.emit_from))
                if self.settled:
                    self.say_settled(step)
                if STRATEGIES[self.prepare.strategy].halts and self.move in self.inbox.pauses:
                    self.inbox.say_halt(step, self.move)
                    if self.installed:
                        self.tell(step, m.Installed(self.move))
            case _:
                pass

    # -- messages of the destination ---------------------------------------------------------

    def on_prepared(self, step: Step, message: m.Prepared) -> None:
        if self.phase is Phase.PREPARING:
            if STRATEGIES[self.prepare.strategy].flips_first:
                self.save(step, Phase.ADOPTABLE)  # the flip comes next: this must be remembered
            else:
                self.phase = Phase.SHADOWING
        if self.record.adopted < 0:
            self.tell(step, m.Prepared(self.move, self.record.frozen_ms))

    def on_ready(self, step: Step, message: m.Ready) -> None:
        if self.phase is Phase.SHADOWING:
            self.record.vote = message
            self.save(step, Phase.ADOPTABLE)
            self.tell(step, message)

    def on_installed(self, step: Step) -> None:
        self.installed = True
        self.tell(step, m.Installed(self.move))

    def on_settled(self, step: Step) -> None:
        if self.phase is Phase.ADOPTED:
            self.settled = True
            self.say_settled(step)

    def say_settled(self, step: Step) -> None:
        """Once our log's clock has reached the keys' own: from then on they need no clock of theirs."""
        inbox, record = self.inbox, self.record
        if inbox.time_ms < record.time_ms <= step.now_ms:
            inbox.tick(step)
        behind = inbox.time_ms < record.time_ms or inbox.watermark_ms < record.watermark_ms
        if not behind and inbox.all_relaunched(self.move):
            self.tell(step, m.Settled(self.move))

    # -- notices of the source's router -------------------------------------------------------

    def on_shadow(self, step: Step, notice: m.ShadowNotice) -> None:
        if self.phase not in (Phase.SHADOWING, Phase.ADOPTABLE) or notice.offset in self.shadow:
            return
        if self.inbox.mutant != "shadow-not-stored":
            self.shadow[notice.offset] = notice
            step.put(("shadow", self.move, notice.offset), notice)
        self.router.to_destination(step, self, m.Shadow(self.move, [notice]))

    def on_flipped(self, step: Step, notice: m.FlippedNotice) -> None:
        if self.phase in (Phase.ADOPTED, Phase.MERGED):
            return
        inbox = self.inbox
        if inbox.mutant == "clock-not-carried":
            notice = msgspec.structs.replace(notice, time_ms=0, watermark_ms=-1)
        self.record.time_ms, self.record.watermark_ms = notice.time_ms, notice.watermark_ms
        inbox.update_table(step, notice.update)
        inbox.groups[self.move] = Group(self.keys, self.destination, leaving=False)
        if self.from_site != self.router.site:
            inbox.install_marks(step, notice.marks, self.member)
        behind = inbox.watermark_ms < notice.watermark_ms
        if behind and inbox.mutant != "carried-watermark-not-logged":  # what that log knows is true here
            inbox.append(step, {}, Watermark(notice.watermark_ms))
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
        )
        entry = inbox.append(step, {}, adopt)
        self.record.adopt, self.record.adopted = adopt, entry.offset
        inbox.rerouted()
        self.save(step, Phase.ADOPTED)
        if STRATEGIES[self.prepare.strategy].halts and self.from_site != self.router.site:
            inbox.pause(step, self.move)
        if self.from_site != self.router.site:
            self.router.sequence_again(step, inbox, inbox.release_waiting())

    def on_emit_from(self, step: Step, notice: m.EmitFromNotice) -> None:
        if self.phase is Phase.ADOPTED and self.record.emit_from < 0:
            self.record.emit_from = notice.offset
            self.save(step, Phase.ADOPTED)
            step.send_durable(self.destination, m.EmitFrom(self.move, notice.offset))

    def on_done(self, step: Step) -> None:
        if self.phase is not Phase.ADOPTED:
            return
        self.inbox.unpause(step, self.move)
        entry = self.inbox.append(step, {}, Done(self.move))
        self.record.merged = entry.offset
        self.inbox.groups.pop(self.move, None)
        self.inbox.rerouted()
        self.save(step, Phase.MERGED)

    def forget(self, step: Step) -> None:
        for offset in self.shadow:
            step.delete(("shadow", self.move, offset))
        for key in self.marks:
            step.delete(("move_mark", self.move, key))
        step.delete(("arrival", self.move))

    # -- the destination comes, goes, and checkpoints ----------------------------------------

    def role(self) -> m.ArrivalRole:
        r = self.record
        return m.ArrivalRole(
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
        """After it attached: the shadow entries it does not have."""
        stage, offset = position
        if stage == SHADOW:
            missing = [n for o, n in sorted(self.shadow.items()) if o > offset]
            if missing:
                step.send(self.destination, m.Shadow(self.move, missing))

    def checkpointed(self, step: Step, position: Position, applied: int) -> bool:
        """Drop what a checkpoint covers. True when the arrival can be forgotten."""
        self.position = max(self.position, position)
        stage, offset = self.position
        for covered in [o for o in self.shadow if stage == OWN or o <= offset]:
            del self.shadow[covered]
            step.delete(("shadow", self.move, covered))
        return self.phase is Phase.MERGED and applied >= self.record.merged

    def admit(self, step: Step, stage: int, outputs: list[Output]) -> list[Output]:
        """Outputs of the keys on the move: each once, in order per key."""
        admitted = []
        fresh: dict[Key, Position] = {}
        for output in outputs:
            position = (stage, output.offset)
            if (
                position > self.marks.get(output.key, (SHADOW, -1))
                or self.inbox.mutant == "move-marks-ignored"
            ):
                admitted.append(output)
                fresh[output.key] = max(position, fresh.get(output.key, (SHADOW, -1)))
        for key, position in fresh.items():
            self.marks[key] = position
            step.put(("move_mark", self.move, key), position)
        return admitted
