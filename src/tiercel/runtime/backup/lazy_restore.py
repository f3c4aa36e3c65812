"""Lazy restore: values that are still in the backup, and move into the store while it is in use.

Responsible for: the position of each missing value; reading one at once when needed; restoring all in the
    background.
Not responsible for: the files of a backup (process_backup.py), the store (storage/store.py).

    restore: names and timers of all keys --> the process works --> a needed value is read from the backup
                                                   |
                                                   +--> a thread restores the others

A version of a key is written once and never changed, so it does not matter when it arrives. A deleted one
does not arrive any more. Until all values are restored, the store is marked as incomplete: a process that
dies before that starts over with the backup, which has everything that was ever acknowledged (decision 0019).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from tiercel.runtime.backup.process_backup import ProcessBackup
from tiercel.runtime.backup.segment_file import MissingSegment, ValueRef
from tiercel.runtime.storage.codec import Pair

log = logging.getLogger(__name__)

RANGE_BYTES = 1024 * 1024  # restored at a time: an object store is slow with many small reads
PUT_PAIRS, PUT_PAUSE_S = 16, 0.001
RETRY_S = 1.0
UNDISTURBED_S_MAX = 5.0  # at most this long, a process that catches up has the backup for itself
QUIET_S = 0.05  # without a read, the process has caught up
STOP_S_MAX = 5.0  # a location may not answer


class ValueLocation(NamedTuple):
    """A value in a backup: its file and its position there."""

    file: str
    body: int  # the offset that positions in this file are relative to
    ref: ValueRef


class LazyRestore:
    """The values that a store does not have yet. For any thread."""

    def __init__(self, backup: ProcessBackup, locations: dict[bytes, ValueLocation]) -> None:
        self._backup = backup
        self._locations = locations  # guarded by the lock
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._read_s = float("inf")  # the time of the last read
        self.lost: Exception | None = (
            None  # a newer state has replaced the backup: the process must start over with it
        )

    def missing_keys(self) -> dict[bytes, tuple[int, ...]]:
        """The stored keys whose values are missing, and the timers of each."""
        with self._lock:
            return {name: location.ref.timers for name, location in self._locations.items()}

    def read(self, name: bytes) -> bytes | None:
        """Read one value from the backup; None: it is not missing any more."""
        with self._lock:
            location = self._locations.get(name)
        self._read_s = time.monotonic()
        return (
            None
            if location is None
            else self._backup.values(location.file, location.body, [location.ref])[0][1]
        )

    def forget(self, names: Iterable[bytes]) -> None:
        """Give up values that the store is about to delete."""
        with self._lock:
            for name in names:
                self._locations.pop(name, None)

    # -- the thread ----------------------------------------------------------------------------

    def start_background_restore(
        self, put: Callable[[list[Pair]], object], on_complete: Callable[[], object]
    ) -> None:
        """Start the thread. It stores values with `put`, and calls `on_complete` after the last."""
        self._thread = threading.Thread(
            target=self._run, args=(put, on_complete), name="tiercel-restore", daemon=True
        )
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether all values are restored."""
        return self._ended.is_set() and not self._stopping and self.lost is None

    def wait(self) -> None:
        """Wait until all values are restored, or the restore was stopped; an error if it cannot complete."""
        self._ended.wait()
        if self.lost is not None:
            raise self.lost

    def stop(self) -> None:
        """Stop restoring."""
        with self._lock:
            self._stopping = True
            self._locations = {}
        self._ended.set()
        if self._thread is not None:
            self._thread.join(STOP_S_MAX)

    def _run(self, put: Callable[[list[Pair]], object], on_complete: Callable[[], object]) -> None:
        begun, count = time.monotonic(), len(self._locations)
        while (
            time.monotonic() < min(begun + UNDISTURBED_S_MAX, self._read_s + QUIET_S) and not self._stopping
        ):
            time.sleep(QUIET_S / 2)
        for file, body, refs in self._ranges():
            failing = False
            while not (self._stopping or self.lost or self._restore_range(file, body, refs, put, failing)):
                failing = True
                time.sleep(RETRY_S)
        if self._stopping or self.lost:  # also when nothing is left because of it
            self._ended.set()
            return
        on_complete()
        log.info("%s: %d values restored in %.1f s", self._backup.process, count, time.monotonic() - begun)
        self._ended.set()

    def _restore_range(
        self, file: str, body: int, refs: list[ValueRef], put: Callable[[list[Pair]], object], failing: bool
    ) -> bool:
        try:
            pairs = self._backup.values(file, body, refs)
            for n in range(0, len(pairs), PUT_PAIRS):
                part = pairs[n : n + PUT_PAIRS]
                with self._lock:  # no value may be deleted between the check and the put
                    put([(name, value) for name, value in part if name in self._locations])
                    for name, _ in part:
                        self._locations.pop(name, None)
                time.sleep(PUT_PAUSE_S)  # other users of the store get a turn
        except Exception as error:  # the process goes on, and reads the values it needs by itself
            if isinstance(error, MissingSegment) and self._backup.is_superseded(file):
                self.lost = error
            if not failing:
                log.warning("the rest of %s is not restored yet: %s", self._backup.process, error)
            return False
        return True

    def _ranges(self) -> Iterator[tuple[str, int, list[ValueRef]]]:
        """Neighbouring values of one file, in ranges of limited size."""
        with self._lock:
            locations = sorted(
                self._locations.values(), key=lambda location: (location.file, location.ref.at)
            )
        for (file, body), of_file in groupby(locations, key=lambda location: location[:2]):
            refs: list[ValueRef] = []
            for location in of_file:
                if refs and location.ref.end - refs[0].at > RANGE_BYTES:
                    yield file, body, refs
                    refs = []
                refs.append(location.ref)
            yield file, body, refs
