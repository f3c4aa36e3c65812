"""The store of a process in RocksDB: atomic batches, ordered keys, one value type per table.

Responsible for: atomic writes, the write-ahead log, the incarnation, reading for recovery.
Not responsible for: the meaning of the tables (core/), when something is written (process/host.py), which
    copy of a store is used (recovery/recover.py).

    put (any number) --commit--> in the write-ahead log --sync--> durable
                                      `os` ends here        `disk`: one sync for all that wait
                                      `replica`: a replica holds it as well

Keys keep their order as bytes (codec.py), so the entries of an inbox are a range. The table of a value gives
its type, and decoding refuses anything else.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, cast

import msgspec
from rocksdict import DbClosedError, Rdict, WriteBatch

from tiercel.core.machine.effects import StorageKey, Write
from tiercel.core.model.keys import StateImage, StoredKeyInfo
from tiercel.core.model.log import Entry
from tiercel.errors import UserError
from tiercel.runtime.deployment import Durability
from tiercel.runtime.net.lazy_outputs import decode_stream_entry, encoder
from tiercel.runtime.storage.codec import (
    Pair,
    decode_key,
    decoders,
    encode_key,
    is_state,
    prefix_of,
    timers_in,
)
from tiercel.runtime.storage.high_water_mark import HighWaterMark
from tiercel.runtime.storage.open import DamagedStore, open_to_read, open_to_write

INCARNATION: Final = b"\x00incarnation"  # not a table, and sorts before all of them: counts the starts
BATCHES: Final = b"\x00batches"  # likewise: counts the batches for backup and replica
FORMAT_KEY: Final = b"\x00format"  # likewise: the format of the store
FORMAT: Final = 2  # grows when older versions cannot read newer stores
RESTORING: Final = b"\x00restoring"  # likewise: some values are still in a backup (backup/lazy_restore.py)
NO_TABLE: Final = b"\x00"  # keys of the store itself begin with this
RESTORED_S_MAX = 120.0  # how long a reader waits for a store that is being restored

_encode = encoder.encode


NO_TIMERS: Final = StoredKeyInfo()


# -- the store --------------------------------------------------------------------------------


StoredVersion = tuple[StateImage, int]  # of a key, and the bytes it has here


class MissingValues(Protocol):
    """Values that are not in the store yet, and arrive while it is in use (backup/lazy_restore.py)."""

    lost: Exception | None  # why they will never arrive

    @property
    def ended(self) -> bool:
        """Whether all have arrived."""

    def start_background_restore(
        self, put: Callable[[list[Pair]], object], on_complete: Callable[[], object]
    ) -> None:
        """Begin to restore all of them; `put` stores some."""

    def missing_keys(self) -> dict[bytes, tuple[int, ...]]:
        """The stored keys whose values are missing, and the timers of each."""

    def read(self, name: bytes) -> bytes | None:
        """One value; None if it is not missing any more."""

    def forget(self, names: Iterable[bytes]) -> None:
        """These keys are about to be deleted, and must not arrive any more."""

    def wait(self) -> None:
        """Until all have arrived."""

    def stop(self) -> None:
        """Nothing arrives any more."""


CommitListener = Callable[
    [int, int, list[Pair]], object
]  # number of the batch, seq of its last write, its pairs


class Store:
    """The storage of one process; `incarnation` counts how often it was opened.

    `next_incarnation` maps the last stored incarnation to the next one, where this store is not the only
    copy.
    """

    def __init__(
        self,
        directory: Path,
        durability: Durability,
        tables: Mapping[str, Any] | None = None,
        next_incarnation: Callable[[int], int] = lambda last: last + 1,
        memory_bytes_max: int = 0,
        missing: MissingValues | None = None,
    ) -> None:
        self.durability = durability
        self._directory = directory
        self._decoders = (
            decoders
            if tables is None
            else {table: msgspec.msgpack.Decoder(kind) for table, kind in tables.items()}
        )
        self._db = _checked(open_to_write(directory, memory_bytes_max), directory)
        self._db.put(FORMAT_KEY, FORMAT.to_bytes(8))
        self.last_incarnation, self.batches = _numbers(self._db)
        self.incarnation = next_incarnation(self.last_incarnation)
        self._db.put(INCARNATION, self.incarnation.to_bytes(8))
        self._high_water_mark = HighWaterMark(directory)
        self.sync()  # an incarnation is never used twice, whatever else is lost
        self._on_commit: CommitListener | None = None
        self._pairs: list[Pair] | None = None  # of the batch, if there are commit listeners
        self._batch = WriteBatch(raw_mode=True)
        self.queued = 0  # seq of the last batch that was put here
        self.written = 0  # in the write-ahead log through this seq
        self._failure: Exception | None = None  # why nothing more is written
        self._deleted: list[bytes] = []  # of the batch, while some values are missing
        self._missing = missing
        if missing is not None:
            missing.start_background_restore(self._put_all, self._mark_complete)

    def add(self, write: Write) -> None:
        """Add one write to the batch; `commit` writes the batch atomically."""
        batch, pairs = self._batch, self._pairs
        for key, value in write.puts.items():
            name, data = encode_key(key), _encode(value)
            batch.put(name, data)
            if pairs is not None:
                pairs.append((name, data))
        for key in write.deletes:
            name = encode_key(key)
            batch.delete(name)
            if pairs is not None:
                pairs.append((name, None))
            if self._missing is not None:
                self._deleted.append(name)
        self.queued = write.seq

    def commit(self) -> int:
        """Write the batch atomically into the write-ahead log; returns the last seq.

        If that fails, the batch is lost, here and for a backup. The process must end and recover from its
        storage: nothing may be written behind a missing batch, even if there is room again.
        """
        if self.written < self.queued:
            if self._failure is not None:
                raise self._failure
            batch, self._batch = self._batch, WriteBatch(raw_mode=True)
            pairs, self._pairs = self._pairs, None if self._pairs is None else []
            queued, self.queued = self.queued, self.written
            if self._on_commit is not None:
                self.batches += 1
                batch.put(BATCHES, self.batches.to_bytes(8))
            if self._missing is not None:
                if self._missing.lost is not None:
                    raise self._missing.lost  # the next start finds the newer state
                self._missing.forget(self._deleted)
                self._deleted.clear()
            try:
                self._db.write(batch)
            except Exception as failure:
                self._failure = failure
                raise
            self.written = self.queued = queued
            if self.durability != "disk" and self._high_water_mark.is_due():
                self._high_water_mark.note(self._db.latest_sequence_number())
            if self._on_commit is not None and pairs is not None:
                self._on_commit(self.batches, queued, pairs)
        return self.written

    def add_commit_listener(self, listener: CommitListener) -> None:
        """Call a listener with every batch that is committed from here on. Several may be added."""
        earlier = self._on_commit

        def both(batch: int, seq: int, pairs: list[Pair]) -> None:
            if earlier is not None:
                earlier(batch, seq, pairs)
            listener(batch, seq, pairs)

        self._on_commit, self._pairs = both, []

    def pairs(self) -> tuple[int, Iterator[Pair]]:
        """Everything that is committed now, whatever is written meanwhile, and how many batches that is.

        For any thread: an iterator of RocksDB stays where it began. Not all there is, unless it is whole.
        """
        return _all_pairs(self._db)

    @property
    def is_fully_restored(self) -> bool:
        """Whether no values are missing any more."""
        return self._missing is None or self._missing.ended

    def replace_with_takeover(self, pairs: Iterable[Pair], missing: MissingValues) -> None:
        """Replace everything with the share of a dead instance; its states arrive in the background."""
        self.commit()
        if self._missing is not None:
            self._missing.stop()
        batch = WriteBatch(raw_mode=True)
        for name in cast("Iterator[bytes]", iter(self._db.keys())):
            if not name.startswith(NO_TABLE):
                batch.delete(name)
        for name, value in pairs:
            batch.put(name, value)
        batch.put(RESTORING, b"1")
        self._db.write(batch)
        self._missing = missing
        missing.start_background_restore(self._put_all, self._mark_complete)

    def sync(self) -> None:
        """Block until everything committed before is on the disk. For a thread."""
        reached = self._db.latest_sequence_number()
        self._db.flush_wal(True)
        if self._high_water_mark.is_due():
            self._high_water_mark.note(reached)

    def items(self, *, values: bool = True, timers: bool = True) -> dict[StorageKey, Any]:
        """Everything, for recovery, except entries of inboxes and output logs, which readers ask for.

        Without `values`, the states of keys are represented by `StoredKeyInfo`, and read when needed. Without
        `timers` as well, their values are not even decoded.
        """
        inbox = encode_key(("inbox",))
        found: dict[StorageKey, Any] = {}
        if self._missing is not None:
            if values:
                self._missing.wait()
            for (
                name,
                known,
            ) in self._missing.missing_keys().items():  # first: values that arrive now are found below
                found[decode_key(name)] = StoredKeyInfo(known) if known else NO_TIMERS
        for data, value in self._everything(states=values or timers):
            if data.startswith((NO_TABLE, inbox)):
                continue
            key = decode_key(data)
            if value is not None and (values or not is_state(data)):
                found[key] = self._decoders[key[0]].decode(value)
            else:
                known = () if value is None else timers_in(value)
                found[key] = StoredKeyInfo(known) if known else NO_TIMERS
        return found

    def _everything(self, *, states: bool) -> Iterator[Pair]:
        """All pairs in order; without `states`, the states of keys have no value."""
        begin: bytes | None = None
        while True:
            for data, value in self._scan(begin):
                if not states and is_state(data):
                    begin = data
                    break
                yield data, value
            else:
                return
            for data in cast("Iterator[bytes]", iter(self._db.keys(from_key=begin))):
                if not is_state(data):
                    begin = data
                    break
                yield data, None
            else:
                return

    def read_local(self, places: Iterable[StorageKey]) -> dict[StorageKey, StoredVersion]:
        """Those of these stored versions of keys that are here: some ten microseconds for each."""
        found = {place: self._db.get(encode_key(place)) for place in places}
        return {place: _version(data) for place, data in found.items() if data is not None}

    def read_all(self, places: Iterable[StorageKey]) -> dict[StorageKey, StoredVersion]:
        """All of these stored versions. It may take long if some are still in the backup: for a thread."""
        return {place: self.read(place) for place in places}

    def read(self, place: StorageKey) -> StoredVersion:
        """One of them, out of the backup if it is not here yet."""
        name = encode_key(place)
        data = self._db.get(name)
        if data is None and self._missing is not None:
            data = self._missing.read(name) or self._db.get(name)  # it may have arrived in between
        if data is None:
            reason = f"{place!r} is in the checkpoint, but not in {self._directory}"
            raise KeyError(reason)
        return _version(data)

    def read_log(self, inbox: str, after: int, limit: int) -> list[Entry]:
        """Entries of an inbox above `after`, at most `limit`, durable or not.

        Output logs are in the same table. They have a stream head, and their entries are `StreamEntry`.
        """
        self.commit()
        prefix = prefix_of(("inbox", inbox))
        outputs = self._db.get(encode_key(("stream_head", inbox))) is not None
        decode = cast(
            "Callable[[bytes], Entry]", decode_stream_entry if outputs else decoders["inbox"].decode
        )
        found: list[Entry] = []
        for data, value in self._scan(encode_key(("inbox", inbox, after + 1))):
            if len(found) >= limit or not data.startswith(prefix):
                break
            found.append(decode(value))
        return found

    def _scan(self, begin: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        return cast("Iterator[tuple[bytes, bytes]]", iter(self._db.items(from_key=begin)))

    def _put_all(self, pairs: list[Pair]) -> None:
        batch = WriteBatch(raw_mode=True)
        for name, value in pairs:
            batch.put(name, value)
        self._db.write(batch)

    def _mark_complete(self) -> None:
        self._db.flush_wal(True)
        self._db.delete(RESTORING)
        self._db.flush_wal(True)

    def close(self) -> None:
        if self._missing is not None:
            self._missing.stop()
        try:
            self.commit()
            with contextlib.suppress(DbClosedError):
                if self.durability == "disk":
                    self._db.flush_wal(True)
                self._high_water_mark.note(self._db.latest_sequence_number())
        finally:
            with contextlib.suppress(DbClosedError):
                self._db.close()
            self._high_water_mark.close()


class StoreView:
    """A read-only view of a store, beside its writer.

    With `complete`, it waits for a store that is being restored.
    """

    def __init__(self, directory: Path, *, complete: bool = True) -> None:
        self._directory = directory
        give_up = time.monotonic() + RESTORED_S_MAX
        while True:
            self._db = _checked(open_to_read(directory), directory)
            self.restoring = self._db.get(RESTORING) is not None
            if not (complete and self.restoring):
                return
            self._db.close()
            if time.monotonic() > give_up:
                what = f"{directory} is still being restored from its backup"
                raise UserError(
                    what, expected="a process that runs, and gets the rest", hint="try again later"
                )
            time.sleep(0.1)

    def get(self, key: StorageKey) -> Any:
        try:
            found = self._db.get(encode_key(key))
            return None if found is None else decoders[str(key[0])].decode(found)
        except Exception as error:
            raise self._damaged(key, error) from error

    def _damaged(self, key: StorageKey, error: Exception) -> DamagedStore:
        what = "cannot be decoded" if isinstance(error, msgspec.DecodeError) else "cannot be read"
        return DamagedStore(f"{self._directory}: {key!r} {what}: {error}")

    def scan(self, prefix: StorageKey) -> Iterator[tuple[StorageKey, Any]]:
        """Everything whose key begins like this, in the order of the keys."""
        begin = prefix_of(prefix)
        decode = decoders[str(prefix[0])].decode
        items = cast("Iterator[tuple[bytes, bytes]]", iter(self._db.items(from_key=begin)))
        while (item := self._next(items, prefix)) is not None and item[0].startswith(begin):
            key = decode_key(item[0])
            try:
                value = decode(item[1])
            except msgspec.DecodeError as error:
                raise self._damaged(key, error) from error
            yield key, value

    def _next(self, items: Iterator[tuple[bytes, bytes]], prefix: StorageKey) -> tuple[bytes, bytes] | None:
        try:
            return next(items, None)
        except Exception as error:  # RocksDB's own checksums
            raise self._damaged(prefix, error) from error

    def pairs(self) -> tuple[int, Iterator[Pair]]:
        """Everything, as it is stored, and how many batches that is."""
        return _all_pairs(self._db)

    @property
    def numbers(self) -> tuple[int, int]:
        """The last incarnation, and the number of batches."""
        return _numbers(self._db)

    def close(self) -> None:
        self._db.close()


def fill(directory: Path, parts: Iterable[Iterable[Pair]], numbers: Callable[[], tuple[int, int]]) -> None:
    """Make a store out of pairs in their order; `numbers`, called last, gives its incarnation and batches."""
    db = open_to_write(directory)
    try:
        for part in parts:
            batch = WriteBatch(raw_mode=True)
            for key, value in part:
                if value is None:
                    batch.delete(key)
                else:
                    batch.put(key, value)
            db.write(batch)
        incarnation, batches = numbers()
        db.put(INCARNATION, incarnation.to_bytes(8))
        db.put(BATCHES, batches.to_bytes(8))
        db.flush_wal(True)
    finally:
        db.close()


def _version(data: bytes) -> StoredVersion:
    image: StateImage = decoders["state"].decode(data)
    return image, len(data)


def _checked(db: Rdict, directory: Path) -> Rdict:
    """Refuse what another version has written in another way. An empty store has no format yet."""
    found = int.from_bytes(db.get(FORMAT_KEY) or FORMAT.to_bytes(8))
    if found != FORMAT:
        db.close()  # as it was found
        what = f"{directory} is stored in format {found}"
        raise UserError(what, expected=f"format {FORMAT}", hint="use the version that wrote it")
    return db


def _numbers(db: Rdict) -> tuple[int, int]:
    return int.from_bytes(db.get(INCARNATION) or b""), int.from_bytes(db.get(BATCHES) or b"")


def _all_pairs(db: Rdict) -> tuple[int, Iterator[Pair]]:
    found = cast("Iterator[tuple[bytes, bytes]]", iter(db.items()))
    first = next(found, None)
    if first is None:
        return 0, iter(())
    batches = int.from_bytes(first[1]) if first[0] == BATCHES else 0  # it sorts before everything else
    return batches, itertools.chain([first], found)
