"""A share of what a dead instance has stored, for the one that takes these keys over.

Responsible for: where it is read: in the dead one's directory, if that is here and the newest, else in its
    backup; reading no more of it than the share; that the heir works before all of it was read.
Not responsible for: who inherits what (core/heirs.py).

Files of a backup are laid out by slots, and so are shares: an heir reads its own sections of them. Where it
may, it reads only names and timers first: they become its own, and their values come while they are in use
(docs/decisions/0028). Until the last one has come it has no checkpoint, and after a death it begins anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tiercel.core.effects import LoadCheckpoint, StorageKey
from tiercel.core.events import CheckpointLoaded
from tiercel.core.heirs import is_of_share
from tiercel.core.records import Inheritance, KeyFacts
from tiercel.errors import UserError
from tiercel.runtime.away import Away
from tiercel.runtime.backups import ProcessBackup, Wanted
from tiercel.runtime.locations import Location
from tiercel.runtime.pieces import Pair
from tiercel.runtime.place import Manifest, Place
from tiercel.runtime.store import NO_TABLE, NO_TIMERS, StoreView
from tiercel.runtime.storing import Storage, exists, is_newest, outline
from tiercel.runtime.tables import decode_key, decode_value, encode_key, prefix_of

STATE = encode_key(("state",))
SLOT_BYTES = len(encode_key(("state", 0)))  # of a stored key: what names its slot

Upgrade = Callable[[dict[StorageKey, Any]], dict[StorageKey, Any]]


class ShareLoader:
    """How one instance gets what it inherits."""

    def __init__(
        self, place: Place, manifest: Manifest, storage: Storage, upgrade: Upgrade, *, lazily: bool
    ) -> None:
        self._place, self._manifest, self._storage = place, manifest, storage
        self._upgrade, self._lazily = upgrade, lazily and storage.backup is not None

    def load(self, effect: LoadCheckpoint) -> Callable[[], CheckpointLoaded]:
        """In a thread; what is left to do is for whoever owns the store."""
        assert effect.inherited is not None
        where, store = _where(self._place, self._manifest, effect.inherited), self._storage.store
        if where.backup is not None and self._lazily and effect.adopt:
            return partial(self._take_over, effect, _outline(where.backup, effect))
        found = self._upgrade(_load(where, effect.inherited))
        return lambda: CheckpointLoaded(found, store, effect.number)

    def _take_over(self, effect: LoadCheckpoint, share: ShareOutline) -> CheckpointLoaded:
        """It becomes ours; what we had stored before is of an older time."""
        store, backup = self._storage
        assert backup is not None, "without a backup of our own it would be durable before it is whole"
        store.take_share(share.pairs, share.away)
        backup.shipper.begin_anew()
        return CheckpointLoaded(share.items, store, effect.number, adopted=True)


class Where(NamedTuple):
    """What is to be read: a directory, or a backup that has something; or nothing was ever stored."""

    directory: Path | None = None
    backup: ProcessBackup | None = None


def _where(place: Place, manifest: Manifest, inherited: Inheritance) -> Where:
    directory, plan = place.process(inherited.of), manifest.backup
    here = not manifest.local and exists(directory)
    backup = head = None
    if plan is not None:
        backup = ProcessBackup(Location(plan.location, plan.read_mb_s), manifest.id, inherited.of)
        head = backup.head()
    if here and (backup is None or head is None or is_newest(directory, backup, head)):
        return Where(directory=directory)
    if backup is None:
        raise UserError(
            f"nothing of {inherited.of} can be read: {directory} is gone, and there is no backup",
            expected="a deployment with backup=, or a storage directory that survives its processes",
        )
    return Where(backup=backup if head is not None else None)


def _load(where: Where, inherited: Inheritance) -> dict[StorageKey, Any]:
    """What the heir begins with, decoded; nothing if the dead one had not stored anything that counts."""
    if where.directory is not None:
        with contextlib.closing(StoreView(where.directory)) as view:
            return _decoded(_share(view.pairs()[1], inherited))
    return {} if where.backup is None else _decoded(_share_of_backup(where.backup, inherited))


def _share(pairs: Iterable[Pair], inherited: Inheritance) -> dict[bytes, bytes | None]:
    return {
        key: value
        for key, value in pairs
        if not key.startswith(NO_TABLE) and is_of_share(decode_key(key), inherited)
    }


def _share_of_backup(backup: ProcessBackup, inherited: Inheritance) -> dict[bytes, bytes | None]:
    """A later piece says more than an earlier one; None: it was deleted."""
    single = inherited.keys.keys
    lowest = encode_key(("state", min(inherited.keys.slots)))
    highest = encode_key(("state", max(inherited.keys.slots) + 1))

    def needed(first: bytes, last: bytes) -> bool:
        """All but sections that hold nothing but states of other slots."""
        only_states = first.startswith(STATE) and last.startswith(STATE)
        return bool(single) or not only_states or (first < highest and last >= lowest)

    found: dict[bytes, bytes | None] = {}
    for piece in backup.pieces(wanted=Wanted(needed)):
        found.update(_share(piece.pairs, inherited))
    return found


def _decoded(found: dict[bytes, bytes | None]) -> dict[StorageKey, Any]:
    places = ((decode_key(key), value) for key, value in found.items() if value is not None)
    return {place: decode_value(place, value) for place, value in places}


class ShareOutline(NamedTuple):
    """A share whose states are still in the dead one's backup."""

    pairs: list[Pair]  # all others, as they are stored
    away: Away
    items: dict[StorageKey, Any]  # both, as a machine sees them


def _outline(backup: ProcessBackup, effect: LoadCheckpoint) -> ShareOutline:
    inherited = effect.inherited
    assert inherited is not None
    slots = {prefix_of(("state", slot)) for slot in inherited.keys.slots}
    single = inherited.keys.keys

    def has(name: bytes) -> bool:
        return name[:SLOT_BYTES] in slots or (bool(single) and is_of_share(decode_key(name), inherited))

    _, pairs, places = outline(backup, has)
    mine = _share(pairs.items(), inherited)
    items = _decoded(mine)
    for name, place in places.items():
        timers = place.spot.timers if effect.timers else ()
        items[decode_key(name)] = KeyFacts(timers) if timers else NO_TIMERS
    return ShareOutline([(k, v) for k, v in mine.items() if v is not None], Away(backup, places), items)
