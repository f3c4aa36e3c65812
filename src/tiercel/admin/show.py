"""The stored state of each process, and how far its backup and its replica are.

Responsible for: the three kinds of state, counted beside the running processes.
Not responsible for: the state of single keys (runtime/storage/state_reader.py).

    processing    an instance's keys, as of its last checkpoint
    routing       a router's tables: who owns what, who reads, which moves are under way; the controller's
    buffer        a router's logs: inboxes, output logs, site outboxes, and sequence numbers of senders
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec

from tiercel.core.machine.stored import CheckpointHeader
from tiercel.core.model.topology import operator_of
from tiercel.errors import UserError
from tiercel.runtime.backup.location import Location
from tiercel.runtime.backup.process_backup import ProcessBackup
from tiercel.runtime.deployment import DeploymentDir, Manifest
from tiercel.runtime.process.metrics import MetricsLine, last_lines
from tiercel.runtime.recovery.read_only import readable_storage
from tiercel.runtime.storage.codec import decode_key
from tiercel.runtime.storage.directory import exists
from tiercel.runtime.storage.incarnations import IncarnationClaims
from tiercel.runtime.storage.store import NO_TABLE, StoreView

Kind = Literal["processing", "routing", "buffer"]

ROUTING = frozenset(
    (
        "route",
        "route_key",
        "reader",
        "retired",
        "pause",
        "outgoing",
        "incoming",
        "ended",
        "move_mark",
    )
)


class StoredProcess(msgspec.Struct, frozen=True):
    """One kind of state of one process."""

    process: str
    kind: Kind
    keys: int  # keys of the operator; else entries of the tables
    bytes: int
    position: str  # of the last checkpoint; of a log, its end
    backup_number: int | None = None  # of the newest complete state in the backup
    backup_age_s: float | None = None
    backup_behind: int | None = None  # batches that the backup does not have
    backup_problem: str | None = None  # why the backup cannot be read
    replica: str | None = None  # that holds its copy, or held it last
    replica_behind: int | None = None  # batches that it does not have; None: it holds nothing now


def show(storage: str | Path) -> list[StoredProcess]:
    """The stored state of a deployment, process by process."""
    deployment = DeploymentDir(storage)
    manifest = deployment.manifest()
    with readable_storage(deployment) as processes:
        names = sorted(d.name for d in processes.iterdir() if exists(d)) if processes.is_dir() else []
        lines = last_lines(deployment.metrics) if manifest.replicas is not None else {}
        copies = {name: _replica_of(name, deployment, lines.get(name)) for name in names}
        return [
            stored
            for name in names
            for stored in _of_process(processes / name, name, manifest, *copies[name])
        ]


def _of_process(
    directory: Path, name: str, manifest: Manifest, replica: str | None, behind: int | None
) -> list[StoredProcess]:
    entries: Counter[Kind] = Counter()
    sizes: Counter[Kind] = Counter()
    with contextlib.closing(StoreView(directory)) as view:
        _, batches = view.numbers
        cursor: CheckpointHeader | None = view.get(("checkpoint",)) if operator_of(name) else None
        keys: set[tuple[object, ...]] = set()
        for data, value in view.pairs()[1]:
            if data.startswith(NO_TABLE):
                continue
            key = decode_key(data)
            kind = kind_of(str(key[0]), name, manifest)
            sizes[kind] += len(data) + len(value or b"")
            if kind != "processing":
                entries[kind] += 1
            elif key[0] in ("state", "move") and cursor is not None and int(key[-1]) <= cursor.generation:
                keys.add(key[:-1])
        if operator_of(name):
            entries["processing"] = len(keys)
        position = _position(view, name, cursor, manifest)
    backup = _backup_of(name, batches, manifest)
    kinds: list[Kind] = [kind for kind in ("processing", "routing", "buffer") if kind in entries]
    copies = (*backup, replica, behind)
    return [
        StoredProcess(name, k, entries[k], sizes[k], "" if k == "routing" else position, *copies)
        for k in kinds
    ]


def kind_of(table: str, process: str, manifest: Manifest) -> Kind:
    if operator_of(process):
        return "processing"
    return "routing" if table in ROUTING or process not in manifest.topology.sites else "buffer"


def _position(view: StoreView, name: str, cursor: CheckpointHeader | None, manifest: Manifest) -> str:
    if name not in manifest.topology.sites:
        return "" if cursor is None else str(cursor.applied)
    ends = {str(key[1]): value[0] for key, value in view.scan(("head",))}
    ends |= {str(key[1]): value for key, value in view.scan(("stream_head",))}
    return ", ".join(f"{log} {end}" for log, end in sorted(ends.items()))


def _replica_of(
    name: str, deployment: DeploymentDir, line: MetricsLine | None
) -> tuple[str | None, int | None]:
    """The replica that holds the copy of a process, and how far behind it is.

    The process reports it once a second. A replica holds a copy only while both run.
    """
    holder = IncarnationClaims(deployment.incarnations, name).holder() or None
    if line is None or line.replica != holder or deployment.registry.find(name) is None:
        return holder, None
    return holder, line.replica_behind


BackupFacts = tuple[int | None, float | None, int | None, str | None]


def _backup_of(name: str, batches: int, manifest: Manifest) -> BackupFacts:
    """Number, age, lag and problem of the backup of a process; all None without a backup."""
    if manifest.backup is None:
        return None, None, None, None
    try:
        head = ProcessBackup(Location(manifest.backup.location), manifest.id, name).head()
    except UserError as error:
        return None, None, None, error.what
    if head is None:
        return None, None, None, f"{manifest.backup.location} holds no complete backup of it"
    age_s = max(0.0, time.time() - head.written_ms / 1e3)
    return head.number, age_s, max(0, batches - head.through), None
