"""The clients of a deployment: fixed producers, mobile sources and subscribers, without IO.

Responsible for: retaining frames until they are acknowledged, and repeating them after a reconnect.
Not responsible for: the origin of rows (the caller of `submit`) and their use (the reader of `entries`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tiercel.core import messages as m
from tiercel.core.machine.effects import Effect, Send
from tiercel.core.machine.events import Connected, Disconnected, Event, Received
from tiercel.core.model.log import Row, StreamEntry, mobile_origin

WINDOW_FRAMES_MAX = 64  # unacknowledged frames of a producer; the router slows it down by delaying acks


class Producer:
    """A producer of one site. It retains each frame until the frame is durable there.

    `incarnation` distinguishes programs that use the same name: the latest one owns the name and fences
    the others.
    """

    def __init__(self, name: str, site: str, incarnation: str = "") -> None:
        self.name = name
        self.site = site
        self.incarnation = incarnation
        self.acknowledged = 0
        self.submitted = 0
        self.greeted = False  # the router has answered with the last number it has
        self.rival = False  # another program sends under our name: the numbers are no longer ours
        self.forgotten = 0  # acknowledged frames that the router has lost
        self._met = False  # greeted at least once
        self._sent_ever = 0  # unlike `_sent`, over all connections
        self._frames: deque[m.Produce] = deque()  # not acknowledged, in order
        self._sent = 0

    def submit(
        self,
        stream: str,
        rows: list[Row],
        watermark_ms: int | None = None,
        *,
        initial: bool = False,
        numbers: Sequence[int] = (),
    ) -> list[Effect]:
        """Submit rows as frame `submitted`; they are durable once `acknowledged` has reached its number.

        `numbers` are those of the rows, for a stream whose devices number them.
        """
        self.submitted += 1
        frame = m.Produce(self.name, self.submitted, stream, rows, watermark_ms, initial, tuple(numbers))
        self._frames.append(frame)
        return self._pump()

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        match event:
            case Connected(peer=self.site):
                return [Send(self.site, m.Hello(self.name, self.incarnation, self._met))]
            case Disconnected(peer=self.site):
                self.greeted = False
            case Received(message=m.ProducerAck(seq=seq, greets=greets)):
                if self.greeted or greets == self.incarnation:
                    return self._on_mark(seq)
                # else a late answer to an earlier program of this name, whose frames may be in flight
            case Received(message=m.ProducerFenced()):
                self.rival = True
            case _:
                pass
        return []

    def _on_mark(self, seq: int) -> list[Effect]:
        first = not self.greeted
        self.greeted = True
        self.rival = self.rival or (self._met and seq > self._sent_ever)
        if first and self._met:  # a disk was lost, and its backup is older than our acks
            self.forgotten = max(self.forgotten, self.acknowledged - seq)
        self._met = True
        self._sent_ever = max(self._sent_ever, seq)
        self.acknowledged = max(self.acknowledged, seq)
        self.submitted = max(self.submitted, seq)  # an earlier incarnation sent these
        while self._frames and self._frames[0].seq <= seq:
            self._frames.popleft()
        self._sent = seq if first else max(self._sent, seq)
        return self._pump()

    def _pump(self) -> list[Effect]:
        if not self.greeted or self.rival or self.forgotten:
            return []
        effects: list[Effect] = []
        for frame in self._frames:
            if frame.seq > self.acknowledged + WINDOW_FRAMES_MAX:
                break
            if frame.seq > self._sent:
                effects.append(Send(self.site, frame))
                self._sent = frame.seq
        self._sent_ever = max(self._sent_ever, self._sent)
        return effects


class MobileSource:
    """A source that changes sites. It numbers its rows per key, so that their path does not matter.

    A source that has lost its counters is another `incarnation`: under the old one its new rows would look
    like repeated ones, and be dropped.
    """

    def __init__(self, name: str, site: str, incarnation: str) -> None:
        self.name = name
        self.site = site
        self.incarnation = incarnation
        self.connected: set[str] = set()
        self.pending: dict[int, m.ProduceMobile] = {}  # not acknowledged, in order
        self._counts: dict[bytes, int] = {}
        self._frames = 0
        self._unsent: dict[int, None] = {}  # frames of `pending` that wait for the window, in order

    @property
    def is_full(self) -> bool:
        """Whether as many frames wait as may be under way: the caller should wait, too."""
        return len(self.pending) >= 2 * WINDOW_FRAMES_MAX

    def submit(self, stream: str, rows: list[Row]) -> list[Effect]:
        self._frames += 1
        numbered = []
        for key, event_time, payload in rows:
            n = self._counts[key] = self._counts.get(key, 0) + 1
            numbered.append((key, event_time, payload, n))
        frame = m.ProduceMobile(self.name, self.incarnation, self._frames, stream, numbered)
        self.pending[frame.frame] = frame
        self._unsent[frame.frame] = None
        return self._pump()

    def travel(self, site: str) -> list[Effect]:
        """Change to another site and send all unacknowledged frames again from there."""
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
            case Received(sender=sender, message=m.MobileReceipt() as receipt):
                return self._on_receipt(sender, receipt)
            case _:
                pass
        return []

    def _on_receipt(self, sender: str, receipt: m.MobileReceipt) -> list[Effect]:
        if receipt.origin != mobile_origin(self.name, self.incarnation):
            return []  # an earlier incarnation sent these frames
        for frame in receipt.frames:
            self.pending.pop(frame, None)
            self._unsent.pop(frame, None)
        effects: list[Effect] = []
        if sender == self.site:
            effects += [Send(self.site, self.pending[n]) for n in receipt.again if n in self.pending]
        return effects + self._pump()

    def _resend(self) -> list[Effect]:
        self._unsent = dict.fromkeys(self.pending)
        return self._pump()

    def _pump(self) -> list[Effect]:
        """Send what fits into the window."""
        if self.site not in self.connected:
            return []
        under_way = len(self.pending) - len(self._unsent)
        frames = list(self._unsent)[: max(0, WINDOW_FRAMES_MAX - under_way)]
        for frame in frames:
            del self._unsent[frame]
        return [Send(self.site, self.pending[frame]) for frame in frames]


class Subscriber:
    """A reader of a stream from an offset on; it returns each entry once and in order.

    With `after=None` it starts at the end of the stream at the time of the first connection. With
    `range_first` it queries the stream's range before each subscription, and so notices an offset outside
    of it. With `entries_max` it requests nothing more while that many entries have not been taken. With the
    name of a `subscription` the log keeps what this reader has not processed, and `after=None` continues
    there; entries count as processed when the caller takes the next ones.
    """

    def __init__(
        self,
        stream: str,
        home: str,
        after: int | None = 0,
        *,
        range_first: bool = False,
        entries_max: int | None = None,
        subscription: str = "",
    ) -> None:
        self.stream = stream
        self.home = home
        self.offset = 0 if after is None else after
        self.entries: list[StreamEntry] = []
        self.subscribed = False
        self.refused = ""  # why the stream cannot be read from this offset; the subscriber then stops
        self._from_now = after is None
        self._range_first = range_first or after is None
        self._entries_max = entries_max
        self.subscription = subscription
        self.processed = -1
        self._taken = -1
        self._owes_consumed = False

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        match event:
            case Connected(peer=self.home):
                self._owes_consumed = False  # a new subscription begins with full credit
                if self._range_first:
                    return [Send(self.home, m.RangeQuery(self.stream, self.subscription))]
                return self._subscribe()
            case Disconnected(peer=self.home):
                self.subscribed = False
            case Received(message=m.RangeReply(stream=self.stream) as reply) if not self.subscribed:
                return self._on_range(reply.first, reply.last, reply.mark)
            case Received(message=m.Publish(stream=self.stream) as publish) if not self.refused:
                return self._on_publish(publish.entries)
            case _:
                pass
        return []

    def take(self) -> tuple[list[StreamEntry], list[Effect]]:
        """The entries that have arrived, and the effects of taking them (credit for more)."""
        taken, self.entries = self.entries, []
        progress = self._taken > self.processed
        self.processed = self._taken
        if taken:
            self._taken = taken[-1].offset
        if not self._owes_consumed and not (self.subscription and progress):
            return taken, []
        self._owes_consumed = False
        return taken, [Send(self.home, self._consumed())]

    @property
    def has_news(self) -> bool:
        """Whether `take` returns entries, or says that the last ones are processed."""
        return bool(self.entries) or bool(self.subscription and self._taken > self.processed)

    def finish(self) -> list[Effect]:
        """All entries that were taken are processed; the subscription's mark says so."""
        self.processed = self._taken
        return [Send(self.home, self._consumed())] if self.subscription and self.subscribed else []

    def _consumed(self) -> m.Consumed:
        return m.Consumed(self.stream, self.offset, self.processed if self.subscription else -1)

    def _subscribe(self) -> list[Effect]:
        self.subscribed = True
        return [Send(self.home, m.Subscribe(self.stream, self.offset, self.subscription))]

    def _on_range(self, first: int, last: int, mark: int) -> list[Effect]:
        if first < 0:
            self.refused = f"site {self.home} keeps no log of the stream {self.stream!r}"
        elif self._from_now:
            self._from_now = False
            self.offset = last if mark < 0 else mark
        elif not first - 1 <= self.offset <= last:
            which = "are no longer kept" if self.offset < first else "do not exist yet"
            self.refused = (
                f"entries after {self.offset} of the stream {self.stream!r} {which}: "
                f"it holds {first} to {last}"
            )
        return [] if self.refused else self._subscribe()

    def _on_publish(self, entries: list[StreamEntry]) -> list[Effect]:
        fresh = entries
        if entries and entries[0].offset <= self.offset:
            fresh = [entry for entry in entries if entry.offset > self.offset]
        if fresh:
            if fresh[0].offset != self.offset + 1:
                self.refused = (
                    f"entries {self.offset + 1} to {fresh[0].offset - 1} of the stream {self.stream!r} "
                    "were deleted before they were read"
                )
                return []
            self.offset = fresh[-1].offset
            self.entries += fresh
        if self._entries_max is not None and len(self.entries) >= self._entries_max:
            self._owes_consumed = True
            return []
        return [Send(self.home, self._consumed())]
