"""The two ends of a router: output logs that subscribers read, and fixed producers it de-duplicates.

Responsible for: what a subscriber may see (only what is durable, in order), what a producer has sent.
Not responsible for: what is in a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tiercel.core import messages as m
from tiercel.core.records import Output, StreamEntry
from tiercel.core.settings import Settings
from tiercel.core.step import Step


class Reading:
    """One subscriber: what it was sent, what it has consumed."""

    __slots__ = ("consumed", "reading", "sent")

    def __init__(self, after: int) -> None:
        self.sent = after
        self.consumed = after
        self.reading = False


class StreamLog:
    """A stream's output log at its home site. Only its tail is in memory; older entries are read."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.offset = 0
        self.tail: dict[int, StreamEntry] = {}
        self.received: dict[str, int] = {}  # lane of a site -> last frame appended
        self.subscribers: dict[str, Reading] = {}
        self._over: dict[str, int] = {}  # subscriber -> answers to come for subscriptions that are over
        self.visible = 0
        self._unsynced: deque[tuple[int, int]] = deque()  # (write, offset)
        self._new = False

    @property
    def first(self) -> int:
        """The oldest entry that is kept."""
        return max(1, self.offset - self.settings.stream_entries_max + 1)

    def append(self, step: Step, outputs: Sequence[Output]) -> None:
        self.offset += 1
        entry = StreamEntry(self.offset, outputs)
        self.tail[self.offset] = entry
        self._new = True
        step.put(("inbox", self.name, self.offset), entry)
        step.put(("stream_head", self.name), self.offset)
        self.tail.pop(self.offset - self.settings.stream_tail_max, None)
        if self.offset > self.settings.stream_entries_max:
            step.delete(("inbox", self.name, self.offset - self.settings.stream_entries_max))

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

    def subscribe(self, step: Step, subscriber: str, after: int) -> None:
        self.unsubscribe(subscriber)
        self.subscribers[subscriber] = Reading(after)
        self.publish(step, subscriber)

    def consumed(self, step: Step, subscriber: str, offset: int) -> None:
        reading = self.subscribers.get(subscriber)
        if reading is not None:
            reading.consumed = max(reading.consumed, offset)
            self.publish(step, subscriber)

    def unsubscribe(self, subscriber: str) -> None:
        reading = self.subscribers.pop(subscriber, None)
        if reading is not None and reading.reading:
            self._over[subscriber] = self._over.get(subscriber, 0) + 1

    def publish(self, step: Step, subscriber: str) -> None:
        """What is durable and within the subscriber's credit; from memory, or read if it is older."""
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
        if subscriber in self._over:  # answers come in the order of the questions
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


class Producers:
    """Fixed producers of this site: one gap-free sequence each, for life."""

    def __init__(self) -> None:
        self.marks: dict[str, int] = {}
        self.lives: dict[str, str] = {}  # who has each name, by what it called itself

    def accept(self, step: Step, producer: str, seq: int, mutant: str = "") -> bool:
        """Whether this frame is the next one. A known one is acknowledged again, a gap is left open."""
        last = self.marks.get(producer, 0)
        if seq != last + 1 and not (mutant == "producer-dedup-lost" and seq > last):
            return False
        self.marks[producer] = seq
        step.put(("producer", producer), seq)
        return True

    def acknowledge(
        self, step: Step, to: str, producer: str, *, early: bool = False, greets: str | None = None
    ) -> None:
        send = step.send if early else step.send_durable
        send(to, m.ProducerMark(producer, self.marks.get(producer, 0), greets))

    def hello(self, step: Step, to: str, hello: m.Hello) -> None:
        """The latest program of a name has it. Numbers alone would not tell two programs apart."""
        life = self.lives.get(hello.producer, "")
        if hello.again and life not in ("", hello.life):
            step.send_durable(to, m.ProducerFenced(hello.producer))
            return
        if hello.life != life:
            self.lives[hello.producer] = hello.life
            step.put(("producer_life", hello.producer), hello.life)
        self.acknowledge(step, to, hello.producer, greets=hello.life)
