"""The high-water mark of a store: detects a write-ahead log that was damaged, cut or deleted.

Responsible for: noting a few times a second how far a store has come, in a file beside it.
Not responsible for: durability (store.py).

RocksDB opens its write-ahead log up to the first damaged record, because a power failure may tear the last,
never durable ones. A log that was damaged, cut or deleted looks the same, and the store would go on without
acknowledged writes. The mark is RocksDB's own count of updates. It is noted only for durable updates, so it
is never ahead of what must be there.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from pathlib import Path

MARK_FILE = "REACHED"  # RocksDB ignores files with other names
NOTE_S = 0.2
NUMBER_BYTES = 8


class HighWaterMark:
    """Writes the high-water mark of one store."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / MARK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        self._next_s = 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self._next_s

    def note(self, number: int) -> None:
        """Note that everything up to this update is durable. A few bytes are written atomically.

        A full disk is ignored here: the store itself reports it.
        """
        self._next_s = time.monotonic() + NOTE_S
        data = number.to_bytes(NUMBER_BYTES)
        with contextlib.suppress(OSError):
            os.pwrite(self._file, data + zlib.crc32(data).to_bytes(4), 0)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_mark(directory: Path) -> int:
    """The noted number; 0 if there is none, or the note is damaged."""
    try:
        found = (directory / MARK_FILE).read_bytes()
    except FileNotFoundError:
        return 0
    data, check = found[:NUMBER_BYTES], found[NUMBER_BYTES:]
    whole = len(data) == NUMBER_BYTES and check == zlib.crc32(data).to_bytes(4)
    return int.from_bytes(data) if whole else 0
