"""A share of what a dead instance has stored, for the one that takes these keys over.

Responsible for: where it is read: in the dead one's directory, if that is here and the newest, else in its
    backup; reading no more of it than the share.
Not responsible for: who inherits what (core/heirs.py).

Files of a backup are laid out by slots, and so are shares: an heir reads its own sections of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from tiercel.core.effects import StorageKey
from tiercel.core.heirs import is_of_share
from tiercel.core.records import Inheritance
from tiercel.errors import UserError
from tiercel.runtime.backups import ProcessBackup, Wanted
from tiercel.runtime.locations import Location
from tiercel.runtime.pieces import Pair
from tiercel.runtime.place import Manifest, Place
from tiercel.runtime.store import NO_TABLE, StoreView
from tiercel.runtime.storing import exists, is_newest
from tiercel.runtime.tables import decode_key, decode_value, encode_key

STATE = encode_key(("state",))


def load_share(place: Place, manifest: Manifest, inherited: Inheritance) -> dict[StorageKey, Any]:
    """What the heir begins with, decoded; nothing if the dead one had not stored anything that counts."""
    directory, plan = place.process(inherited.of), manifest.backup
    here = not manifest.local and exists(directory)
    backup = head = None
    if plan is not None:
        backup = ProcessBackup(Location(plan.location, plan.read_mb_s), manifest.id, inherited.of)
        head = backup.head()
    if here and (backup is None or head is None or is_newest(directory, backup, head)):
        with contextlib.closing(StoreView(directory)) as view:
            return _decoded(_share(view.pairs()[1], inherited))
    if backup is None:
        raise UserError(
            f"nothing of {inherited.of} can be read: {directory} is gone, and there is no backup",
            expected="a deployment with backup=, or a storage directory that survives its processes",
        )
    return _decoded(_share_of_backup(backup, inherited)) if head is not None else {}


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
