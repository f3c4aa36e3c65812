"""The reader of a stream's output log as a DataFrame: entry by entry, each once, in order.

Responsible for: offsets, how much one batch takes, the rows of a range of entries.
Not responsible for: connections (runtime/client/), columns (rows/row_codec.py).

    driver      latestOffset --RangeQuery--> router          {"offset": n, …}: read up to entry n
    executor    read((a, b], keys 1 of 3) --Subscribe a-> router --> Arrow

A range of entries has the same rows whenever it is read. Each partition of a batch has a share of the keys,
so the order of each key's rows is kept. A partition of history has a share of the entries instead. An offset
also names its deployment, because entry n of another deployment is something else.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tiercel.core.model.bundle import is_bundle, open_output, open_outputs, range_of
from tiercel.core.model.keys import slot_of
from tiercel.core.model.log import Output, StreamEntry
from tiercel.core.model.row_batch import count_rows
from tiercel.errors import UserError
from tiercel.runtime.client.subscriber import LogEnd, Subscriber, stream_range
from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.sources.options import EARLIEST, LATEST

if TYPE_CHECKING:
    import pyarrow

LONG_POLL_S = 0.3  # one wait for new entries; Spark asks again at once, and may stop the query in between
RETRY_S = 0.1
PARTITIONS = 4  # of a large batch, unless the option says otherwise
PARTITION_ENTRIES = 16  # with fewer entries, one more task would cost more than it saves
SLOTS = 4096  # for a stream that no operator writes
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
    partitions: int | None = None

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

    def parts(self, entries: int) -> int:
        """How many partitions so many entries have."""
        if self.partitions is not None:
            return max(1, min(self.partitions, entries))
        return max(1, min(PARTITIONS, entries // PARTITION_ENTRIES))


class Share(msgspec.Struct, frozen=True):
    """What one task reads: the rows of a share of the keys, in the entries (after, until]."""

    after: int
    until: int
    part: int = 0
    parts: int = 1
    slots: int = 1  # of the operator that writes the stream: each part has a range of them

    def of(self, outputs: Sequence[Output]) -> Sequence[Output]:
        """The outputs whose keys are in this part. A bundle with keys of several parts is taken apart."""
        if self.parts == 1:
            return outputs
        found: list[Output] = []
        for output in outputs:
            if not is_bundle(output.key):
                if self._part(slot_of(output.row[0], self.slots)) == self.part:
                    found.append(output)
                continue
            slots, of_bundle = range_of(output.key)
            ends = {self._part(of_bundle[0]), self._part(of_bundle[-1])} if slots == self.slots else set()
            if ends == {self.part}:
                found.append(output)
            elif self.part in ends or len(ends) != 1:
                alone = open_output(output)
                found += [o for o in alone if self._part(slot_of(o.row[0], self.slots)) == self.part]
        return found

    def _part(self, slot: int) -> int:
        return slot * self.parts // self.slots


def read_entries(request: ReadRequest, share: Share) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a share, in order."""
    gathered: list[Output] = []
    cursor = LogCursor.at(request, share.after)
    for entry in cursor.entries(share.until):
        gathered += share.of(entry.outputs)
        *whole, gathered = in_batches(gathered, BATCH_ROWS)
        for batch in whole:
            yield _arrow(request, batch)
    cursor.keep()
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


class LogCursor:
    """A position in a log. A Python worker keeps the last one: the next batch begins where the last ended."""

    _kept: ClassVar[LogCursor | None] = None

    def __init__(self, request: ReadRequest, after: int) -> None:
        self._log = (str(request.deployment.directory), request.deployment.manifest().id, request.stream)
        self._stream = request.stream
        self._subscriber = Subscriber(request.deployment, request.stream, after=after)
        self._position = after
        self._ahead: deque[StreamEntry] = deque()  # read, and behind the last range

    @classmethod
    def at(cls, request: ReadRequest, after: int) -> LogCursor:
        kept, LogCursor._kept = LogCursor._kept, None
        if kept is not None:
            log = (str(request.deployment.directory), request.deployment.manifest().id, request.stream)
            if (kept._log, kept._position) == (log, after):
                return kept
            kept.close()
        return cls(request, after)

    def entries(self, until: int) -> Iterator[StreamEntry]:
        """The entries up to this one. The cursor is of no use if they are not read to their end."""
        try:
            while self._position < until:
                if not self._ahead:
                    self._ahead += self._subscriber.poll(READ_S_MAX)
                if not self._ahead:
                    what = f"entry {self._position + 1} of the stream {self._stream!r} did not come"
                    raise UserError(what, hint=f"its router could not be reached for {READ_S_MAX:g} s")
                entry = self._ahead.popleft()
                self._position = entry.offset
                yield entry
        except BaseException:
            self.close()
            raise

    def keep(self) -> None:
        """For the next batch of this worker."""
        LogCursor._kept = self

    def close(self) -> None:
        self._subscriber.close()


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
        after, until = request.bounds(*stream_range(request.deployment, request.stream))
        parts = request.parts(until - after)
        ends = [after + (until - after) * n // parts for n in range(parts + 1)]
        return [InputPartition(Share(*pair)) for pair in itertools.pairwise(ends)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        share: Share = partition.value
        if share.after < share.until:
            yield from read_entries(self._request, share)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the log as it grows."""

    def __init__(self, request: ReadRequest) -> None:
        self._request = request
        self._end = RouterLogEnd(request.deployment, request.stream)
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
        if after == until:
            return []
        parts = self._request.parts(until - after)
        operators = self._request.deployment.manifest().topology.operators
        slots = operators[self._request.operator].slots if self._request.operator in operators else SLOTS
        return [InputPartition(Share(after, until, n, parts, slots)) for n in range(parts)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        return read_entries(self._request, partition.value)

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


class RouterLogEnd:
    """The end of a stream's log, over a connection that is opened at the first use and kept open."""

    def __init__(self, deployment: DeploymentDir, stream: str) -> None:
        self._deployment, self._stream = deployment, stream
        self._client: LogEnd | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RouterLogEnd, (self._deployment, self._stream)  # another process opens its own connection

    def range(self) -> tuple[int, int]:
        """The first and the last entry. Waits for a router that restarts."""
        return self._ask(lambda client: client.range())

    def beyond(self, offset: int) -> int:
        """The last entry. Waits a moment for an entry after `offset`: Spark would ask in a tight loop."""
        found = self._ask(lambda client: client.beyond(offset, LONG_POLL_S) or client.range())
        return found[1]

    def _ask(self, ask: Callable[[LogEnd], tuple[int, int]]) -> tuple[int, int]:
        give_up = time.monotonic() + ROUTER_S_MAX
        while True:
            try:
                if self._client is None:
                    self._client = LogEnd(self._deployment, self._stream)
                return ask(self._client)
            except UserError:
                if time.monotonic() > give_up:
                    raise
                if self._client is not None:
                    self._client.close()
                    self._client = None
                time.sleep(RETRY_S)
