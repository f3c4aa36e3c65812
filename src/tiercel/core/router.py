"""The router of a site: one event in, one atomic write and some messages out.

Responsible for: handing each event to the part it concerns, one write per event, and saying nothing
    that rests on what is not durable.
Not responsible for: the parts' own rules; reading and writing bytes (the driver does).

Life of a tuple: `Produce` -> `take_in` -> `Inbox.intake` -> entry in the log -> `Dispatch` to the
owner, or a lane frame to the owner's site -> its `Outputs` come back -> `emit` -> the next
operators' inboxes and the stream's output log -> `Publish` to subscribers once durable.
"""

from __future__ import annotations

from collections import deque
from typing import Any, assert_never, cast

from tiercel.core import messages as m
from tiercel.core.effects import Effect, StorageKey
from tiercel.core.events import (
    CheckpointLoaded,
    Connected,
    Disconnected,
    Durable,
    Event,
    LogRead,
    Received,
    TimerFired,
)
from tiercel.core.faults import CoreBug, ProtocolViolation, within
from tiercel.core.feed import LIVE
from tiercel.core.inbox import Inbox
from tiercel.core.lanes import Lane
from tiercel.core.movedesk import MoveDesk
from tiercel.core.records import StreamEntry
from tiercel.core.recovery import recover_router
from tiercel.core.settings import Settings
from tiercel.core.step import Step
from tiercel.core.topology import Topology, operator_of

ORDINARY = frozenset((m.Produce, m.Outputs, m.Consumed))  # may share a step
TOGETHER_MAX = 16  # what leaves should not wait for more than that


def must_be(sender: str, producer: str) -> None:
    """A producer speaks for itself: whoever used its numbers would make its own frames look known."""
    if sender != producer:
        reason = f"it sends as producer {producer!r}"
        raise ProtocolViolation(reason)


class Router(MoveDesk):
    """One site's router. `items` is what its storage held when it started."""

    def __init__(
        self,
        site: str,
        topology: Topology,
        settings: Settings,
        incarnation: int,
        items: dict[StorageKey, Any],
    ) -> None:
        super().__init__(site, topology, settings, incarnation)
        self._retrying = False
        self._unsynced: deque[tuple[int, list[tuple[Inbox, int]], list[tuple[Lane, int]]]] = deque()
        self.boot = recover_router(self, items)

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        """The entry. Same state, event and time give the same effects."""
        step = Step(now_ms)
        if self.boot is not None:
            boot, self.boot = self.boot, None
            boot(step)
        released: list[Effect] = []
        match event:
            case Received():
                self.on_message(step, event.sender, event.message)
            case Durable():
                released = self._on_durable(step, event.seq)
            case LogRead(inbox=name, reader=reader, entries=entries):
                if reader.startswith("shadow|"):
                    departure = self.departures.get(reader[7:])
                    if departure is not None:
                        departure.on_shadow_read(step, entries)
                elif name in self.streams:
                    self.streams[name].on_read(step, reader, cast("list[StreamEntry]", entries))
                else:
                    feed = self.inboxes[name].feeds.get(reader)
                    if feed is not None:
                        feed.replay(entries, self.inboxes[name].offset)
            case TimerFired(name=timer):
                self._on_timer(step, timer)
            case Connected(peer=peer):
                self._on_connected(step, peer)
            case Disconnected(peer=peer):
                self._on_disconnected(step, peer)
            case CheckpointLoaded():
                raise CoreBug(self.site + ": a router does not load checkpoints")
            case _:
                assert_never(event)
        return released + self._finish(step)

    def on_events(self, waiting: deque[Event], now_ms: float) -> list[Effect]:
        """Take the first of these events, and those behind it that may share its step and its write.

        Means the same as `on_event` for each of them. Only what comes by the thousand shares a step, and
        only while nothing moves: then nobody minds in which order it is answered.
        """
        step = Step(now_ms)
        taken = 0
        while waiting and taken < TOGETHER_MAX and self._ordinary(event := waiting[0]):
            assert isinstance(event, Received)
            try:
                self.on_message(step, event.sender, event.message)
            except ProtocolViolation:
                if taken:
                    break  # it has changed nothing yet, and is refused by itself in the next step
                waiting.popleft()
                raise
            waiting.popleft()
            taken += 1
        return self._finish(step) if taken else self.on_event(waiting.popleft(), now_ms)

    def _ordinary(self, event: Event) -> bool:
        moving = self.departures or self.arrivals or self.boot is not None
        return not moving and type(event) is Received and type(event.message) in ORDINARY

    def on_message(self, step: Step, sender: str, message: Any) -> None:
        match message:
            case m.Produce():
                must_be(sender, message.producer)
                self.on_produce(step, sender, message)
            case m.Outputs():
                self.on_outputs(step, message)
            case m.Consumed():
                if message.stream in self.streams:
                    self.streams[message.stream].consumed(step, sender, message.offset)
            case m.MoveOutputs():
                self.on_move_outputs(step, message)
            case m.LaneFrame():
                self.on_lane_frame(step, sender, message)
            case m.LaneReceipt():
                self.on_lane_receipt(step, sender, message)
            case m.Checkpointed():
                self.on_checkpointed(step, message)
            case m.ProduceMobile():
                self.on_produce_mobile(step, sender, message)
            case m.WatermarkReport():
                self.promises[message.operator].hear(
                    sender, message.watermark_ms, message.sources, message.concluded_ms
                )
            case m.Moved():
                self.on_moved(step, message)
            case m.Hello():
                must_be(sender, message.producer)
                self.producers.hello(step, sender, message)
            case m.Subscribe():
                if message.stream in self.streams:
                    self.streams[message.stream].subscribe(step, sender, message.after)
            case m.RangeQuery():
                log = self.streams.get(message.stream)
                first, last = (-1, -1) if log is None else (log.first, log.visible)
                step.send(sender, m.RangeReply(message.stream, first, last))
            case m.Attach():
                self.on_attach(step, message)
            case m.Resume():
                self.on_resume(step, message)
            case m.Said():
                feed = self.inboxes[operator_of(message.instance)].feeds.get(message.instance)
                fenced = feed is None or (feed.life != message.life and self.mutant != "zombie-not-fenced")
                if not fenced:
                    self.on_move_message(step, message.instance, message.message)
            case m.Retirement():
                self.retire(step, sender, message.instance)
                self.pay_owed(step)  # it may be the one that was behind
            case _:
                self.on_move_message(step, sender, message)

    def _finish(self, step: Step) -> list[Effect]:
        if self.event_time:
            self.promise(step)
        for inbox in self.inboxes.values():
            for feed in inbox.feeds.values():
                if feed.phase is not LIVE and feed.wants_read():
                    kept = inbox.tail.behind(feed.cursor)
                    if kept is not None:
                        feed.replay(kept, inbox.offset)
                    else:
                        feed.reading = True
                        step.read_log(inbox.name, feed.cursor, self.settings.read_entries_max, feed.instance)
                if feed.pending:
                    feed.flush(step)
        if (self.departures or self.arrivals) and not self._retrying:
            self._retrying = True
            step.timer("retry", step.now_ms + self.settings.retry_ms)
        if step.puts or step.deletes:
            seq = self.journal.written + 1
            offsets = [
                (inbox, inbox.offset) for inbox in self.inboxes.values() if inbox.offset > inbox.durable
            ]
            ends = [
                (lane, lane.next_n - 1) for lane in self.lanes.values() if lane.next_n - 1 > lane.durable_n
            ]
            self._unsynced.append((seq, offsets, ends))
            for stream in self.streams.values():
                stream.written(seq)
        return self.journal.commit(step)

    def _on_durable(self, step: Step, seq: int) -> list[Effect]:
        released = self.journal.durable_through(seq)
        while self._unsynced and self._unsynced[0][0] <= seq:
            _, offsets, ends = self._unsynced.popleft()
            for inbox, offset in offsets:
                inbox.durable = max(inbox.durable, offset)
            for lane, n in ends:
                lane.durable_n = max(lane.durable_n, n)
        if self.lanes:
            self.pump(step)
        for stream in self.streams.values():
            stream.durable(step, seq)
        return released

    def pump(self, step: Step) -> None:
        for lane in list(self.lanes.values()):
            if lane.to == self.site:
                self.loop_back(step, lane)
            else:
                lane.pump(step)

    def _on_timer(self, step: Step, timer: str) -> None:
        if timer == "retry":
            self._retrying = False
            self.on_retry(step)
        elif timer.startswith("tick|"):
            self.on_tick(step, timer[5:])
        elif timer.startswith("trim|"):
            self.inboxes[timer[5:]].trim(step)
        elif timer.startswith("idle|"):
            self.on_look(step, timer[5:])

    def _on_connected(self, step: Step, peer: str) -> None:
        self.connected.add(peer)
        if peer not in self.topology.sites:
            return
        for lane in self.lanes.values():
            if lane.to == peer:
                lane.reconnected()
                lane.pump(step)
        self.repeat_promises(step, peer)

    def _on_disconnected(self, step: Step, peer: str) -> None:
        self.connected.discard(peer)
        for lane in self.lanes.values():
            if lane.to == peer:
                lane.broken()
        for inbox in self.inboxes.values():
            inbox.attaching.pop(peer, None)
            if peer in inbox.feeds:
                inbox.feeds[peer].detach()
                self.let_go(step, inbox, peer)
        for stream in self.streams.values():
            stream.unsubscribe(peer)
        self.owed = {p: owed for p, owed in self.owed.items() if owed[0] != peer}
        self.pay_owed(step)

    def validate(self) -> None:
        """Every queue is within its limit; the simulator asks after each event."""
        limits = self.settings
        for inbox in self.inboxes.values():
            inbox.tail.validate()
            for feed in inbox.feeds.values():
                feed.validate()
        for lane in self.lanes.values():
            within(f"frames under way to {lane.to} for {lane.inbox}", lane.under_way, limits.lane_frames_max)
        for stream in self.streams.values():
            within(f"entries of {stream.name} in memory", len(stream.tail), limits.stream_tail_max)
            for name, reading in stream.subscribers.items():
                sent = reading.sent - reading.consumed
                within(f"entries of {stream.name} sent to {name}", sent, limits.publish_entries_max)
        for arrival in self.arrivals.values():
            within(f"shadow entries of {arrival.move}", len(arrival.shadow), limits.shadow_entries_max + 1)
