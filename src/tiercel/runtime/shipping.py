"""Everything that a store commits, on its way to a backup: by a thread, some time after it was written.

Responsible for: when a base or an increment is made, how much waits in memory, saying what is safe.
Not responsible for: files (backups.py), what waits until it is safe (host.py).

    commit --> buffer --every_s--> increment, head --> on_shipped(seq)
                 |
                 +-- too much in it, or a new life that cannot go on --> base of the whole store, head

A location that fails is tried again for as long as the process lives; meanwhile nothing counts as safe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from tiercel.errors import UserError
from tiercel.runtime.backups import ProcessBackup
from tiercel.runtime.pieces import Header, Pair
from tiercel.runtime.place import BackupPlan
from tiercel.runtime.store import Store

log = logging.getLogger(__name__)

BUFFER_BYTES_MAX = 64 * 1024 * 1024  # not shipped yet; beyond it the whole store is shipped instead
REBASE_BYTES_MIN = 32 * 1024 * 1024  # increments below this are never worth a new base
INCREMENTS_MAX = 1_000  # a restore reads at most so many files behind a base
RETRY_S_MAX = 30.0
CLOSE_S_MAX = 10.0  # for the rest, at a clean end
PACE_BYTES, PACE_S = 256 * 1024, 0.001  # a pause after so much of a base


class Shipper:
    """Ships one store, in a thread of its own."""

    def __init__(self, store: Store, backup: ProcessBackup, plan: BackupPlan, head: Header | None) -> None:
        self._store, self._backup, self._plan = store, backup, plan
        self._on_shipped: Callable[[int], object] = lambda seq: None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="tiercel-backup", daemon=True)
        # guarded by the lock
        self._pairs: dict[bytes, bytes | None] = {}
        self._bytes = 0
        self._taken, self._seq = store.batches, 0  # the last batch that was handed over, and its seq
        # goes on where the life before ended, if we hold exactly what it had shipped
        goes_on = head is not None and (head.life, head.through) == (store.last_life, store.batches)
        last = backup.last_number()
        self._needs_base = not goes_on or (head is not None and last > head.number)  # one that no head names
        self._base = head.base if head is not None else 0
        self._number = max(last, head.number if head is not None else 0)
        self._tail = head.previous if head is not None else ""
        self._increments = head.number - head.base if head is not None else 0
        self._base_bytes = backup.base_bytes(head.base) if head is not None else 0
        self._increment_bytes = 0
        store.hand_over_to(self._take)

    def start(self, on_shipped: Callable[[int], object]) -> None:
        """Begin. `on_shipped` is called in our thread with the seq that is safe now."""
        self._on_shipped = on_shipped
        self._thread.start()

    def close(self) -> None:
        """Ship the rest, as far as that works, and end. The store must still be open."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(2 * CLOSE_S_MAX)  # a location may not answer at all: then the next life goes on

    def _take(self, batch: int, seq: int, pairs: list[Pair]) -> None:
        with self._lock:
            self._taken, self._seq = batch, seq
            if self._needs_base:
                return  # it will hold this batch
            for key, value in pairs:
                self._pairs[key] = value
                self._bytes += len(key) + len(value or b"")
            if self._bytes > BUFFER_BYTES_MAX:
                log.warning("%s: too much waits for its backup; all of it follows", self._backup.process)
                self._drop_buffer()

    def _drop_buffer(self) -> None:
        self._needs_base = True
        self._pairs, self._bytes = {}, 0

    def begin_anew(self) -> None:
        """The store holds something else now: nothing of it is safe before a base of all of it is there."""
        with self._lock:
            self._drop_buffer()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s, give_up = self._plan.every_s, float("inf")
        while True:
            closing = self._closing  # asked before we ship: what was handed over until then goes along
            if closing:
                give_up = min(give_up, time.monotonic() + CLOSE_S_MAX)
            try:
                self._ship()
                pause_s, self._failing = self._plan.every_s, False
            except Exception as error:  # whatever it is: the process goes on, and nothing more is safe
                self._report(error)
                pause_s = min(RETRY_S_MAX, 2 * pause_s)
            if closing and (not self._failing or time.monotonic() > give_up):
                return
            if closing:
                time.sleep(CLOSE_S_MAX / 20)
            else:
                self._wake.wait(pause_s)

    def _report(self, error: Exception) -> None:
        if not self._failing:
            known = isinstance(error, UserError)
            log.warning("the backup of %s waits: %s", self._backup.process, error, exc_info=not known)
        self._failing = True

    def _ship(self) -> None:
        """What has come since, or everything. If it fails, all is as if it had not been tried."""
        grown = self._increment_bytes > max(REBASE_BYTES_MIN, self._base_bytes)
        with self._lock:
            if (grown or self._increments >= INCREMENTS_MAX) and self._store.is_whole:
                self._drop_buffer()
            if self._needs_base and not self._store.is_whole:
                return  # what it lacks is in the files that a new base would supersede
            base, self._needs_base = self._needs_base, False
            pairs, self._pairs = self._pairs, {}
            size, self._bytes = self._bytes, 0
            through, seq = self._taken, self._seq
        try:
            if base:
                self._ship_base()
            elif pairs:
                self._ship_increment(through, list(pairs.items()))
            else:
                return
        except BaseException:
            with self._lock:
                self._needs_base |= base
                self._pairs = pairs | self._pairs
                self._bytes += size
            raise
        self._on_shipped(seq)

    def _ship_base(self) -> None:
        """The store as it is now. Batches that come meanwhile are in the next increment, some in both."""
        number, life = max(self._number, self._backup.last_number()) + 1, self._store.life
        through, everything = self._store.pairs()
        tail, self._base_bytes = self._backup.put_base(life, number, through, _paced(everything))
        self._backup.put_head(life, number, number, through, tail)
        self._base = self._number = number
        self._tail = tail
        self._increments = self._increment_bytes = 0
        try:
            self._backup.forget_old(self._plan.keep, life)
        except UserError as error:  # where nothing may be deleted, all is safe nevertheless
            log.warning("old files of the backup of %s stay: %s", self._backup.process, error)

    def _ship_increment(self, through: int, pairs: list[Pair]) -> None:
        number, life = self._number + 1, self._store.life
        tail, size = self._backup.put_increment(life, number, through, self._tail, pairs)
        # it stays as it is, whatever becomes of its head: one of which we hear that it failed may be there
        self._number, self._tail = number, tail
        self._increments += 1
        self._increment_bytes += size
        self._backup.put_head(life, self._base, number, through, tail)


def _paced(pairs: Iterator[Pair]) -> Iterator[Pair]:
    """Let the loop's thread have its turns: a large store takes seconds."""
    size = 0
    for key, value in pairs:
        size += len(key) + len(value or b"")
        if size > PACE_BYTES:
            size = 0
            time.sleep(PACE_S)
        yield key, value
