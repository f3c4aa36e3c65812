"""Opening the storage of a process: the one place that decides which copy of it is the newest.

Responsible for: the decision table below; restoring the chosen copy; opening the store and its uploader.
Not responsible for: the store (storage/store.py), the files of a backup (backup/), the protocol with replicas
    (replica_fetch.py, replication/).

A process may have up to four copies: its local store, a replica's copy, a store that an earlier incarnation
left on another disk of this host, and a backup. `RULES` is read from top to bottom, and the first rule that
applies decides. A copy is examined when a rule asks for it: asking a replica may take a minute.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from tiercel.core.model.topology import operator_of, site_of
from tiercel.errors import UserError
from tiercel.runtime.backup.location import Location
from tiercel.runtime.backup.process_backup import ProcessBackup
from tiercel.runtime.backup.restore import restore, restore_lazily
from tiercel.runtime.backup.segment_file import Header
from tiercel.runtime.backup.uploader import BackupUploader
from tiercel.runtime.deployment import DeploymentDir, Manifest
from tiercel.runtime.net.addresses import machine_here
from tiercel.runtime.process.durability_gate import BackupGate, Storage
from tiercel.runtime.recovery.replica_fetch import ReplicaFetch
from tiercel.runtime.replication.primary import Replication, replicas_of
from tiercel.runtime.storage.directory import exists, replace_store, set_aside
from tiercel.runtime.storage.incarnations import Claim, IncarnationClaims
from tiercel.runtime.storage.store import Store, StoreView

log = logging.getLogger(__name__)


# -- the decision -----------------------------------------------------------------------------


class Age(NamedTuple):
    """How new a copy is: the incarnation that wrote it last, and the number of its last batch."""

    incarnation: int
    batch: int


class Source(enum.Enum):
    """Where the storage of a process comes from."""

    LOCAL = "local"  # the store in its own directory is opened as it is; without one, a new store is created
    REPLICA = "replica"  # the copy of its replica is restored
    SAME_HOST = "same host"  # the store that its last incarnation left on a disk of this host is copied
    BACKUP = "backup"  # its backup is restored
    EMPTY = "empty"  # the local store is set aside, and a new one is created
    LOST = "lost"  # no copy is left that has everything acknowledged


class Copies(Protocol):
    """The facts that the rules ask for."""

    @property
    def is_replicated(self) -> bool:
        """Whether a replica follows this process."""

    @property
    def local(self) -> Age | None:
        """The store in the process's own directory; None if there is none, or its restore did not finish."""

    @property
    def local_is_partial(self) -> bool:
        """Whether a restore or a takeover into the local store did not finish."""

    @property
    def is_later_elsewhere(self) -> bool:
        """Whether an incarnation later than the local store may have stored elsewhere."""

    @property
    def holder(self) -> str:
        """The replica that held everything acknowledged; empty if none ever did."""

    @property
    def replica(self) -> Age | None:
        """The complete copy of that replica; None if it lost it or does not answer."""

    @property
    def same_host(self) -> Age | None:
        """The newest store on a disk of this host that has everything acknowledged."""

    @property
    def has_backup(self) -> bool:
        """Whether a backup of this process exists."""

    @property
    def backup_is_newer(self) -> bool:
        """Whether a backup of this process exists, and the local store is older or absent."""

    @property
    def is_backed_up(self) -> bool:
        """Whether the deployment has a backup location at all."""


class Rule(NamedTuple):
    """One row of the decision table."""

    source: Source
    applies: Callable[[Copies], bool]
    because: str


def _replica_is_newer(copies: Copies) -> bool:
    return copies.replica is not None and (copies.local is None or copies.replica > copies.local)


RULES = (
    Rule(
        Source.LOCAL,
        lambda c: c.is_replicated and c.local is not None and not c.is_later_elsewhere,
        "the last incarnation stored here",
    ),
    Rule(Source.REPLICA, _replica_is_newer, "the replica holds a newer copy"),
    Rule(Source.LOCAL, lambda c: c.replica is not None, "the replica holds an older copy"),
    Rule(
        Source.SAME_HOST,
        lambda c: bool(c.holder) and c.same_host is not None,
        "the replica lost its copy, as when the whole application ended, but a disk of this host has it",
    ),
    Rule(
        Source.BACKUP,
        lambda c: bool(c.holder) and c.has_backup,
        "the replica lost its copy, and no disk of this host has it",
    ),
    Rule(Source.LOST, lambda c: bool(c.holder), "the replica lost its copy, and there is no other"),
    Rule(Source.BACKUP, lambda c: c.backup_is_newer, "the process left this disk, and came back later"),
    Rule(
        Source.EMPTY,
        lambda c: c.is_backed_up and not c.has_backup and c.local_is_partial,
        "a successor died before its takeover was complete, and had acknowledged nothing",
    ),
    Rule(Source.LOCAL, lambda c: True, "there is no newer copy"),
)


def choose_source(copies: Copies) -> Source:
    """Which copy the process continues with."""
    return next(rule.source for rule in RULES if rule.applies(copies))


# -- opening ----------------------------------------------------------------------------------


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
    """Open the storage of a process that has no replica; restore it first if that is necessary.

    With `lazily`, the states of keys are restored while the process works, and a state it needs is read at
    once. `prepare` is called between restore and opening.
    """
    plan, missing = manifest.backup, None
    with FoundCopies(manifest, process, directory) as copies:
        source, backup = choose_source(copies), copies.backup
        if source is Source.BACKUP and lazily and backup is not None:
            missing = restore_lazily(backup, directory)
        else:
            copies.restore_from(source)
        head = copies.head
    prepare(directory)
    limit = memory_limit(manifest, process)
    if plan is None or backup is None:
        return Storage(Store(directory, manifest.durability, tables, memory_bytes_max=limit))
    store = Store(directory, manifest.durability, tables, backup.claim, limit, missing)
    uploader = BackupUploader(store, backup, plan, head)
    return Storage(store, BackupGate(uploader, is_strict=is_instance or plan.strict))


def open_replicated_storage(
    deployment: DeploymentDir,
    manifest: Manifest,
    process: str,
    directory: Path,
    executor: str = "",
    *,
    is_instance: bool = False,
    lazily: bool = False,
    prepare: Callable[[Path], object] = lambda directory: None,
) -> Storage:
    """Open the storage of a router or an instance, whatever the deployment's durability is."""
    if manifest.replicas is None:
        return open_storage(
            directory, manifest, process, is_instance=is_instance, lazily=lazily, prepare=prepare
        )
    replicas = replicas_of(manifest, site_of(process) if is_instance else process)
    incarnations = IncarnationClaims(deployment.incarnations, process)
    with FoundCopies(
        manifest, process, directory, ReplicaAccess(deployment, incarnations, replicas)
    ) as copies:
        incarnation = copies.claim().incarnation
        copies.restore_from(choose_source(copies))
        backup = copies.backup
    head = None if backup is None else backup.head()
    prepare(directory)
    limit = memory_limit(manifest, process)
    store = Store(directory, manifest.durability, None, lambda _: incarnation, limit)
    gate = None
    if backup is not None and manifest.backup is not None:
        backup.claim(incarnation - 1)
        uploader = BackupUploader(store, backup, manifest.backup, head)
        gate = BackupGate(uploader, is_strict=is_instance or manifest.backup.strict)
    own = (executor, machine_here())
    apart = manifest.replicas.apart
    replication = Replication(process, store, incarnations, deployment.registry, replicas, *own, apart=apart)
    return Storage(store, gate, replication)


def has_replica_copy(deployment: DeploymentDir, process: str) -> bool:
    """Whether a replica holds everything of a process, as both run now."""
    incarnations, since = (
        IncarnationClaims(deployment.incarnations, process),
        deployment.registry.registered_since_ns,
    )
    holder, at = incarnations.holder(), incarnations.holder_since_ns()
    return bool(holder) and at > since(process) > 0 and at > since(holder) > 0


def memory_limit(manifest: Manifest, process: str) -> int:
    """Bytes of decoded state that a process may have in memory; 0: no limit, or it has no state."""
    operator = manifest.topology.operators.get(operator_of(process))
    return 0 if operator is None else operator.memory_limit(manifest.settings)


def is_newest(directory: Path, backup: ProcessBackup, head: Header) -> bool:
    """Whether the store in this directory is complete and not older than the backup."""
    local, _ = _local_copy(directory)
    return local is not None and _is_as_new(local, backup, head)


def _is_as_new(local: Age, backup: ProcessBackup, head: Header) -> bool:
    return local.incarnation >= backup.last_incarnation() and local.batch >= head.through


def _local_copy(directory: Path) -> tuple[Age | None, bool]:
    """The age of the complete store that lies here, and whether an incomplete one does.

    Raises DamagedStore for a damaged one: it stays as it is, while opening it to write would change it.
    """
    if not exists(directory):
        return None, False
    with contextlib.closing(StoreView(directory, complete=False)) as view:
        return (None, True) if view.restoring else (Age(*view.numbers), False)


# -- the copies of one process ----------------------------------------------------------------


class ReplicaAccess(NamedTuple):
    """How a replicated process finds its replica and the places of its earlier incarnations."""

    deployment: DeploymentDir
    incarnations: IncarnationClaims
    replicas: list[str]  # that may hold its copy since this start


class FoundCopies:
    """The copies of one process, each examined when it is asked for. Used in a `with`."""

    def __init__(
        self, manifest: Manifest, process: str, directory: Path, replicated: ReplicaAccess | None = None
    ) -> None:
        self._manifest, self._process, self._directory = manifest, process, directory
        self._replicated = replicated
        self._claimed: Claim | None = None
        self._fetch: ReplicaFetch | None = None
        self._opened = contextlib.ExitStack()
        self.local, self.local_is_partial = _local_copy(directory)
        self.backup: ProcessBackup | None = None
        if (plan := manifest.backup) is not None:
            self.backup = ProcessBackup(Location(plan.location, plan.read_mb_s), manifest.id, process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def claim(self) -> Claim:
        """Claim an incarnation above all others; the replica refuses earlier ones once it is asked."""
        assert self._replicated is not None, "without replicas the store counts its incarnations itself"
        stored = 0 if self.local is None else self.local.incarnation
        here = (
            place_of(self._directory) if self._manifest.local else ""
        )  # else all executors see the same one
        self._claimed = self._replicated.incarnations.claim(max(stored, self._backed_up_incarnation), here)
        return self._claimed

    # -- what the rules ask ----------------------------------------------------------------------

    @property
    def is_replicated(self) -> bool:
        return self._replicated is not None

    @property
    def is_later_elsewhere(self) -> bool:
        assert self._claimed is not None
        stored = 0 if self.local is None else self.local.incarnation
        return self._claimed.elsewhere or self._backed_up_incarnation > stored

    @functools.cached_property
    def holder(self) -> str:
        return "" if self._replicated is None else self._replicated.incarnations.holder()

    @functools.cached_property
    def replica(self) -> Age | None:
        if self._replicated is None or self._claimed is None or self.holder not in self._replicated.replicas:
            return None
        fetch = ReplicaFetch(
            self._replicated.deployment, self._process, self._claimed.incarnation, [self.holder]
        )
        self._fetch = self._opened.enter_context(fetch)
        state = self._fetch.states().get(self.holder)
        self._answered = state is not None
        return None if state is None or state.through < 0 else Age(state.incarnation, state.through)

    @property
    def same_host(self) -> Age | None:
        return max(self._same_host, default=None)

    @functools.cached_property
    def _same_host(self) -> dict[Age, Path]:
        """Stores on disks of this host that have everything acknowledged.

        A process that still writes there has an earlier incarnation, and its replica refuses that one.
        """
        found: dict[Age, Path] = {}
        if self._replicated is not None:
            incarnations = self._replicated.incarnations
            for place in sorted(incarnations.storage_places()):
                path = Path(place.partition(":")[2])
                age = _local_copy(path)[0] if place == place_of(path) else None
                if age is not None and age.incarnation >= incarnations.holder_incarnation():
                    found[age] = path
        return found

    @property
    def is_backed_up(self) -> bool:
        return self.backup is not None

    @functools.cached_property
    def head(self) -> Header | None:
        return None if self.backup is None else self.backup.head()

    @property
    def has_backup(self) -> bool:
        return self.head is not None

    @property
    def backup_is_newer(self) -> bool:
        if self.backup is None or self.head is None:
            return False
        return self.local is None or not _is_as_new(self.local, self.backup, self.head)

    @functools.cached_property
    def _backed_up_incarnation(self) -> int:
        return 0 if self.backup is None else self.backup.last_incarnation()

    # -- what follows from the decision ----------------------------------------------------------

    def restore_from(self, source: Source) -> None:
        """Make the local store that of the chosen copy."""
        match source:
            case Source.LOCAL:
                pass
            case Source.EMPTY:
                set_aside(self._directory)
            case Source.REPLICA:
                self._restore_from_replica()
            case Source.SAME_HOST:
                self._restore_from_same_host()
            case Source.BACKUP:
                self._restore_from_backup()
            case Source.LOST:
                raise self._lost()

    def _restore_from_replica(self) -> None:
        age = self.replica
        assert age is not None
        assert self._fetch is not None
        replace_store(self._directory, self._fetch.parts(self.holder), lambda: age)
        log.warning("%s was restored from %s, through batch %d", self._process, self.holder, age.batch)

    def _restore_from_same_host(self) -> None:
        newest = max(self._same_host)
        path = self._same_host[newest]
        if path != self._directory:
            with contextlib.closing(StoreView(path)) as view:
                replace_store(self._directory, [view.pairs()[1]], lambda: newest)
            log.warning("%s was restored from %s, through batch %d", self._process, path, newest.batch)

    def _restore_from_backup(self) -> None:
        assert self.backup is not None
        header = restore(self.backup, self._directory)
        strict = self._manifest.backup is not None and self._manifest.backup.strict
        if self.holder and not strict:
            log.warning(
                "%s: its replica does not hold it any more; restored from its backup of %d",
                self._process,
                header.written_ms,
            )

    def _lost(self) -> UserError:
        assert self._replicated is not None
        replicas = self._replicated.replicas
        if self.holder not in replicas:
            reason = f"does not run any more: since this start {' and '.join(replicas)} hold copies"
        else:
            reason = "does not hold it any more" if self._answered else "does not answer"
        return UserError(
            f"both copies of {self._process} are gone: {self._directory} has no current one, "
            f"and {self.holder} {reason}",
            expected="one of the two to survive: its disk, or its replica on another executor",
            hint="with backup= as well, the last backup would be restored now",
        )


def place_of(directory: Path) -> str:
    """A directory, and the host that has it."""
    return f"{socket.gethostname()}:{directory}"
