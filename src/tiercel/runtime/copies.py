"""A whole deployment in a backup location, and a deployment's directory made out of one.

Responsible for: what belongs to a deployment besides its processes; that restored processes fit together.
Not responsible for: one process's backup (backups.py), shipping while it runs (shipping.py).

    LOCATION/backup.json         the manifest, as of the last start
    LOCATION/processes/NAME/     the backup of each process

Processes fit together if no reader's checkpoint is ahead of its log, and no log was trimmed for a newer
checkpoint than the one that is there. What runs with a backup keeps to that by itself (safekeeping.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from tiercel.core.taken import Cursor
from tiercel.core.topology import operator_of, site_of
from tiercel.errors import UserError
from tiercel.runtime.backups import ProcessBackup
from tiercel.runtime.locations import Location
from tiercel.runtime.pieces import DamagedBackup
from tiercel.runtime.place import FORMAT, Manifest, Place
from tiercel.runtime.store import StoreView
from tiercel.runtime.storing import exists, processes_in, restore

MANIFEST = "backup.json"  # not the name it has in a storage directory: that is no backup
SECOND = "backup.second.json"  # the same again: without it, nobody could say what the rest belongs to
TRIES = 50  # to see processes that run as they fit together
PAUSE_S = 0.1


class Copied(NamedTuple):
    """One process that was copied or restored."""

    process: str
    number: int
    through: int
    bytes: int


# -- a deployment's manifest in a location --------------------------------------------------------


def describe(manifest: Manifest) -> None:
    """Say in the backup location which deployment it belongs to; refuse one that has another's."""
    if manifest.backup is not None:
        write_manifest(Location(manifest.backup.location), manifest)


def write_manifest(location: Location, manifest: Manifest) -> None:
    with contextlib.suppress(FileNotFoundError):
        found = read_manifest(location)
        if found.id != manifest.id:
            raise UserError(
                f"{location.url} holds the backup of another deployment ({found.id})",
                expected=f"an empty location, or that of {manifest.id}",
                hint="each needs a location of its own; `tiercel state restore` brings that one back",
            )
    for name in (MANIFEST, SECOND):  # killed between the two, one start has no second one
        location.put(name, msgspec.json.format(msgspec.json.encode(manifest), indent=2))


def read_manifest(location: Location) -> Manifest:
    """The manifest in a location; FileNotFoundError if there is none."""
    try:
        found = msgspec.json.decode(location.get(MANIFEST), type=Manifest)
    except (FileNotFoundError, msgspec.DecodeError) as error:
        missing = isinstance(error, FileNotFoundError)
        hint = "the processes' files are not concerned; a copy of the location may have this one"
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            msgspec.json.decode(location.get(SECOND), type=Manifest)
            hint = f"{SECOND} beside it is whole: copy it to {MANIFEST}; nothing else is concerned"
            missing = False
        if missing:
            raise
        raise DamagedBackup(
            f"{location.url}/{MANIFEST} cannot be read: {error}",
            expected="the manifest of a deployment",
            hint=hint,
        ) from error
    if found.format != FORMAT:
        raise DamagedBackup(
            f"{location.url}/{MANIFEST} has format {found.format}",
            expected=f"format {FORMAT}",
            hint="use the version that wrote it",
        )
    return found


# -- copying --------------------------------------------------------------------------------------


def copy_deployment(place: Place, location: Location) -> list[Copied]:
    """A full copy of every process, also beside those that run."""
    manifest = place.manifest()
    if manifest.local:
        raise UserError(
            "the processes of this deployment store on disks of their executors",
            expected="a deployment whose processes store in its directory",
            hint=f"its backup is in {manifest.backup.location if manifest.backup else 'no location'}",
        )
    if manifest.backup is not None and Location(manifest.backup.location).url == location.url:
        raise UserError(
            f"the deployment itself ships to {location.url}", expected="another location for a copy by hand"
        )
    write_manifest(location, manifest)
    with views(place.directory / "processes") as seen:
        copied = []
        moment_ms = time.time_ns() // 1_000_000  # one for all: they are restored together
        for process, view in seen.items():
            backup = ProcessBackup(location, manifest.id, process, moment_ms)
            life = max(view.numbers[0], backup.last_life())  # who went back counts as the newest all the same
            number = backup.last_number() + 1
            batches, pairs = view.pairs()
            checksum, size = backup.put_base(life, number, batches, pairs)
            backup.put_head(life, number, number, batches, checksum)
            copied.append(Copied(process, number, batches, size))
    return copied


@contextlib.contextmanager
def views(processes: Path) -> Iterator[dict[str, StoreView]]:
    """Every process's storage at moments that fit together: instances are looked at first, then routers."""
    with contextlib.ExitStack() as opened:
        for attempt in range(1, TRIES + 1):
            names = sorted(
                (d.name for d in processes.iterdir() if exists(d)), key=lambda n: not operator_of(n)
            )
            with contextlib.ExitStack() as trying:
                seen = {
                    name: trying.enter_context(contextlib.closing(StoreView(processes / name)))
                    for name in names
                }
                misfits = misfitting(seen)
                if not misfits:
                    opened.push(trying.pop_all())
                    break
            if attempt == TRIES:
                raise UserError(
                    f"the processes of {processes.parent} do not come to fit together: {misfits[0]}",
                    expected="a moment at which what each has stored fits what the others have",
                    hint="stop the deployment, or run it with backup=",
                )
            time.sleep(PAUSE_S)
        yield seen


def misfitting(seen: Mapping[str, StoreView]) -> list[str]:
    """Instances whose checkpoint and log do not belong together, each with the reason."""
    found = []
    for name, view in seen.items():
        operator, router = operator_of(name), seen.get(site_of(name))
        if not operator or router is None:
            continue
        cursor: Cursor | None = view.get(("cursor",))
        reader = router.get(("reader", operator, name))
        head = router.get(("head", operator))
        applied = -1 if cursor is None else cursor.applied
        if head is not None and applied > head[0]:
            found.append(f"the checkpoint of {name} is at {applied}, its log ends at {head[0]}")
        elif head is None and applied > 0:
            found.append(f"the checkpoint of {name} is at {applied}, its log is empty")
        elif reader is not None and (cursor is not None or reader.stored) and reader.applied > applied:
            found.append(
                f"the log of {name} was trimmed up to {reader.applied}, its checkpoint is at {applied}"
            )
    return found


def missing_of(manifest: Manifest, seen: Mapping[str, StoreView]) -> Iterator[tuple[str, str]]:
    """Processes that are needed and not there. One that had nothing to ship yet is not needed."""
    for site in manifest.topology.sites:
        if site not in seen:
            yield site, f"holds no whole backup of the router of site {site!r}"
            continue
        for key, reader in seen[site].scan(("reader",)):
            instance = str(key[2])
            if reader.stored and instance not in seen:
                yield (
                    instance,
                    f"holds no whole backup of {instance}, which has a checkpoint at {reader.applied}",
                )


# -- restoring ------------------------------------------------------------------------------------


def restore_deployment(
    location: Location, directory: Path, up_to: Mapping[str, int] | None = None
) -> list[Copied]:
    """Make a deployment's directory out of a location; all of it or nothing, and never over another one.

    `up_to` names the last number to take of some processes; of the others, what is not newer than that.
    """
    place = Place(directory)
    if directory.exists() and any(directory.iterdir()):
        raise UserError(
            f"{directory} is not empty", expected="a directory that does not exist yet, or an empty one"
        )
    try:
        manifest = read_manifest(location)
    except FileNotFoundError as error:
        what = f"{location.url} holds no backup of a deployment"
        raise UserError(what, expected=f"a location with a {MANIFEST}") from error
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Place(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        draft.write(msgspec.structs.replace(manifest, backup=None, local=""))
        restored = _restore_all(location, manifest, draft, dict(up_to or {}))
        with views_now(draft.directory / "processes") as seen:
            for absent, reason in missing_of(manifest, seen):
                lost = DamagedBackup(f"{location.url} {reason}", expected="a whole backup of every process")
                ProcessBackup(location, manifest.id, absent).offer(lost)
                raise lost
            misfits = misfitting(seen)
            if misfits:
                raise UserError(
                    f"what would be restored does not fit together: {misfits[0]}",
                    expected="processes as of one moment",
                    hint="--up-to of an earlier number takes all of them further back",
                )
            draft.want(_wanted(manifest, seen))
        if directory.exists():
            directory.rmdir()
        os.rename(draft.directory, place.directory)
    finally:
        shutil.rmtree(draft.directory, ignore_errors=True)
    return restored


def _restore_all(location: Location, manifest: Manifest, draft: Place, up_to: dict[str, int]) -> list[Copied]:
    processes = processes_in(location)
    for name in up_to.keys() - set(processes):
        raise UserError(f"no backup of {name!r}", expected=f"one of: {', '.join(processes)}")
    backups = {name: ProcessBackup(location, manifest.id, name) for name in processes}
    moments = [_moment(backups[name], number) for name, number in up_to.items()]
    restored = []
    for name, backup in backups.items():
        number = up_to.get(name)
        if number is None and moments:
            number = _number_at(backup, min(moments))
            if number is None:
                continue  # it began later; if others need it all the same, they say so
        elif number is None and backup.head() is None:
            continue  # it has begun a life, and died before it had anything to ship
        header = restore(backup, draft.process(name), number)
        size = sum(file.stat().st_size for file in draft.process(name).iterdir())
        restored.append(Copied(name, header.number, header.through, size))
    return restored


def _moment(backup: ProcessBackup, number: int) -> int:
    last = 0
    for piece in backup.pieces(number):
        last = piece.header.written_ms
    return last


def _number_at(backup: ProcessBackup, moment_ms: int) -> int | None:
    """The last number that was written by then; None: it had not begun."""
    found = backup.number_at(moment_ms)
    if found is None and backup.first_number() > 1:
        raise UserError(
            f"no backup of {backup.process} goes back so far", expected="a later number for --up-to"
        )
    return found


@contextlib.contextmanager
def views_now(processes: Path) -> Iterator[dict[str, StoreView]]:
    with contextlib.ExitStack() as opened:
        names = sorted(d.name for d in processes.iterdir() if exists(d))
        yield {n: opened.enter_context(contextlib.closing(StoreView(processes / n))) for n in names}


def _wanted(manifest: Manifest, seen: Mapping[str, StoreView]) -> list[str]:
    """The instances that the routers know; those that each operator began with, if they know none."""
    known = [
        str(key[2])
        for site in manifest.topology.sites
        if site in seen
        for key, _ in seen[site].scan(("reader",))
    ]
    begun = {operator_of(instance) for instance in known}
    fresh = [o.instances for o in manifest.topology.operators.values() if o.name not in begun]
    return sorted({*known, *(instance for instances in fresh for instance in instances)})
