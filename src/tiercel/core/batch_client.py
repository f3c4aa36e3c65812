"""The client of batch tasks: sends the rows of one task after the other, and collects their outputs; no IO.

Responsible for: frames until they are durable, repeating them after a reconnect, the outputs of the task;
    the commit of a feed's batch.
Not responsible for: the content of rows, attempts (Spark's), waiting (runtime/client/batch_task.py).
"""

from __future__ import annotations

from collections import deque

from tiercel.core import messages as m
from tiercel.core.clients import Subscriber
from tiercel.core.machine.effects import Effect, Send
from tiercel.core.machine.events import Connected, Disconnected, Event, Received
from tiercel.core.model.log import Output, Row, StreamEntry

IN_FLIGHT_FRAMES_MAX = 8


class BatchClient:
    """Runs batch tasks at one site, one at a time."""

    def __init__(self, site: str, outputs: str) -> None:
        """`outputs`: the stream whose log has the outputs of the tasks' rows; empty: they are not read."""
        self.site, self.outputs = site, outputs
        self.connected = False
        self.refused = ""  # why the router, or the log, does not serve the task
        self._task: m.BatchTask | None = None

    def begin(self, task: m.BatchTask, stream: str, timers: tuple[int, int] | None = None) -> list[Effect]:
        """Begin a task; the last one is forgotten. With `timers` it has no rows, but outputs of timers."""
        self._task, self._stream, self._timers = task, stream, timers
        self.refused = ""
        self.begun = False
        self.done = False  # the router has said which outputs are the task's, and all of them have come
        self._known = 0  # frames that an earlier attempt sent
        self._frames: deque[m.BatchFrame] = deque()  # not taken, in order
        self._count = self._sent = 0
        self._ended = False
        self._reader: Subscriber | None = None
        self._offsets: frozenset[int] | None = None
        self._until = -1
        self._gathered: list[StreamEntry] = []
        return self._greet()

    @property
    def untaken(self) -> int:
        """Frames that are not durable yet."""
        return len(self._frames)

    def submit(
        self,
        stream: str,
        rows: list[Row],
        digest: bytes,
        newest_ms: int = -1,
        numbers: tuple[int, ...] = (),
    ) -> list[Effect]:
        """The next frame, after `begun`. Rows that the router has are not sent again."""
        assert self._task is not None
        known = self._count < self._known
        sent, numbers = ([], ()) if known else (rows, numbers)
        frame = m.BatchFrame(self._task, self._count, stream, digest, sent, newest_ms, numbers)
        self._frames.append(frame)
        self._count += 1
        return self._pump()

    def end(self) -> list[Effect]:
        """All rows of the task are submitted."""
        self._ended = True
        return self._pump()

    def take(self) -> tuple[list[Output], list[Effect]]:
        """The task's outputs that have come; none before the router has said which are the task's."""
        effects: list[Effect] = []
        if self._reader is not None:
            entries, effects = self._reader.take()
            self._gathered += entries
        if self._offsets is None:
            return [], effects
        mine, until = self._offsets, self._until
        found = [entry for entry in self._gathered if entry.offset <= until]  # more may have come with them
        self._gathered = []
        return [output for entry in found for output in entry.outputs if output.offset in mine], effects

    def forget(self) -> list[Effect]:
        """End the task, whatever has become of it."""
        if self._task is None:
            return []
        self._task = None
        reads = self._reader is not None and self._reader.subscribed
        self._reader = None
        return [Send(self.site, m.Unsubscribe(self.outputs))] if reads else []

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        match event:
            case Connected(peer=self.site):
                self.connected = True
                return self._greet()
            case Disconnected(peer=self.site):
                self.connected = False
                if self._task is not None and self._reader is not None:
                    self._reader.on_event(event, now_ms)
            case Received(message=message) if self._task is not None:
                return self._on_message(event, message, now_ms)
            case _:
                pass
        return []

    def _on_message(self, event: Received, message: object, now_ms: float) -> list[Effect]:
        match message:
            case m.BatchBegun(task=self._task):
                return self._on_begun(message, now_ms)
            case m.BatchFrameTaken(task=self._task, frame=frame):
                while self._frames and self._frames[0].frame <= frame:
                    self._frames.popleft()
                return self._pump()
            case m.BatchOutputs(task=self._task):
                self._offsets, self._until = frozenset(message.offsets), message.until
                self._see_if_done()
            case m.BatchRefused(task=self._task):
                self.refused = message.reason
            case _ if self._reader is not None:
                effects = self._reader.on_event(event, now_ms)
                self.refused = self.refused or self._reader.refused
                self._see_if_done()
                return effects
            case _:
                pass
        return []

    def _see_if_done(self) -> None:
        reader = self._reader
        self.done = self._offsets is not None and reader is not None and reader.offset >= self._until

    def _greet(self) -> list[Effect]:
        if self._task is None or not self.connected:
            return []
        return [Send(self.site, m.BatchBegin(self._task, self._stream, self._timers))]

    def _on_begun(self, begun: m.BatchBegun, now_ms: float) -> list[Effect]:
        if not self.begun:
            self.begun = True
            self._known = begun.frames
            self._reader = Subscriber(self.outputs, self.site, begun.after) if self.outputs else None
        first = self._frames[0].frame if self._frames else self._count
        if begun.frames < first:
            self.refused = f"the router has lost frames {begun.frames} to {first - 1} of {self._task}"
            return []
        reader = None if self.done else self._reader
        effects = [] if reader is None else reader.on_event(Connected(self.site), now_ms)
        self._sent = first
        return effects + self._pump()

    def _pump(self) -> list[Effect]:
        """Send frames within the window; behind the last one, the end."""
        if not self.begun or not self.connected:
            return []
        effects: list[Effect] = []
        for frame in self._frames:
            if frame.frame >= self._frames[0].frame + IN_FLIGHT_FRAMES_MAX:
                break
            if frame.frame >= self._sent:
                effects.append(Send(self.site, frame))
                self._sent = frame.frame + 1
        if self._ended and not self._frames and self._offsets is None:
            effects.append(Send(self.site, m.BatchEnd(self._task, self._count)))  # type: ignore[arg-type]
        return effects


class CommitClient:
    """Commits batches of feeds at one site, one at a time."""

    def __init__(self, site: str) -> None:
        self.site = site
        self.connected = False
        self.refused = ""
        self.done = True
        self.frames = 0  # published so far
        self._commit: m.FeedCommit | None = None

    def commit(self, commit: m.FeedCommit) -> list[Effect]:
        self._commit = commit
        self.refused, self.done, self.frames = "", False, 0
        return self._send()

    def forget(self, feed: str, batch: int | None = None) -> list[Effect]:
        """A feed has ended, or a batch was given up. If this is lost, the router keeps more."""
        return [Send(self.site, m.FeedForget(feed, batch))]

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        match event:
            case Connected(peer=self.site):
                self.connected = True
                return self._send()
            case Disconnected(peer=self.site):
                self.connected = False
            case Received(message=m.FeedPublished(task=task) as published) if self._is_mine(task):
                self.frames = max(self.frames, published.frames)
                self.done = self.done or published.done
            case Received(message=m.BatchRefused(task=task, reason=reason)) if self._is_mine(task):
                self.refused = reason
            case _:
                pass
        return []

    def _is_mine(self, task: m.BatchTask) -> bool:
        return self._commit is not None and self._commit.task == task

    def _send(self) -> list[Effect]:
        if self._commit is None or self.done or not self.connected:
            return []
        return [Send(self.site, self._commit)]
