"""Rows of DataFrame feeds: the tasks of a batch stage them here, and one commit publishes the batch.

Responsible for: publishing each row of a batch once, whatever Spark repeats; slowing a feed down.
Not responsible for: what is staged (core/logs/staged.py), the tasks of one-query operators (batch_intake.py).

    BatchBegin --> BatchBegun --> BatchFrame ... --> BatchFrameTaken    each attempt of each task
    FeedCommit --> FeedPublished ... --> FeedPublished(done)            once a batch

A frame is published in one write with the position behind it. A router that restarts goes on from there.
"""

from __future__ import annotations

from typing import Any

from tiercel.core import messages as m
from tiercel.core.errors import InvalidRequest, ProtocolViolation
from tiercel.core.logs.staged import StagedLogs, log_of
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.names import StagedReaderName
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import Publication
from tiercel.core.model.log import Entry, Output, Row
from tiercel.core.router.device_rows import DeviceRows
from tiercel.core.router.intake import Intake
from tiercel.core.router.outputs import FanOut
from tiercel.core.router.state import RouterState
from tiercel.core.router.watermarks import Watermarks

FeedMessage = m.BatchBegin | m.BatchFrame | m.FeedCommit | m.FeedForget


class FeedIntake:
    """The feeds that write streams at this site."""

    def __init__(
        self,
        state: RouterState,
        watermarks: Watermarks,
        fan_out: FanOut,
        intake: Intake,
        devices: DeviceRows,
    ) -> None:
        self.state = state
        self.staged = StagedLogs()
        self._watermarks = watermarks
        self._fan_out = fan_out
        self._intake = intake
        self._devices = devices
        self._committers: dict[str, tuple[str, m.BatchTask]] = {}  # feed -> who waits for its publication
        self._reading: set[str] = set()  # feeds whose next frame is being read

    def load(self, key: StorageKey, value: Any) -> None:
        self.staged.load(key, value)

    def on_message(self, step: Step, sender: str, message: FeedMessage) -> None:
        match message:
            case m.BatchBegin(task=task):
                step.send_durable(sender, m.BatchBegun(task, 0, self.staged.begin(step, task)))
            case m.BatchFrame(task=task):
                self._check_numbers(message)
                if self.staged.add(step, message):
                    step.send_durable(sender, m.BatchFrameTaken(task, message.frame))
            case m.FeedCommit():
                self._on_commit(step, sender, message)
            case m.FeedForget():
                self.staged.forget(step, message.feed, message.batch)

    def _check_numbers(self, frame: m.BatchFrame) -> None:
        """Refuse a frame whose rows and numbers do not fit, before anything of it counts."""
        facts = self.state.topology.streams.get(frame.stream)
        expected = len(frame.rows) if facts is not None and facts.is_numbered else 0
        if len(frame.numbers) != expected:
            reason = f"{len(frame.rows)} rows of {frame.stream!r} with {len(frame.numbers)} numbers"
            raise ProtocolViolation(reason)

    def _on_commit(self, step: Step, sender: str, message: m.FeedCommit) -> None:
        task = message.task
        if not self.staged.is_decided(task.query, task.batch):
            try:
                self.staged.decide(step, message)
            except InvalidRequest as refusal:
                step.send(sender, m.BatchRefused(task, str(refusal)))
                return
        publication = self.staged.publications.get(task.query)
        if publication is not None and publication.batch == task.batch:
            self._committers[task.query] = (sender, task)
            self.progressed(step)
        else:
            step.send_durable(sender, m.FeedPublished(task, 0, done=True))

    # -- publishing ------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return bool(self.staged.publications)

    def progressed(self, step: Step) -> None:
        """Readers may have caught up: read the next frame of each batch that is being published."""
        for feed, publication in list(self.staged.publications.items()):
            if feed in self._reading or self._intake.congested(publication.stream):
                continue
            if publication.is_complete:
                self._finish(step, feed, publication)
            else:
                self._reading.add(feed)
                attempt = publication.parts[publication.part].attempt
                step.read_log(log_of(attempt), publication.after, 1, StagedReaderName(feed))

    def on_read(self, step: Step, feed: str, entries: list[Entry]) -> None:
        self._reading.discard(feed)
        publication = self.staged.publications[feed]
        for entry in entries:
            for stream, rows in entry.parts.items():
                self._publish(step, feed, publication, stream, rows)
            self.staged.advance(step, feed)
        reached = self.staged.publications[feed]
        if reached.is_complete:
            self._promise(step, reached)
        if feed in self._committers:
            to, task = self._committers[feed]
            step.send(to, m.FeedPublished(task, reached.frames, done=False))

    def _publish(self, step: Step, feed: str, at: Publication, stream: str, rows: list[Row]) -> None:
        if stream != at.stream:  # dead letters: no operator reads them
            source = f"{feed}|{at.part}|{at.after}".encode()
            refused = [Output(at.batch, source, 0, n, row) for n, row in enumerate(rows)]
            self._fan_out.log_outputs(step, stream, refused)
            return
        facts = self.state.topology.streams.get(stream)
        if facts is not None and facts.delay_ms is not None:
            self._watermarks.written(step, facts)
        if facts is not None and facts.is_numbered:
            numbers = [row[3] for row in rows]
            self._devices.route_rows(step, facts, [(row[0], row[1], row[2]) for row in rows], numbers)
        else:
            self._fan_out.route_rows(step, stream, rows)

    def _promise(self, step: Step, publication: Publication) -> None:
        """As in Spark, the rows of a batch are late by the watermark of the batches before it."""
        facts = self.state.topology.streams.get(publication.stream)
        if facts is not None and facts.delay_ms is not None and publication.newest_ms >= 0:
            newest_ms = publication.newest_ms - facts.delay_ms
            self._watermarks.promise_source(step, publication.stream, publication.stream, newest_ms)

    def _finish(self, step: Step, feed: str, publication: Publication) -> None:
        self.staged.finish(step, feed)
        if feed in self._committers:
            to, task = self._committers.pop(feed)
            step.send_durable(to, m.FeedPublished(task, publication.frames, done=True))

    def disconnected(self, peer: str) -> None:
        for feed in [feed for feed, (to, _) in self._committers.items() if to == peer]:
            del self._committers[feed]
