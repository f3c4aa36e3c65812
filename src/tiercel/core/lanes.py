"""Lanes between sites: one FIFO of numbered, durable frames per (link, target inbox).

Responsible for: keeping frames until they are where they belong, sending them again, the window.
Not responsible for: what is in a frame, and what the receiver does with it (inbox.py, arrivals.py).

A frame leaves the site only when it is durable. `taken` opens the window; `settled` ends the
frame's life: every row of it is in the log of its owner, wherever that is by now. Rows carry their
own numbers per key, so a frame that comes twice does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiercel.core.messages import AnyNotice, LaneFrame
from tiercel.core.records import Output, Row
from tiercel.core.step import Step

FrameId = tuple[str, str, int]  # (sender site, inbox, n)


class Lane:
    """The sending side of one lane."""

    def __init__(self, to: str, inbox: str, window: int, mutant: str = "") -> None:
        self.to = to
        self.inbox = inbox
        self.window = window
        self.mutant = mutant
        self.next_n = 1
        self.frames: dict[int, LaneFrame] = {}  # not settled, in order
        self.via: dict[int, tuple[FrameId, ...]] = {}  # frames that came in on other lanes and wait for these
        self.watermarks: dict[int, int] = {}  # what this site's intake had promised when the frame was made
        self.durable_n = 0
        self._unsent: dict[int, None] = {}  # durable order; sent and untaken are in flight
        self._inflight: set[int] = set()
        self.connected = False

    def recover(self, n: int, frame: LaneFrame, watermark_ms: int) -> None:
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
        via: tuple[FrameId, ...] = (),
    ) -> int:
        n = self.next_n
        self.next_n = n + 1
        frame = LaneFrame(self.inbox, n, rows, notice, outputs)
        self.frames[n] = frame
        self.watermarks[n] = watermark_ms
        self._unsent[n] = None
        if via:
            self.via[n] = via
        step.put(("lane", self.to, self.inbox, n), (frame, watermark_ms))
        step.put(("lane_next", self.to, self.inbox), self.next_n)
        if self.mutant == "sent-before-durable" or (
            self.mutant == "flip-told-too-early" and notice is not None
        ):
            self.durable_n = n
            self.pump(step)
        return n

    def pump(self, step: Step) -> None:
        """Send what is durable and fits into the window."""
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
        """Whatever was in flight may be lost: all that is not settled goes out again, in order."""
        self.connected = True
        self._inflight.clear()
        if self.mutant != "outbox-not-replayed":
            self._unsent = dict.fromkeys(self.frames)

    def broken(self) -> None:
        self.connected = False

    @property
    def under_way(self) -> int:
        return len(self._inflight)

    def taken(self, frames: list[int]) -> None:
        self._inflight.difference_update(frames)

    def settled(self, step: Step, frames: list[int]) -> list[FrameId]:
        """Forget these frames; returns the inbound frames that waited for them."""
        waiting: list[FrameId] = []
        for n in frames:
            if self.frames.pop(n, None) is not None:
                self._inflight.discard(n)
                self._unsent.pop(n, None)
                self.watermarks.pop(n, None)
                waiting += self.via.pop(n, ())
                step.delete(("lane", self.to, self.inbox, n))
        return waiting


class Inbound:
    """One frame received and not yet settled: what it still waits for."""

    __slots__ = ("forwarded", "held", "id", "taken")

    def __init__(self, frame_id: FrameId) -> None:
        self.id = frame_id
        self.held = 0
        self.forwarded = 0  # frames of ours that carry rows of it on
        self.taken = False
