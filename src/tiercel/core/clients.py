"""The ends of a deployment: fixed producers, mobile sources, subscribers. Sans-IO like the rest.

Responsible for: what a client keeps until it is acknowledged, and what it repeats after a reconnect.
Not responsible for: where rows come from (a caller's `submit`) and go to (`entries`).
"""

from __future__ import annotations

from collections import deque

from tiercel.core import messages as m
from tiercel.core.effects import Effect, Send
from tiercel.core.events import Connected, Disconnected, Event, Received
from tiercel.core.records import Row, StreamEntry

WINDOW_FRAMES_MAX = 64  # frames a producer has under way; the router slows it down by not acknowledging


class Producer:
    """A producer that stays with one site for life; each frame is kept until it is durable there."""

    def __init__(self, name: str, site: str) -> None:
        self.name = name
        self.site = site
        self.acknowledged = 0
        self.submitted = 0
        self.greeted = False  # the router has said where we are
        self._frames: deque[m.Produce] = deque()  # not acknowledged, in order
        self._sent = 0

    def submit(
        self, stream: str, rows: list[Row], watermark_ms: int | None = None, *, initial: bool = False
    ) -> list[Effect]:
        """Take rows; they are safe when `acknowledged` has reached the number this returns effects for."""
        self.submitted += 1
        self._frames.append(m.Produce(self.name, self.submitted, stream, rows, watermark_ms, initial))
        return self._pump()

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        match event:
            case Connected(peer=self.site):
                return [Send(self.site, m.Hello(self.name))]
            case Disconnected(peer=self.site):
                self.greeted = False
            case Received(message=m.ProducerMark(seq=seq)):
                return self._on_mark(seq)
            case _:
                pass
        return []

    def _on_mark(self, seq: int) -> list[Effect]:
        first = not self.greeted
        self.greeted = True
        self.acknowledged = max(self.acknowledged, seq)
        self.submitted = max(self.submitted, seq)  # an earlier life of ours sent these
        while self._frames and self._frames[0].seq <= seq:
            self._frames.popleft()
        self._sent = seq if first else max(self._sent, seq)
        return self._pump()

    def _pump(self) -> list[Effect]:
        if not self.greeted:
            return []
        effects: list[Effect] = []
        for frame in self._frames:
            if frame.seq > self.acknowledged + WINDOW_FRAMES_MAX:
                break
            if frame.seq > self._sent:
                effects.append(Send(self.site, frame))
                self._sent = frame.seq
        return effects


class MobileSource:
    """A source that changes sites. It numbers its rows per key, so the way they take does not matter."""

    def __init__(self, name: str, site: str) -> None:
        self.name = name
        self.site = site
        self.connected: set[str] = set()
        self.pending: dict[int, m.ProduceMobile] = {}  # not acknowledged, in order
        self._counts: dict[bytes, int] = {}
        self._frames = 0

    def submit(self, stream: str, rows: list[Row]) -> list[Effect]:
        self._frames += 1
        numbered = []
        for key, event_time, payload in rows:
            n = self._counts[key] = self._counts.get(key, 0) + 1
            numbered.append((key, event_time, payload, n))
        frame = m.ProduceMobile(self.name, self._frames, stream, numbered)
        self.pending[frame.frame] = frame
        return [Send(self.site, frame)] if self.site in self.connected else []

    def travel(self, site: str) -> list[Effect]:
        """Now at another site: whatever is not known to be safe is sent again from there."""
        self.site = site
        return self._resend()

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        match event:
            case Connected(peer=peer):
                self.connected.add(peer)
                if peer == self.site:
                    return self._resend()
            case Disconnected(peer=peer):
                self.connected.discard(peer)
            case Received(message=m.MobileReceipt(frames=frames)):
                for frame in frames:
                    self.pending.pop(frame, None)
            case _:
                pass
        return []

    def _resend(self) -> list[Effect]:
        if self.site not in self.connected:
            return []
        return [Send(self.site, frame) for frame in self.pending.values()]


class Subscriber:
    """Reads a stream from an offset on; each entry once and in order."""

    def __init__(self, stream: str, home: str, after: int = 0) -> None:
        self.stream = stream
        self.home = home
        self.offset = after
        self.entries: list[StreamEntry] = []

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        match event:
            case Connected(peer=self.home):
                return [Send(self.home, m.Subscribe(self.stream, self.offset))]
            case Received(message=m.Publish() as publish) if publish.stream == self.stream:
                for entry in publish.entries:
                    if entry.offset > self.offset:
                        self.offset = entry.offset
                        self.entries.append(entry)
                return [Send(self.home, m.Consumed(self.stream, self.offset))]
            case _:
                pass
        return []
