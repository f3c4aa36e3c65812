"""Site outboxes: one FIFO queue of numbered, durable frames for each (link, target inbox).

Responsible for: storing frames until they are settled, repeating them, the window.
Not responsible for: the contents of a frame, the receiving side (core/router/forwarding.py).

A frame leaves the site only when it is durable. `taken` opens the window. `settled` deletes the frame: every
row of it is in the log of its owner, at any site. Rows carry their own numbers per key, so a repeated frame
does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiercel.core.machine.step import Step
from tiercel.core.messages import AnyNotice, SiteFrame
from tiercel.core.model.log import Output, OutputFence, Row


class FrameId(NamedTuple):
    """A frame of a site for one inbox, or of a mobile source for one stream."""

    sender: str
    inbox: str
    n: int
    origin: str = ""  # the storage or the incarnation of the sender that numbers the frame
    mobile: bool = False


class SiteOutbox:
    """The frames for one inbox of another site."""

    def __init__(self, to: str, inbox: str, origin: str, window: int) -> None:
        self.to = to
        self.inbox = inbox
        self.origin = origin  # of new frames: another storage may have used the same numbers
        self.window = window
        self.next_n = 1
        self.frames: dict[int, SiteFrame] = {}  # not settled, in order
        self.via: dict[int, tuple[FrameId, ...]] = {}  # inbound frames that wait for these
        self.watermarks: dict[int, int] = {}  # the promise of this site's intake when the frame was made
        self.durable_n = 0
        self._unsent: dict[int, None] = {}  # durable order; sent and untaken are in flight
        self._inflight: set[int] = set()
        self.connected = False

    def recover(self, n: int, frame: SiteFrame, watermark_ms: int) -> None:
        self.frames[n] = frame
        self.watermarks[n] = watermark_ms
        self._unsent[n] = None
        self.durable_n = max(self.durable_n, n)

    def add(
        self,
        step: Step,
        watermark_ms: int,
        rows: list[Row],
        *,
        notice: AnyNotice | None = None,
        outputs: Sequence[Output] | None = None,
        after: OutputFence | None = None,
        via: tuple[FrameId, ...] = (),
    ) -> int:
        """Append a frame. Rule R6: a later `pump` sends it, once it is durable here."""
        n = self.next_n
        self.next_n = n + 1
        frame = SiteFrame(self.inbox, self.origin, n, rows, notice, outputs, after)
        self.frames[n] = frame
        self.watermarks[n] = watermark_ms
        self._unsent[n] = None
        if via:
            self.via[n] = via
        step.put(("outbox", self.to, self.inbox, n), (frame, watermark_ms))
        step.put(("outbox_next", self.to, self.inbox), self.next_n)
        return n

    def pump(self, step: Step) -> None:
        """Send durable frames that fit into the window."""
        if not self.connected:
            return
        sent = []
        for n in self._unsent:
            if n > self.durable_n or len(self._inflight) >= self.window:
                break
            step.send(self.to, self.frames[n])
            self._inflight.add(n)
            sent.append(n)
        for n in sent:
            del self._unsent[n]

    def reconnected(self) -> None:
        """The link is up again. Repeat frames that were in flight, because they may be lost."""
        self.connected = True
        self._inflight.clear()
        self.replay()

    def replay(self) -> None:
        """Rule R5: send every frame that is not settled again, in order."""
        self._unsent = dict.fromkeys(self.frames)

    def broken(self) -> None:
        self.connected = False

    @property
    def under_way(self) -> int:
        return len(self._inflight)

    def has(self, origin: str, n: int) -> bool:
        """Whether a receipt is about a frame of this outbox. Rule R43: not one of an earlier storage."""
        frame = self.frames.get(n)
        return frame is not None and frame.origin == origin

    def taken(self, frames: list[int]) -> None:
        self._inflight.difference_update(frames)

    def again(self, frames: list[int]) -> None:
        """Send these frames again, behind all others; one that is asked for repeatedly keeps its place."""
        for n in frames:
            if n in self.frames:
                self._inflight.discard(n)
                self._unsent.setdefault(n)

    def settled(self, step: Step, frames: list[int]) -> list[FrameId]:
        """Forget these frames; returns the inbound frames that waited for them."""
        waiting: list[FrameId] = []
        for n in frames:
            if self.frames.pop(n, None) is not None:
                self._inflight.discard(n)
                self._unsent.pop(n, None)
                self.watermarks.pop(n, None)
                waiting += self.via.pop(n, ())
                step.delete(("outbox", self.to, self.inbox, n))
        return waiting


class InboundFrame:
    """A received frame that is not settled, and the rows and frames that it waits for."""

    __slots__ = ("forwarded", "held", "id", "missing", "taken")

    def __init__(self, frame_id: FrameId) -> None:
        self.id = frame_id
        self.held = 0
        self.forwarded = 0  # frames of this site that forward rows of it
        self.missing = 0  # rows that were over the limit: the frame must be sent again
        self.taken = False
