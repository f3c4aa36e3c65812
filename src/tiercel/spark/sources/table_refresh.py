"""A table that is read again and again: what has changed in it goes into a stream.

Responsible for: reading, finding the rows that are new, different or gone, sending them.
Not responsible for: what an operator does with them (operators/enrichment.py).

A digest of each row that the operator has is stored beside the deployment: at first of those of its initial
state. A refresh that was interrupted sends its rows again, which changes nothing.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql.types import BooleanType, StructField, StructType

from tiercel.errors import UserError
from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.rows.values import View

log = logging.getLogger(__name__)

REMOVED = "_removed"
CHUNK = 1_000
FLUSH_S_MAX = 60.0

_decode = msgspec.msgpack.Decoder(dict[bytes, bytes]).decode


class Producer(Protocol):
    """Writes rows of changes."""

    codec: RowCodec

    def send_many(self, rows: Sequence[Any]) -> None: ...
    def flush(self, timeout_s: float) -> None: ...
    def close(self) -> None: ...


def change_schema(table: StructType, key: Sequence[str]) -> StructType:
    """The columns of a table, null if the row is gone, and whether it is."""
    fields = [StructField(f.name, f.dataType, f.name not in key or f.nullable) for f in table.fields]
    return StructType([*fields, StructField(REMOVED, BooleanType(), False)])


class TableRefresh:
    """Reads one table every so often, from the start of a deployment to its end."""

    def __init__(
        self, operator: str, stream: str, initial: DataFrame, read: Callable[[], DataFrame], every_s: float
    ) -> None:
        self.operator, self.stream = operator, stream
        self._initial, self._read, self._every_s = initial, read, every_s
        self._known: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._producer: Producer | None = None
        self._file = Path()
        self.changes = 0  # rows that were sent and acknowledged since the start
        self.failure = ""  # of the last refresh

    def start(self, directory: Path, producer: Producer) -> None:
        self._producer, self._file = producer, directory / f"refresh-{self.operator}"
        if self._file.exists():
            self._known = _decode(self._file.read_bytes())
        else:
            self._write({key: digest for key, digest, _ in self._rows(self._initial, producer.codec)})
        self._thread = threading.Thread(target=self._run, name=f"refresh-{self.operator}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            try:
                self.refresh()
                self.failure = ""
            except Exception as error:  # the table may be there again next time; rows keep their columns
                if self._ending.is_set():
                    return
                self.failure = f"{type(error).__name__}: {error}"
                log.warning("the table of %s was not refreshed: %s", self.operator, self.failure)

    def refresh(self) -> int:
        """Read the table now. Returns the number of changes, when they are acknowledged."""
        producer = self._producer
        if producer is None:
            raise UserError(f"{self.operator!r} does not run yet", hint="live.deploy() starts it")
        with self._lock:
            return self._refresh(producer)

    def _refresh(self, producer: Producer) -> int:
        codec = producer.codec
        digests: dict[bytes, bytes] = {}
        waiting: list[Any] = []
        count = 0
        for key, digest, change in self._rows(self._read(), codec):
            digests[key] = digest
            if self._known.get(key) != digest:
                waiting.append(change)
                count += 1
            if len(waiting) == CHUNK:
                producer.send_many(waiting)
                waiting = []
        gone = [key for key in self._known if key not in digests]
        waiting += [self._removal(codec, key) for key in gone]
        if waiting:
            producer.send_many(waiting)
        producer.flush(FLUSH_S_MAX)
        if count or gone:
            self._write(digests)
        self.changes += count + len(gone)
        return count + len(gone)

    def _rows(self, frame: DataFrame, codec: RowCodec) -> Iterator[tuple[bytes, bytes, tuple[Any, ...]]]:
        """Key, digest and change of each row of the table."""
        columns = codec.names[:-1]
        missing = [name for name in columns if name not in frame.columns]
        if missing:
            raise UserError(
                f"the table of {self.operator!r} has no column {missing[0]!r} any more",
                expected=f"the columns {', '.join(columns)}",
            )
        for row in frame.select(*columns).toLocalIterator():
            change = (*row, False)
            key, _, payload = codec.pack(change)
            yield key, hashlib.blake2b(payload, digest_size=16).digest(), change

    def _write(self, digests: dict[bytes, bytes]) -> None:
        self._known = digests
        hidden = self._file.with_name(f"{self._file.name}.new")
        hidden.write_bytes(msgspec.msgpack.encode(digests))
        hidden.replace(self._file)

    def _removal(self, codec: RowCodec, key: bytes) -> tuple[Any, ...]:
        keys = RowCodec(codec.schema, codec.key, view=View.INPUT)
        values = dict(zip(codec.key, keys.key_values(key), strict=True))
        return tuple([True if name == REMOVED else values.get(name) for name in codec.names])

    def stop(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(FLUSH_S_MAX)
        if self._producer is not None:
            self._producer.close()
