"""A process's storage, made ready: here, or out of its backup; and shipped from then on.

Responsible for: where a process stores, whether what lies there is the newest, restoring it if not.
Not responsible for: the store itself (store.py), files of a backup (backups.py).

    what lies here is            and a backup            then
    missing                      exists                  it is restored
    of an heir, and not whole    does not exist          it is set aside: the heir begins anew
    of an older life, or less,   exists                  it is set aside, and the backup restored
        or was never whole
    anything else                or not                  it is opened as it is

An older copy lies around where a process came back to an executor that it had left.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from tiercel.core.topology import operator_of
from tiercel.errors import UserError
from tiercel.runtime.away import Away, Spotted
from tiercel.runtime.backups import ProcessBackup, Wanted
from tiercel.runtime.locations import Location
from tiercel.runtime.pieces import Header, Pair
from tiercel.runtime.place import Manifest, Place
from tiercel.runtime.safekeeping import Safekeeping
from tiercel.runtime.shipping import Shipper
from tiercel.runtime.store import RESTORING, Store, StoreView, fill
from tiercel.runtime.tables import is_state

ROCKSDB_FILE = "CURRENT"  # every directory of RocksDB has it
EXECUTOR = "{executor}"
AFTER_DAMAGE = 1 << 32  # batches of a state that was taken in place of a damaged one: never told apart else


class Storage(NamedTuple):
    """A store that is open, and what a host needs to know of its backup, if it has one."""

    store: Store
    backup: Safekeeping | None


def open_storage(
    directory: Path,
    manifest: Manifest,
    process: str,
    tables: Mapping[str, Any] | None = None,
    *,
    is_instance: bool = False,
    lazily: bool = False,
    prepare: Callable[[Path], object] = lambda directory: None,
) -> Storage:
    """The storage of a process, restored first if that is necessary, then prepared.

    `lazily`: the states of keys are restored while the process works; each that it needs at once.
    """
    plan = manifest.backup
    limit = memory_limit(manifest, process)
    if plan is None:
        look_at(directory)
        prepare(directory)
        return Storage(Store(directory, manifest.durability, tables, memory_bytes_max=limit), None)
    backup = ProcessBackup(Location(plan.location, plan.read_mb_s), manifest.id, process)
    head, away = backup.head(), None
    if head is not None and not is_newest(directory, backup, head):
        if lazily:
            away = restore_outline(backup, directory)
        else:
            restore(backup, directory)
    elif head is None and _is_a_share_in_part(directory):
        set_aside(directory)
    prepare(directory)
    store = Store(directory, manifest.durability, tables, backup.claim, limit, away)
    shipper = Shipper(store, backup, plan, head)
    return Storage(store, Safekeeping(shipper, safe_first=is_instance or plan.strict))


def memory_limit(manifest: Manifest, process: str) -> int:
    """Bytes of decoded state that a process may have in memory; 0: no limit, or it has none of it."""
    operator = manifest.topology.operators.get(operator_of(process))
    return 0 if operator is None else operator.memory_limit(manifest.settings)


def directory_of(place: Place, manifest: Manifest, process: str, executor: str) -> Path:
    """Where a router or an instance stores: in the deployment's directory, or on a disk of its executor."""
    if not manifest.local:
        return place.process(process)
    return Path(manifest.local.replace(EXECUTOR, executor)) / manifest.id / process


def exists(directory: Path) -> bool:
    return (directory / ROCKSDB_FILE).exists()


def look_at(directory: Path) -> None:
    """Raise DamagedStore if what lies here is: it stays as it is, while opening would rewrite it."""
    if exists(directory):
        StoreView(directory, whole=False).close()


def is_newest(directory: Path, backup: ProcessBackup, head: Header) -> bool:
    """Whether what lies here is not older than the backup."""
    if not exists(directory):
        return False
    with contextlib.closing(StoreView(directory, whole=False)) as view:
        life, batches = view.numbers
    return not view.restoring and life >= backup.last_life() and batches >= head.through


def _is_a_share_in_part(directory: Path) -> bool:
    """An heir has died before all that it inherits was here; it told nobody of anything yet."""
    if not exists(directory):
        return False
    with contextlib.closing(StoreView(directory, whole=False)) as view:
        return view.restoring


def restore(backup: ProcessBackup, directory: Path, up_to: int | None = None) -> Header:
    """Make a store out of a backup; what lies there is set aside. All or nothing: every file is checked."""
    last: list[Header] = []

    def parts() -> Iterator[list[Pair]]:
        for piece in backup.pieces(up_to):
            last[:] = [piece.header]
            yield piece.pairs

    def numbers() -> tuple[int, int]:
        more = AFTER_DAMAGE if up_to is not None else 0
        return max(backup.last_life(), last[0].life), last[0].through + more

    set_in_place(directory, parts(), numbers)
    return last[0]


def restore_outline(backup: ProcessBackup, directory: Path) -> Away:
    """As `restore`, but the states of keys stay where they are: what is left to bring."""
    last, pairs, places = outline(backup)
    numbers = (max(backup.last_life(), last.life), last.through)
    set_in_place(directory, [[*pairs.items(), (RESTORING, b"1")]], lambda: numbers)
    return Away(backup, places)


class Outline(NamedTuple):
    """A backup without the states of keys, and where those are."""

    last: Header
    pairs: dict[bytes, bytes | None]  # None: deleted, as far as the backup says
    places: dict[bytes, Spotted]


def outline(backup: ProcessBackup, has: Callable[[bytes], bool] | None = None) -> Outline:
    """What a backup holds; of states, with `has`, only those whose stored key it accepts."""
    pairs: dict[bytes, bytes | None] = {}
    places: dict[bytes, Spotted] = {}
    last = None
    for piece in backup.pieces(wanted=Wanted(lambda first, _: not is_state(first), spots=True)):
        for name, value in piece.pairs:  # states too, of a file that had to be read as a whole
            pairs[name] = value
            places.pop(name, None)
        found = {
            spot.key: Spotted(piece.name, piece.body, spot)
            for spot in piece.spots
            if has is None or has(spot.key)
        }
        for name in pairs.keys() & found.keys():
            del pairs[name]
        places.update(found)
        last = piece.header
    assert last is not None, "a backup with a head has a base"
    return Outline(last, pairs, {name: place for name, place in places.items() if place.spot.size})


def set_in_place(
    directory: Path, parts: Iterable[Iterable[Pair]], numbers: Callable[[], tuple[int, int]]
) -> None:
    """Make a store out of parts, all or nothing; what lies there is set aside."""
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
    """Out of the way of whoever looks at all processes: it is nobody's state any more."""
    aside = directory.parent / ".older" / directory.name
    aside.parent.mkdir(exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    directory.rename(aside)


@contextlib.contextmanager
def readable(place: Place) -> Iterator[Path]:
    """A directory with the storage of every process, to look into.

    Processes that store on disks of their executors are seen as their backup has them.
    """
    manifest = place.manifest()
    if manifest.local and manifest.backup is None:
        raise UserError(
            "the processes store on disks of their executors, and only their replicas hold copies",
            expected="a backup to look into, or no local=",
            hint="tiercel.start(..., durability='replica', backup=...)",
        )
    if manifest.backup is None or not manifest.local:
        yield place.directory / "processes"
        return
    location = Location(manifest.backup.location)
    with tempfile.TemporaryDirectory(prefix="tiercel-") as temporary:
        for process in processes_in(location):
            backup = ProcessBackup(location, manifest.id, process)
            if backup.head() is not None:
                restore(backup, Path(temporary) / process)
        yield Path(temporary)


def processes_in(location: Location) -> list[str]:
    """Everyone of whom a location holds something."""
    return [unquote(name) for name in location.names("processes")]
