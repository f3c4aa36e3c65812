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
from typing import TYPE_CHECKING

import msgspec
from pyspark import TaskContext

from tiercel.core.messages import BatchTask
from tiercel.errors import UserError
from tiercel.runtime.client.batch_task import BatchTaskClient, client_for, drop
from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.sources.frame_sender import FrameSender
from tiercel.spark.sources.stream_reader import BATCH_ROWS, in_batches

if TYPE_CHECKING:
    import pyarrow


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
        topology = self.deployment.manifest().topology
        client = client_for(self.deployment, self.site, self.outputs)
        try:
            client.begin(task, self.stream)
            sender = FrameSender(client, self.stream, self.codec, self.dead_letters, task, topology)
            for batch in batches:
                sender.add(batch)
            sender.end()
            client.end()
            yield from arrow_outputs(client, self.output_codec)
        except BaseException:  # the generator may be closed, or the connection be of no use
            drop(client)
            raise


def arrow_outputs(client: BatchTaskClient, codec: RowCodec) -> Iterator[pyarrow.RecordBatch]:
    """The outputs of a task that has ended, as they come."""
    more = True
    while more:
        found, more = client.outputs()
        for batch in in_batches(found, BATCH_ROWS):
            if batch:
                yield codec.arrow_batch([output.row[2] for output in batch])
    client.forget()


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
