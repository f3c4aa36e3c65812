"""The source's router side of a move: from request to Done. Its log is where a move is decided.

Responsible for: locking the keys, begin, shadow feed, the flip, the cut, letting go; undoing.
Not responsible for: state (source.py, destination.py), the destination's log (arrivals.py).

live:          PREPARING --> SHADOWING --> COMPARING --Flip--> FLIPPED --Cut--> CUT --> EMITTING --> DONE
flip first:    PREPARING ------------------------------Flip--> FLIPPED --Cut--> CUT --> EMITTING --> DONE
any of the phases before Flip ------------------------> ABORTED

Before Flip anything may undo the move; after it there is only forward. How a strategy orders
flip, transfer and processing is in strategies.py; the rules that all share are here.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from tiercel.core import messages as m
from tiercel.core.departure_record import DECIDED, DepartureRecord, Phase
from tiercel.core.inbox import Group
from tiercel.core.records import Abort, Begin, Compare, Entry, Flip, Key, Tick, Watermark
from tiercel.core.routing import slot_of
from tiercel.core.step import Step
from tiercel.core.strategies import STRATEGIES, Strategy

if TYPE_CHECKING:
    from tiercel.core.inbox import Inbox
    from tiercel.core.movedesk import MoveDesk


class Departure:
    """One move whose keys are leaving an instance of this site."""

    def __init__(
        self, router: MoveDesk, inbox: Inbox, request: m.MoveRequest, phase: Phase = Phase.PREPARING
    ) -> None:
        self.router = router
        self.inbox = inbox
        self.request = request
        self.move = request.move
        self.keys = request.keys
        self.strategy_name = request.strategy
        self.phase = phase
        self.record = DepartureRecord(request, phase.value, inbox.table.routes_of(request.keys))
        self.to_site = router.site_of(request.destination)
        self.prepared = False
        self.destination_watermark = -1
        self.source_digests: dict[Key, int] | None = None
        self.vote: m.Ready | None = None
        self.compare_since = 0.0
        self.flipped_at = 0.0
        self.captured = False
        self.shadow_live = False  # all so far was shown; what is appended is shown at once
        self.shadow_cursor = 0
        self.shadow_ahead: deque[Entry] = deque(maxlen=inbox.settings.read_entries_max)  # not shown yet
        self.emitted_unsettled: tuple[int, set[tuple[str, str, int]]] | None = None
        self.unsettled: set[tuple[str, str, int]] = set()  # output frames that must arrive before EmitFrom
        self.asked_by = ""
        self.deadline_ms = float("inf")
        self.moved = (0, 0)  # keys and bytes, for reports

    # -- helpers -----------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        return STRATEGIES[self.request.strategy]

    @property
    def source(self) -> str:
        return self.request.source

    @property
    def part(self) -> str:
        return f"{self.move}|{self.source}"

    def member(self, key: Key) -> bool:
        """Whether a key belongs to this move: its slot does, and it is not owned elsewhere by override."""
        if key in self.keys.keys:
            return True
        return slot_of(key, self.inbox.table.count) in self.keys.slots

    def leaving(self, key: Key) -> bool:
        """A member that this move takes along (overrides to others stay where they are)."""
        if key in self.keys.keys:
            return True
        if slot_of(key, self.inbox.table.count) not in self.keys.slots:
            return False
        override = self.inbox.table.overrides.get(key)
        return override is None or override.instance in (self.source, self.request.destination)

    def save(self, step: Step, phase: Phase) -> None:
        self.router.trace_phase(step, self.move, "departure", self.phase.value, phase.value)
        self.phase = phase
        self.record.phase = phase.value
        step.put(("departure", self.move), msgspec.structs.replace(self.record))
        self.router.report(step, self)

    def notify(self, step: Step, notice: m.AnyNotice) -> None:
        """Tell the destination's router, durably and in order."""
        if self.to_site == self.router.site:
            self.router.on_notice(step, self.router.site, self.inbox.name, notice)
        else:
            self.router.lane(self.to_site, self.inbox.name).add(
                step, self.router.intake_promise(self.inbox.name), [], notice=notice
            )

    def retry(self, step: Step) -> None:
        """Say again whatever the present phase waits for."""
        match self.phase:
            case Phase.PREPARING:
                self.router.send_router(step, self.to_site, self.prepare_message(), durable=True)
            case Phase.SHADOWING:
                step.send_durable(self.source, m.Capture(self.move, self.keys, self.request.destination))
                self.tell_emitted(step)
            case Phase.COMPARING:
                self.tell_emitted(step)
            case Phase.FLIPPED:
                self.strategy.say_flip(self, step)
            case Phase.CUT | Phase.EMITTING:
                self.inbox.say_halt(step, self.move)
            case Phase.DONE:
                step.send_durable(self.source, m.Forget(self.move))
            case _:
                pass
        self.advance(step)

    def on_message(self, step: Step, message: object) -> None:
        match message:
            case m.Prepared():
                self.on_prepared(step, message)
            case m.Refused():
                self.abort(step, message.reason)
            case m.CaptureFrom():
                self.on_capture_from(step, message)
            case m.Captured():
                self.moved = (message.keys, message.size_bytes)
                self.on_captured(step)
            case m.Digests():
                self.on_digests(step, message)
            case m.Ready():
                self.on_ready(step, message)
            case m.Cut():
                self.on_cut(step, message)
            case m.Installed():
                self.on_installed(step)
            case m.Settled():
                self.on_settled(step)
            case m.Forgotten() if self.phase is Phase.DONE:
                self.router.end_departure(step, self)
            case _:
                pass  # about a phase that is over

    def prepare_message(self) -> m.Prepare:
        r = self.request
        return m.Prepare(r.move, r.operator, r.keys, r.source, r.destination, r.strategy, self.record.epochs)

    # -- before the flip ---------------------------------------------------------------------

    def on_prepared(self, step: Step, message: m.Prepared) -> None:
        if self.phase is not Phase.PREPARING:
            return
        self.prepared = True
        self.destination_watermark = message.watermark_ms
        self.strategy.on_prepared(self, step)

    def begin(self, step: Step) -> None:
        """Live: from here on the keys' rows are a part of their own, read by the source."""
        entry = self.inbox.append(step, {}, Begin(self.move))
        self.inbox.groups[self.move] = Group(self.keys, self.source, leaving=True)
        self.inbox.rerouted()
        self.record.begin_offset = entry.offset
        self.save(step, Phase.SHADOWING)
        step.send_durable(self.source, m.Capture(self.move, self.keys, self.request.destination))

    def on_capture_from(self, step: Step, message: m.CaptureFrom) -> None:
        if self.phase is not Phase.SHADOWING or self.record.capture_from >= 0:
            return
        self.record.capture_from = message.offset
        self.save(step, Phase.SHADOWING)
        self.shadow_cursor = message.offset
        if self.inbox.mutant == "shadow-from-begin":
            self.shadow_cursor = max(message.offset, self.record.begin_offset)
        start = Watermark(message.watermark_ms)  # keys born later have seen this one
        self.notify(step, m.ShadowNotice(self.move, message.offset, message.time_ms, [], start))
        self.router.set_shadow_hook(self.inbox)
        self.read_shadow(step)

    def read_shadow(self, step: Step) -> None:
        step.read_log(
            self.inbox.name, self.shadow_cursor, self.inbox.settings.read_entries_max, f"shadow|{self.move}"
        )

    def on_shadow_read(self, step: Step, entries: list[Entry]) -> None:
        if self.phase not in (Phase.SHADOWING, Phase.COMPARING) or self.shadow_live:
            return
        for entry in entries:
            if entry.offset > self.shadow_cursor:
                self.shadow(step, entry)
                self.shadow_cursor = entry.offset
        for entry in self.shadow_ahead:  # appended while we read: else a busy log would always be ahead
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
        if self.phase not in (Phase.SHADOWING, Phase.COMPARING):
            return
        if self.shadow_live:
            self.shadow_cursor = entry.offset
            self.shadow(step, entry)
        else:
            self.shadow_ahead.append(entry)

    def shadow(self, step: Step, entry: Entry) -> None:
        """The move's share of an entry. Before Begin it is spread over all that the source reads."""
        rows = entry.parts.get(self.part, [])
        if entry.offset <= self.record.begin_offset:
            read = [r for n, r in entry.parts.items() if n == self.source or n.endswith("|" + self.source)]
            rows = [row for part in read for row in part if self.leaving(row[0])]
        control = entry.control
        if not isinstance(control, Tick | Watermark) and control != Compare(self.move):
            control = None  # other moves' records are theirs
        if rows or control is not None:
            self.notify(step, m.ShadowNotice(self.move, entry.offset, entry.time_ms, rows, control))
            if self.router.shadow_backlog(self) > self.inbox.settings.shadow_entries_max:
                self.abort(step, "the shadow lane is full")

    def tell_emitted(self, step: Step) -> None:
        """What the source emitted and the receivers have, the destination need not keep."""
        if self.emitted_unsettled is None:
            emitted = self.inbox.emitted.get(self.source, 0)
            self.emitted_unsettled = (emitted, self.router.unsettled_outputs(self.inbox.name))
        offset, unsettled = self.emitted_unsettled
        if not unsettled:
            self.emitted_unsettled = None
            self.notify(step, m.EmittedNotice(self.move, offset))

    def on_captured(self, step: Step) -> None:
        if self.phase is Phase.SHADOWING and self.record.capture_from >= 0:
            self.captured = True
            self.compare_since = step.now_ms
            self.save(step, Phase.COMPARING)
            self.inbox.append(step, {}, Compare(self.move))

    def on_digests(self, step: Step, message: m.Digests) -> None:
        if self.phase is Phase.COMPARING:
            self.source_digests = message.digests
            self.advance(step)

    def on_ready(self, step: Step, message: m.Ready) -> None:
        if self.phase is Phase.COMPARING:
            self.vote = message
            self.advance(step)

    def source_watermark_reached(self) -> bool:
        """Flipping earlier would let the keys' outputs come behind a watermark the destination gave."""
        feed = self.inbox.feeds.get(self.source)
        if self.inbox.mutant == "flip-ignores-watermark":
            return True
        return feed is not None and feed.watermark_ms >= self.destination_watermark

    def shadow_complete(self) -> bool:
        """The destination votes at Compare; what was appended since must have been shown to it as well."""
        return self.shadow_live or self.inbox.mutant == "flip-ahead-of-shadow"

    def advance(self, step: Step) -> None:
        """Take the next step that has become possible, if any."""
        settings = self.inbox.settings
        if self.phase is Phase.COMPARING and self.vote is not None:
            overdue = step.now_ms - self.compare_since > settings.compare_wait_ms
            if self.source_digests is None and not overdue:
                return
            differing = self.differing_key()
            if differing is not None:
                self.abort(
                    step, f"not deterministic: key {differing!r} differs between source and destination"
                )
            elif self.source_watermark_reached() and self.shadow_complete():
                self.flip(step)
        elif self.phase is Phase.PREPARING:
            self.strategy.advance_preparing(self, step)
        elif self.phase is Phase.CUT and not self.unsettled:
            self.save(step, Phase.EMITTING)
            self.notify(step, m.EmitFromNotice(self.move, self.record.cut))
        elif self.phase is Phase.FLIPPED:
            silent = step.now_ms - self.flipped_at > settings.takeover_ms
            if self.strategy.can_take_over and silent:
                self.take_over(step)

    def differing_key(self) -> Key | None:
        if self.source_digests is None or self.vote is None or self.inbox.mutant == "digests-not-compared":
            return None
        theirs = self.vote.digests
        both = self.source_digests.keys() & theirs.keys()  # keys that both processed after the capture
        return next((key for key in sorted(both) if self.source_digests[key] != theirs[key]), None)

    # -- the decision ------------------------------------------------------------------------

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
        update = inbox.table.moved(self.keys, self.source, self.request.destination)
        local = self.to_site == self.router.site  # then the sequencer stays the same
        marks = {} if local else inbox.give_marks(step, self.leaving)
        held = [] if local else inbox.drop_held(self.leaving)
        inbox.groups.pop(self.move, None)
        self.record.flip_offset = entry.offset
        self.flipped_at = step.now_ms
        self.save(step, Phase.FLIPPED)
        notice = m.FlippedNotice(
            self.move, entry.offset, entry.time_ms, inbox.watermark_ms, update, marks, self.prepare_message()
        )
        if not local:
            inbox.update_table(step, update)
            inbox.returning.difference_update([k for k in inbox.returning if self.leaving(k)])
        self.notify(step, notice)
        if self.strategy.halts:
            inbox.pause(step, self.move)
        inbox.rerouted()
        self.router.sequence_again(step, inbox, held)
        self.router.set_shadow_hook(inbox)
        self.strategy.say_flip(self, step)

    def on_cut(self, step: Step, message: m.Cut) -> None:
        self.moved = max(self.moved, (message.keys, message.size_bytes))
        if self.phase is Phase.FLIPPED:
            admitted = min(self.inbox.emitted.get(self.source, 0), self.record.flip_offset)
            # a source that fell back to its checkpoint may say less than has already gone out
            self.cut(step, max(message.offset, admitted), "the source said so")

    def take_over(self, step: Step) -> None:
        """The source is silent: what it emitted is known, the rest is the destination's."""
        emitted = self.inbox.emitted.get(self.source, 0)
        self.cut(step, min(emitted, self.record.flip_offset), "taken over")

    def cut(self, step: Step, offset: int, why: str) -> None:
        self.record.cut = offset
        step.note(f"{self.move}: cut at {offset}, {why}")
        self.save(step, Phase.CUT)
        if self.to_site != self.router.site:  # else the same lanes keep the order
            self.unsettled = self.router.unsettled_outputs(self.inbox.name)
        if self.inbox.mutant == "emit-before-arrival":
            self.unsettled = set()
        self.advance(step)

    def output_frame_settled(self, step: Step, frame: tuple[str, str, int]) -> None:
        if self.emitted_unsettled is not None:
            self.emitted_unsettled[1].discard(frame)
        if frame in self.unsettled:
            self.unsettled.discard(frame)
            self.advance(step)

    def on_installed(self, step: Step) -> None:
        """Restart: the state is where it belongs; the operator's dispatch may go on."""
        if self.phase in DECIDED and not self.record.installed:
            self.record.installed = True
            self.save(step, self.phase)
            if self.strategy.halts:
                self.inbox.unpause(step, self.move)
                self.notify(step, m.ResumeNotice(self.move))

    # -- the end -----------------------------------------------------------------------------

    def on_settled(self, step: Step) -> None:
        if not self.inbox.all_relaunched(self.move):
            return  # it is said again
        if self.phase is Phase.EMITTING:
            self.inbox.unpause(step, self.move)  # if Installed was lost: settled means installed
            self.save(step, Phase.DONE)
            self.notify(step, m.DoneNotice(self.move))
            step.send_durable(self.source, m.Forget(self.move))
        elif self.phase is Phase.DONE:
            self.notify(step, m.DoneNotice(self.move))

    def abort(self, step: Step, reason: str) -> None:
        if self.phase in DECIDED and self.inbox.mutant != "abort-after-flip":
            return
        if self.phase is Phase.ABORTED:
            return
        begun = self.phase is not Phase.PREPARING
        self.record.reason = reason
        self.save(step, Phase.ABORTED)
        self.inbox.groups.pop(self.move, None)
        if begun:
            self.inbox.append(step, {}, Abort(self.move, reason))
        self.inbox.rerouted()
        self.notify(step, m.AbortedNotice(self.move))
        step.send_durable(self.source, m.AbortNotice(self.move))
        self.router.set_shadow_hook(self.inbox)
        self.router.end_departure(step, self)

    # -- the source comes and goes -----------------------------------------------------------

    def source_restarted(self, step: Step) -> None:
        if self.phase in (Phase.SHADOWING, Phase.COMPARING, Phase.PREPARING):
            self.abort(step, "the source was restarted")
        elif self.phase is Phase.FLIPPED and self.strategy.can_take_over:
            self.take_over(step)

    def role(self) -> m.DepartureRole | None:
        if self.phase not in DECIDED:
            return None
        r = self.record
        return m.DepartureRole(
            self.move,
            self.keys,
            self.request.destination,
            self.request.strategy,
            r.begin_offset,
            r.flip_offset,
            r.cut if r.cut >= 0 and self.inbox.mutant != "cut-not-enforced" else None,
            r.epochs,
        )

    def refuses_output(self, offset: int, key: Key) -> bool:
        """After the cut the source's outputs above it are the destination's to make."""
        decided = (
            self.phase in (Phase.CUT, Phase.EMITTING, Phase.DONE) and self.inbox.mutant != "cut-not-enforced"
        )
        return decided and self.record.cut < offset <= self.record.flip_offset and self.member(key)

    def trim_floor(self) -> int | None:
        if self.phase is Phase.SHADOWING and self.record.capture_from < 0:
            return max(0, min(self.inbox.emitted.get(self.source, 0), self.record.begin_offset - 1))
        if self.phase in (Phase.SHADOWING, Phase.COMPARING):
            return self.shadow_cursor
        return None


__all__ = ["DECIDED", "Departure", "DepartureRecord", "Phase"]
