"""Opening a RocksDB directory, for its one writer or for readers beside it.

Responsible for: the options, waiting for the lock of a predecessor, detecting damaged files.
Not responsible for: the content (store.py).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rocksdict import AccessType, DBCompressionType, Env, Options, Rdict

from tiercel.errors import UserError
from tiercel.runtime.storage.high_water_mark import MARK_FILE, read_mark

READ_TRIES = 20  # the writer may begin or end a log in between
OPEN_TRIES = 5  # the writer may remove a file between listing and opening
LOCK_WAIT_S = 4.0  # a predecessor that Spark has cancelled may hold the lock for two seconds
WRITE_BUFFER_BYTES = 64 * 1024 * 1024  # entries are often trimmed before they leave it for a file
WRITE_BUFFER_BYTES_MIN = 8 * 1024 * 1024
WAL_BYTES_MAX = 256 * 1024 * 1024  # a restart reads at most this much again


class DamagedStore(UserError):
    """A store that cannot be read; nothing in it was changed."""

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
    """The write buffer fits the memory limit: RocksDB has two or three buffers."""
    if not memory_bytes_max:
        return WRITE_BUFFER_BYTES
    return min(WRITE_BUFFER_BYTES, max(WRITE_BUFFER_BYTES_MIN, memory_bytes_max // 8))


def open_to_read(directory: Path) -> Rdict:
    """Open a directory to read what its writer has written so far."""
    failures = 0
    for attempt in range(1, READ_TRIES + 1):
        try:
            mark, logs = read_mark(directory), _logs(directory)
            opened = Rdict(str(directory), Options(raw_mode=True), access_type=AccessType.read_only(False))
            if _logs(directory) == logs:
                return _check_complete(opened, directory, mark)
            opened.close()
        except Exception as error:
            failures += 1
            if failures == OPEN_TRIES:
                raise _as_damage(directory, error) from error
        time.sleep(0.05 * min(attempt, OPEN_TRIES))
    what = f"{directory} changes faster than it can be read"
    raise UserError(what, expected="a moment without a new log file", hint="try again")


def _logs(directory: Path) -> set[str]:
    """Its write-ahead logs.

    RocksDB first reads its list of files, then lists the logs. A log that the writer replaces by a file
    between the two is in neither list: the view would silently lack its entries.
    """
    return {path.name for path in directory.glob("*.log")}


def _as_damage(directory: Path, error: Exception) -> Exception:
    """DamagedStore for an error about damaged files; any other error as it is."""
    if any(sign in str(error) for sign in ("Corruption", "No such file")):
        return DamagedStore(f"{directory} cannot be opened: {error}")
    return error


def _check_complete(opened: Rdict, directory: Path, mark: int) -> Rdict:
    found = opened.latest_sequence_number()
    if found < mark:
        opened.close()
        raise DamagedStore(
            f"{directory} ends with update {found} of {mark}: its log was damaged, cut or deleted",
            otherwise=f"; without one, deleting the file {MARK_FILE} there lets it go on with what is left",
        )
    return opened


def open_to_write(directory: Path, memory_bytes_max: int = 0) -> Rdict:
    """Open a directory to write; waits for the lock of a predecessor.

    RocksDB rewrites files when it opens them, so damage must be detected before (recovery/recover.py).
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_write_buffer_size(_write_buffer_bytes(memory_bytes_max))
    options.set_compression_type(DBCompressionType.lz4())  # checkpoints write much, and it is the cheapest
    options.set_max_total_wal_size(WAL_BYTES_MAX)
    tidying = Env()
    tidying.lower_thread_pool_cpu_priority()  # compaction takes a core for a second; tuples go first
    options.set_env(tidying)
    mark = read_mark(directory)
    give_up = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return _check_complete(Rdict(str(directory), options), directory, mark)
        except Exception as error:
            if "lock" not in str(error).lower():
                raise _as_damage(directory, error) from error
            if time.monotonic() > give_up:
                reason = f"{directory} is still held by another process after {LOCK_WAIT_S:g} s"
                raise StorageBusy(reason) from error
            time.sleep(0.05)
