"""Staged logs: the rows of a feed's batch until one commit publishes them.

Responsible for: a log for each attempt of a task, which attempts are there, how far a batch is published.
Not responsible for: passing rows on (core/router/feed_intake.py), reading storage (the driver).

    staged|ATTEMPT   1, 2, 3 ...     frames of one attempt, in the table of inboxes; never in memory
    publication      batch, attempts that count, the next frame

A feed may repeat a task under another attempt, or a whole batch in other partitions. Nothing is seen of an
attempt before the commit has named it, and a batch is decided by its first commit.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tiercel.core.errors import InvalidRequest
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import Publication, StagedAttempt
from tiercel.core.messages.batch import BatchFrame, BatchTask
from tiercel.core.messages.feed import FeedCommit
from tiercel.core.model.log import Entry, Row

TABLES: Final = ("feed", "staged", "publication")
ALL_FRAMES: Final = 2**62  # of a batch that is decided, an attempt need not send any


def log_of(attempt: str) -> str:
    """The name of the log that holds the frames of an attempt."""
    return f"staged|{attempt}"


class StagedLogs:
    """What the feeds of one site have staged and published."""

    def __init__(self) -> None:
        self.published: dict[str, int] = {}  # feed -> its last batch that is in the logs
        self.attempts: dict[str, StagedAttempt] = {}
        self.publications: dict[str, Publication] = {}  # by feed

    def load(self, key: StorageKey, value: Any) -> None:
        """Load the last batch of a feed, an attempt, or a publication that is not complete."""
        match key:
            case ("feed", feed):
                self.published[feed] = value
            case ("staged", attempt):
                self.attempts[attempt] = value
            case ("publication", feed):
                self.publications[feed] = value
            case _:
                raise KeyError(key)

    def is_decided(self, feed: str, batch: int) -> bool:
        """Rule R28: the first commit of a batch decides what is published; later attempts change nothing."""
        publication = self.publications.get(feed)
        decided = publication.batch if publication is not None else self.published.get(feed, -1)
        return batch <= decided

    def begin(self, step: Step, task: BatchTask) -> int:
        """The frames that this attempt has staged."""
        if self.is_decided(task.query, task.batch):
            return ALL_FRAMES
        if task.attempt not in self.attempts:
            self._put(step, task.attempt, StagedAttempt(task.query, task.batch, task.partition))
        return self.attempts[task.attempt].frames

    def add(self, step: Step, frame: BatchFrame) -> bool:
        """Store a frame that is the next one; whether it is stored, or need not be."""
        task, n, rows = frame.task, frame.frame, frame.rows
        if self.is_decided(task.query, task.batch):
            return True
        known = self.attempts.get(task.attempt)
        if known is None or n > known.frames:
            return False  # its connection has changed: the attempt begins again
        if n == known.frames:
            self._put(step, task.attempt, msgspec.structs.replace(known, frames=n + 1))
            stored: list[Row] = list(rows)
            if frame.numbers:
                stored = [(*row, number) for row, number in zip(rows, frame.numbers, strict=True)]
            step.put(("inbox", log_of(task.attempt), n + 1), Entry(n + 1, 0, {frame.stream: stored}))
        return True

    def _put(self, step: Step, attempt: str, staged: StagedAttempt) -> None:
        self.attempts[attempt] = staged
        step.put(("staged", attempt), staged)

    def decide(self, step: Step, commit: FeedCommit) -> None:
        """Begin to publish a batch. InvalidRequest if something of it, or of the batch before, is missing."""
        task, parts = commit.task, commit.parts
        before = self.published.get(task.query)
        if before is not None and task.batch > before + 1 and commit.consecutive:
            raise InvalidRequest(
                f"batch {task.batch} of feed {task.query} follows batch {before} in this router: its log has "
                "lost acknowledged frames",
                f"expected a router that has published batch {task.batch - 1}",
                "durability='disk' survives a power loss; a new checkpoint location begins a new feed",
            )
        for part in parts:
            known = self.attempts.get(part.attempt)
            if known is None or known.frames != part.frames:
                found = "nothing" if known is None else f"{known.frames} frames"
                raise InvalidRequest(
                    f"batch {task.batch} of feed {task.query}: {found} of {part.frames} staged frames are "
                    "here",
                    "expected the router that the tasks of the batch have sent their rows to",
                    "start the query again: Spark repeats the batch",
                )
        self._set(step, task.query, Publication(task.batch, commit.stream, parts, commit.newest_ms))

    def _set(self, step: Step, feed: str, publication: Publication) -> None:
        self.publications[feed] = at_next_frame = self.skip_empty(publication)
        step.put(("publication", feed), at_next_frame)

    def skip_empty(self, publication: Publication) -> Publication:
        """The publication at its next frame: some partitions have none."""
        part, after = publication.part, publication.after
        while part < len(publication.parts) and after >= publication.parts[part].frames:
            part, after = part + 1, 0
        return msgspec.structs.replace(publication, part=part, after=after)

    def advance(self, step: Step, feed: str) -> None:
        """Rule R28: the next frame of a publication is in the logs, in the same write; it goes."""
        publication = self.publications[feed]
        attempt, n = publication.parts[publication.part].attempt, publication.after + 1
        step.delete(("inbox", log_of(attempt), n))
        self._set(step, feed, msgspec.structs.replace(publication, after=n, frames=publication.frames + 1))

    def finish(self, step: Step, feed: str) -> int:
        """Remember the batch of a complete publication, and forget what was staged for it."""
        batch = self.publications.pop(feed).batch
        step.delete(("publication", feed))
        self.published[feed] = batch
        step.put(("feed", feed), batch)
        self.drop(step, feed, batch)
        return batch

    def drop(self, step: Step, feed: str, batch: int) -> None:
        """Forget the attempts of this batch and those before."""
        for attempt, staged in list(self.attempts.items()):
            if staged.feed == feed and staged.batch <= batch:
                del self.attempts[attempt]
                step.delete(("staged", attempt))
                for n in range(1, staged.frames + 1):
                    step.delete(("inbox", log_of(attempt), n))

    def forget(self, step: Step, feed: str, batch: int | None) -> None:
        """Forget a feed that has ended, or what was staged of a batch that was given up."""
        if feed in self.publications:
            return  # decided: it is published, whoever gives up
        if batch is None:
            self.drop(step, feed, self.published.get(feed, 0))
            if self.published.pop(feed, None) is not None:
                step.delete(("feed", feed))
        elif not self.is_decided(feed, batch):
            self.drop(step, feed, batch)
