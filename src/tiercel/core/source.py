"""The sending side of a move, in the source instance.

Responsible for: capturing keys one by one between two entries, sending them in small chunks, the cut.
Not responsible for: when the move flips (departures.py), what the destination does (destination.py).

    CAPTURING --every key--> CAPTURED --FlipNotice--> DRAINED --Forget--> gone        (live)
    WAITING --applied the flip--> CAPTURED/DRAINED --Forget--> gone              (flip first)
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from tiercel.core import messages as m
from tiercel.core.keyed import KeyState
from tiercel.core.records import Key, KeyImage, KeySet, TableUpdate
from tiercel.core.routing import slot_of
from tiercel.core.snapshots import Digests
from tiercel.core.step import Step

if TYPE_CHECKING:
    from tiercel.core.keyspace import KeySpace
    from tiercel.core.processing import Processing


class Phase(enum.Enum):
    """Where it is; what each phase means stands beside it."""

    CAPTURING = "capturing"  # keys are captured a few at a time; everything goes on
    CAPTURED = "captured"  # every key was captured; still processing and emitting
    WAITING = "waiting"  # flip first: not yet at the flip
    DRAINED = "drained"  # emits nothing above the cut; keeps the keys until told to forget


class SourceMove:
    """One key set on its way out of this instance."""

    def __init__(self, instance: Processing, move: str, keys: KeySet, destination: str, phase: Phase) -> None:
        self.instance = instance
        self.move = move
        self.keys = keys
        self.destination = destination
        self.phase = phase
        self.begin_offset = 0
        self.flip_offset = -1
        self.cut: int | None = None
        self.epochs: TableUpdate | None = None  # of the keys before the flip, once it is decided
        self.queue: list[Key] = []
        self.chunks: list[m.Chunk] = []
        self.chunk_at: list[int] = []  # a chunk leaves when the log is durable up to here
        self.captured_through = 1 << 60
        self.begun: m.CaptureFrom | None = None  # live: where it began
        self.blocked = False
        self.end_told = False
        self.sent = 0
        self.received = 0
        self.captured_at: dict[Key, int] = {}
        self.size_bytes = 0
        self.digests: Digests | None = None  # as of Compare
        self.retained: dict[Key, KeyState | None] = {}  # out of processing, kept until told to forget
        self.touched: set[Key] = set()  # processed since captured: what the digests compare

    def has(self, key: Key) -> bool:
        return self.keys.has(key, slot_of(key, self.instance.space.slots) if self.keys.slots else -1)

    def members(self) -> list[Key]:
        """The keys of this move that have state here, as they were before the flip.

        A key that left and has come back meanwhile has a newer epoch: that copy is not this move's.
        """
        space = self.instance.space
        found = space.members(self.keys.slots, self.keys.keys)
        if self.epochs is None:
            return found
        routes = self.epochs
        old = [routes.keys.get(k) or routes.slots.get(slot_of(k, space.slots)) for k in found]
        return [
            k for k, route in zip(found, old, strict=True) if route is None or _epoch(space, k) <= route.epoch
        ]

    # -- live: capture while everything goes on ----------------------------------------------

    def start(self, step: Step) -> None:
        instance = self.instance
        self.queue = self.members()
        self.queue.reverse()
        self.begun = m.CaptureFrom(self.move, instance.applied, instance.time_ms, instance.watermark_ms)
        instance.tell(step, self.begun)
        step.timer(f"capture|{self.move}", step.now_ms)

    def capture_some(self, step: Step) -> None:
        """The next few keys, each as it is now; then everyone else has a turn."""
        if self.phase is not Phase.CAPTURING:
            return
        settings = self.instance.settings
        self.blocked = self.sent - self.received >= settings.chunks_unacked_max
        if self.blocked:
            return  # the receipt brings us back here
        images: list[KeyImage] = []
        size = 0
        while self.queue and len(images) < settings.chunk_keys_max and size < settings.chunk_bytes_max:
            image = self.capture(self.queue.pop())
            if image.values is None and settings.mutant == "deleted-keys-not-told":
                continue
            images.append(image)
            size += image.size_bytes
        if images:
            self.add_chunk(images)
            self.size_bytes += size
        if self.queue:
            step.timer(f"capture|{self.move}", step.now_ms + settings.capture_pause_ms)
        else:
            self.phase = Phase.CAPTURED
            self.captured_through = self.instance.applied
            self.instance.tell(step, m.Captured(self.move, len(self.captured_at), self.size_bytes))
        self.pump(step)

    def capture(self, key: Key) -> KeyImage:
        instance = self.instance
        at = instance.applied
        if instance.settings.mutant in ("capture-offset-too-low", "digests-not-compared"):
            at -= 1
        elif instance.settings.mutant == "capture-offset-too-high":
            at += 1
        self.captured_at[key] = at
        state = instance.space.peek(key)
        if state is None:
            return KeyImage(key, 0, at, None, (), instance.time_ms, instance.watermark_ms)
        image = state.image(key, at, instance.time_ms, instance.watermark_ms)
        if instance.settings.mutant == "timers-not-moved":
            image = KeyImage(key, image.epoch, at, image.values, (), image.time_ms, image.watermark_ms)
        return image

    def add_chunk(self, images: list[KeyImage]) -> None:
        self.chunks.append(m.Chunk(self.move, len(self.chunks), images))
        self.chunk_at.append(self.instance.applied)

    def pump(self, step: Step) -> None:
        """Send what rests on durable entries only, a bounded number ahead of the receipts."""
        settings = self.instance.settings
        while self.sent < len(self.chunks) and self.sent - self.received < settings.chunks_unacked_max:
            if self.chunk_at[self.sent] > self.instance.durable:
                return
            step.send(self.destination, self.chunks[self.sent])
            self.sent += 1
        if self.captured_through > self.instance.durable:
            return  # also that there is nothing (more) to send may rest on durable entries only
        done = self.sent == len(self.chunks) and self.phase in (Phase.CAPTURED, Phase.DRAINED)
        if done and not self.end_told:
            self.end_told = True
            step.send(self.destination, m.EndOfKeys(self.move, len(self.chunks)))

    def on_receipt(self, step: Step, message: m.ChunkReceipt) -> None:
        self.received = max(self.received, message.upto)
        if self.phase is Phase.CAPTURING and self.blocked:
            self.capture_some(step)
        else:
            self.pump(step)

    def resend(self, step: Step) -> None:
        """The connection with the destination is new: what it has not acknowledged goes again."""
        self.sent = self.received
        self.end_told = False
        self.pump(step)

    def on_fetch(self, step: Step) -> None:
        """The destination starts over: it has nothing."""
        if self.phase in (Phase.CAPTURED, Phase.DRAINED):
            self.received = self.sent = 0
            self.end_told = False
            self.pump(step)

    def compare(self, step: Step) -> None:
        """What both sides must agree upon: the keys as they are at this entry."""
        self.digests = Digests(self.instance.space, self.touched)
        self.instance.digest_some(step, self.move)

    # -- the flip ----------------------------------------------------------------------------

    def on_flip(self, step: Step) -> None:
        """Out of band, so that an overloaded source lets go at once: stop here, wherever that is."""
        instance = self.instance
        if self.phase is Phase.WAITING:
            return  # flip first: the state is wanted as of the flip, no earlier
        if self.cut is None:
            self.stop_at(min(instance.applied, self.flip_offset))
        instance.flush(step)
        instance.tell(step, self.last_word())

    def capture_all(self, step: Step) -> None:
        """Flip first: the keys are as they were at the flip, and stay so."""
        instance = self.instance
        members = self.members()
        images: list[KeyImage] = []
        size = 0
        for key in members:
            image = self.capture(key)  # as of the flip: our own clock has gone on, Adopt brings theirs
            images.append(msgspec.structs.replace(image, at=self.flip_offset, time_ms=0, watermark_ms=-1))
            size += images[-1].size_bytes
            self.size_bytes += images[-1].size_bytes
            if len(images) >= instance.settings.chunk_keys_max or size >= instance.settings.chunk_bytes_max:
                self.add_chunk(images)
                images, size = [], 0
        if images:
            self.add_chunk(images)
        self.captured_through = instance.applied
        self.stop_at(self.flip_offset)
        instance.flush(step)
        instance.tell(step, self.last_word())
        self.pump(step)

    def last_word(self) -> m.Cut:
        assert self.cut is not None
        return m.Cut(self.move, self.cut, len(self.captured_at), self.size_bytes)

    def stop_at(self, offset: int) -> None:
        """From here on the keys are somebody else's: no row, no timer of theirs is processed here."""
        self.cut = offset
        self.phase = Phase.DRAINED
        self.retain()
        space = self.instance.space
        if self.instance.settings.mutant == "source-forgets-early":
            space.dirty.update(dict.fromkeys(self.retained))
            self.retained = {}

    def retain(self) -> None:
        """Take the keys out of processing; again after an arrival of theirs has merged in a replay."""
        space = self.instance.space
        self.retained.update(space.detach(self.members()))

    def skips(self, offset: int) -> bool:
        """Whether rows of these keys at this offset belong to the destination."""
        return self.cut is not None and self.cut < offset <= self.flip_offset


def _epoch(space: KeySpace, key: Key) -> int:
    state = space.peek(key)
    return 0 if state is None else state.epoch
