"""From the Arrow columns of a task to frames of rows for the router of a site.

Responsible for: one conversion for each column, frames that each attempt cuts in the same way, dead letters
    of rows that do not fit.
Not responsible for: the connection (runtime/client/batch_task.py), what the router does with a frame.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from tiercel.core.messages import BatchTask
from tiercel.core.model.bundle import newest_ms
from tiercel.core.model.topology import Topology
from tiercel.runtime.client.batch_task import BatchTaskClient
from tiercel.runtime.client.validation import split_rows
from tiercel.spark.rows.arrow_rows import ArrowRows
from tiercel.spark.rows.bundles import Bundler, slots_of
from tiercel.spark.rows.row_codec import FEED_DEAD_LETTER_SCHEMA, BadRow, CoreRow, RowCodec

if TYPE_CHECKING:
    import pyarrow

FRAME_ROWS = 10_000  # rows of one inbox entry, cut the same way by each attempt
FRAME_BYTES = 16_000_000  # a frame of wide rows is split; the wire accepts 64 MiB


class FrameSender:
    """Sends the rows of one task. With an empty `dead_letters`, a row that does not fit raises BadRow."""

    def __init__(
        self,
        client: BatchTaskClient,
        stream: str,
        codec: RowCodec,
        dead_letters: str,
        task: BatchTask,
        topology: Topology,
        *,
        feed: str = "",
        exact: bool = True,
    ) -> None:
        """`exact`: the columns have the types of the stream, so that no value needs a check."""
        self._client, self._stream, self._codec = client, stream, codec
        self._dead_letters = dead_letters
        self._arrow = ArrowRows(codec, exact=exact)
        self._bundler = Bundler(codec, slots_of(topology, stream))
        self._dead_letter = DeadLetterMaker(codec, feed or task.query, task.batch, task.partition)
        self._rows: list[tuple[Any, ...]] = []
        self._refused: list[CoreRow] = []
        self._seen = 0
        self.rejected = self.frames = 0
        self.newest_ms = -1

    def add(self, batch: pyarrow.RecordBatch) -> None:
        """Rows as columns, in the order of the stream's columns."""
        rows, refused = self._arrow.rows(batch)
        if refused and not self._dead_letters:
            raise refused[0][2]
        self._refused += [self._dead_letter(self._seen + n + 1, row, why) for n, row, why in refused]
        self._seen += batch.num_rows
        self._rows += rows
        while len(self._rows) >= FRAME_ROWS:
            self._send(self._rows[:FRAME_ROWS])
            del self._rows[:FRAME_ROWS]

    def end(self) -> None:
        """Send what is left."""
        if self._rows:
            self._send(self._rows)
        for begin in range(0, len(self._refused), FRAME_ROWS):
            self._client.send(self._dead_letters, self._refused[begin : begin + FRAME_ROWS])
            self.frames += 1
        self.rejected = len(self._refused)

    def _send(self, rows: list[tuple[Any, ...]]) -> None:
        for packed, _ in split_rows(self._bundler.pack(rows), FRAME_ROWS, FRAME_BYTES):
            newest = newest_ms(packed) if self._codec.event_time else -1
            self.newest_ms = max(self.newest_ms, newest)
            if self._codec.sequence:  # devices number their rows
                numbers = [row[3] for row in packed]
                self._client.send(self._stream, [row[:3] for row in packed], newest, numbers)
            else:
                self._client.send(self._stream, packed, newest)
            self.frames += 1


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
