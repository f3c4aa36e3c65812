"""How far a store has come, in a file beside its own: what it finds must reach as far.

Responsible for: noting that a few times a second, and saying what was lost.
Not responsible for: what is durable when (store.py).

RocksDB opens its write-ahead log up to the first record that is not as it was written: what a power failure
has torn was never durable. A log that was damaged, cut or deleted looks the same to it, and the store would
go on with less than it has promised. The number is RocksDB's own count of updates, and is noted only when
they are durable; so it is never ahead of what must be there.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from pathlib import Path

NAME = "REACHED"  # no name of RocksDB's, which leaves it alone
NOTE_S = 0.2
NUMBER_BYTES = 8


class Witness:
    """Writes the note of one store."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / NAME, os.O_RDWR | os.O_CREAT, 0o644)
        self._next_s = 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self._next_s

    def note(self, number: int) -> None:
        """So far everything is durable. Few bytes in one place: they are there, or what was before is.

        Where there is no room for them, the store itself will say so.
        """
        self._next_s = time.monotonic() + NOTE_S
        data = number.to_bytes(NUMBER_BYTES)
        with contextlib.suppress(OSError):
            os.pwrite(self._file, data + zlib.crc32(data).to_bytes(4), 0)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def reached(directory: Path) -> int:
    """What was noted; 0 if nothing was, or the note itself is not as it was written."""
    try:
        found = (directory / NAME).read_bytes()
    except FileNotFoundError:
        return 0
    data, check = found[:NUMBER_BYTES], found[NUMBER_BYTES:]
    whole = len(data) == NUMBER_BYTES and check == zlib.crc32(data).to_bytes(4)
    return int.from_bytes(data) if whole else 0
