"""Reading a stream's output log as a DataFrame: entry by entry, each once, in order.

Responsible for: offsets, how much one batch takes, the rows of a range of entries.
Not responsible for: connections and their repair (runtime/client.py), columns (schema.py).

    driver      latestOffset --RangeQuery--> router          {"offset": n, …}: read up to entry n
    executor    read((a, b]) --Subscribe a-> router --> Arrow

A range of entries is the same rows whenever it is read: the log holds what was admitted, once. One
partition per batch keeps the order of each key's rows. An offset also names its deployment: entry n of
another one is something else.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tiercel.core.records import Output
from tiercel.core.runs import count_rows
from tiercel.errors import UserError
from tiercel.runtime.client import Subscriber, stream_range
from tiercel.runtime.place import Place
from tiercel.spark.options import EARLIEST, LATEST
from tiercel.spark.schema import Columns

if TYPE_CHECKING:
    import pyarrow

LONG_POLL_S = 0.3  # one wait for news; Spark asks again at once, and may stop the query in between
LOOK_S = 0.01
AWAY_S_MAX = 60.0  # a router that is started again is back long before; then the query fails
READ_S_MAX = 60.0  # without a single entry that is known to be there
BATCH_ROWS = 10_000  # rows of one Arrow batch
IDENTITY = t.StructField("_tiercel_id", t.StringType(), nullable=False)

Offset = dict[str, Any]  # offset: an entry of the log; deployment: whose


class Wanted(msgspec.Struct, frozen=True):
    """What a DataFrame reads: a stream, from where to where, and in which form."""

    place: Place
    stream: str
    operator: str  # that writes the stream
    columns: Columns
    identity: bool  # with a column that names each output for good
    starting: str | int
    ending: str | int = LATEST
    entries_max: int | None = None  # of one batch

    @property
    def schema(self) -> t.StructType:
        fields = self.columns.schema.fields
        return t.StructType([*fields, IDENTITY] if self.identity else list(fields))

    def bounds(self, first: int, last: int) -> tuple[int, int]:
        """(after, until) in terms of entries, once it is known which there are."""
        after = {EARLIEST: first - 1, LATEST: last}.get(str(self.starting), 0)
        after = after if isinstance(self.starting, str) else self.starting - 1
        until = self.ending if isinstance(self.ending, int) else last
        if not first - 1 <= after <= last or until > last:
            what = f"entries {after + 1} to {until} of the stream {self.stream!r}"
            raise UserError(what, expected=f"a range within what is kept: {first} to {last}")
        return after, until


def read_entries(wanted: Wanted, after: int, until: int) -> Iterator[pyarrow.RecordBatch]:
    """The rows of the entries (after, until], in order."""
    gathered: list[Output] = []
    with contextlib.closing(Subscriber(wanted.place, wanted.stream, after=after)) as subscriber:
        while subscriber.offset < until:
            entries = subscriber.poll(READ_S_MAX)
            if not entries:
                what = f"entry {subscriber.offset + 1} of the stream {wanted.stream!r} did not come"
                raise UserError(what, hint=f"its router was not to be reached for {READ_S_MAX:g} s")
            for entry in entries:
                if entry.offset <= until:
                    gathered += entry.outputs
            while len(gathered) >= BATCH_ROWS:
                yield _arrow(wanted, gathered[:BATCH_ROWS])
                del gathered[:BATCH_ROWS]
    if gathered:
        yield _arrow(wanted, gathered)


def identities(operator: str, output: Output) -> list[str]:
    """Of each of its rows; the same for the same row, whatever was moved, killed or read again in between."""
    name = f"{operator}/{output.key.hex()}/{output.epoch}/{output.offset}/{output.n}"
    count = count_rows([output.row])
    return [name] if count == 1 else [f"{name}.{n}" for n in range(count)]


def _arrow(wanted: Wanted, outputs: list[Output]) -> pyarrow.RecordBatch:
    import pyarrow

    batch = wanted.columns.arrow_batch([output.row[2] for output in outputs])
    if not wanted.identity:
        return batch
    names = [name for output in outputs for name in identities(wanted.operator, output)]
    return pyarrow.RecordBatch.from_arrays(
        [*batch.columns, pyarrow.array(names)],
        schema=batch.schema.append(pyarrow.field(IDENTITY.name, pyarrow.string(), nullable=False)),
    )


class HistoryReader(DataSourceReader):
    """What the log holds now, or a part of it."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted

    def partitions(self) -> Sequence[InputPartition]:
        wanted = self._wanted
        return [InputPartition(wanted.bounds(*stream_range(wanted.place, wanted.stream)))]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        after, until = partition.value
        if after < until:
            yield from read_entries(self._wanted, after, until)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The log as it grows."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._end = LogEnd(wanted.place, wanted.stream)
        self._deployment = wanted.place.manifest().id
        self._last: int | None = None  # available now: no entry after this one

    def initialOffset(self) -> Offset:
        return self._offset(self._wanted.bounds(*self._end.range())[0])

    def prepareForTriggerAvailableNow(self) -> None:
        self._last = self._end.range()[1]

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._wanted.entries_max
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        after = self._entry(start)
        last = self._end.beyond(after) if self._last is None else self._last
        if last < after:
            raise UserError(
                f"the log of {self._wanted.stream!r} ends at {last}, and the query has read up to {after}",
                expected="a log that holds what was read",
                hint="its router has lost a part of it: restore that from a backup, or give the query a new "
                "checkpointLocation, and it begins anew",
            )
        if isinstance(limit, ReadMaxRows):  # rows are entries here
            last = min(last, after + limit.max_rows)
        return self._offset(max(last, after))

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        after, until = self._entry(start), self._entry(end)
        return [InputPartition((after, until))] if after != until else []

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return read_entries(self._wanted, *partition.value)

    def _offset(self, entry: int) -> Offset:
        return {"offset": entry, "deployment": self._deployment}

    def _entry(self, offset: Offset) -> int:
        """Of an offset that may come from a checkpoint, and be of a deployment that is no more."""
        if offset.get("deployment", self._deployment) != self._deployment:
            raise UserError(
                f"{self._wanted.place.directory} holds another deployment than the query's checkpoint knows",
                expected="the storage that the query has read before: state and log are there",
                hint="storage= belongs to checkpointLocation: give the same ones again, or two new ones",
            )
        return int(offset["offset"])


class LogEnd:
    """Where a stream's log ends, over a connection that is opened when first needed and kept."""

    def __init__(self, place: Place, stream: str) -> None:
        self._place, self._stream = place, stream
        self._subscriber: Subscriber | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return LogEnd, (self._place, self._stream)  # a copy in another process has its own connection

    def range(self) -> tuple[int, int]:
        """First and last entry. A router that is being started again is waited for."""
        give_up = time.monotonic() + AWAY_S_MAX
        while True:
            try:
                if self._subscriber is None:
                    self._subscriber = Subscriber(self._place, self._stream)
                return self._subscriber.range()
            except UserError:
                if time.monotonic() > give_up:
                    raise
                if self._subscriber is not None:
                    self._subscriber.close()
                    self._subscriber = None
                time.sleep(LOOK_S)

    def beyond(self, offset: int) -> int:
        """The last entry; waits a moment for one after `offset`, so that nobody has to ask in a loop."""
        give_up = time.monotonic() + LONG_POLL_S
        while (last := self.range()[1]) <= offset and time.monotonic() < give_up:
            time.sleep(LOOK_S)
        return last
