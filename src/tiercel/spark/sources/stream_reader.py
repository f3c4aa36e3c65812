"""The reader of a stream's output log as a DataFrame: entry by entry, each once, in order.

Responsible for: offsets, how much one batch takes, the rows of a range of entries.
Not responsible for: connections (runtime/client/), columns (rows/row_codec.py).

    driver      latestOffset --RangeQuery--> router          {"offset": n, …}: read up to entry n
    executor    read((a, b]) --Subscribe a-> router --> Arrow

A range of entries has the same rows whenever it is read. One partition per batch keeps the order of each
key's rows. An offset also names its deployment, because entry n of another deployment is something else.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
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

from tiercel.core.model.bundle import open_outputs
from tiercel.core.model.log import Output
from tiercel.core.model.row_batch import count_rows
from tiercel.errors import UserError
from tiercel.runtime.client.subscriber import Subscriber, stream_range
from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.sources.options import EARLIEST, LATEST

if TYPE_CHECKING:
    import pyarrow

LONG_POLL_S = 0.3  # one wait for new entries; Spark asks again at once, and may stop the query in between
POLL_S = 0.01
ROUTER_S_MAX = 60.0  # a router restarts sooner; after this time the query fails
READ_S_MAX = 60.0  # to wait for an entry that the log has
BATCH_ROWS = 10_000  # rows of one Arrow batch
IDENTITY = t.StructField("_tiercel_id", t.StringType(), nullable=False)

Offset = dict[str, Any]  # offset: an entry of the log; deployment: its id


class ReadRequest(msgspec.Struct, frozen=True):
    """What a DataFrame reads: a stream, a range of entries, and in which form."""

    deployment: DeploymentDir
    stream: str
    operator: str  # the one that writes the stream
    codec: RowCodec
    identity: bool  # with a column that identifies each row
    starting: str | int
    ending: str | int = LATEST
    entries_max: int | None = None  # of one batch

    @property
    def schema(self) -> t.StructType:
        fields = self.codec.schema.fields
        return t.StructType([*fields, IDENTITY] if self.identity else list(fields))

    def bounds(self, first: int, last: int) -> tuple[int, int]:
        """The range (after, until] of entries, given the first and the last entry of the log."""
        after = {EARLIEST: first - 1, LATEST: last}.get(str(self.starting), 0)
        after = after if isinstance(self.starting, str) else self.starting - 1
        until = self.ending if isinstance(self.ending, int) else last
        if not first - 1 <= after <= last or until > last:
            what = f"entries {after + 1} to {until} of the stream {self.stream!r}"
            raise UserError(what, expected=f"a range within the retained entries: {first} to {last}")
        return after, until


def read_entries(request: ReadRequest, after: int, until: int) -> Iterator[pyarrow.RecordBatch]:
    """The rows of the entries (after, until], in order."""
    gathered: list[Output] = []
    with contextlib.closing(Subscriber(request.deployment, request.stream, after=after)) as subscriber:
        while subscriber.offset < until:
            entries = subscriber.poll(READ_S_MAX)
            if not entries:
                what = f"entry {subscriber.offset + 1} of the stream {request.stream!r} did not come"
                raise UserError(what, hint=f"its router could not be reached for {READ_S_MAX:g} s")
            for entry in entries:
                if entry.offset <= until:
                    gathered += entry.outputs
            *whole, gathered = in_batches(gathered, BATCH_ROWS)
            for batch in whole:
                yield _arrow(request, batch)
    if gathered:
        yield _arrow(request, gathered)


def in_batches(outputs: Iterable[Output], rows_max: int) -> list[list[Output]]:
    """Outputs in lists of at least `rows_max` rows; an output may have many. The last one has the rest."""
    batches: list[list[Output]] = [[]]
    rows = 0
    for output in outputs:
        batches[-1].append(output)
        rows += count_rows([output.row])
        if rows >= rows_max:
            batches.append([])
            rows = 0
    return batches


def identities(operator: str, output: Output) -> list[str]:
    """The identity of each row of an output. Moves, crashes and repeated reads do not change it."""
    name = f"{operator}/{output.key.hex()}/{output.epoch}/{output.offset}/{output.n}"
    count = count_rows([output.row])
    return [name] if count == 1 else [f"{name}.{n}" for n in range(count)]


def _arrow(request: ReadRequest, outputs: list[Output]) -> pyarrow.RecordBatch:
    import pyarrow

    batch = request.codec.arrow_batch([output.row[2] for output in outputs])
    if not request.identity:
        return batch
    alone = open_outputs(outputs)
    names = [name for output in alone for name in identities(request.operator, output)]
    return pyarrow.RecordBatch.from_arrays(
        [*batch.columns, pyarrow.array(names)],
        schema=batch.schema.append(pyarrow.field(IDENTITY.name, pyarrow.string(), nullable=False)),
    )


class HistoryReader(DataSourceReader):
    """Reads the entries that the log has now, or a range of them."""

    def __init__(self, request: ReadRequest) -> None:
        self._request = request

    def partitions(self) -> Sequence[InputPartition]:
        request = self._request
        return [InputPartition(request.bounds(*stream_range(request.deployment, request.stream)))]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        after, until = partition.value
        if after < until:
            yield from read_entries(self._request, after, until)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the log as it grows."""

    def __init__(self, request: ReadRequest) -> None:
        self._request = request
        self._end = LogEnd(request.deployment, request.stream)
        self._deployment_id = request.deployment.manifest().id
        self._last: int | None = None  # available now: no entry after this one

    def initialOffset(self) -> Offset:
        return self._offset(self._request.bounds(*self._end.range())[0])

    def prepareForTriggerAvailableNow(self) -> None:
        self._last = self._end.range()[1]

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._request.entries_max
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        after = self._entry(start)
        last = self._end.beyond(after) if self._last is None else self._last
        if last < after:
            raise UserError(
                f"the log of {self._request.stream!r} ends at {last}, and the query has read up to {after}",
                expected="a log that has all entries that were read",
                hint="its router has lost a part of it: restore that from a backup, or give the query a new "
                "checkpointLocation, and it starts again",
            )
        if isinstance(limit, ReadMaxRows):  # rows are entries here
            last = min(last, after + limit.max_rows)
        return self._offset(max(last, after))

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        after, until = self._entry(start), self._entry(end)
        return [InputPartition((after, until))] if after != until else []

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return read_entries(self._request, *partition.value)

    def _offset(self, entry: int) -> Offset:
        return {"offset": entry, "deployment": self._deployment_id}

    def _entry(self, offset: Offset) -> int:
        """The entry of an offset, which may come from a checkpoint for another deployment."""
        if offset.get("deployment", self._deployment_id) != self._deployment_id:
            raise UserError(
                f"{self._request.deployment.directory} holds another deployment than the query's checkpoint",
                expected="the storage that the query has read before, with its state and log",
                hint="storage= belongs to checkpointLocation: give the same ones again, or two new ones",
            )
        return int(offset["offset"])


class LogEnd:
    """The end of a stream's log, over a connection that is opened at the first use and kept open."""

    def __init__(self, deployment: DeploymentDir, stream: str) -> None:
        self._deployment, self._stream = deployment, stream
        self._subscriber: Subscriber | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return LogEnd, (self._deployment, self._stream)  # another process opens its own connection

    def range(self) -> tuple[int, int]:
        """The first and the last entry. Waits for a router that restarts."""
        give_up = time.monotonic() + ROUTER_S_MAX
        while True:
            try:
                if self._subscriber is None:
                    self._subscriber = Subscriber(self._deployment, self._stream)
                return self._subscriber.range()
            except UserError:
                if time.monotonic() > give_up:
                    raise
                if self._subscriber is not None:
                    self._subscriber.close()
                    self._subscriber = None
                time.sleep(POLL_S)

    def beyond(self, offset: int) -> int:
        """The last entry.

        Waits a moment for an entry after `offset`, so that Spark does not ask in a tight loop.
        """
        give_up = time.monotonic() + LONG_POLL_S
        while (last := self.range()[1]) <= offset and time.monotonic() < give_up:
            time.sleep(POLL_S)
        return last
