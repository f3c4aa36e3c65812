"""The intake: rows that enter the deployment at this site, from fixed producers and mobile sources.

Responsible for: accepting each row of a producer once; delaying acknowledgements for slow readers.
Not responsible for: the owner of a key (inbox.py), outputs of instances (outputs.py).
"""

from __future__ import annotations

from tiercel.core import messages as m
from tiercel.core.logs.site_outbox import FrameId, InboundFrame
from tiercel.core.machine.step import Step
from tiercel.core.model.bundle import check_bundles, newest_ms
from tiercel.core.model.log import Output, Row, mobile_origin
from tiercel.core.router.device_rows import DeviceRows
from tiercel.core.router.forwarding import Forwarding
from tiercel.core.router.outputs import FanOut
from tiercel.core.router.state import RouterState
from tiercel.core.router.watermarks import Watermarks


class Intake:
    """The rows of clients."""

    def __init__(
        self,
        state: RouterState,
        watermarks: Watermarks,
        forwarding: Forwarding,
        fan_out: FanOut,
        devices: DeviceRows,
    ) -> None:
        self.state = state
        self._watermarks = watermarks
        self._forwarding = forwarding
        self._fan_out = fan_out
        self._devices = devices

    def on_produce(self, step: Step, sender: str, message: m.Produce) -> None:
        facts = self.state.topology.streams.get(message.stream)
        self._devices.check(facts, message)
        check_bundles(message.rows)
        if self.state.producers.accept(step, message.producer, message.seq):
            source = message.producer
            mark = message.watermark_ms  # of a batch in several frames, which share one watermark
            tuples = message.rows and not message.initial
            if tuples and facts is not None and facts.delay_ms is not None:
                self._watermarks.written(step, facts)
                source = message.stream
                if mark is None:
                    mark = newest_ms(message.rows) - facts.delay_ms
            if facts is not None and facts.holds_dead_letters:
                self.log_produced(step, message)
                if mark is not None:
                    self._watermarks.promise_source(step, message.stream, source, mark)
            else:
                self.take_produced(step, message, source, mark)
        self.acknowledge_producer(step, sender, message.producer, message.stream)

    def take_produced(self, step: Step, message: m.Produce, source: str, mark: int | None) -> None:
        """Rule R19: the watermark before a frame decides which of its rows are late, not the frame's own."""
        facts = self.state.topology.streams.get(message.stream)
        if facts is not None and facts.is_numbered:
            self._devices.route_rows(step, facts, message.rows, message.numbers)
        elif message.rows:
            self._fan_out.route_rows(step, message.stream, message.rows, initial=message.initial)
        if mark is not None:
            self._watermarks.promise_source(step, message.stream, source, mark)

    def log_produced(self, step: Step, message: m.Produce) -> None:
        """Log rows that no operator reads, identified by producer, frame and place."""
        source = message.producer.encode()
        outputs = [Output(message.seq, source, 0, n, row) for n, row in enumerate(message.rows)]
        if outputs:
            self._fan_out.log_outputs(step, message.stream, outputs)

    def acknowledge_producer(self, step: Step, to: str, producer: str, stream: str) -> None:
        """Acknowledge a producer, or delay the ack while a reader lags: this slows the producer down."""
        if self.congested(stream):
            self.state.deferred_acks[producer] = (to, stream)
        else:
            self.state.producers.acknowledge(step, to, producer)

    def tell_congestion(self, step: Step) -> None:
        """Tell all routers when named subscriptions of a stream begin or cease to slow producers down."""
        for log in self.state.streams.values():
            congested = log.is_congested
            if congested != (log.name in self.state.congested_streams):
                self._set_congested(log.name, congested=congested)
                for site in sorted(self.state.connected & self.state.topology.sites.keys()):
                    step.send(site, m.StreamCongested(log.name, congested))
                self.release(step)

    def repeat_congestion(self, step: Step, site: str) -> None:
        """A router has connected: it knows nothing of the streams of this site."""
        for name in self.state.streams:
            if name in self.state.congested_streams:
                step.send(site, m.StreamCongested(name, True))

    def on_stream_congested(self, step: Step, sender: str, message: m.StreamCongested) -> None:
        if self.state.site_of_log(message.stream) == sender:
            self._set_congested(message.stream, congested=message.congested)
            self.release(step)

    def _set_congested(self, stream: str, *, congested: bool) -> None:
        if congested:
            self.state.congested_streams.add(stream)
        else:
            self.state.congested_streams.discard(stream)

    def congested(self, stream: str) -> bool:
        if any(log in self.state.congested_streams for log in self.state.logs_of(stream)):
            return True
        for operator in self.state.consumers(stream):
            if self.state.inboxes[operator].backlog_rows > self.state.settings.backlog_rows_max:
                return True
            for (_, inbox), outbox in self.state.outboxes.items():
                if inbox == operator and len(outbox.frames) > self.state.settings.outbox_frames_max:
                    return True
            if self.congested(self.state.topology.operators[operator].output):
                return True
        return False

    def release(self, step: Step) -> None:
        for producer, (to, stream) in list(self.state.deferred_acks.items()):
            if not self.congested(stream):
                del self.state.deferred_acks[producer]
                self.state.producers.acknowledge(step, to, producer)
                if stream in self.state.last_rows_ms:
                    self.state.last_rows_ms[stream] = step.now_ms

    def on_produce_mobile(self, step: Step, sender: str, message: m.ProduceMobile) -> None:
        """Accept rows of a mobile source, which numbers them; only the key's sequencer checks the numbers."""
        self.state.rows += len(message.rows)
        origin = mobile_origin(message.source, message.incarnation)
        frame = FrameId(sender, message.stream, message.frame, origin, mobile=True)
        known = self.state.inbound.get(frame)
        if known is not None and not known.missing:
            known.taken = False
            self._forwarding.take(step, known)
            return
        inbound = self.state.inbound.setdefault(frame, InboundFrame(frame))
        for operator in self.state.consumers(message.stream):
            inbox, facts = self.state.inboxes[operator], self.state.topology.operators[operator]
            inbox.sequencer.frame_came_again(inbound)
            tag = facts.inputs.index(message.stream)
            more = (inbox.broadcast,) if facts.broadcast else ()
            rows = [
                (
                    key,
                    event_time,
                    (tag, payload, *more) if facts.numbers_inputs else payload,
                    origin,
                    n,
                    inbox.table.route(key).epoch,
                )
                for key, event_time, payload, n in message.rows
            ]
            outbound: dict[str, list[Row]] = {}
            here = []
            for row in rows:
                site = inbox.table.route(row[0]).site
                if site == self.state.site:
                    here.append(row)
                else:
                    outbound.setdefault(site, []).append(row)
                    inbox.sequencer.came_again(row, (inbound,))
            self.state.entering[operator].count(rows, len(rows))
            inbox.sequence(step, here, (inbound,))
            for site, stamped in outbound.items():
                self.state.entering[operator].count_sent_on(stamped)
                self._forwarding.forward(step, site, inbox, stamped)
        self._forwarding.settle_inbound(step)

    def disconnected(self, step: Step, peer: str) -> None:
        """Drop the delayed ack of a producer that is gone: it asks again when it reconnects.

        A home site that is gone says again which of its streams are congested when it is back.
        """
        congested = self.state.congested_streams
        congested -= {log for log in congested if self.state.site_of_log(log) == peer}
        acks = self.state.deferred_acks
        for producer in [name for name, (to, _) in acks.items() if to == peer]:
            del acks[producer]
        self.release(step)
