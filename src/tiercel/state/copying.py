"""Backup and restore of a whole deployment, by hand.

Responsible for: what a caller gives: paths, locations, numbers.
Not responsible for: doing it (runtime/copies.py), backups while a deployment runs (runtime/shipping.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tiercel.runtime.copies import Copied, copy_deployment, restore_deployment
from tiercel.runtime.locations import Location
from tiercel.runtime.place import Place


def backup(storage: str | Path, location: str) -> list[Copied]:
    """A full copy of every process into a location; the deployment may run meanwhile.

    Several sites that run are copied one after the other: rows between them may be missing or doubled
    in the copy. Stop such a deployment first, or give it a backup of its own when it starts.
    """
    return copy_deployment(Place(storage), Location(location))


def restore(location: str, storage: str | Path, up_to: Mapping[str, int] | None = None) -> list[Copied]:
    """A storage directory out of a backup. It must not exist yet, or be empty.

    `up_to` names, for a process whose newest files are damaged, the last number to use; all others are
    then taken as of that moment.
    """
    return restore_deployment(Location(location), Path(storage).absolute(), up_to)
