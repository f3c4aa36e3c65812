"""Clients that write and read rows of a stream's schema: `RowProducer` and `RowSubscriber`.

Responsible for: checking and packing rows, unpacking outputs into `Row`s with their identity.
Not responsible for: connections, retries, windows (runtime/client/).

The clients need only the storage directory of a deployment: no session, no Java.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import msgspec
from pyspark.sql import Row

from tiercel.core.model.bundle import open_outputs
from tiercel.core.model.log import Output, StreamEntry
from tiercel.core.model.row_batch import count_rows
from tiercel.errors import UserError
from tiercel.runtime.client.event_loop_thread import Client
from tiercel.runtime.client.producer import Producer
from tiercel.runtime.client.subscriber import Subscriber
from tiercel.runtime.client.validation import writable_hint
from tiercel.runtime.deployment import DeploymentDir, StreamFacts
from tiercel.spark.operators.plans import InputPlan
from tiercel.spark.operators.processor_adapter import row_maker
from tiercel.spark.operators.transforms import row_of_view
from tiercel.spark.rows.bundles import Bundler, slots_of
from tiercel.spark.rows.columnar import WholeColumns
from tiercel.spark.rows.row_codec import CoreRow, RowCodec, decode_payloads
from tiercel.spark.sources.stream_reader import identities

log = logging.getLogger(__name__)

BROADCAST_BYTES_MAX = 4_096
END_S_MAX = 5.0  # for rows that producers have sent when their deployment ends


def stream_facts(deployment: DeploymentDir, stream: str) -> StreamFacts:
    """The facts of a stream; UserError if there is no stream of that name."""
    known = deployment.manifest().streams
    if stream not in known:
        expected = f"one of: {', '.join(sorted(known))}"
        raise UserError(f"unknown stream {stream!r}", expected=expected, hint="live.stream(...) declares one")
    return known[stream]


class RowProducer:
    """Writes rows to a stream. A row that does not fit raises, and nothing of its batch is sent."""

    def __init__(self, deployment: DeploymentDir | str, stream: str, *, name: str, site: str = "") -> None:
        deployment = deployment if isinstance(deployment, DeploymentDir) else DeploymentDir(deployment)
        facts = stream_facts(deployment, stream)
        if facts.writer:
            what = f"the stream {stream!r} is written by {facts.writer}"
            hint = writable_hint(deployment.manifest())
            raise UserError(what, expected="a stream that producers write", hint=hint)
        self.codec = RowCodec.of(facts)
        self._whole = WholeColumns(self.codec)
        bundler = Bundler(self.codec, slots_of(deployment.manifest().topology, stream))
        self.client = Producer(deployment, stream, name=name, site=site, pack=bundler.pack)

    def send(self, *rows: Any) -> None:
        """Send rows (dicts, Rows or tuples). Blocks only while too many are not acknowledged."""
        self.send_many(rows)

    def send_many(self, rows: Iterable[Any]) -> None:
        self.client.send(self.codec.take(rows))

    def send_columns(self, columns: Any) -> None:
        """Send rows as whole columns: a dict of lists, a pandas DataFrame, an Arrow table.

        The cheapest way.
        """
        self.client.send(self._whole.rows(columns))

    def send_initial(self, packed: Iterable[CoreRow], count: int, size: int) -> None:
        """Send initial state in frames of that many rows or bytes; skips frames that are acknowledged."""
        seq, frame, held = 0, list[CoreRow](), 0
        for row in packed:
            frame.append(row)
            held += len(row[2])
            if len(frame) == count or held > size:
                seq += 1
                self.client.send_frame(seq, frame, initial=True)
                frame, held = [], 0
        if frame:
            self.client.send_frame(seq + 1, frame, initial=True)

    def flush(self, timeout_s: float = 30.0) -> None:
        """Returns when all rows that were sent are acknowledged."""
        self.client.flush(timeout_s)

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> RowProducer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.__exit__(kind, error, trace)

    async def send_async(self, *rows: Any) -> None:
        await self.client.send_async(self.codec.take(rows))

    async def flush_async(self, timeout_s: float = 30.0) -> None:
        await self.client.flush_async(timeout_s)


class BroadcastProducer:
    """Writes each row of a broadcast stream to every site; returns when all of them have it."""

    def __init__(self, producers: Sequence[RowProducer]) -> None:
        self._producers = producers

    def send(self, row: Any) -> None:
        """Rows that producers send later, at any site, carry this one."""
        size = len(self._producers[0].codec.pack(row)[2])
        if size > BROADCAST_BYTES_MAX:
            raise UserError(
                f"a broadcast row of {size:,} bytes",
                expected=f"at most {BROADCAST_BYTES_MAX:,}: every row carries it",
                hint="broadcast a name, and let the operator read what it names",
            )
        for producer in self._producers:
            producer.send(row)
        for producer in self._producers:
            producer.flush()

    def close(self) -> None:
        for producer in self._producers:
            producer.close()

    def __enter__(self) -> BroadcastProducer:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


class ReceivedRow(msgspec.Struct, frozen=True, gc=False):
    """One row of a stream, the offset of its log entry, and its identity."""

    row: Row
    offset: int
    output: Output
    operator: str
    index: int = 0  # of the row among those of its output, if the output is a row batch

    @property
    def id(self) -> str:
        """The identity of the row, as in the column `_tiercel_id` of the data source."""
        return identities(self.operator, self.output)[self.index]


class RowSubscriber:
    """Reads a stream's rows as they become durable."""

    def __init__(
        self,
        deployment: DeploymentDir | str,
        stream: str,
        *,
        after: int | None = None,
        at: str = "",
        site: str = "",
        subscription: str = "",
        view: InputPlan | None = None,
    ) -> None:
        deployment = deployment if isinstance(deployment, DeploymentDir) else DeploymentDir(deployment)
        facts = stream_facts(deployment, stream)
        self._operator = facts.written_by or stream
        self.codec = RowCodec.of(facts)
        self._make = row_maker(self.codec.names)
        self._view = None if view is None else row_of_view(view)
        if view is not None:
            self.codec = RowCodec(view.schema, tuple(n for n in self.codec.key if n in view.schema.names))
        self.client = Subscriber(deployment, stream, after=after, at=at, site=site, subscription=subscription)

    def poll(self, timeout_s: float = 1.0) -> list[ReceivedRow]:
        """The next rows; an empty list if none come within the time."""
        rows: list[ReceivedRow] = []
        for entry in self.client.poll(timeout_s):
            rows += self._rows(entry)
        return rows

    def poll_values(self, timeout_s: float = 1.0) -> list[Sequence[Any]]:
        """As `poll`, but only the values of each row, in the order of the columns: half the work."""
        rows: list[Sequence[Any]] = []
        for entry in self.client.poll(timeout_s):
            rows += self._values(entry)
        return rows

    def _values(self, entry: StreamEntry) -> list[Sequence[Any]]:
        payloads = decode_payloads([output.row[2] for output in entry.outputs])
        if self._view is not None:
            return [row for row in map(self._view, payloads) if row is not None]
        return payloads if self.codec.plain else list(map(self.codec.values, payloads))

    def _rows(self, entry: StreamEntry) -> list[ReceivedRow]:
        entry = StreamEntry(entry.offset, open_outputs(entry.outputs))
        operator, offset = self._operator, entry.offset
        rows: Iterable[Row | None]
        if self._view is None:
            rows = map(self._make, self._values(entry))
        else:
            rows = map(self._view, decode_payloads([output.row[2] for output in entry.outputs]))
        places = ((output, n) for output in entry.outputs for n in range(count_rows([output.row])))
        return [
            ReceivedRow(row, offset, output, operator, n)
            for row, (output, n) in zip(rows, places, strict=True)
            if row is not None
        ]

    def __iter__(self) -> Iterator[ReceivedRow]:
        for entry in self.client:
            yield from self._rows(entry)

    async def __aiter__(self) -> AsyncIterator[ReceivedRow]:
        async for entry in self.client:
            for row in self._rows(entry):
                yield row

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> RowSubscriber:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def end_client(client: Client) -> None:
    """Close a client whose deployment ends; rows that were sent may still be acknowledged."""
    try:
        client.close(END_S_MAX) if isinstance(client, Producer) else client.close()
    except UserError as failure:
        log.warning("the deployment ends: %s", failure)
