"""Takeover: loading a share of a dead instance's state for a successor.

Responsible for: where the share is read (the directory of the dead instance if it is the newest copy, else
    its backup); reading nothing but the share; letting the successor work before all of it was read.
Not responsible for: which successor takes over which keys (core/migration/parallel_recovery.py).

Backup files are ordered by slots, and so are shares: a successor reads its own sections. Where possible it
first reads only names and timers, which it owns at once, and values while they are in use
(docs/decisions/0028). It has no checkpoint until the last value is restored. If it dies before that, it
starts over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tiercel.core.machine.effects import LoadCheckpoint, StorageKey
from tiercel.core.machine.events import CheckpointLoaded
from tiercel.core.migration.parallel_recovery import is_of_share
from tiercel.core.model.keys import StoredKeyInfo
from tiercel.core.model.log import Takeover
from tiercel.errors import UserError
from tiercel.runtime.backup.lazy_restore import LazyRestore
from tiercel.runtime.backup.location import Location
from tiercel.runtime.backup.process_backup import ProcessBackup, ReadRequest
from tiercel.runtime.backup.restore import read_outline
from tiercel.runtime.deployment import DeploymentDir, Manifest
from tiercel.runtime.process.durability_gate import Storage
from tiercel.runtime.recovery.recover import is_newest
from tiercel.runtime.storage.codec import Pair, decode_key, decode_value, encode_key, prefix_of
from tiercel.runtime.storage.directory import exists
from tiercel.runtime.storage.store import NO_TABLE, NO_TIMERS, StoreView

STATE = encode_key(("state",))
SLOT_BYTES = len(encode_key(("state", 0)))  # the prefix of a stored key that contains its slot

Upgrade = Callable[[dict[StorageKey, Any]], dict[StorageKey, Any]]


class ShareLoader:
    """Loads the share of a dead instance for its successor."""

    def __init__(
        self,
        deployment: DeploymentDir,
        manifest: Manifest,
        storage: Storage,
        upgrade: Upgrade,
        *,
        lazily: bool,
    ) -> None:
        self._deployment, self._manifest, self._storage = deployment, manifest, storage
        self._upgrade, self._lazily = upgrade, lazily and storage.backup is not None

    def load(self, effect: LoadCheckpoint) -> Callable[[], CheckpointLoaded]:
        """Read the share, in a thread; the result is called in the thread that owns the store."""
        assert effect.takeover is not None
        source = _find_share(self._deployment, self._manifest, effect.takeover)
        if source.backup is not None and self._lazily and effect.adopt:
            return partial(self._take_over, effect, _outline_of_share(source.backup, effect))
        found = self._upgrade(_read_share(source, effect.takeover))
        return lambda: CheckpointLoaded(found, effect.number)

    def _take_over(self, effect: LoadCheckpoint, share: ShareOutline) -> CheckpointLoaded:
        """Replace the own, older store with the share."""
        store, backup, _ = self._storage
        assert backup is not None, "without an own backup the share would be durable before it is complete"
        store.replace_with_takeover(share.pairs, share.missing)
        backup.uploader.start_over()
        return CheckpointLoaded(share.items, effect.number, adopted=True)


class ShareSource(NamedTuple):
    """Where a share is read: a directory or a backup; neither if nothing was ever stored."""

    directory: Path | None = None
    backup: ProcessBackup | None = None


def _find_share(deployment: DeploymentDir, manifest: Manifest, takeover: Takeover) -> ShareSource:
    directory, plan = deployment.process(takeover.of), manifest.backup
    here = not manifest.local and exists(directory)
    backup = head = None
    if plan is not None:
        backup = ProcessBackup(Location(plan.location, plan.read_mb_s), manifest.id, takeover.of)
        head = backup.head()
    if here and (backup is None or head is None or is_newest(directory, backup, head)):
        return ShareSource(directory=directory)
    if backup is None:
        raise UserError(
            f"nothing of {takeover.of} can be read: {directory} is gone, and there is no backup",
            expected="a deployment with backup=, or a storage directory that survives its processes",
        )
    return ShareSource(backup=backup if head is not None else None)


def _read_share(source: ShareSource, takeover: Takeover) -> dict[StorageKey, Any]:
    """The decoded share; empty if the dead instance had no checkpoint."""
    if source.directory is not None:
        with contextlib.closing(StoreView(source.directory)) as view:
            return _decoded(_share(view.pairs()[1], takeover))
    return {} if source.backup is None else _decoded(_share_of_backup(source.backup, takeover))


def _share(pairs: Iterable[Pair], takeover: Takeover) -> dict[bytes, bytes | None]:
    return {
        key: value
        for key, value in pairs
        if not key.startswith(NO_TABLE) and is_of_share(decode_key(key), takeover)
    }


def _share_of_backup(backup: ProcessBackup, takeover: Takeover) -> dict[bytes, bytes | None]:
    """The share in a backup. Later segments replace earlier ones; None: deleted."""
    overrides = takeover.keys.keys
    lowest = encode_key(("state", min(takeover.keys.slots)))
    highest = encode_key(("state", max(takeover.keys.slots) + 1))

    def needed(first: bytes, last: bytes) -> bool:
        """Whether a section may hold anything but states of other slots."""
        only_states = first.startswith(STATE) and last.startswith(STATE)
        return bool(overrides) or not only_states or (first < highest and last >= lowest)

    found: dict[bytes, bytes | None] = {}
    for segment in backup.segments(request=ReadRequest(needed)):
        found.update(_share(segment.pairs, takeover))
    return found


def _decoded(found: dict[bytes, bytes | None]) -> dict[StorageKey, Any]:
    stored = ((decode_key(key), value) for key, value in found.items() if value is not None)
    return {key: decode_value(key, value) for key, value in stored}


class ShareOutline(NamedTuple):
    """A share whose states are still in the backup of the dead instance."""

    pairs: list[Pair]  # everything but states, as stored
    missing: LazyRestore
    items: dict[StorageKey, Any]  # both, decoded for the machine


def _outline_of_share(backup: ProcessBackup, effect: LoadCheckpoint) -> ShareOutline:
    takeover = effect.takeover
    assert takeover is not None
    slots = {prefix_of(("state", slot)) for slot in takeover.keys.slots}
    overrides = takeover.keys.keys

    def is_in_share(name: bytes) -> bool:
        return name[:SLOT_BYTES] in slots or (bool(overrides) and is_of_share(decode_key(name), takeover))

    _, pairs, locations = read_outline(backup, is_in_share)
    mine = _share(pairs.items(), takeover)
    items = _decoded(mine)
    for name, location in locations.items():
        timers = location.ref.timers if effect.timers else ()
        items[decode_key(name)] = StoredKeyInfo(timers) if timers else NO_TIMERS
    return ShareOutline(
        [(k, v) for k, v in mine.items() if v is not None], LazyRestore(backup, locations), items
    )
