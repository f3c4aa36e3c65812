"""The storage of a process whose replica holds a copy of it: opened here, or restored from there.

Responsible for: which copy is the newest, a life that is above all others, what cannot be restored.
Not responsible for: following from then on (replication.py), storage without replicas (storing.py).

    what lies here is                        then
    of the last life that was claimed        it is opened: whoever wrote it last wrote it here
    missing, or of an earlier life           the replica that follows us is asked, and refuses earlier lives:
        it holds a newer one                     that is restored
        it holds an older one                    it is opened
        it holds nothing any more, or is         what its last life left on a disk of this host is taken, as
        not one of ours since this start         after the end of the whole application; or its backup;
                                                 without either, an error says so
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tiercel.core import messages as m
from tiercel.core.topology import site_of
from tiercel.errors import UserError
from tiercel.runtime.addresses import machine_here
from tiercel.runtime.backups import ProcessBackup
from tiercel.runtime.fetching import Fetching
from tiercel.runtime.lives import Claim, Lives
from tiercel.runtime.locations import Location
from tiercel.runtime.place import Manifest, Place
from tiercel.runtime.replication import Replication, replicas_of
from tiercel.runtime.safekeeping import Safekeeping
from tiercel.runtime.shipping import Shipper
from tiercel.runtime.store import Store, StoreView
from tiercel.runtime.storing import (
    Storage,
    exists,
    is_newest,
    memory_limit,
    open_storage,
    restore,
    set_in_place,
)

log = logging.getLogger(__name__)


class Replicated(NamedTuple):
    """A store that is open, and who else keeps what is in it."""

    storage: Storage
    replication: Replication | None


def open_replicated(
    place: Place,
    manifest: Manifest,
    process: str,
    directory: Path,
    executor: str = "",
    *,
    is_instance: bool = False,
    lazily: bool = False,
    prepare: Callable[[Path], object] = lambda directory: None,
) -> Replicated:
    """The storage of a router or an instance, whatever the deployment's durability is."""
    if manifest.replicas is None:
        storage = open_storage(
            directory, manifest, process, is_instance=is_instance, lazily=lazily, prepare=prepare
        )
        return Replicated(storage, None)
    replicas = replicas_of(manifest, site_of(process) if is_instance else process)
    lives = Lives(place.lives, process)
    backup = None
    if manifest.backup is not None:
        backup = ProcessBackup(Location(manifest.backup.location), manifest.id, process)
    found = _numbers(directory)
    others = 0 if backup is None else backup.last_life()
    here = _here(directory) if manifest.local else ""  # else all see the same one
    claim = lives.claim(max(found[0], others) if found else others, here)
    if found is None or claim.elsewhere or others > found[0]:
        _restore_if_needed(place, manifest, process, directory, found, lives, claim, backup, replicas)
    head = None if backup is None else backup.head()
    prepare(directory)
    limit = memory_limit(manifest, process)
    store = Store(directory, manifest.durability, None, lambda _: claim.life, limit)
    safekeeping = None
    if backup is not None and manifest.backup is not None:
        backup.claim(claim.life - 1)
        shipper = Shipper(store, backup, manifest.backup, head)
        safekeeping = Safekeeping(shipper, safe_first=is_instance or manifest.backup.strict)
    here_too = (executor, machine_here())
    apart = manifest.replicas.apart
    replication = Replication(process, store, lives, place.registry, replicas, *here_too, apart=apart)
    return Replicated(Storage(store, safekeeping), replication)


def has_copy(place: Place, process: str) -> bool:
    """Whether a replica holds everything of a process, as both run now."""
    lives, since = Lives(place.lives, process), place.registry.since
    holder, at = lives.holder(), lives.held_at()
    return bool(holder) and at > since(process) > 0 and at > since(holder) > 0


def _numbers(directory: Path) -> tuple[int, int] | None:
    """The last life that was stored here, and how many batches it has; None: nothing whole lies here."""
    if not exists(directory):
        return None
    with contextlib.closing(StoreView(directory, whole=False)) as view:
        return None if view.restoring else view.numbers


def _restore_if_needed(
    place: Place,
    manifest: Manifest,
    process: str,
    directory: Path,
    found: tuple[int, int] | None,
    lives: Lives,
    claim: Claim,
    backup: ProcessBackup | None,
    replicas: list[str],
) -> None:
    holder = lives.holder()
    state: m.CopyState | None = None
    if holder in replicas:
        with Fetching(place, process, claim.life, [holder]) as fetching:
            state = fetching.states().get(holder)
            if state is not None and state.through >= 0 and (found is None or _age(state) > found):
                age = _age(state)
                set_in_place(directory, fetching.parts(holder), lambda: age)
                log.warning("%s was restored from %s, through batch %d", process, holder, state.through)
    held = state is not None and state.through >= 0
    if holder and not held:
        if not _restore_from_neighbour(process, directory, lives):
            says = "does not answer" if state is None else "holds it no more"
            if holder not in replicas:
                says = f"does not run any more: since this start copies are held by {' and '.join(replicas)}"
            _restore_from_backup(manifest, process, directory, backup, f"{holder} {says}")
    elif not holder and backup is not None:  # it had no replica when it ran last
        head = backup.head()
        if head is not None and not is_newest(directory, backup, head):
            restore(backup, directory)


def _here(directory: Path) -> str:
    return f"{socket.gethostname()}:{directory}"


def _restore_from_neighbour(process: str, directory: Path, lives: Lives) -> bool:
    """From a disk of this host where it stored last, if all that was ever acknowledged is there.

    Whoever still writes there has an earlier life, and no replica takes that for true any more.
    """
    ages: dict[tuple[int, int], Path] = {}
    for where in sorted(lives.places()):
        path = Path(where.partition(":")[2])
        age = _numbers(path) if where == _here(path) else None
        if age is not None and age[0] >= lives.held_since():
            ages[age] = path
    if not ages:
        return False
    newest = max(ages)
    if ages[newest] != directory:
        with contextlib.closing(StoreView(ages[newest])) as view:
            set_in_place(directory, [view.pairs()[1]], lambda: newest)
        log.warning("%s was restored from %s, through batch %d", process, ages[newest], newest[1])
    return True


def _age(state: m.CopyState) -> tuple[int, int]:
    return state.life, state.through


def _restore_from_backup(
    manifest: Manifest,
    process: str,
    directory: Path,
    backup: ProcessBackup | None,
    says: str,
) -> None:
    if backup is None or backup.head() is None:
        what = f"both copies of {process} are gone: {directory} has none of now, and {says}"
        raise UserError(
            what,
            expected="one of the two to survive: its disk, or its replica on another executor",
            hint="with backup= as well, the last backup would be restored now",
        )
    header = restore(backup, directory)
    strict = manifest.backup is not None and manifest.backup.strict
    if not strict:
        log.warning(
            "%s: its replica holds it no more; restored from its backup of %d", process, header.written_ms
        )
