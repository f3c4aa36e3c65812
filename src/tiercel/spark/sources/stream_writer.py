"""The writer of a DataFrame into a stream: each row of each batch exactly once, also after retries.

Responsible for: columns that fit, what runs on executors and in the driver.
Not responsible for: frames and dead letters (frame_sender.py), what a router does with an attempt and a
    commit (core/router/feed_intake.py).

    executor    write: Arrow --> frames --> router, staged under (feed, batch, partition, attempt)
    driver      commit: these attempts --> router, which publishes them once      (again, if the driver fails)
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
from pyspark import TaskContext
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from tiercel.core.messages import BatchTask, StagedPart
from tiercel.errors import UserError
from tiercel.runtime.client.batch_task import client_for, drop
from tiercel.runtime.client.feed import feed_client, keep_site
from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.sources.frame_sender import FrameSender

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)

DEAD_LETTER, FAIL = "dead-letter", "fail"
NAME_MAX = 200  # of a feed's name: it names a directory


class Target(msgspec.Struct, frozen=True):
    """The stream that the rows go to, and the stream for rows that do not fit."""

    deployment: DeploymentDir
    stream: str
    site: str
    codec: RowCodec
    dead_letters: str = ""  # the stream for rows that do not fit; empty: they fail the batch
    query: str = ""  # the name of the query


def column_names(given: t.StructType, codec: RowCodec) -> list[str]:
    """The stream's names of a DataFrame's columns, which may differ in case; UserError if they do not fit."""
    names = {name.lower(): name for name in codec.names}
    missing = names.keys() - {name.lower() for name in given.names}
    extra = [name for name in given.names if name.lower() not in names]
    wrong = [
        f"{field.name} is {field.dataType.simpleString()}, not {wanted.dataType.simpleString()}"
        for field in given.fields
        if field.name.lower() in names
        and not _fits(field.dataType, (wanted := codec.schema[names[field.name.lower()]]).dataType)
    ]
    faults = [f"{names[name]} is missing" for name in sorted(missing)]
    faults += [f"{name} is unknown" for name in extra] + wrong
    if faults:
        raise UserError(
            f"the DataFrame does not fit the stream: {'; '.join(faults)}",
            expected=codec.schema.simpleString(),
            hint="select and cast its columns before it is written",
        )
    return [names[name.lower()] for name in given.names]


def _fits(given: t.DataType, wanted: t.DataType) -> bool:
    """Whether values of one type can be values of the other. Each value is still checked."""
    if isinstance(wanted, t.IntegralType):
        return isinstance(given, t.IntegralType)
    if isinstance(wanted, t.FloatType | t.DoubleType):
        return isinstance(given, t.IntegralType | t.FloatType | t.DoubleType)
    if isinstance(wanted, t.DecimalType):
        return isinstance(given, t.DecimalType | t.IntegralType)
    return given.simpleString() == wanted.simpleString()


class StagedRows(WriterCommitMessage):
    """What one attempt of a task has staged at the router."""

    def __init__(self, feed: str, partition: int, part: StagedPart, newest_ms: int, rejected: int) -> None:
        self.feed, self.partition, self.part = feed, partition, part
        self.newest_ms, self.rejected = newest_ms, rejected


class Columns(msgspec.Struct, frozen=True):
    """The columns of a DataFrame under the names of the stream, in the order of the DataFrame."""

    names: list[str]
    exact: bool  # they have the types of the stream's columns

    @classmethod
    def of(cls, given: t.StructType, codec: RowCodec) -> Columns:
        names = column_names(given, codec)
        wanted = [codec.schema[name].dataType for name in names]
        return cls(names, [field.dataType for field in given.fields] == wanted)


def stage(
    target: Target, feed: str, batch: int, columns: Columns, batches: Iterator[pyarrow.RecordBatch]
) -> StagedRows:
    """On an executor: send the rows of one partition to the router, which keeps them until the commit."""
    context = TaskContext.get()
    assert context is not None
    task = BatchTask(feed, batch, context.partitionId(), uuid.uuid4().hex)
    first = next((found for found in batches if found.num_rows), None)
    if first is None:  # most partitions of some sources are empty: they need no connection
        return StagedRows(feed, task.partition, StagedPart("", 0), -1, 0)
    client = client_for(target.deployment, target.site)
    try:
        client.begin(task, target.stream)
        sender = FrameSender(
            client,
            target.stream,
            target.codec,
            target.dead_letters,
            task,
            target.deployment.manifest().topology,
            feed=target.query,
            exact=columns.exact,
        )
        for found in itertools.chain([first], batches):
            sender.add(found.rename_columns(columns.names).select(target.codec.names))
        sender.end()
        client.flush()
        client.forget()
    except BaseException:
        drop(client)
        raise
    part = StagedPart(task.attempt, sender.frames)
    return StagedRows(feed, task.partition, part, sender.newest_ms, sender.rejected)


def publish(
    target: Target,
    messages: Sequence[WriterCommitMessage | None],
    batch: int,
    *,
    remembered: bool = True,
    consecutive: bool = True,
) -> None:
    """In the driver: name the attempts that count. The router publishes them, in the order of partitions."""
    staged = sorted(staged_in(messages), key=lambda message: message.partition)
    if not staged:
        return  # no partitions
    feed = staged[0].feed
    if remembered:
        keep_site(target.deployment, feed, target.site)
    with feed_client(target.deployment, target.site, feed) as client:
        newest_ms = max(message.newest_ms for message in staged)
        parts = [message.part for message in staged if message.part.frames]
        client.commit(batch, target.stream, parts, newest_ms, consecutive=consecutive)
        if not remembered:
            client.forget()
    rejected = sum(message.rejected for message in staged)
    if rejected:
        where = (batch, rejected, target.stream, target.dead_letters)
        log.warning("batch %d: %d rows do not fit stream %s: see %s", *where)


def give_up(target: Target, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
    """In the driver: let the router forget what the tasks of a failed batch have staged."""
    for feed in {message.feed for message in staged_in(messages)}:
        with contextlib.suppress(UserError), feed_client(target.deployment, target.site, feed) as client:
            client.forget(batch)  # without an answer; what stays goes with the next batch


def staged_in(messages: Sequence[WriterCommitMessage | None]) -> list[StagedRows]:
    return [message for message in messages if isinstance(message, StagedRows)]


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes a streaming query into a stream.

    The query's id, from its checkpoint, is the name of the feed.
    """

    def __init__(self, target: Target, columns: Columns) -> None:
        self._target, self._columns = target, columns

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> StagedRows:
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        assert query is not None
        assert batch is not None
        return stage(self._target, query, int(batch), self._columns, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        publish(self._target, messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        give_up(self._target, messages, batchId)


class NamedBatch(msgspec.Struct, frozen=True):
    """The identity of a DataFrame that is written without a query, for a job that runs again."""

    feed: str
    number: int = 0
    remembered: bool = True

    @classmethod
    def of(cls, stream: str, batch_id: str, feed: str, batch: int | None) -> NamedBatch:
        """By the options: a name of its own, or a number of a feed; else a name that never comes again."""
        if feed:
            if batch is None or batch_id:
                raise UserError(f"option feed = {feed!r}", expected="option batch, a number that grows")
            found = cls(f"batches-{quote(stream, safe='')}|{quote(feed, safe='')}", batch)
        elif batch_id:
            found = cls(f"batch-{quote(stream, safe='')}|{quote(batch_id, safe='')}")
        else:
            return cls(f"once-{uuid.uuid4()}", remembered=False)
        if len(found.feed) > NAME_MAX:
            what = f"option {'feed' if feed else 'batchId'} = {feed or batch_id!r} is too long"
            raise UserError(what, expected=f"at most {NAME_MAX} characters with the name of the stream")
        return found


class BatchStreamWriter(DataSourceArrowWriter):
    """Writes one DataFrame into a stream, as a batch of a feed.

    A batch with an identity is remembered: a job that runs again resumes where the first stopped, and adds
    nothing if the first was complete.
    """

    def __init__(self, target: Target, columns: Columns, batch: NamedBatch) -> None:
        self._target, self._columns, self._batch = target, columns, batch

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> StagedRows:
        return stage(self._target, self._batch.feed, self._batch.number, self._columns, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        batch = self._batch
        publish(self._target, messages, batch.number, remembered=batch.remembered, consecutive=False)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        give_up(self._target, messages, self._batch.number)
