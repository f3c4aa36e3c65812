"""Forwarding: frames to other sites that sequence a key, and frames from other sites.

Responsible for: bringing each forwarded row into the log of its owner, and the receipt for it.
Not responsible for: the order of the rows of a key (inbox.py), the sending side (site_outbox.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tiercel.core import messages as m
from tiercel.core.logs.inbox import Inbox
from tiercel.core.logs.sequencer import HeldRow
from tiercel.core.logs.site_outbox import FrameId, InboundFrame, SiteOutbox
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import HeldOutputs
from tiercel.core.model.keys import Key
from tiercel.core.model.log import Output, OutputFence, Row
from tiercel.core.model.routing import Route, RouteUpdate, slot_of
from tiercel.core.router.state import RouterState
from tiercel.core.router.watermarks import Watermarks


class ForwardingListener(Protocol):
    """The component that handles the notices in frames and the receipts of frames."""

    def on_notice(self, step: Step, sender: str, notice: m.AnyNotice) -> None:
        """A frame carries a notice about a move."""

    def on_rows(self, step: Step, sender: str, inbox: str, rows: list[Row]) -> None:
        """A frame carries rows that entered at another site."""

    def on_frame_settled(self, step: Step, frame: FrameId) -> None:
        """All rows and outputs in a frame of this site are in their logs."""

    def on_backlog_shrunk(self, step: Step) -> None:
        """Acknowledgements that wait for slow readers may be due."""


class Forwarding:
    """The frames that this site sends and receives."""

    def __init__(self, state: RouterState, watermarks: Watermarks, listener: ForwardingListener) -> None:
        self.state = state
        self._watermarks = watermarks
        self._listener = listener
        self._under_way: dict[str, int] = {}  # inbox -> keys under way when numbers were last forgotten

    def load(self, key: StorageKey, value: Any) -> None:
        """A stored frame, or the number of the next one."""
        outbox = self.state.outbox(key[1], key[2])
        if key[0] == "outbox":
            outbox.recover(key[3], *value)
        else:
            outbox.next_n = value

    def forward(
        self, step: Step, site: str, inbox: Inbox, rows: list[Row], via: tuple[FrameId, ...] = ()
    ) -> None:
        outbox = self.state.outbox(site, inbox.name)
        outbox.add(step, self._watermarks.intake_promise(inbox.name), rows, via=via)

    def on_frame(self, step: Step, sender: str, frame: m.SiteFrame) -> None:
        frame_id = FrameId(sender, frame.inbox, frame.n, frame.origin)
        if frame.outputs is not None:
            self.take_outputs(step, frame_id, frame.outputs, frame.after)
            return
        if frame.notice is not None:
            self._listener.on_notice(step, sender, frame.notice)
            self.receipt(step, frame_id)
            return
        inbox = self.state.inboxes[frame.inbox]
        known = self.state.inbound.get(frame_id)
        if known is not None:
            known.taken = False  # it fills the sender's window again
            if not known.missing:  # its rows are held or forwarded: our receipt was lost
                self.take(step, known)
                return
        inbound = known or InboundFrame(frame_id)
        self.state.inbound[frame_id] = inbound
        inbox.sequencer.frame_came_again(inbound)
        self._listener.on_rows(step, sender, inbox.name, frame.rows)
        self.sequence(step, inbox, frame.rows, inbound)
        self.settle_inbound(step)

    def take_outputs(
        self, step: Step, frame: FrameId, outputs: Sequence[Output], after: OutputFence | None
    ) -> None:
        """Outputs of another site, for a stream that has its home here."""
        log = self.state.streams[frame.inbox]
        if log.is_next(frame.origin, frame.n):
            log.received[frame.origin] = frame.n
            step.put(("received", frame.inbox, frame.origin), frame.n)
            if after is None:
                log.append(step, outputs)
            else:
                log.append_or_hold(step, HeldOutputs(after, outputs, frame.sender, frame.origin, frame.n))
            for held in log.release(step) if log.held else ():
                if held.sender:
                    self.receipt(step, FrameId(held.sender, frame.inbox, held.n, held.origin))
        if log.held and log.holds(frame.origin, frame.n):
            step.send_durable(frame.sender, m.SiteFrameReceipt(frame.inbox, frame.origin, [frame.n], []))
        elif frame.n <= log.received.get(frame.origin, 0):
            self.receipt(step, frame)

    def sequence(self, step: Step, inbox: Inbox, rows: list[Row], inbound: InboundFrame) -> None:
        onward, correction = inbox.sequence(step, rows, (inbound,))
        for site, stamped in onward.items():
            inbound.forwarded += 1
            self.forward(step, site, inbox, stamped, via=(inbound.id,))
        sender = inbound.id.sender
        if correction is not None and sender in self.state.topology.sites and sender != self.state.site:
            step.send_durable(sender, m.OwnerChanged(inbox.name, correction))

    def sequence_again(self, step: Step, inbox: Inbox, held: list[HeldRow]) -> None:
        """Sequence held rows again after the table changed: they are next, early, or of another owner."""
        for item in held:
            onward, _ = inbox.sequence(step, [item.row], tuple(item.frames))
            for site, stamped in onward.items():
                for inbound in item.frames:
                    inbound.forwarded += 1
                self.forward(step, site, inbox, stamped, via=tuple(i.id for i in item.frames))
        self.settle_inbound(step)

    def may_believe(self, route: Route) -> bool:
        """Rule R14: only the flip itself makes a site the owner of keys, never a hint of another site."""
        return route.site != self.state.site

    def on_owner_changed(self, step: Step, message: m.OwnerChanged) -> None:
        """Take over newer owners of some keys, which another site reports."""
        inbox = self.state.inboxes[message.operator]
        slots = {s: r for s, r in message.update.slots.items() if self.may_believe(r)}
        keys = {k: r for k, r in message.update.keys.items() if self.may_believe(r)}
        for key, route in inbox.table.overrides_in(frozenset(slots)).items():
            if route.site == self.state.site:
                keys[key] = route  # a key of this site stays here, even if its slot changes owner
        for key in message.update.keys.keys() - keys.keys():  # moving here; the old owner counts
            slot = slot_of(key, inbox.table.count)
            if slot in slots and slots[slot].epoch > inbox.table.slots[slot].epoch:
                keys[key] = inbox.table.route(key)
        if inbox.update_table(step, RouteUpdate(slots, keys)):
            self.sequence_again(step, inbox, inbox.sequencer.release_waiting())

    def settle_inbound(self, step: Step) -> None:
        """Acknowledge every frame whose rows are all in the logs of their owners."""
        for frame_id, inbound in list(self.state.inbound.items()):
            if frame_id not in self.state.inbound:
                continue
            if inbound.held or inbound.forwarded or inbound.missing:
                self.take(step, inbound)
                continue
            del self.state.inbound[frame_id]
            if frame_id.mobile:
                self._mobile_receipt(step, frame_id)
            else:
                self.receipt(step, frame_id)
        for inbox in self.state.inboxes.values():
            for inbound in inbox.sequencer.take_wanted():
                self._ask_again(step, inbound.id)

    def _ask_again(self, step: Step, frame: FrameId) -> None:
        if frame.mobile:
            step.send(frame.sender, m.MobileReceipt(frame.sender, frame.origin, [], (frame.n,)))
        else:
            step.send(frame.sender, m.SiteFrameReceipt(frame.inbox, frame.origin, [], [], (frame.n,)))

    def _mobile_receipt(self, step: Step, frame: FrameId) -> None:
        step.send_durable(frame.sender, m.MobileReceipt(frame.sender, frame.origin, [frame.n]))

    def take(self, step: Step, inbound: InboundFrame) -> None:
        """Open the sender's window: rows that would close a gap may follow the held ones."""
        if not self.may_open_window(inbound):
            return
        frame = inbound.id
        inbound.taken = True
        if frame.mobile:
            if not inbound.held and not inbound.missing:
                self._mobile_receipt(step, frame)
        elif frame.sender != self.state.site:
            step.send(frame.sender, m.SiteFrameReceipt(frame.inbox, frame.origin, [frame.n], []))

    def may_open_window(self, inbound: InboundFrame) -> bool:
        """Rule R30: held rows do not close the window of the frames that would release them."""
        return not inbound.taken

    def receipt(self, step: Step, frame: FrameId) -> None:
        n = frame.n
        if frame.sender == self.state.site:
            self.on_receipt(step, frame.sender, m.SiteFrameReceipt(frame.inbox, frame.origin, [], [n]))
        else:
            step.send_durable(frame.sender, m.SiteFrameReceipt(frame.inbox, frame.origin, [n], [n]))

    def on_receipt(self, step: Step, sender: str, message: m.SiteFrameReceipt) -> None:
        outbox = self.state.outbox(sender, message.inbox)
        settled = [n for n in message.settled if outbox.has(message.origin, n)]
        outbox.taken([n for n in message.taken if outbox.has(message.origin, n)])
        outbox.again([n for n in message.again if outbox.has(message.origin, n)])
        for frame_id in outbox.settled(step, settled):
            inbound = self.state.inbound.get(frame_id)
            if inbound is not None:
                inbound.forwarded -= 1
        for n in settled:
            self._listener.on_frame_settled(step, FrameId(sender, message.inbox, n))
        self.settle_inbound(step)
        outbox.pump(step)
        self._listener.on_backlog_shrunk(step)
        inbox = self.state.inboxes.get(message.inbox)
        if inbox is not None and len(inbox.sequencer.counts) > self.numbered_keys_max(inbox.name):
            self._forget_numbers(step, inbox)

    def numbered_keys_max(self, inbox: str) -> int:
        """The number of keys at which numbers are forgotten; more if many were under way last time."""
        return max(self.state.settings.numbered_keys_max, 2 * self._under_way.get(inbox, 0))

    def _forget_numbers(self, step: Step, inbox: Inbox) -> None:
        """Rule R1: the numbers of a key are forgotten only when all of its rows are settled."""
        outboxes = [outbox for outbox in self.state.outboxes.values() if outbox.inbox == inbox.name]
        frames = [frame for outbox in outboxes for frame in outbox.frames.values()]
        unsettled = {row[0] for frame in frames for row in frame.rows}
        by_site: dict[str, dict[Key, int]] = {}
        for key, n in inbox.sequencer.forget_numbers(step, unsettled).items():
            by_site.setdefault(inbox.table.route(key).site, {})[key] = n
        self._under_way[inbox.name] = len(unsettled)
        for site, numbers in by_site.items():
            if site == self.state.site:
                inbox.sequencer.forget_marks(step, self.state.origin, numbers)
            else:
                step.send_durable(site, m.MarksForgotten(inbox.name, self.state.origin, numbers))

    def on_marks_forgotten(self, step: Step, message: m.MarksForgotten) -> None:
        sequencer = self.state.inboxes[message.operator].sequencer
        sequencer.forget_marks(step, message.origin, message.numbers)

    def deliver_to_self(self, step: Step, outbox: SiteOutbox) -> None:
        """Deliver the outbox to this site itself: rows of keys that returned before their older rows did."""
        for n in [n for n in outbox.frames if n <= outbox.durable_n]:
            frame = outbox.frames[n]
            if FrameId(self.state.site, outbox.inbox, n, frame.origin) not in self.state.inbound:
                self.on_frame(step, self.state.site, frame)

    def unsettled_outputs(self, operator: str) -> set[FrameId]:
        """Frames with outputs of this operator that have not arrived."""
        stream = self.state.topology.operators[operator].output
        concerned = {
            stream,
            self.state.topology.operators[operator].dead_letters,
            *self.state.consumers(stream),
        }
        return {
            FrameId(outbox.to, outbox.inbox, n)
            for outbox in self.state.outboxes.values()
            if outbox.inbox in concerned
            for n in outbox.frames
        }

    def output_fences(self, operator: str) -> dict[str, OutputFence] | None:
        """The last outputs of this operator that are on their way, by stream.

        None: other operators read the outputs. Their logs have no fences, so who follows must wait.
        """
        facts = self.state.topology.operators[operator]
        if self.state.consumers(facts.output) or self.state.broadcast_to(facts.output):
            return None
        fences = {}
        for outbox in self.state.outboxes.values():
            if outbox.frames and outbox.inbox in (facts.output, facts.dead_letters):
                n = next(reversed(outbox.frames))
                fences[outbox.inbox] = OutputFence(outbox.frames[n].origin, n)
        return fences

    def pump(self, step: Step) -> None:
        """Send frames that have become durable."""
        for outbox in list(self.state.outboxes.values()):
            if outbox.to == self.state.site:
                self.deliver_to_self(step, outbox)
            else:
                outbox.pump(step)

    def connected(self, step: Step, site: str) -> None:
        for outbox in self.state.outboxes.values():
            if outbox.to == site:
                outbox.reconnected()
                outbox.pump(step)

    def disconnected(self, peer: str) -> None:
        for outbox in self.state.outboxes.values():
            if outbox.to == peer:
                outbox.broken()
