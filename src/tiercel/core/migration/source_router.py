"""The outgoing move: the source router's side of a move, from request to Done. Its log decides the move.

Responsible for: locking the keys, Begin, the shadow, the flip, the cut, releasing the source; undoing.
Not responsible for: state (source_instance.py, destination_instance.py), the destination's log
    (destination_router.py).

live:          PREPARING --> BEGUN --> SHADOWING --> COMPARING --Flip--> FLIPPED --> CUT --> EMITTING --> DONE
flip first:    PREPARING --> PREPARED ---------------------------Flip--> FLIPPED --> CUT --> EMITTING --> DONE
every phase before Flip --> ABORTED

A move that flips first cuts the source where it is. In CUT the router reads the rows between the cut and the
flip from its log, and sends them to the destination as a shadow. The log above `retained_from` is retained
until then.

Before Flip the router may undo the move; after it the move always completes. strategies.py orders flip,
transfer and processing; this module has the rules that all strategies share. The transitions are
SOURCE_ROUTER in phases.py.
"""

from __future__ import annotations

from collections import deque

import msgspec

from tiercel.core import messages as m
from tiercel.core.errors import CoreBug
from tiercel.core.logs.dispatch import DispatchPhase
from tiercel.core.logs.inbox import Inbox, MovingKeys
from tiercel.core.logs.site_outbox import FrameId
from tiercel.core.machine.names import ShadowReaderName
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import OutgoingMoveRecord
from tiercel.core.migration.parallel_recovery import replace_destination
from tiercel.core.migration.phases import (
    DECIDED,
    SHADOWED,
    SOURCE_ROUTER,
    STOPPED,
    UNDECIDED,
    MovePhase,
    SourceRouterPhase,
)
from tiercel.core.migration.ports import OutgoingPort, RouterPort
from tiercel.core.migration.strategies import STRATEGIES, FlipFacts, Strategy
from tiercel.core.migration.units import count_waiting
from tiercel.core.model.bundle import is_bundle, opened_for
from tiercel.core.model.keys import Key
from tiercel.core.model.log import Abort, Begin, Compare, Entry, Flip, OutputFence, Row, Tick, Watermark
from tiercel.core.model.routing import slot_of
from tiercel.core.model.topology import site_of


class OutgoingMove:
    """One move whose source is an instance of this site."""

    def __init__(
        self,
        router: RouterPort,
        moves: OutgoingPort,
        inbox: Inbox,
        record: OutgoingMoveRecord,
    ) -> None:
        self.router = router
        self._moves = moves
        self.inbox = inbox
        self.record = record
        request = self.request = record.request
        self.move = request.move
        self.keys = request.keys
        self.strategy_name = request.strategy
        self._phase = MovePhase(SOURCE_ROUTER, request.move, SourceRouterPhase(record.phase), self._changed)
        self.to_site = site_of(request.destination)
        self.destination_watermark = -1
        self.source_digests: dict[Key, int] | None = None
        self.vote: m.Ready | None = None
        self.behind_ms = 0.0  # how long the source was seen to work on entries before Compare
        self.last_seen_ms = 0.0  # of the source, while the router waits for its digests
        self.compare_offset = 0
        self.flipped_at = 0.0
        self.shadow_live = False  # the shadow is at the end of the log; appended entries follow at once
        self.shadow_cursor = 0
        self.shadow_ahead: deque[Entry] = deque(maxlen=inbox.settings.read_entries_max)  # not shadowed yet
        self.emitted_unsettled: tuple[int, set[FrameId]] | None = None
        self.unsettled: set[FrameId] = set()  # output frames that must arrive before EmitFrom, or before Done
        self.fences: dict[str, OutputFence] | None = {}  # None: EmitFrom waits until they have arrived
        self.cut_shadowed = not self.strategy.freezes  # the destination has the rows up to the flip
        self.waiting: dict[int, tuple[int, int]] = {}  # unit -> its first row behind the cut, number of rows
        self.asked_by = ""
        self.deadline_ms = float("inf")
        self.rows_have_come = False  # at the destination's site
        self.moved = (0, 0)  # keys and bytes, for reports
        self.messages = 0
        self.overlap = 1.0 if self.strategy.votes else 0.0  # both instances process during a live transfer

    @property
    def phase(self) -> SourceRouterPhase:
        return self._phase.now

    def become(self, step: Step, phase: SourceRouterPhase) -> None:
        """Change the phase, durably, and report it to the client that requested the move."""
        self._phase.become(step, phase)

    def _changed(self, step: Step, phase: SourceRouterPhase) -> None:
        self.record.phase = phase.value
        self.retain_log()
        self.save(step)

    def retain_log(self) -> None:
        """Retain the part of the log that the destination has not been sent yet."""
        cutting = self.phase in (SourceRouterPhase.FLIPPED, SourceRouterPhase.CUT) and self.strategy.freezes
        if self.phase is SourceRouterPhase.BEGUN or self.phase in SHADOWED or cutting:
            self.inbox.shadow_readers[self.move] = self
        else:
            self.inbox.shadow_readers.pop(self.move, None)

    def save(self, step: Step) -> None:
        """Persist the record and report the phase."""
        step.put(("outgoing", self.move), msgspec.structs.replace(self.record))
        self._moves.report(step, self.move)

    @property
    def strategy(self) -> Strategy:
        return STRATEGIES[self.request.strategy]

    @property
    def source(self) -> str:
        return self.request.source

    def member(self, key: Key) -> bool:
        """Whether a key belongs to this move: its slot does, and no override gives it another owner."""
        if key in self.keys.keys:
            return True
        return slot_of(key, self.inbox.table.count) in self.keys.slots

    def takes_along(self, key: Key) -> bool:
        """Whether this move transfers a key: overrides to other owners stay."""
        if key in self.keys.keys:
            return True
        if slot_of(key, self.inbox.table.count) not in self.keys.slots:
            return False
        override = self.inbox.table.overrides.get(key)
        return override is None or override.instance in (self.source, self.request.destination)

    def is_at_source(self, key: Key) -> bool:
        """Whether the source had a key of this move: a key that left earlier is at the destination.

        The log may hold rows of such a key that a lagging source has not passed; its earlier move has them.
        The table of today would not tell, because the flip has changed it.
        """
        override = self.record.epochs.keys.get(key)
        at = (self.source, *self.record.served_for)
        return self.member(key) and (override is None or override.instance in at)

    def notify(self, step: Step, notice: m.AnyNotice) -> None:
        """Send the destination router a notice, durably and in order."""
        self.messages += 1
        if self.to_site == self.router.site:
            self._moves.on_notice(step, self.router.site, notice)
        else:
            self.router.outbox(self.to_site, self.inbox.name).add(
                step, self.router.intake_promise(self.inbox.name), [], notice=notice
            )

    def retry(self, step: Step) -> None:
        """Repeat the message whose answer the current phase waits for."""
        match self.phase:
            case SourceRouterPhase.PREPARING:
                self.router.send_router(step, self.to_site, self.prepare_message(), durable=True)
            case SourceRouterPhase.BEGUN | SourceRouterPhase.SHADOWING:
                step.send_durable(self.source, self.capture_message())
                self.tell_emitted(step)
            case SourceRouterPhase.COMPARING:
                self.tell_emitted(step)
            case SourceRouterPhase.FLIPPED:
                self.announce_flip(step)
            case SourceRouterPhase.CUT | SourceRouterPhase.EMITTING:
                self.inbox.request_restarts(step, self.move)
                if self.strategy.freezes and not self.record.installed:
                    self.announce_flip(step)
            case SourceRouterPhase.DONE:
                for holder in self.holders:
                    step.send_durable(holder, m.Forget(self.move))
            case _:
                pass
        self.advance(step)

    @property
    def holders(self) -> tuple[str, ...]:
        """The instances that have the keys in their checkpoints: the source, or its successors."""
        return self.record.successors or (self.source,)

    def is_served_by(self, instance: str) -> bool:
        """Whether only this instance has the state of the keys: the move is decided, and flips first."""
        served = self.phase in DECIDED and self.phase is not SourceRouterPhase.DONE
        return served and self.strategy.freezes and self.source == instance

    def taken_over(self, step: Step, dead: str, successors: tuple[str, ...]) -> None:
        """The destination has the state, and the source is dead: successors forget the keys in its place."""
        if self.phase is SourceRouterPhase.FLIPPED:
            self.take_over(step)
        others = tuple(holder for holder in self.holders if holder != dead)
        self.record.successors = (*others, *successors)
        self.save(step)

    def forgotten_by(self, step: Step, holder: str) -> None:
        """A holder no longer has the keys; the move ends with the last one."""
        left = tuple(other for other in self.holders if other != holder)
        if left:
            self.record.successors = left
            self.save(step)
        else:
            self._moves.end_outgoing(step, self.move)

    def on_message(self, step: Step, message: m.Message, sender: str = "") -> None:
        """A message about this move. The table says in which phases it is expected."""
        self.messages += 1
        if not self._phase.accepts(step, message):
            return
        match message:
            case m.Prepared():
                self.on_prepared(step, message)
            case m.Refused():
                self.abort(step, message.reason)
            case m.CaptureFrom():
                self.on_capture_from(step, message)
            case m.Captured():
                self.on_captured(step, message)
            case m.Digests():
                self.on_digests(step, message)
            case m.Ready():
                self.on_ready(step, message)
            case m.SourceStopped():
                self.on_cut(step, message)
            case m.StateComplete():
                self.overlap = max(self.overlap, message.overlap)
                self.on_installed(step)
            case m.DestinationCheckpointed():
                self.on_settled(step)
            case m.DestinationReplaced():
                replace_destination(step, self, message.destination)
            case m.Forgotten():
                self.forgotten_by(step, sender)
            case _:
                raise CoreBug(f"source router: no handler for {type(message).__name__}")

    def prepare_message(self) -> m.Prepare:
        r = self.request
        return m.Prepare(r.move, r.operator, r.keys, r.source, r.destination, r.strategy, self.record.epochs)

    def capture_message(self) -> m.Capture:
        return m.Capture(self.move, self.keys, self.request.destination, self.strategy.copies)

    # -- before the flip ---------------------------------------------------------------------

    def on_prepared(self, step: Step, message: m.Prepared) -> None:
        self.destination_watermark = message.watermark_ms
        if self.strategy.shadows:
            self.begin(step)
        elif self.may_flip():
            self.flip(step)
        else:
            self.become(step, SourceRouterPhase.PREPARED)

    def begin(self, step: Step) -> None:
        """Live: from here on the keys' rows form a part of their own, which the source reads."""
        entry = self.inbox.append(step, {}, Begin(self.move))
        self.inbox.set_moving(self.move, MovingKeys(self.keys, self.source, outgoing=True))
        self.record.begin_offset = entry.offset
        self.become(step, SourceRouterPhase.BEGUN)
        step.send_durable(self.source, self.capture_message())

    def on_capture_from(self, step: Step, message: m.CaptureFrom) -> None:
        self.become(step, SourceRouterPhase.SHADOWING)
        self.shadow_cursor = self.shadow_start(message.offset)
        start = Watermark(message.watermark_ms)  # newer keys have seen this watermark
        self.notify(step, m.ShadowNotice(self.move, message.offset, message.time_ms, [], start))
        self.read_shadow(step)

    def shadow_start(self, captured_from: int) -> int:
        """Rule R21: the shadow begins behind the lowest offset at which the source captures a key."""
        return captured_from

    def read_shadow(self, step: Step) -> None:
        at_most, reader = self.inbox.settings.read_entries_max, ShadowReaderName(self.move)
        step.read_log(self.inbox.name, self.shadow_cursor, at_most, reader)

    def on_shadow_read(self, step: Step, entries: list[Entry]) -> None:
        if self.phase is SourceRouterPhase.CUT and not self.cut_shadowed:
            self.shadow_cut(step, entries)
        if self.phase not in SHADOWED or self.shadow_live:
            return
        for entry in entries:
            if entry.offset > self.shadow_cursor:
                self.shadow(step, entry)
                self.shadow_cursor = entry.offset
        for entry in self.shadow_ahead:  # appended during the read: otherwise a busy log stays ahead
            if entry.offset == self.shadow_cursor + 1:
                self.shadow(step, entry)
                self.shadow_cursor = entry.offset
        if self.shadow_cursor >= self.inbox.offset:
            self.shadow_live = True
            self.shadow_ahead.clear()
            self.advance(step)
        else:
            self.read_shadow(step)

    def shadow_appended(self, step: Step, entry: Entry) -> None:
        if self.phase not in SHADOWED:
            return
        if self.shadow_live:
            self.shadow_cursor = entry.offset
            self.shadow(step, entry)
        else:
            self.shadow_ahead.append(entry)

    def shadow(self, step: Step, entry: Entry) -> None:
        """Shadow the move's rows of an entry. Before Begin they are in all parts that the source reads."""
        if self.phase not in SHADOWED:
            return  # an earlier entry has undone the move
        if entry.offset <= self.record.begin_offset:
            rows = self.rows_in_source_parts(entry)
        else:
            rows = [row for part in entry.moving if part.move == self.move for row in part.rows]
        control = entry.control
        if not isinstance(control, Tick | Watermark) and control != Compare(self.move):
            control = None  # a record of another move
        if rows or control is not None:
            self.notify(step, m.ShadowNotice(self.move, entry.offset, entry.time_ms, rows, control))
            if self._moves.shadow_backlog(self.move) > self.inbox.settings.shadow_entries_max:
                self.abort(step, "the shadow outbox is full")

    def rows_in_source_parts(self, entry: Entry) -> list[Row]:
        """The move's rows of an entry in which they are not a part of their own."""
        readers = (self.source, *self.record.served_for)
        rows = opened_for([row for reader in readers for row in entry.rows_of(reader)], [self.keys])
        return [row for row in rows if not is_bundle(row[0]) and self.is_at_source(row[0])]

    def start_cut_shadow(self, step: Step) -> None:
        """Flip first: send the destination the rows between the cut and the flip."""
        self.shadow_cursor, self.waiting = self.record.last_offset, {}
        if self.shadow_cursor < self.record.flip_offset:
            start = Watermark(self.record.last_watermark_ms)
            self.notify(step, m.ShadowNotice(self.move, self.shadow_cursor, 0, [], start))
            self.read_shadow(step)
        else:
            self.end_cut_shadow(step, Watermark(self.record.last_watermark_ms))

    def shadow_cut(self, step: Step, entries: list[Entry]) -> None:
        flip_offset, slots = self.record.flip_offset, self.inbox.table.count
        for entry in entries:
            if not self.shadow_cursor < entry.offset < flip_offset:
                continue
            self.shadow_cursor = entry.offset
            rows = self.rows_in_source_parts(entry)
            control = entry.control if isinstance(entry.control, Tick | Watermark) else None
            if rows or control is not None:
                self.notify(step, m.ShadowNotice(self.move, entry.offset, entry.time_ms, rows, control))
            count_waiting(self.waiting, rows, entry.offset, slots)
        if self.waiting and self.strategy.needs_backlog:
            step.send(self.source, m.Backlog(self.move, dict(self.waiting)))
        if not entries or entries[-1].offset >= flip_offset - 1:
            self.end_cut_shadow(step, None)
        else:
            self.read_shadow(step)

    def end_cut_shadow(self, step: Step, control: Watermark | None) -> None:
        """Send the end mark of the shadow: an entry at the offset of the flip."""
        self.notify(step, m.ShadowNotice(self.move, self.record.flip_offset, 0, [], control))
        self.cut_shadowed = True
        self.shadow_cursor = self.record.flip_offset
        self.advance(step)

    def tell_emitted(self, step: Step) -> None:
        """Notify the destination of the source's arrived outputs, so that it drops its withheld ones."""
        if self.emitted_unsettled is None:
            emitted = self.inbox.emitted.get(self.source, 0)
            self.emitted_unsettled = (emitted, self.router.unsettled_outputs(self.inbox.name))
        offset, unsettled = self.emitted_unsettled
        if not unsettled:
            self.emitted_unsettled = None
            self.notify(step, m.EmittedNotice(self.move, offset))

    def on_captured(self, step: Step, message: m.Captured) -> None:
        self.moved = (message.keys, message.size_bytes)
        self.messages += 2 * message.chunks  # and their receipts
        if self.phase in DECIDED:
            self._moves.report(step, self.move)
            return
        self.last_seen_ms = step.now_ms
        self.become(step, SourceRouterPhase.COMPARING)
        self.compare_offset = self.inbox.append(step, {}, Compare(self.move)).offset

    def on_digests(self, step: Step, message: m.Digests) -> None:
        self.source_digests = message.digests
        if self.phase in DECIDED:
            self.compare_late(step)
        else:
            self.advance(step)

    def source_advanced(self, step: Step) -> None:
        """Outputs of the source have arrived. Count how long it works on entries before Compare."""
        if self.phase is SourceRouterPhase.COMPARING:
            if self.inbox.emitted.get(self.source, 0) < self.compare_offset:
                self.behind_ms += min(step.now_ms - self.last_seen_ms, self.inbox.settings.retry_ms)
            self.last_seen_ms = step.now_ms
        self.advance(step)

    def may_flip_uncompared(self) -> bool:
        """Rule R13: only a source that is seen to be overloaded may flip before its digests have arrived.

        The digests of a silent source may be on their way, so the move waits for them until its deadline.
        """
        return self.behind_ms > self.inbox.settings.compare_wait_ms

    def compare_late(self, step: Step) -> None:
        """Report a difference that was found only after the flip, because the flip did not wait."""
        differing = self.differing_key()
        if differing is not None and not self.record.reason:
            self.record.reason = f"not deterministic: key {differing!r} differs, found after the flip"
            self.save(step)

    def on_ready(self, step: Step, message: m.Ready) -> None:
        self.vote = message
        self.advance(step)

    def source_watermark_reached(self) -> bool:
        """Rule R18: no output of the keys may be late behind the watermark of the destination's site."""
        cursor = self.inbox.cursors.get(self.source)
        return cursor is not None and cursor.watermark_ms >= self.destination_watermark

    def source_attached(self) -> bool:
        """Rule: keys whose state only the source has stay while it is away: it may never return."""
        cursor = self.inbox.cursors.get(self.source)
        return cursor is not None and cursor.phase is not DispatchPhase.DETACHED

    def shadow_complete(self) -> bool:
        """Rule R21: the destination must also have the rows that were appended since the vote's Compare."""
        return self.shadow_live

    def advance(self, step: Step) -> None:
        """Take the next step that has become possible, if any."""
        if self.phase is SourceRouterPhase.COMPARING and self.vote is not None:
            if self.source_digests is None and not self.may_flip_uncompared():
                return
            differing = self.differing_key()
            if differing is not None:
                where = "differs between source and destination"
                self.abort(step, f"not deterministic: key {differing!r} {where}")
            elif self.may_flip():
                self.flip(step)
        elif self.phase is SourceRouterPhase.PREPARED and self.may_flip():
            self.flip(step)
        elif self.phase is SourceRouterPhase.CUT and self.cut_shadowed:
            if self.unsettled and self.fences is None:  # no fence would hold back what overtakes them
                return
            self.become(step, SourceRouterPhase.EMITTING)
            self.notify(step, m.EmitFromNotice(self.move, self.record.last_offset, self.fences or {}))
        elif self.phase is SourceRouterPhase.FLIPPED:
            silent = step.now_ms - self.flipped_at > self.inbox.settings.source_silence_ms
            if self.strategy.destination_can_finish and silent:
                self.take_over(step)

    def may_flip(self) -> bool:
        """Whether the strategy flips the move as soon as the destination is prepared."""
        facts = FlipFacts(
            prepared=True,
            voted=self.vote is not None,
            shadow_complete=self.shadow_complete(),
            source_attached=self.source_attached(),
            source_watermark_reached=self.source_watermark_reached(),
            rows_came=self.rows_are_there(),
        )
        return self.strategy.may_flip(facts)

    def rows_are_there(self) -> bool:
        """Rule R47: a predicted move flips once rows of its keys have entered at the destination's site."""
        return self.rows_have_come

    def rows_came(self, step: Step, site: str, rows: list[Row]) -> None:
        """Rows that entered at another site are here; a predicted move is decided by them, or undone."""
        if not self.strategy.awaits_rows or not any(self.member(row[0]) for row in rows):
            return
        if site == self.to_site:
            self.rows_have_come = True
            self.advance(step)
        elif self.may_abort():
            self.abort(step, f"rows of its keys came at {site}, not at {self.to_site}")

    def differing_key(self) -> Key | None:
        """Rule R13: a key whose state differs between source and destination; None if there is none."""
        if self.source_digests is None or self.vote is None:
            return None
        theirs = self.vote.digests
        both = self.source_digests.keys() & theirs.keys()  # keys that both processed after the capture
        return next((key for key in sorted(both) if self.source_digests[key] != theirs[key]), None)

    def flip(self, step: Step) -> None:
        inbox = self.inbox
        r = self.request
        flip = Flip(
            self.move,
            self.keys,
            self.source,
            r.destination,
            r.strategy,
            self.record.begin_offset,
            self.record.epochs,
        )
        entry = inbox.append(step, {}, flip)
        local = self.to_site == self.router.site  # then the sequencer and the clock stay the same
        floor_ms = 0 if local else self.clock_floor_ms(entry)
        update = inbox.table.moved(self.keys, self.source, self.request.destination, floor_ms)
        marks = {} if local else inbox.sequencer.give_marks(step, self.keys, self.takes_along)
        recent = {} if local else inbox.sequencer.devices.give(step, self.keys, self.takes_along)
        held = [] if local else inbox.sequencer.drop_held(self.keys, self.takes_along)
        inbox.clear_moving(self.move)
        self.record.flip_offset = entry.offset
        self.record.retained_from = min(inbox.emitted.get(self.source, 0), entry.offset)
        self.flipped_at = step.now_ms
        self.become(step, SourceRouterPhase.FLIPPED)
        notice = m.FlipToDestination(
            self.move,
            entry.offset,
            entry.time_ms,
            inbox.watermark_ms,
            update,
            marks,
            self.prepare_message(),
            recent,
        )
        if not local:
            inbox.update_table(step, update)
            inbox.sequencer.await_no_own_rows(self.keys, self.takes_along)
        self.notify(step, notice)
        if self.strategy.restarts:
            inbox.pause(step, self.move)
        self.router.sequence_again(step, inbox, held)
        self.announce_flip(step)

    def clock_floor_ms(self, flip: Entry) -> int:
        """Rule R17: the clock of the keys never runs behind the log that they leave."""
        return flip.time_ms

    def announce_flip(self, step: Step) -> None:
        """Send the source the flip, once every instance that must restart has done so."""
        if self.inbox.all_relaunched(self.move):
            role = self.role()
            assert role is not None
            step.send_durable(self.source, m.FlipToSource(self.move, role))
        else:
            self.inbox.request_restarts(step, self.move)

    def on_cut(self, step: Step, message: m.SourceStopped) -> None:
        self.moved = max(self.moved, (message.keys, message.size_bytes))
        admitted = min(self.inbox.emitted.get(self.source, 0), self.record.flip_offset)
        # a source that fell back to its checkpoint may report less than the admitted outputs
        self.record.last_watermark_ms = message.watermark_ms
        self.stop_source(step, max(message.offset, admitted), "the source reported it")
        if self.strategy.freezes:
            self.announce_flip(step)  # with the cut: the source may send its units
            self.start_cut_shadow(step)

    def take_over(self, step: Step) -> None:
        """Cut off a silent source at its last admitted output; the destination emits the rest."""
        emitted = self.inbox.emitted.get(self.source, 0)
        self.stop_source(step, min(emitted, self.record.flip_offset), "taken over")

    def stop_source(self, step: Step, offset: int, why: str) -> None:
        self.record.last_offset = offset
        step.note(f"{self.move}: cut at {offset}, {why}")
        self.become(step, SourceRouterPhase.CUT)
        if self.to_site != self.router.site:  # else the outputs of both use the same outbox
            self.await_outputs()
        self.advance(step)

    def await_outputs(self) -> None:
        """Note the source's outputs that are on their way: what the destination emits comes behind them."""
        self.unsettled = self.must_arrive_first()
        self.fences = self.router.output_fences(self.inbox.name)

    def all_arrived(self) -> bool:
        """Rule R10: behind Done the keys' outputs carry no fence, so the source's must have arrived."""
        return not self.unsettled

    def must_arrive_first(self) -> set[FrameId]:
        """Rule R10: the destination emits once these frames with outputs of the source have arrived."""
        return self.router.unsettled_outputs(self.inbox.name)

    def output_frame_settled(self, step: Step, frame: FrameId) -> None:
        if self.emitted_unsettled is not None:
            self.emitted_unsettled[1].discard(frame)
        if frame in self.unsettled:
            self.unsettled.discard(frame)
            self.advance(step)

    def on_installed(self, step: Step) -> None:
        """Restart strategy: resume the operator's dispatch, because the destination has the state."""
        if not self.record.installed:
            self.record.installed = True
            self.save(step)
            if self.strategy.restarts:
                self.inbox.unpause(step, self.move)
                self.notify(step, m.ResumeNotice(self.move))

    # -- the end -----------------------------------------------------------------------------

    def on_settled(self, step: Step) -> None:
        if not self.inbox.all_relaunched(self.move) or not self.all_arrived():
            return  # the destination router repeats the message
        if self.phase is SourceRouterPhase.EMITTING:
            self.inbox.unpause(step, self.move)  # StateComplete may have been lost; this message implies it
            self.become(step, SourceRouterPhase.DONE)
            self.notify(step, m.DoneNotice(self.move))
            for holder in self.holders:
                step.send_durable(holder, m.Forget(self.move))
        else:
            self.notify(step, m.DoneNotice(self.move))

    def may_abort(self) -> bool:
        """Rule R26: a move is undone only before the flip is logged."""
        return self.phase not in DECIDED

    def abort(self, step: Step, reason: str) -> None:
        if not self.may_abort() or self.phase is SourceRouterPhase.ABORTED:
            return
        begun = self.phase not in (SourceRouterPhase.PREPARING, SourceRouterPhase.PREPARED)
        self.record.reason = reason
        self.become(step, SourceRouterPhase.ABORTED)
        self.inbox.clear_moving(self.move)
        if begun:
            self.inbox.append(step, {}, Abort(self.move, reason))
        self.notify(step, m.AbortedNotice(self.move))
        step.send_durable(self.source, m.AbortNotice(self.move))
        self._moves.end_outgoing(step, self.move)

    # -- attach and restart of the source ----------------------------------------------------

    def source_restarted(self, step: Step) -> None:
        if self.phase in UNDECIDED:
            self.abort(step, "the source was restarted")
        elif self.phase is SourceRouterPhase.FLIPPED and self.strategy.destination_can_finish:
            self.take_over(step)

    def role(self) -> m.OutgoingRole | None:
        if self.phase not in DECIDED:
            return None
        r = self.record
        return m.OutgoingRole(
            self.move,
            self.keys,
            self.request.destination,
            self.request.strategy,
            r.begin_offset,
            r.flip_offset,
            self.must_stop_at(),
            r.epochs,
            self.earliest_stop(),
        )

    def earliest_stop(self) -> int:
        """Rule R35: the source does not stop before its admitted outputs, nor before it has the keys.

        It may still read the end of the move that brought them, or rows of an instance that it takes over.
        """
        inbox = self.inbox
        bounds = [inbox.emitted.get(self.source, 0), self._moves.merged_at(self.source)]
        if self.source in inbox.successors:
            bounds.append(inbox.successors[self.source].through)
        return max(bounds)

    def must_stop_at(self) -> int | None:
        """Rule R23: the offset above which the source must not emit, once it is decided."""
        return self.record.last_offset if self.record.last_offset >= 0 else None

    def refuses_output(self, offset: int, key: Key) -> bool:
        """Rule R23: outputs of the source above its last offset are the destination's to emit."""
        return (
            self.phase in STOPPED
            and self.record.last_offset < offset <= self.record.flip_offset
            and self.member(key)
        )

    def trim_floor(self) -> int:
        """The shadow still needs the log above this offset."""
        if self.phase is SourceRouterPhase.BEGUN:
            return max(0, min(self.inbox.emitted.get(self.source, 0), self.record.begin_offset - 1))
        if self.phase is SourceRouterPhase.FLIPPED:
            return self.record.retained_from
        return self.shadow_cursor
