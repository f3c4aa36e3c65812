"""A machine's storage in RocksDB: atomic batches, ordered keys, one value type per table.

Responsible for: `Write` in one atomic step, what is durable when, what a new life finds.
Not responsible for: what the tables mean (core/), when something is written (host.py).

    put (any number) --commit--> in the write-ahead log --sync--> durable
                                      `os` ends here        `disk` goes on: one sync for all that wait
                                      `replica`: and another process holds it (replication.py)

Keys keep their order as bytes (tables.py), so the entries of an inbox are a range. Values carry no type of
their own: the table says it, and decoding refuses what does not fit.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import msgspec
from rocksdict import DbClosedError, Rdict, WriteBatch

from tiercel.core.effects import StorageKey, Write
from tiercel.core.records import Entry, KeyFacts, KeyImage
from tiercel.errors import UserError
from tiercel.runtime.opening import DamagedStore, open_to_read, open_to_write
from tiercel.runtime.packed import decode_stream_entry, encoder
from tiercel.runtime.pieces import Pair
from tiercel.runtime.tables import decode_key, decoders, encode_key, is_state, prefix_of, timers_in
from tiercel.runtime.witness import Witness

if TYPE_CHECKING:
    from tiercel.runtime.away import Away

Durability = Literal["os", "disk", "replica"]

LIFE: Final = b"\x00life"  # sorts before every table, and is none: counts the starts at this place
BATCHES: Final = b"\x00batches"  # same: counts the batches that were handed over for a backup
FORMAT_KEY: Final = b"\x00format"  # same: how everything here is written
FORMAT: Final = 1  # grows when an older version could not read what a newer one has written
RESTORING: Final = b"\x00restoring"  # same: some values are still in a backup (away.py)
NO_TABLE: Final = b"\x00"  # what begins like this is about the store itself
WHOLE_S_MAX = 120.0  # who looks at a store that is being restored waits so long for the rest

_encode = encoder.encode


NO_TIMERS: Final = KeyFacts()


# -- the store --------------------------------------------------------------------------------


HandOver = Callable[[int, int, list[Pair]], object]  # batch, seq of its last write, what was written


class Store:
    """One process's storage; `life` counts how often it was opened.

    `next_life` gives the life after the last one that is stored here, where this is not the only copy.
    """

    def __init__(
        self,
        directory: Path,
        durability: Durability,
        tables: Mapping[str, Any] | None = None,
        next_life: Callable[[int], int] = lambda last: last + 1,
        memory_bytes_max: int = 0,
        away: Away | None = None,
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
        self.last_life, self.batches = _numbers(self._db)
        self.life = next_life(self.last_life)
        self._db.put(LIFE, self.life.to_bytes(8))
        self._witness = Witness(directory)
        self.sync()  # a life is never counted twice, whatever else is lost
        self._hand_over: HandOver | None = None
        self._pairs: list[Pair] | None = None  # of the batch, if it is to be handed over
        self._batch = WriteBatch(raw_mode=True)
        self.queued = 0  # seq of the last batch that was put here
        self.written = 0  # in the write-ahead log through this seq
        self._failure: Exception | None = None  # why nothing more is written
        self._deleted: list[bytes] = []  # of the batch, while some values are away
        self._away = away
        if away is not None:
            away.bring(self._put_all, self._whole)

    def add(self, write: Write) -> None:
        """Put one write behind the others; `commit` makes all of them real at once."""
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
            if self._away is not None:
                self._deleted.append(name)
        self.queued = write.seq

    def commit(self) -> int:
        """Everything added so far, atomically, into the write-ahead log; returns the last seq.

        If that fails it is gone, here and for a backup: its writer ends, and begins anew from what is stored.
        Nothing may be written behind what is missing, even if there is room again.
        """
        if self.written < self.queued:
            if self._failure is not None:
                raise self._failure
            batch, self._batch = self._batch, WriteBatch(raw_mode=True)
            pairs, self._pairs = self._pairs, None if self._pairs is None else []
            queued, self.queued = self.queued, self.written
            if self._hand_over is not None:
                self.batches += 1
                batch.put(BATCHES, self.batches.to_bytes(8))
            if self._away is not None:
                if self._away.lost is not None:
                    raise self._away.lost  # whoever starts next finds what is there instead
                self._away.forget(self._deleted)
                self._deleted.clear()
            try:
                self._db.write(batch)
            except Exception as failure:
                self._failure = failure
                raise
            self.written = self.queued = queued
            if self.durability != "disk" and self._witness.is_due():
                self._witness.note(self._db.latest_sequence_number())
            if self._hand_over is not None and pairs is not None:
                self._hand_over(self.batches, queued, pairs)
        return self.written

    def hand_over_to(self, taker: HandOver) -> None:
        """From here on, whatever is committed is handed over too, batch by batch; to everyone who asked."""
        earlier = self._hand_over

        def both(batch: int, seq: int, pairs: list[Pair]) -> None:
            if earlier is not None:
                earlier(batch, seq, pairs)
            taker(batch, seq, pairs)

        self._hand_over, self._pairs = both, []

    def pairs(self) -> tuple[int, Iterator[Pair]]:
        """Everything that is committed now, whatever is written meanwhile, and how many batches that is.

        For any thread: an iterator of RocksDB stays where it began. Not all there is, unless it is whole.
        """
        return _all_pairs(self._db)

    @property
    def is_whole(self) -> bool:
        """Whether no values are away any more."""
        return self._away is None or self._away.ended

    def take_share(self, pairs: Iterable[Pair], away: Away) -> None:
        """Everything here is replaced by what another has left; its states come while they are needed."""
        self.commit()
        if self._away is not None:
            self._away.stop()
        batch = WriteBatch(raw_mode=True)
        for name in cast("Iterator[bytes]", iter(self._db.keys())):
            if not name.startswith(NO_TABLE):
                batch.delete(name)
        for name, value in pairs:
            batch.put(name, value)
        batch.put(RESTORING, b"1")
        self._db.write(batch)
        self._away = away
        away.bring(self._put_all, self._whole)

    def sync(self) -> None:
        """Blocks until the disk has everything that was committed before. For a thread."""
        reached = self._db.latest_sequence_number()
        self._db.flush_wal(True)
        if self._witness.is_due():
            self._witness.note(reached)

    def items(self, *, values: bool = True, timers: bool = True) -> dict[StorageKey, Any]:
        """Everything, for recovery. Entries of inboxes and output logs are left out: readers ask for them.

        Without `values`, of an instance's own keys only `KeyFacts`: it reads the others when it needs them.
        Without `timers` none of them has any, and their values are not even looked at.
        """
        inbox = encode_key(("inbox",))
        found: dict[StorageKey, Any] = {}
        if self._away is not None:
            if values:
                self._away.wait()
            for name, known in self._away.names().items():  # first: what comes meanwhile is found below
                found[decode_key(name)] = KeyFacts(known) if known else NO_TIMERS
        for data, value in self._everything(states=values or timers):
            if data.startswith((NO_TABLE, inbox)):
                continue
            key = decode_key(data)
            if value is not None and (values or not is_state(data)):
                found[key] = self._decoders[key[0]].decode(value)
            else:
                known = () if value is None else timers_in(value)
                found[key] = KeyFacts(known) if known else NO_TIMERS
        return found

    def _everything(self, *, states: bool) -> Iterator[Pair]:
        """All pairs in order; without `states`, those of keys' states have no value."""
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

    def read(self, place: StorageKey) -> tuple[KeyImage, int]:
        """A version of a key that is stored, and its bytes."""
        name = encode_key(place)
        data = self._db.get(name)
        if data is None and self._away is not None:
            data = self._away.read(name) or self._db.get(name)  # it may have come while we looked
        if data is None:
            reason = f"{place!r} is in the checkpoint, but not in {self._directory}"
            raise KeyError(reason)
        image: KeyImage = decoders["state"].decode(data)
        return image, len(data)

    def read_log(self, inbox: str, after: int, limit: int) -> list[Entry]:
        """Entries of an inbox above `after`, at most `limit`, durable or not.

        An output log lies in the same table and is told by its head; its entries are `StreamEntry`,
        and its reader in the core knows that.
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

    def _whole(self) -> None:
        self._db.flush_wal(True)
        self._db.delete(RESTORING)
        self._db.flush_wal(True)

    def close(self) -> None:
        if self._away is not None:
            self._away.stop()
        try:
            self.commit()
            with contextlib.suppress(DbClosedError):
                if self.durability == "disk":
                    self._db.flush_wal(True)
                self._witness.note(self._db.latest_sequence_number())
        finally:
            with contextlib.suppress(DbClosedError):
                self._db.close()
            self._witness.close()


class StoreView:
    """A process's storage as it is now: what its writer has committed, without disturbing the writer.

    One that is being restored is waited for; unless it need not be `whole`, as for a look at a few facts.
    """

    def __init__(self, directory: Path, *, whole: bool = True) -> None:
        self._directory = directory
        give_up = time.monotonic() + WHOLE_S_MAX
        while True:
            self._db = _checked(open_to_read(directory), directory)
            self.restoring = self._db.get(RESTORING) is not None
            if not (whole and self.restoring):
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
        """The last life, and how many batches were handed over."""
        return _numbers(self._db)

    def close(self) -> None:
        self._db.close()


def fill(directory: Path, parts: Iterable[Iterable[Pair]], numbers: Callable[[], tuple[int, int]]) -> None:
    """Make a store out of pairs, in their order; `numbers`, asked at the end: its last life, its batches."""
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
        life, batches = numbers()
        db.put(LIFE, life.to_bytes(8))
        db.put(BATCHES, batches.to_bytes(8))
        db.flush_wal(True)
    finally:
        db.close()


def _checked(db: Rdict, directory: Path) -> Rdict:
    """Refuse what another version has written in another way. The first format did not say which it is."""
    found = int.from_bytes(db.get(FORMAT_KEY) or FORMAT.to_bytes(8))
    if found != FORMAT:
        db.close()  # as it was found
        what = f"{directory} is stored in format {found}"
        raise UserError(what, expected=f"format {FORMAT}", hint="use the version that wrote it")
    return db


def _numbers(db: Rdict) -> tuple[int, int]:
    return int.from_bytes(db.get(LIFE) or b""), int.from_bytes(db.get(BATCHES) or b"")


def _all_pairs(db: Rdict) -> tuple[int, Iterator[Pair]]:
    found = cast("Iterator[tuple[bytes, bytes]]", iter(db.items()))
    first = next(found, None)
    if first is None:
        return 0, iter(())
    batches = int.from_bytes(first[1]) if first[0] == BATCHES else 0  # it sorts before everything else
    return batches, itertools.chain([first], found)
