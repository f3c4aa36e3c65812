"""Rows in, rows out: the clients of runtime/client.py, for rows of a stream's schema.

Responsible for: checking and packing rows, unpacking outputs into `Row`s with their identity.
Not responsible for: connections, retries, windows (runtime/client.py).

They need a deployment's storage directory and nothing else: no session, no Java.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import msgspec
from pyspark.sql import Row

from tiercel.core.records import Output, StreamEntry
from tiercel.core.runs import count_rows
from tiercel.errors import UserError
from tiercel.runtime.arguments import writable_hint
from tiercel.runtime.background import Client
from tiercel.runtime.client import Producer, Subscriber
from tiercel.runtime.place import Place, StreamFacts
from tiercel.spark.border import row_maker
from tiercel.spark.schema import Columns, CoreRow, decode_payloads
from tiercel.spark.stream_reader import identities
from tiercel.spark.whole_columns import WholeColumns

log = logging.getLogger(__name__)

END_S_MAX = 5.0  # for what producers have sent when their deployment ends


def stream_facts(place: Place, stream: str) -> StreamFacts:
    """What is known about a stream; a clear error if there is none of that name."""
    known = place.manifest().streams
    if stream not in known:
        expected = f"one of: {', '.join(sorted(known))}"
        raise UserError(f"unknown stream {stream!r}", expected=expected, hint="live.stream(...) declares one")
    return known[stream]


class RowProducer:
    """Writes rows to a stream. A row that does not fit raises, and nothing of its batch is sent."""

    def __init__(self, place: Place | str, stream: str, *, name: str, site: str = "") -> None:
        place = place if isinstance(place, Place) else Place(place)
        facts = stream_facts(place, stream)
        if facts.writer:
            what = f"the stream {stream!r} is written by {facts.writer}"
            hint = writable_hint(place.manifest())
            raise UserError(what, expected="a stream that producers write", hint=hint)
        self.columns = Columns.of(facts)
        self._whole = WholeColumns(self.columns)
        self.client = Producer(place, stream, name=name, site=site, pack=self.columns.gather)

    def send(self, *rows: Any) -> None:
        """Hand rows over (dicts, Rows or tuples); blocks only while too much is under way."""
        self.send_many(rows)

    def send_many(self, rows: Iterable[Any]) -> None:
        self.client.send(self.columns.take(rows))

    def send_columns(self, columns: Any) -> None:
        """Rows as whole columns: a dict of lists, a pandas DataFrame, an Arrow table. The cheapest way."""
        self.client.send(self._whole.rows(columns))

    def send_initial(self, packed: Iterable[CoreRow], count: int, size: int) -> None:
        """Rows that are keys' first state, in frames of so many rows or bytes; what is safe is skipped."""
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
        """Returns when everything sent is safe."""
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
        await self.client.send_async(self.columns.take(rows))

    async def flush_async(self, timeout_s: float = 30.0) -> None:
        await self.client.flush_async(timeout_s)


class Received(msgspec.Struct, frozen=True, gc=False):
    """One row of a stream, the offset of its log entry, and who it is."""

    row: Row
    offset: int
    output: Output
    operator: str
    place: int = 0  # of the row among those of its output, if that is a run

    @property
    def id(self) -> str:
        """Its identity, as the data source's column `_tiercel_id` has it."""
        return identities(self.operator, self.output)[self.place]


class RowSubscriber:
    """Reads a stream's rows as they become durable."""

    def __init__(self, place: Place | str, stream: str, *, after: int | None = None) -> None:
        place = place if isinstance(place, Place) else Place(place)
        facts = stream_facts(place, stream)
        self._operator = facts.written_by or stream
        self.columns = Columns.of(facts)
        self._make = row_maker(self.columns.names)
        self.client = Subscriber(place, stream, after=after)

    def poll(self, timeout_s: float = 1.0) -> list[Received]:
        """What has come; an empty list if nothing has by then."""
        rows: list[Received] = []
        for entry in self.client.poll(timeout_s):
            rows += self._rows(entry)
        return rows

    def poll_values(self, timeout_s: float = 1.0) -> list[Sequence[Any]]:
        """As `poll`, but of each row only its values, in the order of the columns: half the work."""
        rows: list[Sequence[Any]] = []
        for entry in self.client.poll(timeout_s):
            rows += self._values(entry)
        return rows

    def _values(self, entry: StreamEntry) -> list[Sequence[Any]]:
        rows = decode_payloads([output.row[2] for output in entry.outputs])
        return rows if self.columns.plain else list(map(self.columns.values, rows))

    def _rows(self, entry: StreamEntry) -> list[Received]:
        rows, operator, offset = map(self._make, self._values(entry)), self._operator, entry.offset
        places = ((output, n) for output in entry.outputs for n in range(count_rows([output.row])))
        return [
            Received(row, offset, output, operator, n) for row, (output, n) in zip(rows, places, strict=True)
        ]

    def __iter__(self) -> Iterator[Received]:
        for entry in self.client:
            yield from self._rows(entry)

    async def __aiter__(self) -> AsyncIterator[Received]:
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
    """Its deployment ends: what was sent may still arrive."""
    try:
        client.close(END_S_MAX) if isinstance(client, Producer) else client.close()
    except UserError as failure:
        log.warning("the deployment ends: %s", failure)
