"""Values of a store that are still in its backup, and come while the store is in use.

Responsible for: where each of them is; getting one at once when it is needed, and all in the background.
Not responsible for: the files of a backup (backups.py), the store they come into (store.py).

    restore: names and timers of all keys --> the process works --> a key is needed: it is read there
                                                   |
                                                   +--> a thread brings the others, until all are here

A version of a key is written once and never changed, so it does not matter when it comes. What was deleted
meanwhile does not come any more. Until everything is here the store says that it is not whole: a process that
dies before begins anew with the backup, which has all that was ever told to others (decision 0019).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from tiercel.runtime.backups import ProcessBackup
from tiercel.runtime.pieces import MissingPiece, Pair, Spot

log = logging.getLogger(__name__)

RANGE_BYTES = 1024 * 1024  # brought at a time: an object store takes longer for many small ones
PUT_PAIRS, PUT_PAUSE_S = 16, 0.001
RETRY_S = 1.0
HEAD_START_S_MAX = 5.0  # while it catches up, a process has the backup for itself; at most so long
CALM_S = 0.05  # without a read: it has caught up
STOP_S_MAX = 5.0  # a location may not answer


class Spotted(NamedTuple):
    """A file of the backup, and where in it a value is."""

    file: str
    body: int  # where the spots of this file begin to be counted
    spot: Spot


class Away:
    """What a store does not have yet. All of it is for any thread."""

    def __init__(self, backup: ProcessBackup, places: dict[bytes, Spotted]) -> None:
        self._backup = backup
        self._places = places  # guarded by the lock
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._read_s = float("inf")  # when one was last needed
        self.lost: MissingPiece | None = None  # a newer state has replaced this one: begin anew with that

    def names(self) -> dict[bytes, tuple[int, ...]]:
        """Of all that are away, their timers."""
        with self._lock:
            return {name: place.spot.timers for name, place in self._places.items()}

    def read(self, name: bytes) -> bytes | None:
        """One of them; None: it is not away any more."""
        with self._lock:
            place = self._places.get(name)
        self._read_s = time.monotonic()
        return None if place is None else self._backup.values(place.file, place.body, [place.spot])[0][1]

    def forget(self, names: Iterable[bytes]) -> None:
        """These were deleted: they must not come any more. Said before the store deletes them."""
        with self._lock:
            for name in names:
                self._places.pop(name, None)

    # -- the thread ----------------------------------------------------------------------------

    def bring(self, put: Callable[[list[Pair]], object], whole: Callable[[], object]) -> None:
        """Begin to bring them all; `put` stores some, `whole` is called when the last one is there."""
        self._thread = threading.Thread(
            target=self._run, args=(put, whole), name="tiercel-restore", daemon=True
        )
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether all are here."""
        return self._ended.is_set() and not self._stopping and self.lost is None

    def wait(self) -> None:
        """Until all are here, or it was stopped; an error if they will never come."""
        self._ended.wait()
        if self.lost is not None:
            raise self.lost

    def stop(self) -> None:
        """Nothing comes any more, whatever is under way."""
        with self._lock:
            self._stopping = True
            self._places = {}
        self._ended.set()
        if self._thread is not None:
            self._thread.join(STOP_S_MAX)

    def _run(self, put: Callable[[list[Pair]], object], whole: Callable[[], object]) -> None:
        begun, count = time.monotonic(), len(self._places)
        while time.monotonic() < min(begun + HEAD_START_S_MAX, self._read_s + CALM_S) and not self._stopping:
            time.sleep(CALM_S / 2)
        for file, body, spots in self._ranges():
            failing = False
            while not (self._stopping or self.lost or self._brought(file, body, spots, put, failing)):
                failing = True
                time.sleep(RETRY_S)
        if self._stopping or self.lost:  # also when nothing is left to bring because of it
            self._ended.set()
            return
        whole()
        log.info("%s: %d values restored in %.1f s", self._backup.process, count, time.monotonic() - begun)
        self._ended.set()

    def _brought(
        self, file: str, body: int, spots: list[Spot], put: Callable[[list[Pair]], object], failing: bool
    ) -> bool:
        try:
            pairs = self._backup.values(file, body, spots)
            for n in range(0, len(pairs), PUT_PAIRS):
                part = pairs[n : n + PUT_PAIRS]
                with self._lock:  # between our look and our put nobody deletes one of them
                    put([(name, value) for name, value in part if name in self._places])
                    for name, _ in part:
                        self._places.pop(name, None)
                time.sleep(PUT_PAUSE_S)  # whoever works with the store has a turn
        except Exception as error:  # the process goes on: what it needs it asks for itself
            if isinstance(error, MissingPiece) and self._backup.has_passed(file):
                self.lost = error
            if not failing:
                log.warning("the rest of %s is not restored yet: %s", self._backup.process, error)
            return False
        return True

    def _ranges(self) -> Iterator[tuple[str, int, list[Spot]]]:
        """Neighbours in one file, about so many bytes of them at a time."""
        with self._lock:
            places = sorted(self._places.values(), key=lambda place: (place.file, place.spot.at))
        for (file, body), of_file in groupby(places, key=lambda place: place[:2]):
            spots: list[Spot] = []
            for place in of_file:
                if spots and place.spot.end - spots[0].at > RANGE_BYTES:
                    yield file, body, spots
                    spots = []
                spots.append(place.spot)
            yield file, body, spots
