"""The two ends of a router: output logs that subscribers read, and fixed producers it de-duplicates.

Responsible for: what a subscriber may see (only what is durable, in order), what a producer has sent.
Not responsible for: what is in a row.
"""

from __future__ import annotations

from collections import deque

from tiercel.core import messages as m
from tiercel.core.records import Output, StreamEntry
from tiercel.core.step import Step


class StreamLog:
    """A stream's output log at its home site."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.offset = 0
        self.entries: dict[int, StreamEntry] = {}
        self.received: dict[str, int] = {}  # lane of a site -> last frame appended
        self.subscribers: dict[str, int] = {}  # -> last offset sent
        self.visible = 0
        self._unsynced: deque[tuple[int, int]] = deque()  # (write, offset)
        self._new = False

    def append(self, step: Step, outputs: list[Output]) -> None:
        self.offset += 1
        entry = StreamEntry(self.offset, outputs)
        self.entries[self.offset] = entry
        self._new = True
        step.put(("stream", self.name, self.offset), entry)

    def written(self, seq: int) -> None:
        if self._new:
            self._new = False
            self._unsynced.append((seq, self.offset))

    def durable(self, step: Step, seq: int) -> None:
        unsynced = self._unsynced
        while unsynced and unsynced[0][0] <= seq:
            self.visible = unsynced.popleft()[1]
        for subscriber in self.subscribers:
            self._publish(step, subscriber)

    def subscribe(self, step: Step, subscriber: str, after: int) -> None:
        self.subscribers[subscriber] = after
        self._publish(step, subscriber)

    def unsubscribe(self, subscriber: str) -> None:
        self.subscribers.pop(subscriber, None)

    def _publish(self, step: Step, subscriber: str) -> None:
        sent = self.subscribers[subscriber]
        if sent < self.visible:
            entries = [self.entries[o] for o in range(sent + 1, self.visible + 1)]
            self.subscribers[subscriber] = self.visible
            step.send(subscriber, m.Publish(self.name, entries))


class Producers:
    """Fixed producers of this site: one gap-free sequence each, for life."""

    def __init__(self) -> None:
        self.marks: dict[str, int] = {}

    def accept(self, step: Step, producer: str, seq: int) -> bool:
        """Whether this frame is the next one. A known one is acknowledged again, a gap is left open."""
        last = self.marks.get(producer, 0)
        if seq != last + 1:
            return False
        self.marks[producer] = seq
        step.put(("producer", producer), seq)
        return True

    def acknowledge(self, step: Step, to: str, producer: str) -> None:
        step.send_durable(to, m.ProducerMark(producer, self.marks.get(producer, 0)))

    def hello(self, step: Step, to: str, producer: str) -> None:
        self.acknowledge(step, to, producer)
