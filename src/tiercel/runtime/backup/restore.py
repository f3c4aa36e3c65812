"""Restore of one process from its backup, at once or lazily.

Responsible for: making a store out of the files of a backup; the outline for a lazy restore.
Not responsible for: whether a restore is necessary (recovery/recover.py), the files (process_backup.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from tiercel.runtime.backup.lazy_restore import LazyRestore, ValueLocation
from tiercel.runtime.backup.location import Location
from tiercel.runtime.backup.process_backup import ProcessBackup, ReadRequest
from tiercel.runtime.backup.segment_file import Header
from tiercel.runtime.storage.codec import Pair, encode_key, is_state
from tiercel.runtime.storage.directory import replace_store
from tiercel.runtime.storage.store import RESTORING

AFTER_DAMAGE = (
    1 << 32
)  # added to the batches of a state restored in place of a damaged one, to tell the two apart


# A backup may lack the last writes of a router, whose numbers may have been used: see `as_older_copy`.
NUMBERS_ANEW: Pair = (encode_key(("storage",)), None)


def restore(backup: ProcessBackup, directory: Path, up_to: int | None = None) -> Header:
    """Make a store out of a backup, atomically; every file is verified. An existing store is set aside."""
    last: list[Header] = []

    def parts() -> Iterator[list[Pair]]:
        for segment in backup.segments(up_to):
            last[:] = [segment.header]
            yield segment.pairs
        yield [NUMBERS_ANEW]

    def numbers() -> tuple[int, int]:
        more = AFTER_DAMAGE if up_to is not None else 0
        return max(backup.last_incarnation(), last[0].incarnation), last[0].through + more

    replace_store(directory, parts(), numbers)
    return last[0]


def restore_lazily(backup: ProcessBackup, directory: Path) -> LazyRestore:
    """Restore everything but the states of keys; returns the lazy restore of those."""
    last, pairs, locations = read_outline(backup)
    numbers = (max(backup.last_incarnation(), last.incarnation), last.through)
    replace_store(directory, [[*pairs.items(), NUMBERS_ANEW, (RESTORING, b"1")]], lambda: numbers)
    return LazyRestore(backup, locations)


class BackupOutline(NamedTuple):
    """A backup without the states of keys, and the locations of those."""

    last: Header
    pairs: dict[bytes, bytes | None]  # None: deleted
    locations: dict[bytes, ValueLocation]


def read_outline(backup: ProcessBackup, has: Callable[[bytes], bool] | None = None) -> BackupOutline:
    """Read the outline of a backup; with `has`, only states whose stored key it accepts."""
    pairs: dict[bytes, bytes | None] = {}
    locations: dict[bytes, ValueLocation] = {}
    last = None
    for segment in backup.segments(request=ReadRequest(lambda first, _: not is_state(first), refs=True)):
        for name, value in segment.pairs:  # includes states if the whole file had to be read
            pairs[name] = value
            locations.pop(name, None)
        found = {
            ref.key: ValueLocation(segment.name, segment.body, ref)
            for ref in segment.refs
            if has is None or has(ref.key)
        }
        for name in pairs.keys() & found.keys():
            del pairs[name]
        locations.update(found)
        last = segment.header
    assert last is not None, "a backup with a head has a base"
    return BackupOutline(last, pairs, {name: at for name, at in locations.items() if at.ref.size})


def processes_in(location: Location) -> list[str]:
    """All processes with files in a location."""
    return [unquote(name) for name in location.names("processes")]
