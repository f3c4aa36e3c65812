"""The writer of a DataFrame into a stream: each row of each batch exactly once, also after retries.

Responsible for: columns that fit, dead letters of rows that do not, what runs on executors and in the driver.
Not responsible for: staged files, publish plans and sequence numbers (runtime/client/staged_batches.py).

    executor    write: Arrow --> rows of the core --> a staged file      (again, if the task fails)
                write: Arrow --> rows that do not fit --> another one, of dead letters
    driver      commit: publish all files of the batch, in order         (again, if the driver fails)
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
from pyspark import TaskContext
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from tiercel.errors import UserError
from tiercel.runtime.client.staged_batches import BatchPublisher, StagedFile, StagingWriter
from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.rows.row_codec import FEED_DEAD_LETTER_SCHEMA, BadRow, CoreRow, RowCodec

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)

DEAD_LETTER, FAIL = "dead-letter", "fail"
NAME_MAX = 200  # of a feed's name: it names a directory
SLICE_ROWS = 5_000  # rows that are Python objects at the same time


class Target(msgspec.Struct, frozen=True):
    """The stream that the rows go to, and the stream for rows that do not fit."""

    deployment: DeploymentDir
    stream: str
    site: str
    codec: RowCodec
    dead_letters: str = ""  # the stream for rows that do not fit; empty: they fail the batch
    query: str = ""  # the name of the query


class Staged(WriterCommitMessage):
    """The file that one task has staged."""

    def __init__(self, feed: str, file: StagedFile) -> None:
        self.feed = feed
        self.file = file


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


def python_rows(
    batches: Iterable[pyarrow.RecordBatch], names: Sequence[str]
) -> Iterator[list[dict[str, Any]]]:
    """Rows as Python values, a slice at a time; from Arrow, because its timestamps have their zone."""
    for batch in batches:
        named = batch.rename_columns(list(names))
        for begin in range(0, named.num_rows, SLICE_ROWS):
            yield named.slice(begin, SLICE_ROWS).to_pylist(maps_as_pydicts="strict")


def stage(
    target: Target, feed: str, batch: int, names: Sequence[str], batches: Iterator[pyarrow.RecordBatch]
) -> Staged:
    """On an executor: write the rows of one partition into a file."""
    context = TaskContext.get()
    assert context is not None
    partition = context.partitionId()
    directory = BatchPublisher(target.deployment, feed).staging(batch)
    file = StagingWriter(directory, partition, context.attemptNumber())
    refused: StagingWriter | None = None
    dead_letter = DeadLetterMaker(target.codec, target.query or feed, batch, partition)
    seen = 0
    try:
        for rows in python_rows(batches, names):
            packed, bad = target.codec.pack_all(rows)
            if bad and not target.dead_letters:
                raise bad[0][2]
            file.add(packed)
            if bad:
                refused = refused or StagingWriter(directory, partition, context.attemptNumber())
                refused.add([dead_letter(seen + n + 1, row, reason) for n, row, reason in bad])
            seen += len(rows)
        return Staged(feed, file.finish(None if refused is None else refused.finish()))
    except BaseException:
        file.abandon()
        if refused is not None:
            refused.abandon()
        raise


class DeadLetterMaker:
    """Makes dead letters of rows that do not fit, for one partition."""

    def __init__(self, codec: RowCodec, feed: str, batch: int, partition: int) -> None:
        self._key, self._names = codec.key_alone(), codec.key
        self._codec = RowCodec(FEED_DEAD_LETTER_SCHEMA)
        self._where = (feed, batch, partition)

    def __call__(self, number: int, row: dict[str, Any], reason: BadRow) -> CoreRow:
        """The key is null if the key itself does not fit."""
        key = None
        with contextlib.suppress(BadRow):
            key = self._key.pack({name: row[name] for name in self._names})[0]
        return self._codec.pack((str(reason), key, number, _json(row), *self._where))


def _json(row: Any) -> str:
    try:
        return msgspec.json.encode(row, enc_hook=str).decode()
    except TypeError:  # a map with keys that JSON cannot have
        return msgspec.json.encode(repr(row)).decode()


def publish(
    target: Target, messages: Sequence[WriterCommitMessage | None], batch: int
) -> BatchPublisher | None:
    """In the driver: publish all files that the tasks of a batch have staged."""
    staged = [message for message in messages if isinstance(message, Staged)]
    if not staged:
        return None  # no partitions
    feed = BatchPublisher(target.deployment, staged[0].feed)
    files = [message.file for message in staged]
    plan = feed.publish(batch, target.stream, target.site, files, target.dead_letters)
    if plan.rejected:
        log.warning(
            "batch %d: %d rows do not fit stream %s: see %s",
            batch,
            plan.rejected,
            plan.stream,
            plan.dead_letters,
        )
    return feed


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes a streaming query into a stream.

    The query's id, from its checkpoint, is the name of the feed.
    """

    def __init__(self, target: Target, names: Sequence[str]) -> None:
        self._target, self._names = target, names

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Staged:
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        assert query is not None
        assert batch is not None
        return stage(self._target, query, int(batch), self._names, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        publish(self._target, messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _drop_staged(self._target, messages, batchId)


class BatchStreamWriter(DataSourceArrowWriter):
    """Writes one DataFrame into a stream, as a feed with a single batch.

    A batch with an id is remembered: a job that runs again resumes where the first stopped, and adds
    nothing if the first was complete.
    """

    def __init__(self, target: Target, names: Sequence[str], batch_id: str = "") -> None:
        self._target, self._names = target, names
        self._remembered = bool(batch_id)
        self._name = f"once-{uuid.uuid4()}"
        if batch_id:
            self._name = f"batch-{quote(target.stream, safe='')}|{quote(batch_id, safe='')}"
        if len(self._name) > NAME_MAX:
            what = f"option batchId = {batch_id!r} is too long"
            raise UserError(what, expected=f"at most {NAME_MAX} characters with the name of the stream")

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Staged:
        return stage(self._target, self._name, 0, self._names, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        feed = publish(self._target, messages, 0)
        if feed is not None and not self._remembered:
            feed.forget()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _drop_staged(self._target, messages, 0)


def _drop_staged(target: Target, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
    for name in {message.feed for message in messages if isinstance(message, Staged)}:
        BatchPublisher(target.deployment, name).drop(batch)
