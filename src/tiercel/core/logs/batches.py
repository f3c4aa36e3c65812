"""The batch table: what the tasks of a query's current micro-batch have sent to one stream.

Responsible for: each frame of each partition, and its place in the inbox, until the next batch begins;
    places of the output log with outputs of timers, until a later batch has yielded them.
Not responsible for: rows (core/router/batch_intake.py), when the outputs of a task are complete (there too).

Spark runs a task again after a failure, and a whole batch after a restart of the query. The table knows what
an earlier attempt sent: rows are appended once, and their outputs are read again from the output log.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tiercel.core.errors import InvalidRequest
from tiercel.core.machine.effects import StorageKey
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import CurrentBatch, FramePlace, TimerPlace
from tiercel.core.messages.batch import BatchTask

TABLES: Final = ("batch", "batch_task", "batch_frame", "batch_timer")


class BatchPart(msgspec.Struct):
    """The share of one partition in the current batch."""

    after: int  # the end of the output log when the partition began
    frames: list[FramePlace] = msgspec.field(default_factory=list)
    timers: list[TimerPlace] | None = None  # what it yields, if it has no rows but outputs of timers

    @property
    def offsets(self) -> list[int]:
        return [frame.offset for frame in self.frames if frame.offset]


class BatchTable:
    """The current batch of the one query that writes a stream in its own tasks."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.current: CurrentBatch | None = None
        self.parts: dict[int, BatchPart] = {}  # by partition
        self.newest_ms = -1  # the newest event time of the current batch and those before
        self.timers: dict[int, TimerPlace] = {}  # by number; those of committed batches are forgotten
        self.last_timer = 0

    def load(self, key: StorageKey, value: Any) -> None:
        """Load the stored query and batch, a partition, or a frame; frames come after their partition."""
        match key:
            case ("batch", _):
                self.current = value
                self.newest_ms = max(self.newest_ms, value.newest_ms)
            case ("batch_task", _, partition):
                self.parts[partition] = BatchPart(value)
            case ("batch_frame", _, partition, n):
                frames = self.parts[partition].frames
                frames.extend(FramePlace(b"", 0) for _ in range(n + 1 - len(frames)))
                frames[n] = value
            case ("batch_timer", _, n):
                self.timers[n] = value
                self.last_timer = max(self.last_timer, n)
            case _:
                raise KeyError(key)

    def begin(self, step: Step, task: BatchTask, log_end: int) -> tuple[BatchPart, bool]:
        """The share of a task's partition, and whether the task begins the next batch.

        Raises InvalidRequest if the task cannot be part of the query's current or next batch.
        """
        current = self.current
        self.check_query(task)
        begins = current is None or task.batch > current.batch
        if begins:
            self._next_batch(step, task)
        part = self.parts.get(task.partition)
        if part is None:
            part = self.parts[task.partition] = BatchPart(log_end)
            step.put(("batch_task", self.stream, task.partition), log_end)
        return part, begins

    def check_query(self, task: BatchTask) -> None:
        """Refuse a batch of another query, a batch that is over, and a query of another deployment."""
        current = self.current
        if current is None:
            if task.batch > 0:
                raise InvalidRequest(
                    f"query {task.query} is at batch {task.batch}, and this deployment holds none before it",
                    "expected the deployment that the query's checkpoint was written with",
                    "storage= belongs to checkpointLocation: give the same ones again, or two new ones",
                )
        elif task.query != current.query:
            raise InvalidRequest(
                f"query {task.query} sends rows that query {current.query} sends already",
                "expected one query: each further one would apply its rows once more",
                "write to several sinks in foreachBatch, or use live.stream(...).feed(df) and dataframe(); "
                "storage= belongs to checkpointLocation",
            )
        elif task.batch < current.batch:
            raise InvalidRequest(
                f"batch {task.batch} of query {task.query} is over: batch {current.batch} has begun",
                "expected the last batch again, or the next one",
                "a task that Spark gave up ends here; a checkpoint that was set back needs a new storage=",
            )

    def _next_batch(self, step: Step, task: BatchTask) -> None:
        """Forget the frames of the last batch: Spark has committed it."""
        for partition, part in self.parts.items():
            step.delete(("batch_task", self.stream, partition))
            for n in range(len(part.frames)):
                step.delete(("batch_frame", self.stream, partition, n))
        self.parts.clear()
        self.current = CurrentBatch(task.query, task.batch, self.newest_ms)
        step.put(("batch", self.stream), self.current)

    # -- outputs of timers ----------------------------------------------------------------------

    def are_of_rows(self, after: int, through: int) -> bool:
        """Whether each inbox entry in (after, through] holds rows of the current batch."""
        offsets = [o for part in self.parts.values() for o in part.offsets]
        return sum(after < o <= through for o in offsets) == through - after

    def add_timers(self, step: Step, entry: int, offsets: set[int]) -> None:
        """Note an entry of the output log with outputs of these inbox offsets, if some are not of rows."""
        offsets = offsets - {o for part in self.parts.values() for o in part.offsets}
        if offsets:
            self.last_timer += 1
            place = self.timers[self.last_timer] = TimerPlace(entry, sorted(offsets))
            step.put(("batch_timer", self.stream, self.last_timer), place)

    def places(self, after: int, until: int) -> list[TimerPlace]:
        """The places (after, until]: what the anchor of a batch yields at each attempt."""
        missing = [n for n in range(after + 1, until + 1) if n not in self.timers]
        if missing:
            raise InvalidRequest(
                f"outputs of timers are planned up to place {until}, and place {missing[0]} is not here",
                "expected the deployment that the query's checkpoint was written with",
                "storage= belongs to checkpointLocation: give the same ones again, or two new ones",
            )
        return [self.timers[n] for n in range(after + 1, until + 1)]

    def forget_timers(self, step: Step, through: int) -> None:
        """Forget places of committed batches; the last one stays, because it has the number."""
        for n in [n for n in self.timers if n <= through and n < self.last_timer]:
            del self.timers[n]
            step.delete(("batch_timer", self.stream, n))

    def is_known(self, task: BatchTask, n: int, digest: bytes) -> bool:
        """Accept each frame of a batch task once, and only with the rows of the first attempt."""
        frames = self.parts[task.partition].frames
        if n < len(frames) and not self.is_same(frames[n].digest, digest):
            raise self.changed(task, f"frame {n} has other rows")
        return n < len(frames)

    def is_same(self, first: bytes, digest: bytes) -> bool:
        """Whether two attempts have sent the same rows."""
        return first == digest

    def changed(self, task: BatchTask, how: str) -> InvalidRequest:
        return InvalidRequest(
            f"batch {task.batch} of query {task.query}, partition {task.partition}: {how} than at its first "
            "attempt",
            "expected a source that gives a batch the same rows, in the same partitions, at each attempt",
            "was the query restarted with other cores or partitions? repartition behind a source that is "
            "not replayable does not help: write it to files or Kafka first",
        )

    def add(self, step: Step, task: BatchTask, digest: bytes, offset: int, newest_ms: int) -> None:
        """Note the next frame of a partition, with the offset of its inbox entry."""
        part = self.parts[task.partition]
        place = FramePlace(digest, offset)
        step.put(("batch_frame", self.stream, task.partition, len(part.frames)), place)
        part.frames.append(place)
        if newest_ms > self.newest_ms:
            self.newest_ms = newest_ms
