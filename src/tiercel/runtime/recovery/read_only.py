"""Reading the storage of a deployment beside its processes.

Responsible for: a directory to read from, also where processes store on disks of their executors.
Not responsible for: the content (storage/state_reader.py), opening storage to write (recover.py).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tiercel.core.model.keys import Key
from tiercel.errors import UserError
from tiercel.runtime.backup.location import Location
from tiercel.runtime.backup.process_backup import ProcessBackup
from tiercel.runtime.backup.restore import processes_in, restore
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.storage.state_reader import StoredKey, keys_in


@contextlib.contextmanager
def readable_storage(deployment: DeploymentDir) -> Iterator[Path]:
    """A directory with the storage of every process, for reading.

    Processes that store on disks of their executors are restored from their backups.
    """
    manifest = deployment.manifest()
    if manifest.local and manifest.backup is None:
        raise UserError(
            "the processes store on disks of their executors, and only their replicas have copies",
            expected="a backup to read from, or no local=",
            hint="tiercel.start(..., durability='replica', backup=...)",
        )
    if manifest.backup is None or not manifest.local:
        yield deployment.directory / "processes"
        return
    location = Location(manifest.backup.location)
    with tempfile.TemporaryDirectory(prefix="tiercel-") as temporary:
        for process in processes_in(location):
            backup = ProcessBackup(location, manifest.id, process)
            if backup.head() is not None:
                restore(backup, Path(temporary) / process)
        yield Path(temporary)


def stored_keys(deployment: DeploymentDir, operator: str, key: Key | None = None) -> Iterator[StoredKey]:
    """The state of every key of an operator, or of one key, ordered by slot."""
    slots = deployment.manifest().topology.operator(operator).slots
    with readable_storage(deployment) as processes:
        yield from keys_in(processes, operator, slots, None if key is None else [key])
