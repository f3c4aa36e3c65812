"""The standby: an instance that holds a copy of another one's keys, so that a move need not send them.

Responsible for: which keys the source still has to send, the copy at the standby, and when a key of the copy
    may be used.
Not responsible for: the move (source_instance.py, destination_instance.py), who is whose standby
    (coordinator.py).

    source --Increment(session, 1, keys) ... Increment(session, n, changed keys)--> standby
    source --Chunk(images; keys of the copy by name)-->                             standby, as destination

The source sends a key again after the checkpoint that holds its change. A session ends with the incarnation,
with its connection, and when an increment is missing; then the next session sends everything. A copy is in
memory only, and only a hint: a key that is not in it travels as in any other move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from tiercel.core import messages as m
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.machine.step import Step
from tiercel.core.migration.instance_port import InstancePort
from tiercel.core.model.keys import Key, StateImage

Session = tuple[int, int]  # incarnation of the source, number of the session in it
LOST = -1  # in a receipt: an increment before this one is missing


class StandbySender:
    """The increments of one instance for its standby."""

    def __init__(
        self, instance: InstancePort, standby: str, session: int, is_used: Callable[[], bool]
    ) -> None:
        self.instance = instance
        self.standby = standby
        self.session: Session = (instance.incarnation, session)
        self.n = 0  # increments sent
        self.received = 0
        self.is_over = False  # the connection is another one, or an increment was lost
        self._is_used = is_used
        self._rests_until_ms = 0.0
        self.unsent: dict[Key, None] = dict.fromkeys(instance.space.all_keys())

    def covers(self, key: Key) -> bool:
        """Whether the standby has this key as it is now."""
        space = self.instance.space
        return not self.is_over and self.is_unchanged(key) and space.has(key)

    def is_unchanged(self, key: Key) -> bool:
        """Rule R40: a key has not changed since the standby got it."""
        return key not in self.unsent and key not in self.instance.space.dirty

    def is_paused(self) -> bool:
        """Whether a move uses the copy: a copy that changed would not be the one that the move names."""
        return self._is_used()

    def used(self, step: Step) -> None:
        """A move has used the copy. The next part of the same move may follow soon: rest until then."""
        self._rests_until_ms = step.now_ms + self.instance.settings.retry_ms
        self.continue_soon(step)

    def changed(self, step: Step, keys: Iterable[Key]) -> None:
        """A checkpoint has taken these keys."""
        self.unsent.update(dict.fromkeys(keys))
        self.continue_soon(step)

    def continue_soon(self, step: Step, pause_ms: float = 0.0) -> None:
        if self.unsent:
            step.timer(Timer(TimerKind.STANDBY), max(step.now_ms + pause_ms, self._rests_until_ms))

    def send_some(self, step: Step) -> None:
        """Send the next few keys; then other work has its turn."""
        settings, space = self.instance.settings, self.instance.space
        window_is_full = self.n - self.received >= settings.chunks_unacked_max
        if self.is_over or window_is_full or not self.unsent or self.is_paused():
            return
        if step.now_ms < self._rests_until_ms:
            self.continue_soon(step)
            return
        images: list[StateImage] = []
        size = 0
        for key in list(self._ahead()):
            if (images and size >= settings.chunk_bytes_max) or not space.is_readable(key):
                break
            del self.unsent[key]
            images.append(self._image(key))
            size += images[-1].size_bytes
        if images:
            self.n += 1
            step.send(self.standby, m.Increment(self.instance.name, self.session, self.n, images))
        self.continue_soon(step, settings.capture_pause_ms)  # most of a core stays free

    def _image(self, key: Key) -> StateImage:
        state = self.instance.space.peek(key)
        if state is None:
            return StateImage(key, 0, self.instance.applied, None)
        return state.image(key, self.instance.applied, 0, -1)

    def _ahead(self) -> Iterator[Key]:
        for n, key in enumerate(self.unsent):
            if n == self.instance.settings.chunk_keys_max:
                return
            yield key

    def read_ahead(self) -> list[StorageKey]:
        """The stored versions that the next increment needs."""
        space = self.instance.space
        return [space.stored_at(key) for key in self._ahead() if key in space.evicted]

    def on_receipt(self, step: Step, receipt: m.IncrementReceipt) -> None:
        if receipt.session == self.session:
            self.is_over = self.is_over or receipt.n == LOST
            self.received = max(self.received, receipt.n)
            self.continue_soon(step)


class StandbyCopy:
    """What a standby has of one instance's keys, in one session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.n = 0
        self.images: dict[Key, StateImage] = {}

    def has_all_before(self, n: int) -> bool:
        """Rule R40: a copy is the sum of all increments of its session; one may be lost."""
        return n <= self.n + 1

    def take(self, increment: m.Increment) -> None:
        self.n = increment.n
        for image in increment.images:
            if image.values is None and not image.timers:
                self.images.pop(image.key, None)
            else:
                self.images[image.key] = image

    def is_of(self, chunk: m.Chunk) -> bool:
        """Rule R40: a key counts as of the session and the increments that the source names."""
        return chunk.copy == (*self.session, self.n)

    def completed(self, chunk: m.Chunk) -> m.Chunk | None:
        """The chunk with the state of the keys that it only names; None if the copy does not have them."""
        kept = set(chunk.kept)
        if not self.is_of(chunk) or not kept <= self.images.keys():
            return None
        images = [self._complete(image) if image.key in kept else image for image in chunk.images]
        return msgspec.structs.replace(chunk, images=images, kept=())

    def _complete(self, named: StateImage) -> StateImage:
        """The state of the copy, as of the offset and times at which the source named the key."""
        copied = self.images[named.key]
        return msgspec.structs.replace(named, values=copied.values, timers=copied.timers)


class StandbyCopies:
    """The copies that an instance holds as a standby."""

    def __init__(self) -> None:
        self._copies: dict[str, StandbyCopy] = {}  # by source

    @property
    def keys(self) -> int:
        return sum(len(copy.images) for copy in self._copies.values())

    def on_increment(self, step: Step, increment: m.Increment) -> None:
        copy = self._copies.get(increment.source)
        if increment.n == 1 and (copy is None or increment.session > copy.session):
            copy = self._copies[increment.source] = StandbyCopy(increment.session)
        n = increment.n
        if copy is None or increment.session != copy.session or not copy.has_all_before(n):
            n = LOST
        elif n > copy.n:
            copy.take(increment)
        step.send(increment.source, m.IncrementReceipt(increment.session, n))

    def completed(self, source: str, chunk: m.Chunk) -> m.Chunk | None:
        """A chunk with all its state; None if its source must send it again, without the copy."""
        if not chunk.kept:
            return chunk
        copy = self._copies.get(source)
        return None if copy is None else copy.completed(chunk)
