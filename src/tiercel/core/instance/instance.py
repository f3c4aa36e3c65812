"""The instance of an operator as a machine: events, attaching, loading and resuming.

Responsible for: passing events to its components, replay after a crash or a lost end of the log.
Not responsible for: processing (processing.py), checkpoints (checkpoint_writer.py, checkpoint_loader.py),
    moves (core/migration/instance_moves.py), user code (user_code.py), storing.

    (start) --connected--> ATTACHING --reply--> LOADING --loaded--> RUNNING
                               ^------- connection lost --------------+

The state of an instance is its last checkpoint plus the entries since. Every incarnation replays the same
entries to the same user code and produces the same outputs, and the router admits each output once.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard, assert_never

import msgspec

from tiercel.core import messages as m
from tiercel.core.errors import CoreBug, LostCheckpoint, LostLog
from tiercel.core.instance.checkpoint_loader import load
from tiercel.core.instance.checkpoint_writer import CheckpointScope, CheckpointWriter
from tiercel.core.instance.prefetch import missing_at_load, missing_state
from tiercel.core.instance.processing import Processing
from tiercel.core.instance.row_queue import RowQueue
from tiercel.core.instance.user_code import OperatorCode, ProcessorRunner
from tiercel.core.machine.effects import Continue, Effect, Exit, LoadCheckpoint, StorageKey
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
from tiercel.core.machine.names import Timer, TimerKind, TimerName
from tiercel.core.machine.step import Journal, Step
from tiercel.core.machine.stored import CheckpointHeader
from tiercel.core.migration.destination_instance import StateReceiver
from tiercel.core.migration.instance_moves import InstanceMoves
from tiercel.core.migration.source_instance import StateSender
from tiercel.core.model.keys import Key
from tiercel.core.model.log import Takeover
from tiercel.core.model.routing import RoutingTable
from tiercel.core.model.topology import Operator, site_of
from tiercel.core.settings import Settings
from tiercel.core.state.table import StateTable

TOGETHER_MAX = 64  # entries of several messages that share a step: their outputs leave together


class InstancePhase(enum.Enum):
    """The phases of an instance's session with its router."""

    ATTACHING = "attaching"  # waits for its router
    LOADING = "loading"  # older incarnations are fenced; the checkpoint is being read
    RUNNING = "running"  # it processes entries


class Instance:
    """One instance. `incarnation` grows with each start of its process and fences older ones.

    Without moves it only processes rows; a message about a move is then a bug.
    """

    def __init__(
        self,
        name: str,
        operator: Operator,
        code: OperatorCode,
        settings: Settings,
        incarnation: int,
        *,
        with_moves: bool = True,
    ) -> None:
        self.name = name
        self.operator = operator
        self.settings = settings
        self.incarnation = incarnation
        self.router = site_of(name)
        self.phase = InstancePhase.ATTACHING
        self.runner = ProcessorRunner(code, operator)
        self.journal = Journal()
        self.processing = Processing(self)
        self.checkpointer = CheckpointWriter(self)
        self.moves = InstanceMoves(self) if with_moves else None
        self.waits = 0  # of this incarnation, for `gauges`
        self.waited_ms = 0.0
        self.queue = RowQueue(settings.slice_ms)
        self.lag = 0  # rows that wait in the inbox, as the router last reported
        self.reset()
        self.session = 0
        self.halting = ""
        self._reply: m.AttachReply | None = None
        self._own: dict[StorageKey, Any] | None = None  # our own stored items, during a takeover
        self._asked = 0  # number of the last `LoadCheckpoint`

    def reset(self) -> None:
        """Drop all state in memory; the instance continues from its checkpoint."""
        self.routes = RoutingTable.initial(self.operator)
        self.space = StateTable(
            self.operator.slots,
            self._epoch_of,
            *self.runner.about_keys,
            memory_bytes_max=self.operator.memory_limit(self.settings),
        )
        if not self.runner.event_time:
            self.space.has_reached = self._has_reached
        self.applied = 0
        self.flushes = 0  # of this incarnation
        self.confirmed = 0  # flushes that are durable at the router
        self.time_ms = 0
        self.watermark_ms = -1
        self.router_incarnation = 0
        self.durable = 0
        self.takeover = -1  # `Takeover.through` of the last one
        self.loaded = False
        self.processing.forget()
        self.queue.clear()
        if self.moves is not None:
            self.moves.forget()
        self.checkpointer.forget()

    def _epoch_of(self, key: Key) -> int:
        return self.routes.route(key).epoch

    def _has_reached(self, key: Key, time_ms: int) -> bool:
        return time_ms <= self.routes.floor_ms and time_ms <= self.routes.route(key).floor_ms

    # -- events ------------------------------------------------------------------------------

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        """Handle one event. The same state, event and time give the same effects."""
        step = Step(now_ms)
        released: list[Effect] = []
        read_ahead = self.space.memory_limit.read_ahead
        match event:
            case Received():
                self._on_message(step, event.sender, event.message)
            case Continued(took_ms=took_ms):
                self.queue.continued(took_ms)
                self._process_slice(step)
                self.queue.count_measured()
            case Durable(seq=seq):
                released = self.journal.durable_through(seq)
                self.checkpointer.stored(step, seq)
            case TimerFired(name=timer):
                self._on_timer(step, timer)
            case Connected(peer=peer):
                self._on_connected(step, peer)
            case Disconnected(peer=peer):
                if peer == self.router:
                    self.phase = InstancePhase.ATTACHING
                    self.queue.clear()
            case CheckpointLoaded():
                self._on_loaded(step, event)
            case StateRead(items=items):
                self.space.memory_limit.read_ahead = items
                return []
            case LogRead():
                raise CoreBug(self.name + ": an instance does not read logs")
            case _:
                assert_never(event)
        if read_ahead:
            self.space.memory_limit.read_ahead = {}  # valid for this event only
        return released + self.journal.commit(step)

    def on_events(self, waiting: deque[Event], now_ms: float) -> list[Effect]:
        """Handle the first of these events; entries that came in several messages share its step.

        The result is that of one message for all of them. While keys are evicted or leave, each event has a
        step of its own: the driver reads what it needs.
        """
        event = waiting.popleft()
        if waiting and not self.space.evicted and not self.senders and _is_dispatch(event):
            entries = list(event.message.entries)
            while waiting and _is_dispatch(waiting[0]) and len(entries) < TOGETHER_MAX:
                entries += waiting.popleft().message.entries  # type: ignore[union-attr]
            event = Received(event.sender, m.Dispatch(entries))
        return self.on_event(event, now_ms)

    def missing_state(self, event: Event) -> tuple[StorageKey, ...]:
        """The stored versions that this event may need; the driver delivers them first, as `StateRead`."""
        if type(event) is CheckpointLoaded:  # faster than isinstance; called before each event
            if self._reply is None or event.number != self._asked:
                return ()
            return missing_at_load(self, event, self._reply.outgoing_moves)
        return missing_state(self, event) if self.space.evicted or self.senders else ()

    def _on_connected(self, step: Step, peer: str) -> None:
        if peer == self.router:
            self.phase = InstancePhase.ATTACHING
            self.queue.clear()
            self.session += 1
            step.send(self.router, m.Attach(self.name, self.incarnation, self.session))
        if self.moves is not None:
            self.moves.on_connected(step, peer)

    def _on_message(self, step: Step, sender: str, message: Any) -> None:
        match message:
            case m.Dispatch() if self.phase is InstancePhase.RUNNING:
                at_once = self.queue.is_free
                self.queue.add_entries(message.entries)
                if at_once:
                    self._process_slice(step)
            case m.Shadow() if self.phase is InstancePhase.RUNNING and self.moves is not None:
                at_once = self.queue.is_free
                self.queue.add_shadow(message.move, message.entries)
                if at_once:
                    self._process_slice(step)
            case m.Confirmed():
                self._on_confirmed(step, message)
            case m.AttachReply():
                self._on_attach_reply(step, message)
            case m.RestartRequest():
                if message.incarnation == self.incarnation:
                    self.halting = message.move
                    self.checkpointer.soon(step)
            case m.InstanceFenced():
                if message.incarnation == self.incarnation:
                    self.exit(step, "a later incarnation has attached, or successors have taken over")
            case _ if self.moves is None:
                raise CoreBug(f"{self.name} was built without moves, and received {message}")
            case m.StandbyRole() | m.Increment() | m.IncrementReceipt():
                if self.phase is InstancePhase.RUNNING:
                    self.moves.on_standby_message(step, message)
            case _ if self.phase is InstancePhase.RUNNING:
                if type(message) is m.AbortNotice:
                    self.queue.drop_shadow(message.move)
                elif type(message) is m.EmitFrom:
                    self.queue.hurry(message.move)
                self.moves.on_message(step, message)
                self._go_on(step)
            case m.AbortNotice() if self.phase is InstancePhase.LOADING and self._reply is not None:
                # the router does not repeat it, and our roles are older
                others = [role for role in self._reply.incoming_moves if role.move != message.move]
                self._reply = msgspec.structs.replace(self._reply, incoming_moves=others)
            case _:
                pass  # too early; the sender repeats it

    def _go_on(self, step: Step) -> None:
        """Process rows that have waited for a message about a move, as soon as it is their turn."""
        assert self.moves is not None
        if self.moves.has_work and self.queue.is_free:
            self._process_slice(step)
        elif self.moves.has_work or (self.queue and not self.moves.blocked):
            self._continue(step)

    def _process_slice(self, step: Step) -> None:
        """Process some of the rows that wait; everything that arrives meanwhile comes before the others."""
        moves, before = self.moves, self._rows_called
        waited = moves is not None and moves.has_work and self.phase is InstancePhase.RUNNING
        if waited and moves is not None and (self.queue.gives_way() or moves.blocked):
            moves.work(step, self.queue.service.rows_in(self.queue.slice_ms))
            self.processing.flush(step)
            self.queue.took(self._rows_called - before)
            self._continue(step)
            return
        if not self.queue or (moves is not None and moves.blocked):
            return
        entries, shadow, move = self.queue.take()
        if shadow:
            assert moves is not None
            moves.on_message(step, m.Shadow(move, shadow))
        else:
            self.waits += 1
            self.waited_ms += step.now_ms - entries[0].time_ms
            self.space.memory_limit.paused = True
            self.processing.process_entries(step, entries)
            self.processing.flush(step)
            self.space.memory_limit.paused = False
            if self.space.memory_limit.active:
                self.checkpointer.enforce_memory_limit(step)
        self.queue.took(self._rows_called - before)
        self._continue(step)

    @property
    def _rows_called(self) -> int:
        """Rows that were given to user code; others only wait for the state of their keys, which is fast."""
        return self.processing.rows + self.runner.rows_apart

    def _continue(self, step: Step) -> None:
        if self.queue.must_continue(more=self.moves is not None and self.moves.has_work):
            step.effects.append(Continue())

    def _on_timer(self, step: Step, timer: TimerName) -> None:
        match timer:
            case Timer(kind=TimerKind.CHECKPOINT):
                self.checkpointer.due(step)
            case Timer(kind=TimerKind.SLICE):
                self.checkpointer.write_some(step)
            case Timer() if self.moves is not None:
                self.moves.on_timer(step, timer)
            case _:
                pass  # the host wakes a machine with a timer that has no meaning

    # -- attach, load, resume ----------------------------------------------------------------

    def _on_confirmed(self, step: Step, message: m.Confirmed) -> None:
        if message.incarnation != self.incarnation:
            return
        self.confirmed = max(self.confirmed, message.flush)
        self.durable = max(self.durable, message.durable)
        self.lag = message.lag
        self.checkpointer.try_store(step)
        if self.moves is not None and self.moves.senders:
            self.moves.on_durable(step)

    def _on_attach_reply(self, step: Step, reply: m.AttachReply) -> None:
        if (reply.incarnation, reply.session) != (self.incarnation, self.session):
            return
        self._reply = reply
        if self.loaded and not self.router_has_lost_entries(reply) and not self.was_retired(reply):
            self._resume(step)
        else:  # the router may have lost messages, entries or this instance: restart at the checkpoint
            if self.moves is not None:
                self.moves.on_reset(step)
            flushes = self.flushes
            self.reset()
            self.flushes = flushes
            self.phase = InstancePhase.LOADING
            self._own = None
            self._asked += 1
            # lazy restore; unless an abandoned cursor may still become durable and delete some keys
            values, timers = self.checkpointer.in_flight, self.runner.has_timers
            step.effects.append(LoadCheckpoint(values, timers, number=self._asked))

    def router_has_lost_entries(self, reply: m.AttachReply) -> bool:
        """Whether the log ends before our position, or the router has not admitted some of our outputs."""
        if any(inc > self.router_incarnation and self.applied > end for inc, end in reply.ends):
            return True
        return self.confirmed < self.flushes and (
            reply.router_incarnation != self.router_incarnation or reply.flush < self.flushes
        )

    def was_retired(self, reply: m.AttachReply) -> bool:
        """Whether the router has forgotten this instance: its state is from before its retirement."""
        return reply.fresh or _is_older(reply, self.applied)

    def _check_newest(self, items: dict[StorageKey, Any], reported: int) -> None:
        """Raise `LostCheckpoint` if the stored checkpoint is too old: the log before it is trimmed."""
        cursor: CheckpointHeader | None = items.get(("checkpoint",))
        found = -1 if cursor is None else cursor.applied
        if found < reported:
            whose = self._reply.takeover if self._own is not None and self._reply is not None else None
            raise LostCheckpoint(whose.of if whose is not None else self.name, found, reported)

    def _check_log(self, items: dict[StorageKey, Any], reply: m.AttachReply) -> None:
        """Raise `LostLog` if the log ends before the checkpoint: it would reuse offsets for new rows."""
        cursor: CheckpointHeader | None = items.get(("checkpoint",))
        if cursor is not None and (
            cursor.applied > reply.head or cursor.router_incarnation > reply.router_incarnation
        ):
            raise LostLog(self.name, reply.head, cursor.applied)

    def _on_loaded(self, step: Step, loaded: CheckpointLoaded) -> None:
        if self.phase is not InstancePhase.LOADING or self._reply is None or loaded.number != self._asked:
            return
        items: dict[StorageKey, Any] = loaded.items
        self._check_log(items, self._reply)
        cursor: CheckpointHeader | None = items.get(("checkpoint",))
        if self._reply.fresh or (cursor is not None and _is_older(self._reply, cursor.applied, stored=True)):
            self.checkpointer.discard(items)
            items = {}
        takeover = self._reply.takeover
        if takeover is not None and takeover.fresh and self._own is None and not _is_since(takeover, items):
            self._own = items  # of an unfinished checkpoint, or from before its retirement
            self._asked += 1
            adopt, timers = not self.checkpointer.in_flight, self.runner.has_timers
            step.effects.append(
                LoadCheckpoint(timers=timers, takeover=takeover, number=self._asked, adopt=adopt)
            )
            return
        if self._reply.stored and not self._reply.fresh:
            self._check_newest(items, self._reply.start)
        load(step, self, items, self._reply.start, self._reply.start_watermark_ms)
        if self._own is not None and not loaded.adopted:
            self.checkpointer.takeover(self._own)
        if self._own is not None and takeover is not None:
            self.takeover = takeover.through
        self._own = None
        self.loaded = True
        self._resume(step)
        self.checkpointer.arm(step)

    def _resume(self, step: Step) -> None:
        reply = self._reply
        assert reply is not None
        self.router_incarnation = reply.router_incarnation
        if self.moves is not None:
            self.moves.take_roles(step, reply)
        self.phase = InstancePhase.RUNNING
        positions = {move: a.received_position for move, a in self.receivers.items()}
        step.send(
            self.router,
            m.Resume(self.name, self.incarnation, self.session, self.applied, positions, self.watermark_ms),
        )
        self.flush(step)
        if self.moves is not None and self.moves.has_work:
            self._continue(step)

    def validate(self) -> None:
        """Check the limits of queues, and that no evicted key is dirty; called after each simulated event."""
        if self.moves is not None:
            self.moves.validate()
        for key in self.space.evicted.keys() & self.space.dirty.keys():
            raise CoreBug(f"{self.name}: key {key!r} is to be stored again, and its stored version is all")

    def gauges(self) -> dict[str, float]:
        """Counters of this incarnation, and the size of its state, estimated from a few keys."""
        spaces = [self.space, *(receiver.space for receiver in self.receivers.values())]
        keys = sum(space.count for space in spaces)
        sizes = [size for space in spaces for size in space.sample_bytes()]
        return {
            "rows": self.processing.rows,
            "outputs": self.processing.outputs,
            "waited": self.waits,
            "waited_ms": self.waited_ms,
            "lag": self.lag,
            "state_keys": keys,
            "state_bytes": keys * sum(sizes) / len(sizes) if sizes else 0,
            "hot_keys": sum(len(space.keys) for space in spaces),
            "read_back": self.space.memory_limit.reads,
            "moves": len(self.senders) + len(self.receivers),
            "standby_keys": self.moves.copies.keys if self.moves is not None else 0,
        }

    # -- calls of components (InstancePort) ----------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self.phase is InstancePhase.RUNNING

    @property
    def user_code(self) -> ProcessorRunner:
        return self.runner

    @property
    def senders(self) -> Mapping[str, StateSender]:
        """The moves out of this instance."""
        return self.moves.senders if self.moves is not None else {}

    @property
    def receivers(self) -> Mapping[str, StateReceiver]:
        """The moves into this instance."""
        return self.moves.receivers if self.moves is not None else {}

    def keys_changed(self, step: Step, keys: Iterable[Key]) -> None:
        """A checkpoint has taken the changes of these keys."""
        if self.moves is not None and self.moves.standby is not None:
            self.moves.standby.changed(step, keys)

    def standby_read_ahead(self) -> list[StorageKey]:
        standby = self.moves.standby if self.moves is not None else None
        return standby.read_ahead() if standby is not None else []

    def tell(self, step: Step, message: m.Message) -> None:
        """Send the router a message about a move, with our incarnation: it accepts only the latest one."""
        step.send(self.router, m.FromInstance(self.name, self.incarnation, message))

    def flush(self, step: Step) -> None:
        self.processing.flush(step)

    def checkpoint_soon(self, step: Step) -> None:
        """Take a checkpoint of arriving keys; the other keys wait for the next regular one."""
        self.checkpointer.soon(step, CheckpointScope.ARRIVALS)

    def tidy_soon(self, step: Step) -> None:
        self.checkpointer.schedule_soon(step)

    def after_next_checkpoint(self, step: Step, message: m.Message) -> None:
        self.checkpointer.notify_after_next(step, message)

    def stored_generation(self, key: Key) -> int | None:
        """The generation of the stored version of a key, if a finished checkpoint has its last change."""
        generation = self.checkpointer.stored_generation(key)
        covered = generation is not None and generation <= self.space.memory_limit.covered
        return generation if covered and key not in self.space.dirty else None

    def drop_stored_move(self, move: str) -> None:
        self.checkpointer.drop_move(move)

    def is_taking_over(self) -> bool:
        """Whether it still processes rows of the dead instance: a shadow would miss those."""
        takeover = self._reply.takeover if self._reply is not None else None
        return takeover is not None and self.applied < takeover.through

    def exit(self, step: Step, reason: str) -> None:
        step.effects.append(Exit(reason))


def _is_dispatch(event: Event) -> TypeGuard[Received]:
    return type(event) is Received and type(event.message) is m.Dispatch


def _is_older(reply: m.AttachReply, applied: int, *, stored: bool = False) -> bool:
    """Whether the state of a new instance is from before its retirement: the instance starts behind it.

    The router reported this when the instance first attached, but the instance may have died before its first
    checkpoint. A checkpoint for exactly the start may be as old, because nothing was logged since. If it is
    newer, it holds nothing that another process has seen.
    """
    newcomer = not reply.stored and reply.takeover is None
    return newcomer and (applied < reply.start or (stored and applied == reply.start))


def _is_since(takeover: Takeover, items: dict[StorageKey, Any]) -> bool:
    """Whether a successor's stored checkpoint is newer than its takeover; the router may not know it yet.

    Once the router knows it, it trims the log behind the dead instance's checkpoint. A new start from that
    checkpoint would miss those entries.
    """
    cursor: CheckpointHeader | None = items.get(("checkpoint",))
    return cursor is not None and cursor.takeover == takeover.through
