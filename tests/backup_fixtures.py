"""A store and its backup, made step by step in a test's own thread."""

from __future__ import annotations

from pathlib import Path

from tiercel.core.machine.effects import Write
from tiercel.runtime.backup.process_backup import ProcessBackup
from tiercel.runtime.backup.uploader import BackupUploader
from tiercel.runtime.deployment import BackupPlan
from tiercel.runtime.storage.store import Store, StoreView

ME, DEPLOYMENT = "count@cloud#1", "d1"


class BackedUpStore:
    """A store whose backup is made step by step, in the test's own thread."""

    def __init__(self, directory: Path, backup: ProcessBackup, keep: int = 2) -> None:
        head = backup.head()
        self.store = Store(directory, "os", next_incarnation=backup.claim)
        self.uploader = BackupUploader(self.store, backup, BackupPlan(backup.location.url, keep=keep), head)
        self.safe = 0
        self.uploader._on_uploaded = self._note
        self.seq = 0
        self.closed = False

    def _note(self, seq: int) -> None:
        self.safe = seq

    def write(self, deletes: tuple[tuple[str, str], ...] = (), **counts: int) -> BackedUpStore:
        self.seq += 1
        self.store.add(Write(self.seq, {("count", name): n for name, n in counts.items()}, deletes))
        self.store.commit()
        return self

    def upload(self) -> BackedUpStore:
        self.uploader._upload()
        return self

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.store.close()


def content(directory: Path) -> dict[str, int]:
    view = StoreView(directory)
    try:
        return {str(key[1]): value for key, value in view.scan(("count",))}
    finally:
        view.close()


def names(backup: ProcessBackup, kind: str = "") -> list[str]:
    return [name for name in backup.location.names(backup.folder) if name.startswith(kind)]
