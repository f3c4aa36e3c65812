"""The state sender: the source instance's side of a move.

Responsible for: capturing keys between two entries, sending them unit by unit, stopping at the cut.
Not responsible for: the time of the flip (source_router.py), the destination (destination_instance.py), the
    order of the units (orders.py).

    CAPTURING --every key--> CAPTURED --FlipToSource--> DRAINED --Forget--> ABSENT    (live)
    WAITING --cut reached--> DRAINED --Forget--> ABSENT                               (flip first)

A move that flips first stops its keys where the source is when it learns of the flip: the cut. From there on
the retained copies never change, so a chunk is read from them when it is sent, and none is stored. The sender
starts once the router has logged the cut: a later incarnation would otherwise stop elsewhere, and the units
of both would not fit together. Its transitions are SOURCE_INSTANCE in phases.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from tiercel.core import messages as m
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.machine.step import Step
from tiercel.core.migration.instance_port import InstancePort
from tiercel.core.migration.orders import Waiting
from tiercel.core.migration.phases import SOURCE_INSTANCE, MovePhase, SourceInstancePhase
from tiercel.core.migration.standby import StandbySender
from tiercel.core.migration.strategies import STRATEGIES
from tiercel.core.migration.units import Unit, UnitQueue, units_of
from tiercel.core.model.keys import Key, KeySet, StateImage
from tiercel.core.model.routing import RouteUpdate, slot_of
from tiercel.core.state.digests import DigestJob
from tiercel.core.state.handle import KeyState
from tiercel.core.state.table import StateTable

FIRST_CHUNK_KEYS = 8  # that are read ahead before the size of the keys is known


class StateSender:
    """One key set that moves out of this instance."""

    def __init__(self, instance: InstancePort, move: str, keys: KeySet, destination: str) -> None:
        self.instance = instance
        self.move = move
        self.keys = keys
        self.destination = destination
        self._phase = MovePhase(SOURCE_INSTANCE, move, SourceInstancePhase.ABSENT)
        self.accepts, self.become = self._phase.accepts, self._phase.become
        self.flip_offset = -1
        self.last_offset: int | None = None
        self.epochs: RouteUpdate | None = None  # of the keys before the flip, once it is decided
        self.queue: UnitQueue | None = None  # the units that are not sent yet
        self.in_flight: deque[tuple[m.Chunk, int]] = deque()  # not acknowledged, each with its offset
        self.sent = 0  # of `in_flight`, on this connection
        self.next_chunk = 0
        self.begun: m.CaptureFrom | None = None  # live: the start of the capture
        self.captured_at: dict[Key, int] = {}
        self.size_bytes = 0
        self.digests: DigestJob | None = None  # as of Compare
        self._strategy_order = "sorted"
        self.stop_after = -1  # flip first: the entry behind which the keys stop
        self.stopped: m.SourceStopped | None = None  # flip first: the report, until the router has logged it
        self.cut_logged = False
        self.retained_state: dict[Key, KeyState | None] = {}  # not processed any more; until Forget
        self.retained_at: dict[Key, int] = {}  # the stored generations of those that are not in memory
        self.touched: set[Key] = set()  # processed since their capture: the keys to compare
        self._copy: StandbySender | None = None  # what the destination has as a standby

    @property
    def phase(self) -> SourceInstancePhase:
        return self._phase.now

    def has(self, key: Key) -> bool:
        return self.keys.has(key, slot_of(key, self.instance.space.slots) if self.keys.slots else -1)

    def members(self) -> list[Key]:
        """The keys of this move that have state here, as they were before the flip.

        A key that left and has returned has a newer epoch, and its copy does not belong to this move. No copy
        is newer than its route, so only returned keys need the check.
        """
        space = self.instance.space
        found = space.members(self.keys.slots, self.keys.keys)
        if self.epochs is None:
            return found
        routes = self.epochs
        old = [routes.keys.get(k) or routes.slots.get(slot_of(k, space.slots)) for k in found]
        known = self.instance.routes
        return [
            k
            for k, route in zip(found, old, strict=True)
            if route is None or known.route(k).epoch <= route.epoch or _epoch(space, k) <= route.epoch
        ]

    # -- sending units -----------------------------------------------------------------------

    def start(self, step: Step) -> None:
        """Live: begin to capture, after sending the outputs of all entries up to here."""
        instance = self.instance
        self.become(step, SourceInstancePhase.CAPTURING)
        instance.flush(step)
        self._fill_queue("sorted", self.members())
        self.begun = m.CaptureFrom(self.move, instance.applied, instance.time_ms, instance.watermark_ms)
        instance.tell(step, self.begun)
        self.continue_soon(step)

    def use(self, standby: StandbySender) -> None:
        """Do not send what the destination has as a standby, as long as its session lasts."""
        if standby.standby == self.destination and not standby.is_over:
            self._copy = standby

    @property
    def uses_copy(self) -> bool:
        """Whether a chunk that is under way, or is still to be made, may name keys of the copy."""
        return self._copy is not None and self.phase in (
            SourceInstancePhase.CAPTURING,
            SourceInstancePhase.CAPTURED,
        )

    def _fill_queue(self, order: str, keys: list[Key]) -> None:
        slots = self.instance.space.slots
        self.queue = UnitQueue(self.move, order, units_of(self.keys, slots), keys, slots)

    def continue_soon(self, step: Step, pause_ms: float = 0.0) -> None:
        step.timer(Timer(TimerKind.CAPTURE, self.move), step.now_ms + pause_ms)

    @property
    def window_is_full(self) -> bool:
        return len(self.in_flight) >= self.instance.settings.chunks_unacked_max

    def capture_some(self, step: Step) -> None:
        """Send the next few keys; then other work has its turn."""
        queue = self.queue
        if queue is None or not queue or not self.may_send() or self.window_is_full:
            self.pump(step)
            return  # the next receipt continues here
        live = self.phase is SourceInstancePhase.CAPTURING
        while queue and not self.window_is_full:
            rests_on = self.instance.applied if self.last_offset is None else self.last_offset
            self.in_flight.append((self._next_chunk(queue), rests_on))
            if live or self.instance.space.evicted or self.retained_at:
                break  # the driver has read the keys of one chunk
        if not queue and live:
            self.become(step, SourceInstancePhase.CAPTURED)
            self.instance.tell(step, self._captured())
        elif not queue:
            self.instance.tell(step, self._captured())
        elif not self.window_is_full:
            self.continue_soon(step, self.instance.settings.capture_pause_ms if live else 0.0)
        self.pump(step)

    def _captured(self) -> m.Captured:
        return m.Captured(self.move, len(self.captured_at), self.size_bytes, self.next_chunk)

    def may_send(self) -> bool:
        """Rule R32: frozen units leave once the router has logged the cut; live ones while they change."""
        if self.phase is SourceInstancePhase.DRAINED:
            return self.cut_logged or self.stopped is None
        return self.phase in (SourceInstancePhase.CAPTURING, SourceInstancePhase.CAPTURED)

    def _next_chunk(self, queue: UnitQueue) -> m.Chunk:
        """The next keys of the queue, and the units that are whole with them."""
        settings = self.instance.settings
        images: list[StateImage] = []
        whole: list[Unit] = []
        kept: list[Key] = []
        size = sent_before = 0
        while (unit := queue.first()) is not None:
            left = queue.left_of(unit)
            if not images:
                sent_before = len(queue.keys[unit]) - len(left)
            while left and len(images) < settings.chunk_keys_max and size < settings.chunk_bytes_max:
                if images and not self.is_readable(left[-1]) and not self._is_copied(left[-1]):
                    break  # the driver reads it before the next chunk
                key = left.pop()
                if self._is_copied(key):
                    images.append(self._named(key))
                    kept.append(key)
                else:
                    images.append(self.capture(key))
                size += images[-1].size_bytes
            if left:
                break
            queue.ended(unit)
            whole.append(unit)
        self.size_bytes += size
        self.next_chunk += 1
        copy = (*self._copy.session, self._copy.n) if kept and self._copy is not None else None
        return m.Chunk(self.move, self.next_chunk, images, whole, sent_before, kept, copy)

    def _is_copied(self, key: Key) -> bool:
        return self._copy is not None and self._copy.covers(key)

    def _named(self, key: Key) -> StateImage:
        """An image without the state, which the destination has."""
        at, instance = self.captured_offset(), self.instance
        self.captured_at[key] = at
        return StateImage(key, 0, at, None, (), instance.time_ms, instance.watermark_ms)

    def captured_offset(self) -> int:
        """The offset of an image that is captured now: the cut, or else its last processed entry."""
        return self.instance.applied if self.last_offset is None else self.last_offset

    def capture(self, key: Key) -> StateImage:
        """The image of a key with its timers; a deleted key has an image without state."""
        instance = self.instance
        at = self.captured_offset()
        self.captured_at[key] = at
        state = self._retained(key) if key in self.retained_state else instance.space.peek(key)
        frozen = self.last_offset is not None  # then the shadow and Adopt carry its times
        time_ms, watermark_ms = (0, -1) if frozen else (instance.time_ms, instance.watermark_ms)
        if state is None:
            return StateImage(key, 0, at, None, (), time_ms, watermark_ms)
        return state.image(key, at, time_ms, watermark_ms)

    def _retained(self, key: Key) -> KeyState | None:
        state = self.retained_state[key]
        if state is None and key in self.retained_at:
            space, generation = self.instance.space, self.retained_at[key]
            state = space.restored(space.memory_limit.read(key, generation)[0], generation)
        return None if state is None or state.empty else state

    def _place(self, key: Key) -> StorageKey:
        return ("state", slot_of(key, self.instance.space.slots), key, self.retained_at[key])

    def is_readable(self, key: Key) -> bool:
        """Whether the key is in memory, or the driver has read its stored version for this event."""
        if key in self.retained_state:
            in_memory = self.retained_state[key] is not None or key not in self.retained_at
            return in_memory or self._place(key) in self.instance.space.memory_limit.read_ahead
        return self.instance.space.is_readable(key)

    def read_ahead(self) -> Iterator[StorageKey]:
        """The stored versions that the next chunk needs, estimated from the captured keys."""
        if self.queue is None or not self.may_send() or self.window_is_full:
            return
        settings, captured = self.instance.settings, len(self.captured_at)
        count = FIRST_CHUNK_KEYS
        if captured:
            count = settings.chunk_bytes_max // max(1, self.size_bytes // captured) + 1
        for key in self.queue.ahead(min(count, settings.chunk_keys_max)):
            if key in self.retained_state:
                if self.retained_state[key] is None and key in self.retained_at:
                    yield self._place(key)
            elif key in self.instance.space.evicted:
                yield self.instance.space.stored_at(key)

    def pump(self, step: Step) -> None:
        """Send chunks that depend on durable entries only."""
        while self.sent < len(self.in_flight):
            chunk, offset = self.in_flight[self.sent]
            if offset > self.instance.durable:
                return
            step.send(self.destination, chunk)
            self.sent += 1

    def on_receipt(self, step: Step, message: m.UnitReceipt) -> None:
        while self.in_flight and self.in_flight[0][0].n <= message.n:
            self.in_flight.popleft()
            self.sent = max(0, self.sent - 1)
        if message.durable:
            self.release(message.durable)
        if self.queue:
            self.continue_soon(step)
        self.pump(step)

    def release(self, units: Iterable[Unit]) -> None:
        """Rule R33: a unit that is durable at the destination need not be in memory here.

        The stored version stays until Forget, and can be sent again: an older incarnation of the destination
        may have reported the unit. A key that is not stored stays in memory.
        """
        if self.queue is not None and self.phase is SourceInstancePhase.DRAINED:
            for key in [key for unit in units for key in self.queue.keys.get(unit, ())]:
                generation = self.instance.stored_generation(key)
                if self.retained_state.get(key) is not None and generation is not None:
                    self.retained_state[key] = None
                    self.retained_at[key] = generation

    def on_request(self, step: Step, request: m.UnitRequest) -> None:
        """Send these units next, again if the destination has lost them."""
        if self.queue is None:
            return
        if request.in_full:
            self._copy = None
        under_way = {unit for chunk, _ in self.in_flight for unit in chunk.units}
        self.queue.request(unit for unit in request.units if unit not in under_way)
        self.queue.facts.ask(request.units)
        self.continue_soon(step)
        if request.again:
            self.resend(step)

    def on_backlog(self, waiting: dict[Unit, tuple[int, int]]) -> None:
        """Order the units by the rows that wait for them."""
        if self.queue is not None:
            self.queue.facts.waiting.update({unit: Waiting(*facts) for unit, facts in waiting.items()})
            self.queue.reorder()

    def resend(self, step: Step) -> None:
        """Send unacknowledged chunks again, because the connection with the destination is new."""
        self.sent = 0
        self.pump(step)

    def compare(self, step: Step) -> None:
        """Start the digests of the keys as of this entry, which both sides compare."""
        self.digests = DigestJob(self.instance.space, self.touched)
        self.digest_some(step)

    def digest_some(self, step: Step) -> None:
        """Compute the digests of the next few keys; the router gets them when all are computed."""
        if self.digests is not None and self.digests.advance(step, self.move, self.instance.settings):
            self.instance.tell(step, m.Digests(self.move, self.digests.found))

    # -- the flip ----------------------------------------------------------------------------

    def on_decided(self, step: Step, role: m.OutgoingRole) -> None:
        """The move is decided: the router reports it, or a replay reaches its record."""
        self.flip_offset, self.epochs = role.flip_offset, role.epochs
        if role.destination != self.destination:
            self.destination = role.destination  # a successor of the dead one: it requests what it misses
            self.resend(step)
        if STRATEGIES[role.strategy].freezes:
            self._stop_early(step, role)
        elif self.phase is not SourceInstancePhase.DRAINED:
            if role.last_offset is not None:
                self.stop_at(step, -1)  # the router has all of our outputs: process these keys no further
            elif self.instance.applied >= role.flip_offset:
                self.stop_at(step, role.flip_offset)  # the checkpoint is behind the flip, where we stopped
            elif self.phase is not SourceInstancePhase.FLIPPED:
                self.become(step, SourceInstancePhase.FLIPPED)

    def on_flip_record(self, step: Step, role: m.OutgoingRole) -> None:
        """The flip in the log: the destination owns the rows behind it, also before FlipToSource arrives."""
        self.on_decided(step, role)
        if self.phase is SourceInstancePhase.FLIPPED:
            self.stop_at(step, role.flip_offset)

    def on_flip(self, step: Step, role: m.OutgoingRole) -> None:
        """The flip as a message, so that an overloaded source stops at once, at its current offset."""
        self.on_decided(step, role)
        if STRATEGIES[role.strategy].freezes:
            return
        instance = self.instance
        if self.last_offset is None:
            self.stop_at(step, min(instance.applied, self.flip_offset))
        instance.flush(step)
        assert self.last_offset is not None
        keys, size_bytes = len(self.captured_at), self.size_bytes
        instance.tell(step, m.SourceStopped(self.move, self.last_offset, keys, size_bytes))

    # -- flip first: the cut -----------------------------------------------------------------

    def _stop_early(self, step: Step, role: m.OutgoingRole) -> None:
        """Stop the keys where this instance is; in a replay, where the router has logged the cut."""
        if role.last_offset is not None:
            self.cut_logged = True
        if self.phase is SourceInstancePhase.DRAINED:
            if self.cut_logged:
                self.continue_soon(step)
            elif self.stopped is not None:
                self.instance.tell(step, self.stopped)  # before any later output: it may be lost
            return
        if self.phase is SourceInstancePhase.ABSENT:
            self.become(step, SourceInstancePhase.WAITING)
        self._strategy_order = STRATEGIES[role.strategy].order
        self.stop_after = self.earliest_stop(role)
        self.stop_if_reached(step)

    def earliest_stop(self, role: m.OutgoingRole) -> int:
        """Rule R35: the logged cut, or else the last outputs that the router has from this instance."""
        return role.last_offset if role.last_offset is not None else min(role.emitted, role.flip_offset)

    def stop_if_reached(self, step: Step, before: int | None = None) -> None:
        """Stop the keys if every entry up to the cut is processed. `before`: the entry that comes next."""
        if self.phase is not SourceInstancePhase.WAITING:
            return
        applied = self.instance.applied
        if self.cut_logged:
            if applied >= self.stop_after or (before is not None and before > self.stop_after):
                self._freeze(step, self.stop_after)
        elif applied >= self.stop_after:
            self._freeze(step, min(applied, self.flip_offset))
        elif before is not None and before > self.stop_after:
            self._freeze(step, self.stop_after)

    def _freeze(self, step: Step, offset: int) -> None:
        instance = self.instance
        instance.flush(step)
        watermark_ms = instance.watermark_ms
        self.stop_at(step, offset)
        self._fill_queue(self._strategy_order, list(self.retained_state))
        self.continue_soon(step)
        if not self.cut_logged:
            self.stopped = m.SourceStopped(self.move, offset, len(self.retained_state), 0, watermark_ms)
            instance.tell(step, self.stopped)

    def stop_at(self, step: Step, offset: int) -> None:
        """Stop processing rows and timers of these keys: the destination owns them from here on."""
        self.last_offset = offset
        self.become(step, SourceInstancePhase.DRAINED)
        if self._copy is not None:
            self._copy.used(step)
        self.retain()

    def retain(self) -> None:
        """Take the keys out of processing; again if a replay has merged an earlier arrival of them."""
        space = self.instance.space
        members = self.members()
        self.retained_at.update({key: space.evicted[key] for key in members if key in space.evicted})
        self.retained_state.update(space.detach(members))

    def skips(self, offset: int) -> bool:
        """Whether rows of these keys at this offset belong to the destination."""
        return self.last_offset is not None and self.last_offset < offset <= self.flip_offset


def _epoch(space: StateTable, key: Key) -> int:
    state = space.peek(key)
    return 0 if state is None else state.epoch
