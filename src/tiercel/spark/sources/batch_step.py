"""The step of a live operator inside the user's own query: `df.mapInArrow(BatchStep(...), schema)`.

Responsible for: Arrow in, frames of rows to the router, the outputs that they cause as Arrow out.
Not responsible for: what is known of a batch (core/logs/batches.py), connections (runtime/client/).

    task of batch N, partition p:  Arrow --> frames under (query, N, p, 0), (query, N, p, 1) ... --> router
                                   Arrow <-- outputs of these rows <-- output log

Spark may run the task again, run a copy of it, or run the whole batch again after a restart. Each attempt
sends the same rows under the same names, and reads the same outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark import TaskContext

from tiercel.core.messages import BatchTask
from tiercel.core.model.bundle import newest_ms
from tiercel.core.model.log import Output
from tiercel.errors import UserError
from tiercel.runtime.client.batch_task import BatchTaskClient, client_for, drop
from tiercel.runtime.client.validation import split_rows
from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.rows.arrow_rows import ArrowRows
from tiercel.spark.rows.bundles import Bundler, slots_of
from tiercel.spark.rows.row_codec import CoreRow, RowCodec
from tiercel.spark.sources.stream_reader import BATCH_ROWS, in_batches
from tiercel.spark.sources.stream_writer import DeadLetterMaker

if TYPE_CHECKING:
    import pyarrow

FRAME_ROWS = 10_000  # rows of one inbox entry, cut the same way by each attempt
FRAME_BYTES = 16_000_000  # a frame of wide rows is split; the wire accepts 64 MiB


class BatchStep(msgspec.Struct, frozen=True):
    """What runs in each task of a query that contains a live operator."""

    deployment: DeploymentDir
    site: str
    stream: str  # the operator's input
    codec: RowCodec
    dead_letters: str  # the stream of input rows that do not fit
    outputs: str  # the operator's output
    output_codec: RowCodec

    def __call__(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        task = this_task()
        client = client_for(self.deployment, self.site, self.outputs)
        try:
            client.begin(task, self.stream)
            sender = FrameSender(self, client, task)
            for batch in batches:
                sender.add(batch)
            sender.end()
            more = True
            while more:
                found, more = client.outputs()
                yield from self._arrow(found)
            client.forget()
        except BaseException:  # the generator may be closed, or the connection be of no use
            drop(client)
            raise

    def _arrow(self, outputs: list[Output]) -> Iterator[pyarrow.RecordBatch]:
        for batch in in_batches(outputs, BATCH_ROWS):
            if batch:
                yield self.output_codec.arrow_batch([output.row[2] for output in batch])


def this_task() -> BatchTask:
    """The identity of this task; UserError outside a streaming query."""
    context = TaskContext.get()
    query = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
    batch = context.getLocalProperty("streaming.sql.batchId") if context is not None else None
    if context is None or query is None or batch is None:
        raise UserError(
            "a live operator runs outside of a streaming query",
            expected="df.writeStream: its tasks have the number of their batch",
            hint="write a batch DataFrame with df.write.format('tiercel')",
        )
    return BatchTask(query, int(batch), context.partitionId())


class FrameSender:
    """Sends the rows of one task as frames that each attempt cuts in the same way."""

    def __init__(self, step: BatchStep, client: BatchTaskClient, task: BatchTask) -> None:
        self._step, self._client = step, client
        self._arrow = ArrowRows(step.codec)
        self._bundler = Bundler(step.codec, slots_of(step.deployment.manifest().topology, step.stream))
        self._dead_letter = DeadLetterMaker(step.codec, task.query, task.batch, task.partition)
        self._rows: list[tuple[Any, ...]] = []
        self._refused: list[CoreRow] = []
        self._seen = 0

    def add(self, batch: pyarrow.RecordBatch) -> None:
        rows, refused = self._arrow.rows(batch)
        self._refused += [self._dead_letter(self._seen + n + 1, row, why) for n, row, why in refused]
        self._seen += batch.num_rows
        self._rows += rows
        while len(self._rows) >= FRAME_ROWS:
            self._send(self._rows[:FRAME_ROWS])
            del self._rows[:FRAME_ROWS]

    def end(self) -> None:
        if self._rows:
            self._send(self._rows)
        for begin in range(0, len(self._refused), FRAME_ROWS):
            self._client.send(self._step.dead_letters, self._refused[begin : begin + FRAME_ROWS])
        self._client.end()

    def _send(self, rows: list[tuple[Any, ...]]) -> None:
        for packed, _ in split_rows(self._bundler.pack(rows), FRAME_ROWS, FRAME_BYTES):
            newest = newest_ms(packed) if self._step.codec.event_time else -1
            self._client.send(self._step.stream, packed, newest)
