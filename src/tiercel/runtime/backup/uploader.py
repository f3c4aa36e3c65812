"""The backup uploader: a thread that writes everything a store commits to a backup.

Responsible for: when a base or an increment is written, how much waits in memory, reporting what is uploaded.
Not responsible for: files (process_backup.py), what waits for the upload (process/durability_gate.py).

    commit --> buffer --every_s--> increment, head --> on_uploaded(seq)
                 |
                 +-- too much in it, or the chain cannot continue --> base of the whole store, head

A location that fails is tried again for as long as the process runs; nothing counts as uploaded until then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from tiercel.errors import UserError
from tiercel.runtime.backup.process_backup import ProcessBackup
from tiercel.runtime.backup.segment_file import Header
from tiercel.runtime.deployment import BackupPlan
from tiercel.runtime.storage.codec import Pair
from tiercel.runtime.storage.store import Store

log = logging.getLogger(__name__)

BUFFER_BYTES_MAX = 64 * 1024 * 1024  # not uploaded yet; beyond it the whole store is uploaded instead
REBASE_BYTES_MIN = 32 * 1024 * 1024  # increments below this do not justify a new base
INCREMENTS_MAX = 1_000  # a restore reads at most this many files behind a base
RETRY_S_MAX = 30.0
CLOSE_S_MAX = 10.0  # for the rest, at a regular end
PACE_BYTES, PACE_S = 256 * 1024, 0.001  # a pause after each such part of a base


class BackupUploader:
    """Uploads one store, in its own thread."""

    def __init__(self, store: Store, backup: ProcessBackup, plan: BackupPlan, head: Header | None) -> None:
        self._store, self._backup, self._plan = store, backup, plan
        self._on_uploaded: Callable[[int], object] = lambda seq: None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="tiercel-backup", daemon=True)
        # guarded by the lock
        self._pairs: dict[bytes, bytes | None] = {}
        self._bytes = 0
        self._taken, self._seq = store.batches, 0  # the last committed batch, and its seq
        # continue the last incarnation's chain if the store is exactly what it had uploaded
        continues = head is not None and (head.incarnation, head.through) == (
            store.last_incarnation,
            store.batches,
        )
        last = backup.last_number()
        self._needs_base = not continues or (
            head is not None and last > head.number
        )  # a file that no head names
        self._base = head.base if head is not None else 0
        self._number = max(last, head.number if head is not None else 0)
        self._tail = head.previous if head is not None else ""
        self._increments = head.number - head.base if head is not None else 0
        self._base_bytes = backup.base_bytes(head.base) if head is not None else 0
        self._increment_bytes = 0
        store.add_commit_listener(self._on_commit)

    def start(self, on_uploaded: Callable[[int], object]) -> None:
        """Start the thread. It calls `on_uploaded` with the seq that is uploaded."""
        self._on_uploaded = on_uploaded
        self._thread.start()

    def close(self) -> None:
        """Upload the rest, as far as possible, and end. The store must still be open."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(
                2 * CLOSE_S_MAX
            )  # a location may not answer at all: then the next incarnation continues

    def _on_commit(self, batch: int, seq: int, pairs: list[Pair]) -> None:
        with self._lock:
            self._taken, self._seq = batch, seq
            if self._needs_base:
                return  # it will hold this batch
            for key, value in pairs:
                self._pairs[key] = value
                self._bytes += len(key) + len(value or b"")
            if self._bytes > BUFFER_BYTES_MAX:
                log.warning(
                    "%s: too much waits for its backup; the whole store is uploaded", self._backup.process
                )
                self._require_base()

    def _require_base(self) -> None:
        self._needs_base = True
        self._pairs, self._bytes = {}, 0

    def start_over(self) -> None:
        """The store was replaced: nothing of it is uploaded before a new base is complete."""
        with self._lock:
            self._require_base()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s, give_up = self._plan.every_s, float("inf")
        while True:
            closing = (
                self._closing
            )  # read before the upload, which then includes everything committed until now
            if closing:
                give_up = min(give_up, time.monotonic() + CLOSE_S_MAX)
            try:
                self._upload()
                pause_s, self._failing = self._plan.every_s, False
            except Exception as error:  # the process goes on, and nothing more counts as uploaded
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

    def _upload(self) -> None:
        """Upload the buffer as an increment, or a base. A failure changes nothing."""
        grown = self._increment_bytes > max(REBASE_BYTES_MIN, self._base_bytes)
        with self._lock:
            if (grown or self._increments >= INCREMENTS_MAX) and self._store.is_fully_restored:
                self._require_base()
            if self._needs_base and not self._store.is_fully_restored:
                return  # missing values are in the files that a new base would supersede
            base, self._needs_base = self._needs_base, False
            pairs, self._pairs = self._pairs, {}
            size, self._bytes = self._bytes, 0
            through, seq = self._taken, self._seq
        try:
            if base:
                self._upload_base()
            elif pairs:
                self._upload_increment(through, list(pairs.items()))
            else:
                return
        except BaseException:
            with self._lock:
                self._needs_base |= base
                self._pairs = pairs | self._pairs
                self._bytes += size
            raise
        self._on_uploaded(seq)

    def _upload_base(self) -> None:
        """Upload the store as it is now. Later batches are in the next increment, some of them in both."""
        number, incarnation = max(self._number, self._backup.last_number()) + 1, self._store.incarnation
        through, everything = self._store.pairs()
        tail, self._base_bytes = self._backup.put_base(incarnation, number, through, _paced(everything))
        self._backup.put_head(incarnation, number, number, through, tail)
        self._base = self._number = number
        self._tail = tail
        self._increments = self._increment_bytes = 0
        try:
            self._backup.delete_old(self._plan.keep, incarnation)
        except UserError as error:  # not being allowed to delete does not affect the backup
            log.warning("old files of the backup of %s stay: %s", self._backup.process, error)

    def _upload_increment(self, through: int, pairs: list[Pair]) -> None:
        number, incarnation = self._number + 1, self._store.incarnation
        tail, size = self._backup.put_increment(incarnation, number, through, self._tail, pairs)
        # the file counts even if writing its head seems to fail: the head may exist
        self._number, self._tail = number, tail
        self._increments += 1
        self._increment_bytes += size
        self._backup.put_head(incarnation, self._base, number, through, tail)


def _paced(pairs: Iterator[Pair]) -> Iterator[Pair]:
    """Pause now and then for the loop thread: a large store takes seconds."""
    size = 0
    for key, value in pairs:
        size += len(key) + len(value or b"")
        if size > PACE_BYTES:
            size = 0
            time.sleep(PACE_S)
        yield key, value
