"""Writing a DataFrame into a stream: each row of each batch exactly once, whatever is tried again.

Responsible for: columns that fit, rows that do not, what runs on executors and what in the driver.
Not responsible for: staged files, plans and numbers (runtime/feeds.py).

    executor    write: Arrow --> rows of the core --> a staged file      (again, if the task fails)
    driver      commit: publish all files of the batch, in order         (again, if the driver fails)
"""

from __future__ import annotations

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
from tiercel.runtime.feeds import Feed, Stage, StagedFile, write_whole
from tiercel.runtime.place import Place
from tiercel.spark.schema import BadRow, Columns

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)

DEAD_LETTER, FAIL = "dead-letter", "fail"
NAME_MAX = 200  # of a feed: it names a directory
SLICE_ROWS = 5_000  # rows that are Python objects at a time


class Target(msgspec.Struct, frozen=True):
    """Where the rows go, and what becomes of those that do not fit."""

    place: Place
    stream: str
    site: str
    columns: Columns
    bad_rows: str = DEAD_LETTER


class Staged(WriterCommitMessage):
    """What one task has staged."""

    def __init__(self, feed: str, file: StagedFile) -> None:
        self.feed = feed
        self.file = file


def column_names(given: t.StructType, columns: Columns) -> list[str]:
    """The stream's names of a DataFrame's columns, which may differ in case; an error if they do not fit."""
    names = {name.lower(): name for name in columns.names}
    missing = names.keys() - {name.lower() for name in given.names}
    extra = [name for name in given.names if name.lower() not in names]
    wrong = [
        f"{field.name} is {field.dataType.simpleString()}, not {wanted.dataType.simpleString()}"
        for field in given.fields
        if field.name.lower() in names
        and not _fits(field.dataType, (wanted := columns.schema[names[field.name.lower()]]).dataType)
    ]
    faults = [f"{names[name]} is missing" for name in sorted(missing)]
    faults += [f"{name} is unknown" for name in extra] + wrong
    if faults:
        raise UserError(
            f"the DataFrame does not fit the stream: {'; '.join(faults)}",
            expected=columns.schema.simpleString(),
            hint="select and cast its columns before it is written",
        )
    return [names[name.lower()] for name in given.names]


def _fits(given: t.DataType, wanted: t.DataType) -> bool:
    """Whether values of one type can be values of the other; each one is still checked."""
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
    """Rows as people write them, some at a time. Out of Arrow, for its timestamps have their zone."""
    for batch in batches:
        named = batch.rename_columns(list(names))
        for begin in range(0, named.num_rows, SLICE_ROWS):
            yield named.slice(begin, SLICE_ROWS).to_pylist(maps_as_pydicts="strict")


def stage(
    target: Target, feed: str, batch: int, names: Sequence[str], batches: Iterator[pyarrow.RecordBatch]
) -> Staged:
    """On an executor: one partition's rows into a file."""
    context = TaskContext.get()
    assert context is not None
    place = Feed(target.place, feed)
    file = Stage(place.staging(batch), context.partitionId(), context.attemptNumber())
    refused: list[tuple[Any, BadRow]] = []
    try:
        for rows in python_rows(batches, names):
            packed, bad = target.columns.pack_all(rows)
            if bad and target.bad_rows == FAIL:
                raise bad[0][1]
            file.add(packed)
            refused += bad
        if refused:
            lines = [msgspec.json.encode({"row": r, "reason": str(b)}, enc_hook=str) for r, b in refused]
            write_whole(place.bad_rows(batch, context.partitionId()), b"\n".join(lines) + b"\n")
        return Staged(feed, file.finish(len(refused)))
    except BaseException:
        file.abandon()
        raise


def publish(target: Target, messages: Sequence[WriterCommitMessage | None], batch: int) -> Feed | None:
    """In the driver: everything that the tasks of a batch have staged."""
    staged = [message for message in messages if isinstance(message, Staged)]
    if not staged:
        return None  # no partitions
    feed = Feed(target.place, staged[0].feed)
    plan = feed.publish(batch, target.stream, target.site, [message.file for message in staged])
    if plan.bad:
        log.warning(
            "batch %d: %d rows do not fit stream %s: %s", batch, plan.bad, target.stream, feed.directory
        )
    return feed


class FeedWriter(DataSourceStreamArrowWriter):
    """A streaming query into a stream. Its checkpoint gives the query its id, and the feed its name."""

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
        _drop(self._target, messages, batchId)


class FeedOnceWriter(DataSourceArrowWriter):
    """One DataFrame into a stream: a feed of its own, with a single batch.

    A batch with an id is remembered by it: a job that is run again goes on where the first has stopped, and
    adds nothing if that was its end.
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
        _drop(self._target, messages, 0)


def _drop(target: Target, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
    for name in {message.feed for message in messages if isinstance(message, Staged)}:
        Feed(target.place, name).drop(batch)
