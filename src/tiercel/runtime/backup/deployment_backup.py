"""The backup of a whole deployment: into a location, and a storage directory out of one.

Responsible for: the manifest in a location; consistency between the backups of processes.
Not responsible for: the backup of one process (process_backup.py), uploads of a running deployment
    (uploader.py).

    LOCATION/backup.json         the manifest, as of the last start
    LOCATION/processes/NAME/     the backup of each process

Backups of processes are consistent if no checkpoint is ahead of its log, and no log was trimmed for a newer
checkpoint. Deployments that run with a backup guarantee that (process/durability_gate.py).
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

from tiercel.core.machine.stored import CheckpointHeader
from tiercel.core.model.topology import operator_of, site_of
from tiercel.errors import UserError
from tiercel.runtime.backup.location import Location
from tiercel.runtime.backup.process_backup import ProcessBackup
from tiercel.runtime.backup.restore import processes_in, restore
from tiercel.runtime.backup.segment_file import DamagedBackup
from tiercel.runtime.deployment import FORMAT, DeploymentDir, Manifest
from tiercel.runtime.storage.directory import exists
from tiercel.runtime.storage.store import StoreView

MANIFEST = "backup.json"  # another name than in a storage directory, which is not a backup
SECOND = "backup.second.json"  # a second copy: without a manifest the other files are useless
TRIES = 50  # to see running processes in a consistent state
PAUSE_S = 0.1


class BackupResult(NamedTuple):
    """One process that was backed up or restored."""

    process: str
    number: int
    through: int
    bytes: int


# -- a deployment's manifest in a location --------------------------------------------------------


def write_backup_manifest(manifest: Manifest) -> None:
    """Write the manifest into the backup location; refuse the location of another deployment."""
    if manifest.backup is not None:
        write_manifest(Location(manifest.backup.location), manifest)


def write_manifest(location: Location, manifest: Manifest) -> None:
    with contextlib.suppress(FileNotFoundError):
        found = read_manifest(location)
        if found.id != manifest.id:
            raise UserError(
                f"{location.url} holds the backup of another deployment ({found.id})",
                expected=f"an empty location, or that of {manifest.id}",
                hint="each deployment needs its own location; `tiercel state restore` restores that one",
            )
    for name in (MANIFEST, SECOND):  # a kill between the two leaves no second one until the next start
        location.put(name, msgspec.json.format(msgspec.json.encode(manifest), indent=2))


def read_manifest(location: Location) -> Manifest:
    """The manifest in a location; FileNotFoundError if there is none."""
    try:
        found = msgspec.json.decode(location.get(MANIFEST), type=Manifest)
    except (FileNotFoundError, msgspec.DecodeError) as error:
        missing = isinstance(error, FileNotFoundError)
        hint = "the files of the processes are not affected; a copy of the location may have this one"
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            msgspec.json.decode(location.get(SECOND), type=Manifest)
            hint = f"{SECOND} beside it is undamaged: copy it to {MANIFEST}; nothing else is affected"
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


# -- backup --------------------------------------------------------------------------------------


def backup_deployment(storage: str | Path, location_url: str) -> list[BackupResult]:
    """Copy every process in full into a location; the deployment may run meanwhile.

    Running sites are copied one after the other: rows between them may be missing or doubled there. Stop
    a deployment of several sites first, or start it with a backup of its own.
    """
    deployment, location = DeploymentDir(storage), Location(location_url)
    manifest = deployment.manifest()
    if manifest.local:
        raise UserError(
            "the processes of this deployment store on disks of their executors",
            expected="a deployment whose processes store in its directory",
            hint=f"its backup is in {manifest.backup.location if manifest.backup else 'no location'}",
        )
    if manifest.backup is not None and Location(manifest.backup.location).url == location.url:
        raise UserError(
            f"the deployment itself uploads its backup to {location.url}",
            expected="another location for a copy by hand",
        )
    write_manifest(location, manifest)
    with consistent_views(deployment.directory / "processes") as views_by_process:
        copied = []
        moment_ms = time.time_ns() // 1_000_000  # the same for all processes: they are restored together
        for process, view in views_by_process.items():
            backup = ProcessBackup(location, manifest.id, process, moment_ms)
            incarnation = max(
                view.numbers[0], backup.last_incarnation()
            )  # a restored deployment counts as the newest all the same
            number = backup.last_number() + 1
            batches, pairs = view.pairs()
            checksum, size = backup.put_base(incarnation, number, batches, pairs)
            backup.put_head(incarnation, number, number, batches, checksum)
            copied.append(BackupResult(process, number, batches, size))
    return copied


@contextlib.contextmanager
def consistent_views(processes: Path) -> Iterator[dict[str, StoreView]]:
    """Consistent views of all processes. Instances are read before routers."""
    with contextlib.ExitStack() as opened:
        for attempt in range(1, TRIES + 1):
            names = sorted(
                (d.name for d in processes.iterdir() if exists(d)), key=lambda n: not operator_of(n)
            )
            with contextlib.ExitStack() as trying:
                views_by_process = {
                    name: trying.enter_context(contextlib.closing(StoreView(processes / name)))
                    for name in names
                }
                problems = inconsistencies(views_by_process)
                if not problems:
                    opened.push(trying.pop_all())
                    break
            if attempt == TRIES:
                raise UserError(
                    f"the processes of {processes.parent} do not become consistent: {problems[0]}",
                    expected="a moment at which their storage is consistent",
                    hint="stop the deployment, or run it with backup=",
                )
            time.sleep(PAUSE_S)
        yield views_by_process


def inconsistencies(views_by_process: Mapping[str, StoreView]) -> list[str]:
    """Instances whose checkpoint does not fit their log, each with the reason."""
    found = []
    for name, view in views_by_process.items():
        operator, router = operator_of(name), views_by_process.get(site_of(name))
        if not operator or router is None:
            continue
        cursor: CheckpointHeader | None = view.get(("checkpoint",))
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


def missing_processes(
    manifest: Manifest, views_by_process: Mapping[str, StoreView]
) -> Iterator[tuple[str, str]]:
    """Processes that are needed and absent. A process that had nothing to upload yet is not needed."""
    for site in manifest.topology.sites:
        if site not in views_by_process:
            yield site, f"holds no complete backup of the router of site {site!r}"
            continue
        for key, reader in views_by_process[site].scan(("reader",)):
            instance = str(key[2])
            if reader.stored and instance not in views_by_process:
                yield (
                    instance,
                    f"holds no complete backup of {instance}, which has a checkpoint at {reader.applied}",
                )


# -- restoring ------------------------------------------------------------------------------------


def restore_deployment(
    location_url: str, storage: str | Path, up_to: Mapping[str, int] | None = None
) -> list[BackupResult]:
    """Make a storage directory out of a backup, completely or not at all. It must be absent or empty.

    `up_to` names the last number to use of a process whose newest files are damaged; the other processes are
    restored as of the same moment.
    """
    location, directory = Location(location_url), Path(storage).absolute()
    deployment = DeploymentDir(directory)
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
    draft = DeploymentDir(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        draft.write(msgspec.structs.replace(manifest, backup=None, local=""))
        restored = _restore_all(location, manifest, draft, dict(up_to or {}))
        with views_as_they_are(draft.directory / "processes") as views_by_process:
            for absent, reason in missing_processes(manifest, views_by_process):
                lost = DamagedBackup(
                    f"{location.url} {reason}", expected="a complete backup of every process"
                )
                ProcessBackup(location, manifest.id, absent).suggest_complete_state(lost)
                raise lost
            problems = inconsistencies(views_by_process)
            if problems:
                raise UserError(
                    f"the restored processes would not be consistent: {problems[0]}",
                    expected="processes as of one moment",
                    hint="--up-to of an earlier number takes all of them further back",
                )
            draft.set_desired_instances(_instances_to_run(manifest, views_by_process))
        if directory.exists():
            directory.rmdir()
        os.rename(draft.directory, deployment.directory)
    finally:
        shutil.rmtree(draft.directory, ignore_errors=True)
    return restored


def _restore_all(
    location: Location, manifest: Manifest, draft: DeploymentDir, up_to: dict[str, int]
) -> list[BackupResult]:
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
                continue  # it began later; the check below reports it if others need it
        elif number is None and backup.head() is None:
            continue  # it ended before it had anything to upload
        header = restore(backup, draft.process(name), number)
        size = sum(file.stat().st_size for file in draft.process(name).iterdir())
        restored.append(BackupResult(name, header.number, header.through, size))
    return restored


def _moment(backup: ProcessBackup, number: int) -> int:
    last = 0
    for segment in backup.segments(number):
        last = segment.header.written_ms
    return last


def _number_at(backup: ProcessBackup, moment_ms: int) -> int | None:
    """The last number that was written by then; None: the process had not begun."""
    found = backup.number_at(moment_ms)
    if found is None and backup.first_number() > 1:
        raise UserError(
            f"no backup of {backup.process} goes back that far", expected="a later number for --up-to"
        )
    return found


@contextlib.contextmanager
def views_as_they_are(processes: Path) -> Iterator[dict[str, StoreView]]:
    with contextlib.ExitStack() as opened:
        names = sorted(d.name for d in processes.iterdir() if exists(d))
        yield {n: opened.enter_context(contextlib.closing(StoreView(processes / n))) for n in names}


def _instances_to_run(manifest: Manifest, views_by_process: Mapping[str, StoreView]) -> list[str]:
    """The instances that the routers know, or the first ones of an operator if they know none of it."""
    known = [
        str(key[2])
        for site in manifest.topology.sites
        if site in views_by_process
        for key, _ in views_by_process[site].scan(("reader",))
    ]
    begun = {operator_of(instance) for instance in known}
    fresh = [o.instances for o in manifest.topology.operators.values() if o.name not in begun]
    return sorted({*known, *(instance for instances in fresh for instance in instances)})
