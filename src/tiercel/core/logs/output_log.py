"""The output log of a stream, at its home site.

Responsible for: publishing durable entries to subscribers, in order and within their credit; trimming;
    holding outputs until those of another site that come before them have arrived.
Not responsible for: the contents of a row, producers (producers.py).

When keys move between sites, the destination emits at once. Its frames carry a fence: they come behind a
frame of the source's site. If that has not arrived, the home holds them until it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from tiercel.core import messages as m
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import HeldOutputs
from tiercel.core.model.log import Output, OutputFence, StreamEntry
from tiercel.core.settings import Settings

TABLES = ("stream_head", "stream_trimmed", "subscription", "received", "held_outputs")


class SubscriberCursor:
    """The sent and consumed positions of one subscriber."""

    __slots__ = ("consumed", "reading", "sent", "subscription")

    def __init__(self, after: int, subscription: str) -> None:
        self.sent = after
        self.consumed = after
        self.subscription = subscription  # its name, if it is a durable one
        self.reading = False


class OutputLog:
    """A stream's output log at its home site. Only its tail is in memory; older entries are in storage."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.offset = 0
        self.trimmed = 0  # entries up to here are deleted
        self.marks: dict[str, int] = {}  # named subscription -> entries up to here are processed
        self._unstored_marks: set[str] = set()
        self.tail: dict[int, StreamEntry] = {}
        self.received: dict[str, int] = {}  # origin of frames -> last frame appended or held
        self.held: dict[int, HeldOutputs] = {}  # in the order of their arrival
        self.subscribers: dict[str, SubscriberCursor] = {}
        self._asking: dict[str, m.RangeQuery] = {}  # peers that wait for an entry
        self._over: dict[str, int] = {}  # subscriber -> reads in flight for ended subscriptions
        self.visible = 0
        self._unsynced: deque[tuple[int, int]] = deque()  # (write, offset)
        self._new = False

    def load(self, key: StorageKey, value: Any) -> None:
        """Load the stored ends of the log, a named subscription, a site's last frame, or held outputs."""
        match key:
            case ("stream_head", _):
                self.offset = self.visible = value
            case ("stream_trimmed", _):
                self.trimmed = value
            case ("subscription", _, name):
                self.marks[name] = value
            case ("received", _, origin):
                self.received[origin] = value
            case ("held_outputs", _, number):
                self.recover_held(number, value)
            case _:
                raise KeyError(key)

    def is_next(self, origin: str, n: int) -> bool:
        """Whether a frame with outputs follows the last one. A new storage may begin with any number."""
        last = self.received.get(origin)
        return last is None or n == last + 1

    # -- fences --------------------------------------------------------------------------------

    def recover_held(self, number: int, held: HeldOutputs) -> None:
        """Rule R10: a restarted home still holds what waits for another site."""
        self.held[number] = held

    def must_hold(self, after: OutputFence) -> bool:
        """Rule R10: outputs of moved keys wait for those that the source's site has sent before."""
        if any(after.is_replaced_by(origin) for origin in self.received):
            return False
        arrived = self.received.get(after.origin, 0) >= after.n
        return not arrived or any(h.origin == after.origin and h.n <= after.n for h in self.held.values())

    def append_or_hold(self, step: Step, held: HeldOutputs) -> None:
        """Append outputs behind their fence, or hold them until what comes before has arrived."""
        if not self.must_hold(held.after):
            self.append(step, held.outputs)
            return
        number = max(self.held, default=0) + 1
        self.held[number] = held
        step.put(("held_outputs", self.name, number), held)

    def holds(self, origin: str, n: int) -> bool:
        """Whether the outputs of this frame are held."""
        return any(held.origin == origin and held.n == n for held in self.held.values())

    def release(self, step: Step) -> list[HeldOutputs]:
        """Append what need not wait any longer; returns it."""
        released: list[HeldOutputs] = []
        while ready := [number for number, held in self.held.items() if not self.must_hold(held.after)]:
            for number in ready:
                held = self.held.pop(number)
                step.delete(("held_outputs", self.name, number))
                self.append(step, held.outputs)
                released.append(held)
        return released

    @property
    def first(self) -> int:
        """The offset of the oldest retained entry."""
        return self.trimmed + 1

    @property
    def is_new(self) -> bool:
        """Whether this step has appended an entry."""
        return self._new

    @property
    def is_congested(self) -> bool:
        """Whether producers must wait for a named subscription that lags."""
        kept_max = self.settings.stream_entries_max + self.settings.subscription_entries_max
        return self._holds() and self.offset - min(self.marks.values()) > kept_max

    def _holds(self) -> bool:
        return bool(self.marks) and self.settings.subscription_entries_max > 0

    def trim_point(self) -> int:
        """The offset up to which no entry is kept: neither by number, nor for a named subscription."""
        point = self.offset - self.settings.stream_entries_max
        return min(point, *self.marks.values()) if self._holds() else point

    def append(self, step: Step, outputs: Sequence[Output]) -> None:
        self.offset += 1
        entry = StreamEntry(self.offset, outputs)
        self.tail[self.offset] = entry
        self._new = True
        step.put(("inbox", self.name, self.offset), entry)
        step.put(("stream_head", self.name), self.offset)
        self.tail.pop(self.offset - self.settings.stream_tail_max, None)
        point = min(self.trim_point(), self.trimmed + self.settings.trim_entries_max)
        if point > self.trimmed:
            for offset in range(self.trimmed + 1, point + 1):
                step.delete(("inbox", self.name, offset))
            self.trimmed = point
            step.put(("stream_trimmed", self.name), point)
        if self._unstored_marks:
            for name in sorted(self._unstored_marks):
                step.put(("subscription", self.name, name), self.marks[name])
            self._unstored_marks.clear()

    def written(self, seq: int) -> None:
        if self._new:
            self._new = False
            self._unsynced.append((seq, self.offset))

    def durable(self, step: Step, seq: int) -> None:
        unsynced = self._unsynced
        if not unsynced:
            return
        while unsynced and unsynced[0][0] <= seq:
            self.visible = unsynced.popleft()[1]
        for subscriber in self.subscribers:
            self.publish(step, subscriber)
        if self._asking:
            for peer, query in list(self._asking.items()):
                self.asked(step, peer, query)

    def asked(self, step: Step, peer: str, query: m.RangeQuery) -> None:
        """Answer with the entries that can be read, once there is one that the peer does not know."""
        if self.visible > query.beyond:
            self._asking.pop(peer, None)
            mark = self.marks.get(query.subscription, -1)
            step.send(peer, m.RangeReply(self.name, self.first, self.visible, mark))
        else:
            self._asking[peer] = query

    def disconnected(self, peer: str) -> None:
        self.unsubscribe(peer)
        self._asking.pop(peer, None)

    def subscribe(self, step: Step, subscriber: str, message: m.Subscribe) -> None:
        self.unsubscribe(subscriber)
        name = message.subscription
        self.subscribers[subscriber] = SubscriberCursor(message.after, name)
        if name and name not in self.marks:
            self.marks[name] = message.after
            step.put(("subscription", self.name, name), message.after)
        self.publish(step, subscriber)

    def end_subscription(self, step: Step, name: str) -> None:
        """Keep nothing for a named subscription any more."""
        if self.marks.pop(name, None) is not None:
            self._unstored_marks.discard(name)
            step.delete(("subscription", self.name, name))

    def consumed(self, step: Step, subscriber: str, message: m.Consumed) -> None:
        reading = self.subscribers.get(subscriber)
        if reading is not None:
            reading.consumed = max(reading.consumed, message.offset)
            name = reading.subscription
            if message.processed > self.marks.get(name, message.processed):
                self.marks[name] = message.processed
                self._unstored_marks.add(name)  # the next entry stores it: an older mark only keeps more
            self.publish(step, subscriber)

    def unsubscribe(self, subscriber: str) -> None:
        reading = self.subscribers.pop(subscriber, None)
        if reading is not None and reading.reading:
            self._over[subscriber] = self._over.get(subscriber, 0) + 1

    def publish(self, step: Step, subscriber: str) -> None:
        """Send durable entries within the subscriber's credit, from memory or, if older, from storage."""
        reading = self.subscribers[subscriber]
        last = min(self.visible, reading.consumed + self.settings.publish_entries_max)
        if reading.sent >= last or reading.reading:
            return
        if reading.sent + 1 in self.tail:
            entries = [self.tail[o] for o in range(reading.sent + 1, last + 1)]
            reading.sent = last
            step.send(subscriber, m.Publish(self.name, entries))
        else:
            reading.reading = True
            step.read_log(self.name, reading.sent, last - reading.sent, subscriber)

    def on_read(self, step: Step, subscriber: str, entries: list[StreamEntry]) -> None:
        if subscriber in self._over:  # answers arrive in the order of the reads
            self._over[subscriber] -= 1
            if not self._over[subscriber]:
                del self._over[subscriber]
            return
        reading = self.subscribers.get(subscriber)
        if reading is None or not reading.reading:
            return
        reading.reading = False
        wanted = [e for e in entries if reading.sent < e.offset <= self.visible]
        if wanted:
            reading.sent = wanted[-1].offset
            step.send(subscriber, m.Publish(self.name, wanted))
