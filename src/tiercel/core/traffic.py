"""Rows through a site: taking in, admitting outputs, fan-out, lanes, ticks.

Responsible for: each row accepted once and on its way, in one write per event.
Not responsible for: who owns a key, and changes of that (inbox.py, movedesk.py); event_time.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiercel.core import messages as m
from tiercel.core.event_time import EventTime
from tiercel.core.inbox import Held, Inbox
from tiercel.core.lanes import FrameId, Inbound, Lane
from tiercel.core.records import INITIAL, Output, Row, TableUpdate
from tiercel.core.routing import slot_of
from tiercel.core.runs import count_rows
from tiercel.core.step import Step
from tiercel.core.watermarks import FOREVER


class Traffic(EventTime):
    """The data path of a router."""

    # -- what enters here --------------------------------------------------------------------

    def on_produce(self, step: Step, sender: str, message: m.Produce) -> None:
        if self.producers.accept(step, message.producer, message.seq, self.mutant):
            facts = self.topology.streams.get(message.stream)
            source = message.producer
            mark = message.watermark_ms  # of a batch that came in several frames: they share one
            tuples = message.rows and not message.initial
            if tuples and facts is not None and facts.delay_ms is not None:
                self.written(step, facts)
                source = message.stream
                if mark is None:
                    mark = max([row[1] for row in message.rows]) - facts.delay_ms
                if self.mutant == "late-for-each-other":
                    self.promise_source(step, message.stream, source, mark)
            if facts is not None and facts.letters:
                self.log_produced(step, message)
            elif message.rows:
                self.take_in(step, message.stream, message.rows, initial=message.initial)
            if mark is not None:
                self.promise_source(step, message.stream, source, mark)
        self.acknowledge_producer(step, sender, message.producer, message.stream)

    def log_produced(self, step: Step, message: m.Produce) -> None:
        """Rows that no operator reads, as they are; producer, frame and place are their identity."""
        source = message.producer.encode()
        outputs = [Output(message.seq, source, 0, n, row) for n, row in enumerate(message.rows)]
        if outputs:
            self.log_outputs(step, message.stream, outputs)

    def acknowledge_producer(self, step: Step, to: str, producer: str, stream: str) -> None:
        """The mark is held back while a reader is too far behind: that is what slows a producer down."""
        if self.congested(stream):
            self.owed[producer] = (to, stream)
        else:
            self.producers.acknowledge(step, to, producer, early=self.mutant == "acknowledged-too-early")

    def congested(self, stream: str) -> bool:
        for operator in self.consumers(stream):
            if self.inboxes[operator].backlog_rows > self.settings.backlog_rows_max:
                return True
            for (_, inbox), lane in self.lanes.items():
                if inbox == operator and len(lane.frames) > self.settings.outbox_frames_max:
                    return True
            if self.congested(self.topology.operators[operator].output):
                return True
        return False

    def pay_owed(self, step: Step) -> None:
        for producer, (to, stream) in list(self.owed.items()):
            if not self.congested(stream):
                del self.owed[producer]
                self.producers.acknowledge(step, to, producer)
                if stream in self.last_rows_ms:
                    self.last_rows_ms[stream] = step.now_ms

    def take_in(self, step: Step, stream: str, rows: list[Row], *, initial: bool = False) -> None:
        """Rows of a stream, to every operator that reads it; without those that are late for it.

        An operator of several inputs is told with each row which one it came by.
        """
        self.rows += count_rows(rows)
        for name in self.consumers(stream):
            inbox, operator = self.inboxes[name], self.topology.operators[name]
            mine = [(r[0], INITIAL, r[2]) for r in rows] if initial else rows
            n = operator.inputs.index(stream)
            if len(operator.inputs) > 1:
                mine = [(r[0], r[1], (n, r[2])) for r in mine]
            if n in inbox.timed and not initial:
                mine = self.in_time(name, mine)
            if mine:
                for site, stamped in inbox.intake(step, mine).items():
                    self.send_away(step, site, inbox, stamped)

    def send_away(
        self, step: Step, site: str, inbox: Inbox, rows: list[Row], via: tuple[FrameId, ...] = ()
    ) -> None:
        lane = self.lane(site, inbox.name)
        lane.add(step, self.intake_promise(inbox.name), rows, via=via)

    def on_produce_mobile(self, step: Step, sender: str, message: m.ProduceMobile) -> None:
        """A mobile source numbers its rows itself; only the key's sequencer judges the numbers."""
        self.rows += len(message.rows)
        frame = ("~" + sender, message.stream, message.frame)
        known = self.inbound.get(frame)
        if known is not None:
            known.taken = False
            self.take(step, known)
            return
        inbound = self.inbound[frame] = Inbound(frame)
        for operator in self.consumers(message.stream):
            inbox, inputs = self.inboxes[operator], self.topology.operators[operator].inputs
            tag = inputs.index(message.stream) if len(inputs) > 1 else None
            rows = [
                (
                    key,
                    event_time,
                    payload if tag is None else (tag, payload),
                    message.source,
                    n,
                    inbox.table.route(key).epoch,
                )
                for key, event_time, payload, n in message.rows
            ]
            away: dict[str, list[Row]] = {}
            here = []
            for row in rows:
                site = inbox.table.route(row[0]).site
                if site == self.site:
                    here.append(row)
                else:
                    away.setdefault(site, []).append(row)
            inbox.sequence(step, here, (inbound,))
            for site, stamped in away.items():
                self.send_away(step, site, inbox, stamped)
        self.settle_inbound(step)

    # -- outputs of this site's instances ----------------------------------------------------

    def on_outputs(self, step: Step, message: m.Outputs) -> None:
        inbox = self.inboxes[_operator(message.instance)]
        feed = inbox.feeds.get(message.instance)
        if feed is None or (feed.life != message.life and self.mutant != "zombie-not-fenced"):
            return  # a life that was fenced
        mark = inbox.emitted.get(message.instance, 0)
        if message.through > mark:
            outputs = message.outputs
            if self.consumers(self.topology.operators[inbox.name].output):
                outputs = list(outputs)  # before anything changes: what is no list of outputs is refused here
            leaves = any(d.source == message.instance for d in self.departures.values())
            if outputs and (message.first <= mark or leaves):
                outputs = [o for o in outputs if o.offset > mark and not self.refused(message.instance, o)]
            inbox.emitted[message.instance] = message.through
            step.put(("emitted", inbox.name, message.instance), message.through)
            self.emit(step, inbox.name, outputs, message.rows if outputs is message.outputs else None)
            if message.dead_letters:
                dead = [
                    o
                    for o in message.dead_letters
                    if o.offset > mark and not self.refused(message.instance, o)
                ]
                self.emit_dead(step, inbox.name, dead)
        feed.flush_no = message.flush
        feed.processed(message.through)
        confirmed = m.Confirmed(message.life, message.flush, inbox.offset, feed.lag_rows)
        step.send_durable(message.instance, confirmed)
        feed.watermark_ms = max(feed.watermark_ms, message.watermark_ms)
        feed.timers = message.timers
        if message.timers:
            self.keep_ticking(step, inbox)
        inbox.passed(inbox.slowest_through())
        if self.owed:
            self.pay_owed(step)
        if self.departures:
            self.outputs_admitted(step, inbox, message.instance)

    def refused(self, instance: str, output: Output) -> bool:
        return any(
            d.source == instance and d.refuses_output(output.offset, output.key)
            for d in self.departures.values()
        )

    def outputs_admitted(self, step: Step, inbox: Inbox, instance: str) -> None:
        """A hook for moves: the source's outputs advanced."""

    def on_move_outputs(self, step: Step, message: m.MoveOutputs) -> None:
        inbox = self.inboxes[_operator(message.instance)]
        feed = inbox.feeds.get(message.instance)
        arrival = self.arrivals.get(message.move)
        if feed is None or feed.life != message.life or arrival is None:
            return
        every = arrival.admit(step, message.stage, [*message.outputs, *message.dead_letters])
        dead = {id(o) for o in message.dead_letters}
        self.emit(step, inbox.name, [o for o in every if id(o) not in dead])
        self.emit_dead(step, inbox.name, [o for o in every if id(o) in dead])

    def emit(self, step: Step, operator: str, outputs: Sequence[Output], rows: int | None = None) -> None:
        """Admitted outputs, of so many rows: to the next operators' inboxes and the log, in one write."""
        if outputs:
            self.outputs += count_rows([o.row for o in outputs]) if rows is None else rows
            stream = self.topology.operators[operator].output
            if self.consumers(stream):
                self.take_in(step, stream, [o.row for o in outputs])
            self.log_outputs(step, stream, outputs)

    def emit_dead(self, step: Step, operator: str, outputs: list[Output]) -> None:
        if outputs:
            self.log_outputs(step, self.topology.operators[operator].dead_letters, outputs)

    def log_outputs(self, step: Step, stream: str, outputs: Sequence[Output]) -> None:
        """To the stream's one home, here or through a lane."""
        facts = self.topology.streams.get(stream)
        if facts is not None and facts.logged:
            if facts.home == self.site:
                self.streams[stream].append(step, outputs)
            else:
                self.lane(facts.home, stream).add(step, FOREVER, [], outputs=outputs)

    # -- lanes -------------------------------------------------------------------------------

    def on_lane_frame(self, step: Step, sender: str, frame: m.LaneFrame) -> None:
        if frame.outputs is not None:
            log = self.streams[frame.inbox]
            if frame.n == log.received.get(sender, 0) + 1:
                log.received[sender] = frame.n
                step.put(("received", frame.inbox, sender), frame.n)
                log.append(step, frame.outputs)
            if frame.n <= log.received.get(sender, 0):
                self.receipt(step, sender, frame.inbox, frame.n)
            return
        if frame.notice is not None:
            self.on_notice(step, sender, frame.inbox, frame.notice)
            self.receipt(step, sender, frame.inbox, frame.n)
            return
        frame_id = (sender, frame.inbox, frame.n)
        known = self.inbound.get(frame_id)
        if known is not None:  # sent again while its rows are held or under way: our receipt was lost
            known.taken = False
            self.take(step, known)
            return
        inbound = self.inbound[frame_id] = Inbound(frame_id)
        self.sequence(step, self.inboxes[frame.inbox], frame.rows, inbound)
        self.settle_inbound(step)

    def sequence(self, step: Step, inbox: Inbox, rows: list[Row], inbound: Inbound) -> None:
        onward, correction = inbox.sequence(step, rows, (inbound,))
        for site, stamped in onward.items():
            inbound.forwarded += 1
            self.send_away(step, site, inbox, stamped, via=(inbound.id,))
        if correction is not None and inbound.id[0] in self.topology.sites and inbound.id[0] != self.site:
            step.send_durable(inbound.id[0], m.Moved(inbox.name, correction))

    def sequence_again(self, step: Step, inbox: Inbox, held: list[Held]) -> None:
        """Rows that were held, after the table changed: they are next, early, or someone else's now."""
        for item in held:
            onward, _ = inbox.sequence(step, [item.row], tuple(item.frames))
            for site, stamped in onward.items():
                for inbound in item.frames:
                    inbound.forwarded += 1
                self.send_away(step, site, inbox, stamped, via=tuple(i.id for i in item.frames))
        self.settle_inbound(step)

    def on_moved(self, step: Step, message: m.Moved) -> None:
        """News of others. That keys are ours we believe only the Flip in our lane, with all it carries."""
        inbox = self.inboxes[message.operator]
        ours = self.site if self.mutant != "stale-moved-believed" else ""
        slots = {s: r for s, r in message.update.slots.items() if r.site != ours}
        keys = {k: r for k, r in message.update.keys.items() if r.site != ours}
        for key, route in inbox.table.overrides_in(frozenset(slots)).items():
            if route.site == self.site:
                keys[key] = route  # what is ours stays ours, whatever becomes of its slot
        for key in message.update.keys.keys() - keys.keys():  # on its way to us, and until then where it was
            slot = slot_of(key, inbox.table.count)
            if slot in slots and slots[slot].epoch > inbox.table.slots[slot].epoch:
                keys[key] = inbox.table.route(key)
        if inbox.update_table(step, TableUpdate(slots, keys)):
            self.sequence_again(step, inbox, inbox.release_waiting())

    def settle_inbound(self, step: Step) -> None:
        """Acknowledge every frame whose rows are all where they belong."""
        for frame_id, inbound in list(self.inbound.items()):
            sender, inbox, n = frame_id
            if frame_id not in self.inbound:
                continue
            if inbound.held or inbound.forwarded:
                self.take(step, inbound)
                continue
            del self.inbound[frame_id]
            if sender[0] == "~":
                step.send_durable(sender[1:], m.MobileReceipt(sender[1:], [n]))
            else:
                self.receipt(step, sender, inbox, n)

    def take(self, step: Step, inbound: Inbound) -> None:
        """Open the sender's window: what would close a gap may come behind what is held."""
        sender, inbox, n = inbound.id
        if inbound.held and self.mutant == "held-rows-close-the-lane":
            return
        if inbound.taken or (inbound.held and self.held_rows() > self.settings.held_rows_max):
            return
        inbound.taken = True
        if sender[0] == "~":
            if not inbound.held:
                step.send_durable(sender[1:], m.MobileReceipt(sender[1:], [n]))
        elif sender != self.site:
            step.send(sender, m.LaneReceipt(inbox, [n], []))

    def held_rows(self) -> int:
        return sum(len(of_origin) for inbox in self.inboxes.values() for of_origin in inbox.held.values())

    def receipt(self, step: Step, sender: str, inbox: str, n: int) -> None:
        if sender == self.site:
            self.on_lane_receipt(step, sender, m.LaneReceipt(inbox, [], [n]))
        else:
            step.send_durable(sender, m.LaneReceipt(inbox, [n], [n]))

    def on_lane_receipt(self, step: Step, sender: str, message: m.LaneReceipt) -> None:
        lane = self.lane(sender, message.inbox)
        lane.taken(message.taken)
        for frame_id in lane.settled(step, message.settled):
            inbound = self.inbound.get(frame_id)
            if inbound is not None:
                inbound.forwarded -= 1
        for n in message.settled:
            self.output_frame_settled(step, (sender, message.inbox, n))
        self.settle_inbound(step)
        lane.pump(step)
        if self.owed:
            self.pay_owed(step)

    def output_frame_settled(self, step: Step, frame: FrameId) -> None:
        for departure in list(self.departures.values()):
            departure.output_frame_settled(step, frame)

    def loop_back(self, step: Step, lane: Lane) -> None:
        """Our own lane to ourselves: rows of keys that came home before their older rows did."""
        for n in [n for n in lane.frames if n <= lane.durable_n]:
            if (self.site, lane.inbox, n) not in self.inbound:
                self.on_lane_frame(step, self.site, lane.frames[n])

    def unsettled_outputs(self, operator: str) -> set[FrameId]:
        """Frames with this operator's outputs that are not yet where they belong."""
        stream = self.topology.operators[operator].output
        concerned = {stream, self.topology.operators[operator].dead_letters, *self.consumers(stream)}
        return {
            (lane.to, lane.inbox, n)
            for lane in self.lanes.values()
            if lane.inbox in concerned
            for n in lane.frames
        }

    # -- ticks -------------------------------------------------------------------------------

    def keep_ticking(self, step: Step, inbox: Inbox) -> None:
        if inbox.name not in self.ticking:
            self.ticking.add(inbox.name)
            step.timer(f"tick|{inbox.name}", step.now_ms + self.settings.tick_ms)

    def on_tick(self, step: Step, name: str) -> None:
        inbox = self.inboxes[name]
        self.ticking.discard(name)
        if any(feed.timers for feed in inbox.feeds.values()):
            inbox.tick(step)
            self.keep_ticking(step, inbox)


def _operator(instance: str) -> str:
    return instance.rpartition("@")[0]
