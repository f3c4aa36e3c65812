"""The load of the rivals: rows that are due, at a rate, as files in a directory.

Responsible for: what is due when, and a record of it.
Not responsible for: reading the files (the rival), judging its outputs (rival.py).
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns
from typing import Protocol

Reading = tuple[int, int, int, float]  # sensor, n, due_ns, value

TICK_NS = 10_000_000
FILE_NS = 100_000_000  # of rows in one file
STRIDE = 389  # prime to the number of keys: all keys in turn, in no simple order


class Sink(Protocol):
    """Where rows are handed over."""

    def send(self, rows: Sequence[Reading]) -> None: ...

    def flush(self) -> None: ...


class InputFiles:
    """A directory of CSV files, each with the rows of a tenth of a second."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._rows: list[Reading] = []
        self._file_ns = monotonic_ns()

    def send(self, rows: Sequence[Reading]) -> None:
        self._rows += rows
        if monotonic_ns() - self._file_ns >= FILE_NS:
            self.flush()

    def flush(self) -> None:
        """Hand over the rows of an unfinished file. A name that begins with a dot is not read yet."""
        now = self._file_ns = monotonic_ns()
        if self._rows:
            draft = self._directory / f".{now}"
            draft.write_text("".join(f"{s},{n},{d},{v}\n" for s, n, d, v in self._rows), encoding="ascii")
            draft.rename(self._directory / f"{now:020d}.csv")
            self._rows = []


class FileLoad(threading.Thread):
    """Hands over what is due, at a rate, until it is stopped."""

    def __init__(self, system: Sink, keys: int, rate: int) -> None:
        super().__init__(name="tiercel-file-load", daemon=True)
        self._system, self._keys, self._rate = system, keys, rate
        self.sensor, self.due_ns = array("q"), array("q")
        self._counts = [0] * keys
        self._over = threading.Event()

    def run(self) -> None:
        begun_ns, sent = monotonic_ns(), 0
        while not self._over.wait(TICK_NS / 1e9):
            now_ns = monotonic_ns()
            due = int((now_ns - begun_ns) * self._rate / 1e9)
            rows: list[Reading] = []
            for number in range(sent, due):
                sensor = number * STRIDE % self._keys
                n = self._counts[sensor] = self._counts[sensor] + 1
                due_ns = begun_ns + int(number * 1e9 / self._rate)
                self.sensor.append(sensor)
                self.due_ns.append(due_ns)
                rows.append((sensor, n, due_ns, float(n)))
            sent = due
            self._system.send(rows)

    def stop(self) -> None:
        self._over.set()
        self.join()
        self._system.flush()

    def sent_before(self, due_ns: int) -> set[tuple[int, int]]:
        """What was due before a moment: sensor and due time, which no two rows share."""
        return {(s, d) for s, d in zip(self.sensor, self.due_ns, strict=True) if d < due_ns}
