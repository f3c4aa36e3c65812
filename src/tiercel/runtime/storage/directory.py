"""The directory of one store: where a process stores, and replacing a store as a whole.

Responsible for: the path; replacing a store atomically; setting an old one aside.
Not responsible for: the store itself (store.py), which copy is the newest (recovery/recover.py).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from tiercel.runtime.deployment import DeploymentDir, Manifest
from tiercel.runtime.storage.codec import Pair
from tiercel.runtime.storage.store import StoreView, fill

ROCKSDB_FILE = "CURRENT"  # every directory of RocksDB has it


EXECUTOR = "{executor}"


def directory_of(deployment: DeploymentDir, manifest: Manifest, process: str, executor: str) -> Path:
    """Where a router or an instance stores: in the deployment directory, or on a disk of its executor."""
    if not manifest.local:
        return deployment.process(process)
    return Path(manifest.local.replace(EXECUTOR, executor)) / manifest.id / process


def exists(directory: Path) -> bool:
    return (directory / ROCKSDB_FILE).exists()


def check_undamaged(directory: Path) -> None:
    """Raise DamagedStore for a damaged store, which stays as it is. Opening it to write would change it."""
    if exists(directory):
        StoreView(directory, complete=False).close()


def replace_store(
    directory: Path, parts: Iterable[Iterable[Pair]], numbers: Callable[[], tuple[int, int]]
) -> None:
    """Make a store out of parts, atomically; a store that exists there is set aside."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        store = draft / "store"
        fill(store, parts, numbers)
        if directory.exists():
            set_aside(directory)
        store.rename(directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def set_aside(directory: Path) -> None:
    """Move a store out of the way, so that readers of all processes do not find it."""
    aside = directory.parent / ".older" / directory.name
    aside.parent.mkdir(exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    directory.rename(aside)
