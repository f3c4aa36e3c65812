"""Writing a DataFrame into a stream: each row of each batch exactly once, whatever is tried again.

Responsible for: columns that fit, rows that do not, what runs on executors and what in the driver.
Not responsible for: staged files, plans and numbers (runtime/feeds.py).

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
from tiercel.runtime.feeds import Feed, Stage, StagedFile
from tiercel.runtime.place import Place
from tiercel.spark.schema import FEED_LETTER_SCHEMA, BadRow, Columns, CoreRow

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
    letters: str = ""  # the stream for those; empty: they fail the batch
    query: str = ""  # the name that its user gave it


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
    partition = context.partitionId()
    directory = Feed(target.place, feed).staging(batch)
    file = Stage(directory, partition, context.attemptNumber())
    refused: Stage | None = None
    letter = Letters(target.columns, target.query or feed, batch, partition)
    seen = 0
    try:
        for rows in python_rows(batches, names):
            packed, bad = target.columns.pack_all(rows)
            if bad and not target.letters:
                raise bad[0][2]
            file.add(packed)
            if bad:
                refused = refused or Stage(directory, partition, context.attemptNumber())
                refused.add([letter(seen + n + 1, row, reason) for n, row, reason in bad])
            seen += len(rows)
        return Staged(feed, file.finish(None if refused is None else refused.finish()))
    except BaseException:
        file.abandon()
        if refused is not None:
            refused.abandon()
        raise


class Letters:
    """Makes dead letters of the rows of one partition that do not fit."""

    def __init__(self, columns: Columns, feed: str, batch: int, partition: int) -> None:
        self._key, self._names = columns.key_alone(), columns.key
        self._columns = Columns(FEED_LETTER_SCHEMA)
        self._where = (feed, batch, partition)

    def __call__(self, number: int, row: dict[str, Any], reason: BadRow) -> CoreRow:
        """The key is null if that is what does not fit."""
        key = None
        with contextlib.suppress(BadRow):
            key = self._key.pack({name: row[name] for name in self._names})[0]
        return self._columns.pack((str(reason), key, number, _json(row), *self._where))


def _json(row: Any) -> str:
    try:
        return msgspec.json.encode(row, enc_hook=str).decode()
    except TypeError:  # keys of a map that JSON cannot have
        return msgspec.json.encode(repr(row)).decode()


def publish(target: Target, messages: Sequence[WriterCommitMessage | None], batch: int) -> Feed | None:
    """In the driver: everything that the tasks of a batch have staged."""
    staged = [message for message in messages if isinstance(message, Staged)]
    if not staged:
        return None  # no partitions
    feed = Feed(target.place, staged[0].feed)
    files = [message.file for message in staged]
    plan = feed.publish(batch, target.stream, target.site, files, target.letters)
    if plan.bad:
        log.warning(
            "batch %d: %d rows do not fit stream %s: see %s", batch, plan.bad, plan.stream, plan.letters
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
