"""The router of a site: a machine that turns one event into one atomic write and some messages.

Responsible for: passing each event to its component, one write per event, and holding back messages that
    depend on data that is not durable.
Not responsible for: the rules of the components; reading and writing bytes (the driver does).

The path of a row: `Produce` -> `route_rows` -> `Inbox.append_or_forward` -> entry in the log -> `Dispatch` to
the owner, or a frame to the owner's site -> `Outputs` of the owner -> `emit` -> the next operators' inboxes
and the stream's output log -> `Publish` to subscribers once durable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, assert_never, cast

from tiercel.core import messages as m
from tiercel.core.errors import CoreBug, ProtocolViolation, check_limit
from tiercel.core.logs.batches import TABLES as BATCH_TABLES
from tiercel.core.logs.dispatch import LIVE
from tiercel.core.logs.inbox import TABLES, Inbox
from tiercel.core.logs.output_log import TABLES as STREAM_TABLES
from tiercel.core.logs.sequencer import HeldRow
from tiercel.core.logs.site_outbox import FrameId, SiteOutbox
from tiercel.core.logs.staged import TABLES as STAGED_TABLES
from tiercel.core.machine.effects import Effect, StorageKey
from tiercel.core.machine.events import (
    CheckpointLoaded,
    Connected,
    Continued,
    Disconnected,
    Durable,
    Event,
    LogRead,
    Received,
    StateRead,
    TimerFired,
)
from tiercel.core.machine.names import ShadowReaderName, StagedReaderName, Timer, TimerKind, TimerName
from tiercel.core.machine.step import Step
from tiercel.core.migration.coordinator import MoveCoordinator
from tiercel.core.migration.destination_router import IncomingMove
from tiercel.core.migration.ports import RouterPort
from tiercel.core.migration.source_router import OutgoingMove
from tiercel.core.model.log import OutputFence, Row, StreamEntry
from tiercel.core.model.topology import Topology, operator_of
from tiercel.core.router.batch_intake import BatchIntake
from tiercel.core.router.device_rows import DeviceRows
from tiercel.core.router.feed_intake import FeedIntake
from tiercel.core.router.forwarding import Forwarding
from tiercel.core.router.intake import Intake
from tiercel.core.router.load_sample import InboxLoad, ReaderLoad
from tiercel.core.router.moves import Moves, NoMoves
from tiercel.core.router.outputs import FanOut, OutputAdmission
from tiercel.core.router.recovery import Loader, load_items, not_loaded
from tiercel.core.router.sessions import Sessions
from tiercel.core.router.state import RouterState
from tiercel.core.router.watermarks import Watermarks
from tiercel.core.settings import Settings

ORDINARY = frozenset((m.Produce, m.Outputs, m.Consumed))  # may share a step
TOGETHER_MAX = 16  # limits the delay of the messages that the first event causes


def must_be(sender: str, producer: str) -> None:
    """Refuse a peer that sends under another producer's name: the frames of that one would look repeated."""
    if sender != producer:
        reason = f"it sends as producer {producer!r}"
        raise ProtocolViolation(reason)


class Router:
    """The router of one site. `items` are the contents of its storage at the start.

    `migration` builds the component that moves keys; with `None` the router only processes rows.
    """

    def __init__(
        self,
        site: str,
        topology: Topology,
        settings: Settings,
        incarnation: int,
        items: dict[StorageKey, Any],
        *,
        migration: Callable[[RouterPort], MoveCoordinator] | None = MoveCoordinator,
    ) -> None:
        state = self.state = RouterState(site, topology, settings, incarnation)
        self.site, self.topology, self.settings = site, state.topology, settings
        self.incarnation = incarnation
        self.journal = state.journal
        self.inboxes, self.outboxes, self.streams = state.inboxes, state.outboxes, state.streams
        self.migration = migration(self) if migration is not None else None
        self.moves: Moves = self.migration if self.migration is not None else NoMoves()
        self.watermarks = Watermarks(state)
        self.forwarding = Forwarding(state, self.watermarks, self)
        fan_out = FanOut(state, self.watermarks, self.forwarding)
        self.devices = DeviceRows(state, self.forwarding, fan_out)
        self.intake = Intake(state, self.watermarks, self.forwarding, fan_out, self.devices)
        self.batches = BatchIntake(state, self.watermarks, fan_out, self.moves)
        self.outputs = OutputAdmission(state, fan_out, self.intake, self.moves, self.batches)
        self.sessions = Sessions(state, self.moves)
        self.feeds = FeedIntake(state, self.watermarks, fan_out, self.intake, self.devices)
        self._retrying = False
        self._unsynced: deque[tuple[int, list[tuple[Inbox, int]], list[tuple[SiteOutbox, int]]]] = deque()
        self._recovered = False
        self._is_new = ("storage",) not in items  # a new storage, or an older copy: it numbers anew
        state.storage = items.get(("storage",), incarnation)
        load_items(items, self._loaders())

    # -- the moves of this site, for tests and status ----------------------------------------------

    @property
    def outgoing_moves(self) -> dict[str, OutgoingMove]:
        return self.migration.outgoing_moves if self.migration is not None else {}

    @property
    def incoming_moves(self) -> dict[str, IncomingMove]:
        return self.migration.incoming_moves if self.migration is not None else {}

    # -- RouterPort: calls of migration ------------------------------------------------------------

    def send_router(self, step: Step, site: str, message: m.Message, *, durable: bool = False) -> None:
        if site == self.site:
            self.on_message(step, self.site, message)
        elif durable:
            step.send_durable(site, message)
        else:
            step.send(site, message)

    def outbox(self, to: str, inbox: str) -> SiteOutbox:
        return self.state.outbox(to, inbox)

    def intake_promise(self, operator: str) -> int:
        return self.watermarks.intake_promise(operator)

    def output_promise(self, operator: str) -> int:
        return self.watermarks.output_promise(operator)

    def unsettled_outputs(self, operator: str) -> set[FrameId]:
        return self.forwarding.unsettled_outputs(operator)

    def output_fences(self, operator: str) -> dict[str, OutputFence] | None:
        return self.forwarding.output_fences(operator)

    def sequence_again(self, step: Step, inbox: Inbox, held: list[HeldRow]) -> None:
        self.forwarding.sequence_again(step, inbox, held)

    # -- ForwardingListener: contents and receipts of frames ---------------------------------------

    def on_notice(self, step: Step, sender: str, notice: m.AnyNotice) -> None:
        self.moves.on_notice(step, sender, notice)

    def on_rows(self, step: Step, sender: str, inbox: str, rows: list[Row]) -> None:
        if self.moves.count and sender != self.site:
            self.moves.rows_came(step, sender, inbox, rows)

    def on_frame_settled(self, step: Step, frame: FrameId) -> None:
        self.moves.frame_settled(step, frame)

    def on_backlog_shrunk(self, step: Step) -> None:
        if self.state.deferred_acks:
            self.intake.release(step)

    # -- recovery ----------------------------------------------------------------------------------

    def _loaders(self) -> dict[str, Loader]:
        return {
            **dict.fromkeys(TABLES, self._load_inbox),
            **dict.fromkeys(("producer", "producer_incarnation"), self.state.producers.load),
            **dict.fromkeys(("outbox", "outbox_next"), self.forwarding.load),
            **dict.fromkeys(STREAM_TABLES, self._load_stream),
            **dict.fromkeys(self.moves.tables, self.moves.load),
            "source": self.watermarks.load,
            **dict.fromkeys(BATCH_TABLES, self.batches.load),
            **dict.fromkeys(STAGED_TABLES, self.feeds.load),
            "storage": not_loaded,
            "inbox": not_loaded,
        }

    def _load_inbox(self, key: StorageKey, value: Any) -> None:
        self.inboxes[key[1]].load(key, value)

    def _load_stream(self, key: StorageKey, value: Any) -> None:
        self.streams[key[1]].load(key, value)

    def _recover(self, step: Step) -> None:
        """The first step of an incarnation, before its first event."""
        if self._is_new:
            step.put(("storage",), self.state.storage)
        for inbox in self.inboxes.values():
            inbox.sequencer.begin_origin(step, self.state.origin, new=self._is_new)
            inbox.begin_incarnation(step, self.incarnation)
        self.moves.recover(step)
        for inbox in self.inboxes.values():
            for instance in list(inbox.readers):  # none is connected yet; some may never return
                self.sessions.let_go(step, inbox, instance)
        for outbox in self.outboxes.values():
            if outbox.to == self.site:
                self.forwarding.deliver_to_self(step, outbox)
        self.watermarks.start_idle_timers(step)
        self.watermarks.start_site_timers(step)

    # -- events ------------------------------------------------------------------------------------

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        """Handle one event. The same state, event and time give the same effects."""
        step = Step(now_ms)
        if not self._recovered:
            self._recovered = True
            self._recover(step)
        released: list[Effect] = []
        match event:
            case Received():
                self.on_message(step, event.sender, event.message)
            case Durable():
                released = self._on_durable(step, event.seq)
            case LogRead(inbox=name, reader=reader, entries=entries):
                if isinstance(reader, ShadowReaderName):
                    self.moves.on_shadow_read(step, reader.move, entries)
                elif isinstance(reader, StagedReaderName):
                    self.feeds.on_read(step, reader.feed, entries)
                elif name in self.streams:
                    self.streams[name].on_read(step, reader, cast("list[StreamEntry]", entries))
                else:
                    cursor = self.inboxes[name].cursors.get(reader)
                    if cursor is not None:
                        cursor.replay(entries, self.inboxes[name].offset)
            case TimerFired(name=timer):
                self._on_timer(step, timer)
            case Connected(peer=peer):
                self._on_connected(step, peer)
            case Disconnected(peer=peer):
                self._on_disconnected(step, peer)
            case CheckpointLoaded() | StateRead() | Continued():
                raise CoreBug(self.site + ": a router loads no checkpoints and evicts no keys")
            case _:
                assert_never(event)
        return released + self._finish(step)

    def on_events(self, waiting: deque[Event], now_ms: float) -> list[Effect]:
        """Handle the first of these events, and the following ones that may share its step and its write.

        The result is the same as with `on_event` for each of them. Only frequent events share a step, and
        only while nothing moves: then the order of the answers does not matter.
        """
        step = Step(now_ms)
        taken = 0
        while waiting and taken < TOGETHER_MAX and self._ordinary(event := waiting[0]):
            assert isinstance(event, Received)
            try:
                self.on_message(step, event.sender, event.message)
            except ProtocolViolation:
                if taken:
                    break  # it has changed nothing yet; the next step refuses it alone
                waiting.popleft()
                raise
            waiting.popleft()
            taken += 1
        return self._finish(step) if taken else self.on_event(waiting.popleft(), now_ms)

    def _ordinary(self, event: Event) -> bool:
        return (
            self._recovered
            and not self.moves.count
            and type(event) is Received
            and type(event.message) in ORDINARY
        )

    def on_message(self, step: Step, sender: str, message: Any) -> None:
        match message:
            case m.Produce():
                must_be(sender, message.producer)
                self.intake.on_produce(step, sender, message)
            case m.Outputs():
                self.outputs.on_outputs(step, message)
            case m.Consumed():
                if message.stream in self.streams:
                    self.streams[message.stream].consumed(step, sender, message)
                    self.intake.tell_congestion(step)
            case m.BatchFrame(task=task) | m.BatchBegin(task=task) if task.attempt:
                self.feeds.on_message(step, sender, message)
            case m.BatchFrame() | m.BatchBegin() | m.BatchEnd():
                self.batches.on_message(step, sender, message)
            case m.TimerQuery():
                self.batches.on_timer_query(step, sender, message)
            case m.FeedCommit() | m.FeedForget():
                self.feeds.on_message(step, sender, message)
            case m.MoveOutputs():
                self.outputs.on_move_outputs(step, message)
            case m.SiteFrame():
                self.forwarding.on_frame(step, sender, message)
            case m.SiteFrameReceipt():
                self.forwarding.on_receipt(step, sender, message)
            case m.Checkpointed():
                self.sessions.on_checkpointed(step, message)
            case m.ProduceMobile():
                self.intake.on_produce_mobile(step, sender, message)
            case m.WatermarkReport():
                self.watermarks.on_report(sender, message)
            case m.MarksForgotten():
                self.forwarding.on_marks_forgotten(step, message)
            case m.OwnerChanged():
                self.forwarding.on_owner_changed(step, message)
            case m.Hello():
                must_be(sender, message.producer)
                self.state.producers.hello(step, sender, message)
            case m.Subscribe():
                if message.stream in self.streams:
                    self.streams[message.stream].subscribe(step, sender, message)
            case m.Unsubscribe():
                if message.stream in self.streams:
                    self.streams[message.stream].unsubscribe(sender)
            case m.EndSubscription():
                if message.stream in self.streams:
                    self.streams[message.stream].end_subscription(step, message.subscription)
                    self.intake.tell_congestion(step)
            case m.StreamCongested():
                self.intake.on_stream_congested(step, sender, message)
            case m.RangeQuery():
                log = self.streams.get(message.stream)
                if log is None:
                    step.send(sender, m.RangeReply(message.stream, -1, -1))
                else:
                    log.asked(step, sender, message)
            case m.Attach():
                self.sessions.on_attach(step, message)
            case m.Resume():
                self.sessions.on_resume(step, message)
            case m.FromInstance():
                cursor = self.inboxes[operator_of(message.instance)].cursors.get(message.instance)
                if cursor is not None and not cursor.is_fenced(message.incarnation):
                    self.moves.on_message(step, message.instance, message.message)
            case m.Retirement():
                self.sessions.retire(step, sender, message)
                self.intake.release(step)  # it may be the reader that lagged
            case _:
                self.moves.on_message(step, sender, message)

    def _finish(self, step: Step) -> list[Effect]:
        if self.watermarks.active:
            self.watermarks.promise(step)
        if any([log.marks and log.is_new for log in self.streams.values()]):
            self.intake.tell_congestion(step)
        for inbox in self.inboxes.values():
            for cursor in inbox.cursors.values():
                if cursor.phase is not LIVE and cursor.wants_read():
                    withheld = inbox.tail.behind(cursor.cursor)
                    if withheld is not None:
                        cursor.replay(withheld, inbox.offset)
                    else:
                        cursor.reading = True
                        step.read_log(
                            inbox.name, cursor.cursor, self.settings.read_entries_max, cursor.instance
                        )
                if cursor.pending:
                    cursor.flush(step)
        if self.batches.active:
            self.batches.progressed(step)
        if self.devices.active:
            self.devices.keep_time(step)
        if self.feeds.active or self.state.deferred_acks:
            self._let_in(step)
        if not self._retrying and self.moves.count:
            self._retrying = True
            step.timer(Timer(TimerKind.RETRY), step.now_ms + self.settings.retry_ms)
        if step.puts or step.deletes:
            seq = self.journal.written + 1
            offsets = [
                (inbox, inbox.offset) for inbox in self.inboxes.values() if inbox.offset > inbox.durable
            ]
            ends = [
                (outbox, outbox.next_n - 1)
                for outbox in self.outboxes.values()
                if outbox.next_n - 1 > outbox.durable_n
            ]
            self._unsynced.append((seq, offsets, ends))
            for stream in self.streams.values():
                stream.written(seq)
        return self.journal.commit(step)

    def _let_in(self, step: Step) -> None:
        """Whoever waits for slow readers goes on if these have caught up, or have nothing left to read."""
        shrunk, limit = False, self.settings.backlog_rows_max
        for inbox in self.inboxes.values():
            if inbox.backlog_rows > limit and inbox.readers.keys() <= inbox.cursors.keys():
                inbox.passed(inbox.slowest_through())
                shrunk = shrunk or inbox.backlog_rows <= limit
        if shrunk and self.state.deferred_acks:
            self.intake.release(step)
        if self.feeds.active:
            self.feeds.progressed(step)

    def _on_durable(self, step: Step, seq: int) -> list[Effect]:
        released = self.journal.durable_through(seq)
        while self._unsynced and self._unsynced[0][0] <= seq:
            _, offsets, ends = self._unsynced.popleft()
            for inbox, offset in offsets:
                inbox.durable = max(inbox.durable, offset)
            for outbox, n in ends:
                outbox.durable_n = max(outbox.durable_n, n)
        if self.outboxes:
            self.forwarding.pump(step)
        for stream in self.streams.values():
            stream.durable(step, seq)
        return released

    def _on_timer(self, step: Step, timer: TimerName) -> None:
        match timer:
            case Timer(kind=TimerKind.RETRY):
                self._retrying = False
                self.moves.on_retry(step)
            case Timer(kind=TimerKind.TICK, of=name):
                self.outputs.on_tick(step, name)
            case Timer(kind=TimerKind.TRIM, of=name):
                self.inboxes[name].trim(step)
            case Timer(kind=TimerKind.GAP, of=name):
                self.devices.on_timer(step, name)
            case Timer(kind=TimerKind.IDLE, of=name):
                self.watermarks.on_idle_timer(step, name)
            case Timer(kind=TimerKind.ABSENT, of=site):
                self.watermarks.on_absent_timer(site)
            case _:
                pass  # the host wakes a machine with a timer that has no meaning

    def _on_connected(self, step: Step, peer: str) -> None:
        self.state.connected.add(peer)
        if peer not in self.topology.sites:
            return
        self.watermarks.site_came(peer)
        self.forwarding.connected(step, peer)
        self.intake.repeat_congestion(step, peer)
        self.watermarks.repeat_promises(step, peer)

    def _on_disconnected(self, step: Step, peer: str) -> None:
        self.state.connected.discard(peer)
        if peer in self.topology.sites:
            self.watermarks.site_left(step, peer)
        self.forwarding.disconnected(peer)
        self.sessions.disconnected(step, peer)
        self.batches.disconnected(peer)
        self.feeds.disconnected(peer)
        for stream in self.streams.values():
            stream.disconnected(peer)
        self.intake.disconnected(step, peer)

    # -- metrics and checks ------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """Counters of this incarnation, and the backlog of the inboxes."""
        return {
            "rows": self.state.rows,
            "outputs": self.state.outputs,
            "lag": sum(inbox.backlog_rows for inbox in self.inboxes.values()),
            "moves": self.moves.count,
        }

    def loads(self) -> dict[str, InboxLoad]:
        """The load of each operator at this site. Called once a second: samples fade with each call."""
        found = {}
        for name, inbox in self.inboxes.items():
            sample = self.state.entering[name]
            slots, keys = sample.each_second()
            readers = {
                cursor.instance: ReaderLoad(cursor.arrived_rows, cursor.lag_rows, cursor.oldest_at_ms)
                for cursor in inbox.cursors.values()
            }
            found[name] = InboxLoad(sample.entered, slots, keys, readers, sample.take_sent_on())
        return found

    def validate(self) -> None:
        """Check that every queue is within its limit; the simulator calls it after each event."""
        limits = self.settings
        for inbox in self.inboxes.values():
            inbox.tail.validate()
            for cursor in inbox.cursors.values():
                cursor.validate()
        for outbox in self.outboxes.values():
            check_limit(
                f"frames in flight to {outbox.to} for {outbox.inbox}",
                outbox.under_way,
                limits.site_frames_max,
            )
        for stream in self.streams.values():
            check_limit(f"entries of {stream.name} in memory", len(stream.tail), limits.stream_tail_max)
            for name, reading in stream.subscribers.items():
                sent = reading.sent - reading.consumed
                check_limit(f"entries of {stream.name} sent to {name}", sent, limits.publish_entries_max)
        self.moves.validate()
