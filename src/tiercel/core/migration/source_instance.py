"""The state sender: the source instance's side of a move.

Responsible for: capturing keys between two entries, sending them in small chunks, stopping at the cut.
Not responsible for: the time of the flip (source_router.py), the destination (destination_instance.py).

    CAPTURING --every key--> CAPTURED --FlipToSource--> DRAINED --Forget--> ABSENT    (live)
    WAITING --flip reached--> DRAINED --Forget--> ABSENT                              (flip first)

Its transitions are SOURCE_INSTANCE in phases.py.
"""

from __future__ import annotations

import msgspec

from tiercel.core import messages as m
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.machine.step import Step
from tiercel.core.migration.instance_port import InstancePort
from tiercel.core.migration.phases import SOURCE_INSTANCE, MovePhase, SourceInstancePhase
from tiercel.core.migration.strategies import STRATEGIES, CaptureMode
from tiercel.core.model.keys import Key, KeySet, StateImage
from tiercel.core.model.routing import RouteUpdate, slot_of
from tiercel.core.state.digests import DigestJob
from tiercel.core.state.handle import KeyState
from tiercel.core.state.table import StateTable


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
        self.queue: list[Key] = []
        self.chunks: list[m.Chunk] = []
        self.chunk_at: list[int] = []  # a chunk is sent when the log is durable up to this offset
        self.captured_through = 1 << 60
        self.begun: m.CaptureFrom | None = None  # live: the start of the capture
        self.blocked = False
        self.end_sent = False
        self.sent = 0
        self.received = 0
        self.captured_at: dict[Key, int] = {}
        self.size_bytes = 0
        self.digests: DigestJob | None = None  # as of Compare
        self.retained_state: dict[Key, KeyState | None] = {}  # not processed any more; until Forget
        self.touched: set[Key] = set()  # processed since their capture: the keys to compare

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

    # -- live: capture while processing continues --------------------------------------------

    def start(self, step: Step) -> None:
        """Begin to capture, after sending the outputs of all entries up to here."""
        instance = self.instance
        self.become(step, SourceInstancePhase.CAPTURING)
        instance.flush(step)
        self.queue = self.members()
        self.queue.reverse()
        self.begun = m.CaptureFrom(self.move, instance.applied, instance.time_ms, instance.watermark_ms)
        instance.tell(step, self.begun)
        step.timer(Timer(TimerKind.CAPTURE, self.move), step.now_ms)

    def capture_some(self, step: Step) -> None:
        """Capture the next few keys in their current state; then other work has its turn."""
        if self.phase is not SourceInstancePhase.CAPTURING:
            return
        settings = self.instance.settings
        self.blocked = self.sent - self.received >= settings.chunks_unacked_max
        if self.blocked:
            return  # the next receipt continues here
        images = self.capture_next()
        if images:
            self.add_chunk(images)
            self.size_bytes += sum(image.size_bytes for image in images)
        if self.queue:
            step.timer(Timer(TimerKind.CAPTURE, self.move), step.now_ms + settings.capture_pause_ms)
        else:
            self.become(step, SourceInstancePhase.CAPTURED)
            self.captured_through = self.instance.applied
            self.instance.tell(step, m.Captured(self.move, len(self.captured_at), self.size_bytes))
        self.pump(step)

    def capture_next(self) -> list[StateImage]:
        """The images of the next keys, including deleted keys, whose image has no state."""
        settings, space = self.instance.settings, self.instance.space
        images: list[StateImage] = []
        size = 0
        while self.queue and len(images) < settings.chunk_keys_max and size < settings.chunk_bytes_max:
            if images and not space.is_readable(self.queue[-1]):
                break  # the driver reads it before the next chunk
            images.append(self.capture(self.queue.pop()))
            size += images[-1].size_bytes
        return images

    def captured_offset(self) -> int:
        """The offset of an image that is captured now: its last processed entry."""
        return self.instance.applied

    def capture(self, key: Key) -> StateImage:
        """The image of a key in its current state, with its timers."""
        instance = self.instance
        at = self.captured_offset()
        self.captured_at[key] = at
        state = instance.space.peek(key)
        if state is None:
            return StateImage(key, 0, at, None, (), instance.time_ms, instance.watermark_ms)
        return state.image(key, at, instance.time_ms, instance.watermark_ms)

    def add_chunk(self, images: list[StateImage]) -> None:
        self.chunks.append(m.Chunk(self.move, len(self.chunks), images))
        self.chunk_at.append(self.instance.applied)

    def pump(self, step: Step) -> None:
        """Send chunks that depend on durable entries only, a bounded number ahead of the receipts."""
        settings = self.instance.settings
        while self.sent < len(self.chunks) and self.sent - self.received < settings.chunks_unacked_max:
            if self.chunk_at[self.sent] > self.instance.durable:
                return
            step.send(self.destination, self.chunks[self.sent])
            self.sent += 1
        if self.captured_through > self.instance.durable:
            return  # EndOfKeys must depend on durable entries only, too
        if self.sent == len(self.chunks) and not self.end_sent:
            self.end_sent = True
            step.send(self.destination, m.EndOfKeys(self.move, len(self.chunks)))

    def on_receipt(self, step: Step, message: m.ChunkReceipt) -> None:
        self.received = max(self.received, message.upto)
        if self.phase is SourceInstancePhase.CAPTURING and self.blocked:
            self.capture_some(step)
        else:
            self.pump(step)

    def resend(self, step: Step) -> None:
        """Send unacknowledged chunks again, because the connection with the destination is new."""
        self.sent = self.received
        self.end_sent = False
        self.pump(step)

    def on_restart_transfer(self, step: Step) -> None:
        """Send all chunks again, because the destination has lost them."""
        self.received = self.sent = 0
        self.end_sent = False
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
        reached = self.instance.applied >= role.flip_offset
        if STRATEGIES[role.strategy].captures is CaptureMode.FROZEN:
            if self.phase is SourceInstancePhase.ABSENT:
                self.become(step, SourceInstancePhase.WAITING)
            if self.phase is SourceInstancePhase.WAITING and reached:
                self.capture_all(step)
        elif self.phase is not SourceInstancePhase.DRAINED:
            if role.last_offset is not None:
                self.stop_at(step, -1)  # the router has all of our outputs: process these keys no further
            elif reached:
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
        instance = self.instance
        if self.phase is SourceInstancePhase.WAITING:
            return  # flip first: the state must be as of the flip, not earlier
        if self.last_offset is None:
            self.stop_at(step, min(instance.applied, self.flip_offset))
        instance.flush(step)
        instance.tell(step, self.source_stopped_message())

    def capture_all(self, step: Step) -> None:
        """Flip first: capture all keys, which no longer change after the flip."""
        instance = self.instance
        members = self.members()
        images: list[StateImage] = []
        size = 0
        for key in members:
            image = self.capture(key)  # as of the flip: our clock has advanced, Adopt carries theirs
            images.append(msgspec.structs.replace(image, at=self.flip_offset, time_ms=0, watermark_ms=-1))
            size += images[-1].size_bytes
            self.size_bytes += images[-1].size_bytes
            if len(images) >= instance.settings.chunk_keys_max or size >= instance.settings.chunk_bytes_max:
                self.add_chunk(images)
                images, size = [], 0
        if images:
            self.add_chunk(images)
        self.captured_through = instance.applied
        self.stop_at(step, self.flip_offset)
        instance.flush(step)
        instance.tell(step, self.source_stopped_message())
        self.pump(step)

    def source_stopped_message(self) -> m.SourceStopped:
        assert self.last_offset is not None
        return m.SourceStopped(self.move, self.last_offset, len(self.captured_at), self.size_bytes)

    def stop_at(self, step: Step, offset: int) -> None:
        """Stop processing rows and timers of these keys: the destination owns them from here on."""
        self.last_offset = offset
        self.become(step, SourceInstancePhase.DRAINED)
        self.retain()

    def retain(self) -> None:
        """Take the keys out of processing; again if a replay has merged an earlier arrival of them."""
        space = self.instance.space
        self.retained_state.update(space.detach(self.members()))

    def skips(self, offset: int) -> bool:
        """Whether rows of these keys at this offset belong to the destination."""
        return self.last_offset is not None and self.last_offset < offset <= self.flip_offset


def _epoch(space: StateTable, key: Key) -> int:
    state = space.peek(key)
    return 0 if state is None else state.epoch
