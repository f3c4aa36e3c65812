"""How a directory of RocksDB is opened: by its one writer, or by whoever looks at it meanwhile.

Responsible for: its options, the lock that a predecessor may hold for a moment, damaged files.
Not responsible for: what is in it (store.py).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rocksdict import AccessType, DBCompressionType, Env, Options, Rdict

from tiercel.errors import UserError
from tiercel.runtime.witness import NAME, reached

LOOK_TRIES = 20  # as long as its writer begins or ends a log meanwhile
OPEN_TRIES = 5  # a writer may remove a file between our look at the directory and our opening it
LOCK_WAIT_S = 4.0  # a predecessor that Spark has cancelled may hold the lock for two seconds
WRITE_BUFFER_BYTES = 64 * 1024 * 1024  # entries are often trimmed before they leave it for a file
WRITE_BUFFER_BYTES_MIN = 8 * 1024 * 1024
WAL_BYTES_MAX = 256 * 1024 * 1024  # what a restart reads again at most


class DamagedStore(UserError):
    """What a process has stored cannot be read; nothing of it was changed."""

    def __init__(self, what: str, otherwise: str = "") -> None:
        super().__init__(
            what,
            expected="files as they were written",
            hint="set this directory aside: with a backup the process is restored from it when it starts; "
            f"`tiercel state restore` makes a whole deployment out of a backup{otherwise}",
        )
        self.otherwise = otherwise

    def __reduce__(self) -> tuple[Any, ...]:
        return DamagedStore, (self.what, self.otherwise)


class StorageBusy(Exception):
    """Another process holds the directory."""


def _write_buffer_bytes(memory_bytes_max: int) -> int:
    """Who may keep little in memory does not keep much more in buffers: RocksDB has two or three of them."""
    if not memory_bytes_max:
        return WRITE_BUFFER_BYTES
    return min(WRITE_BUFFER_BYTES, max(WRITE_BUFFER_BYTES_MIN, memory_bytes_max // 8))


def open_to_read(directory: Path) -> Rdict:
    """What its writer has written so far; the writer does not notice."""
    failures = 0
    for attempt in range(1, LOOK_TRIES + 1):
        try:
            noted, logs = reached(directory), _logs(directory)
            opened = Rdict(str(directory), Options(raw_mode=True), access_type=AccessType.read_only(False))
            if _logs(directory) == logs:
                return _all_there(opened, directory, noted)
            opened.close()
        except Exception as error:
            failures += 1
            if failures == OPEN_TRIES:
                raise _if_damaged(directory, error) from error
        time.sleep(0.05 * min(attempt, OPEN_TRIES))
    what = f"{directory} changes faster than it can be looked at"
    raise UserError(what, expected="a moment without a new log file", hint="try again")


def _logs(directory: Path) -> set[str]:
    """Its write-ahead logs.

    RocksDB reads which of its files count, then which logs there are. One that its writer has replaced by
    a file between the two is in neither: the view would lack the middle, and nothing else would tell.
    """
    return {path.name for path in directory.glob("*.log")}


def _if_damaged(directory: Path, error: Exception) -> Exception:
    """What RocksDB says about files that are not as it wrote them; anything else stays as it is."""
    if any(sign in str(error) for sign in ("Corruption", "No such file")):
        return DamagedStore(f"{directory} cannot be opened: {error}")
    return error


def _all_there(opened: Rdict, directory: Path, noted: int) -> Rdict:
    found = opened.latest_sequence_number()
    if found < noted:
        opened.close()
        raise DamagedStore(
            f"{directory} ends with update {found} of {noted}: its log was damaged, cut or deleted",
            otherwise=f"; without one, deleting the file {NAME} there lets it go on with what is left",
        )
    return opened


def open_to_write(directory: Path, memory_bytes_max: int = 0) -> Rdict:
    """For its one writer; one before it is waited for. Files are rewritten: look first (`look_at`)."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(_write_buffer_bytes(memory_bytes_max))
    options.set_compression_type(DBCompressionType.lz4())  # checkpoints write much, and it is the cheapest
    options.set_max_total_wal_size(WAL_BYTES_MAX)
    tidying = Env()
    tidying.lower_thread_pool_cpu_priority()  # compaction takes a core for a second; tuples go first
    options.set_env(tidying)
    noted = reached(directory)
    give_up = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return _all_there(Rdict(str(directory), options), directory, noted)
        except Exception as error:
            if "lock" not in str(error).lower():
                raise _if_damaged(directory, error) from error
            if time.monotonic() > give_up:
                reason = f"{directory} is still held by another process after {LOCK_WAIT_S:g} s"
                raise StorageBusy(reason) from error
            time.sleep(0.05)
