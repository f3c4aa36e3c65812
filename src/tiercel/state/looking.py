"""What each process of a deployment keeps, and how far its copies are: in a backup, at a replica.

Responsible for: the three kinds of state, counted beside the processes that write them.
Not responsible for: the state of single keys (runtime/stored_state.py).

    processing    an instance's keys, as of its last checkpoint
    routing       a router's tables: who owns what, who reads, which moves are under way; the controller's
    buffer        a router's logs: inboxes, output logs, lanes, and what was seen of whom
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec

from tiercel.core.taken import Cursor
from tiercel.core.topology import operator_of
from tiercel.errors import UserError
from tiercel.runtime.backups import ProcessBackup
from tiercel.runtime.lives import Lives
from tiercel.runtime.locations import Location
from tiercel.runtime.metrics import Line, last_lines
from tiercel.runtime.place import Manifest, Place
from tiercel.runtime.store import NO_TABLE, StoreView
from tiercel.runtime.storing import exists, readable
from tiercel.runtime.tables import decode_key

Kind = Literal["processing", "routing", "buffer"]

ROUTING = frozenset(
    (
        "route",
        "route_key",
        "reader",
        "retired",
        "pause",
        "departure",
        "arrival",
        "ended",
        "merged",
        "move_mark",
    )
)


class Kept(msgspec.Struct, frozen=True):
    """One kind of state of one process."""

    process: str
    kind: Kind
    keys: int  # keys of the operator; else entries of the tables
    bytes: int
    position: str  # what the last checkpoint covers; of a log, where it ends
    backup_number: int | None = None  # of the newest whole state in the backup
    backup_age_s: float | None = None
    backup_behind: int | None = None  # batches that the backup does not have
    backup_problem: str | None = None  # why nothing is known of it, although there should be one
    replica: str | None = None  # who holds its copy, or held it last
    replica_behind: int | None = None  # batches that it does not have; None: it holds nothing now


def show(storage: str | Path) -> list[Kept]:
    """All that is kept, process by process."""
    place = Place(storage)
    manifest = place.manifest()
    with readable(place) as processes:
        names = sorted(d.name for d in processes.iterdir() if exists(d)) if processes.is_dir() else []
        lines = last_lines(place.metrics) if manifest.replicas is not None else {}
        copies = {name: _replica_of(name, place, lines.get(name)) for name in names}
        return [
            kept for name in names for kept in _of_process(processes / name, name, manifest, *copies[name])
        ]


def _of_process(
    directory: Path, name: str, manifest: Manifest, replica: str | None, behind: int | None
) -> list[Kept]:
    entries: Counter[Kind] = Counter()
    sizes: Counter[Kind] = Counter()
    with contextlib.closing(StoreView(directory)) as view:
        _, batches = view.numbers
        cursor: Cursor | None = view.get(("cursor",)) if operator_of(name) else None
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
    return [Kept(name, k, entries[k], sizes[k], "" if k == "routing" else position, *copies) for k in kinds]


def kind_of(table: str, process: str, manifest: Manifest) -> Kind:
    if operator_of(process):
        return "processing"
    return "routing" if table in ROUTING or process not in manifest.topology.sites else "buffer"


def _position(view: StoreView, name: str, cursor: Cursor | None, manifest: Manifest) -> str:
    if name not in manifest.topology.sites:
        return "" if cursor is None else str(cursor.applied)
    ends = {str(key[1]): value[0] for key, value in view.scan(("head",))}
    ends |= {str(key[1]): value for key, value in view.scan(("stream_head",))}
    return ", ".join(f"{log} {end}" for log, end in sorted(ends.items()))


def _replica_of(name: str, place: Place, line: Line | None) -> tuple[str | None, int | None]:
    """Who holds its copy, and how far behind that is; a replica holds it only as long as both run.

    The process says so itself, once a second: without it nobody knows, and there is nothing to know.
    """
    holder = Lives(place.lives, name).holder() or None
    if line is None or line.replica != holder or place.registry.find(name) is None:
        return holder, None
    return holder, line.replica_behind


Backed = tuple[int | None, float | None, int | None, str | None]


def _backup_of(name: str, batches: int, manifest: Manifest) -> Backed:
    """Number, age, how far it is behind, and what is wrong; nothing for a process without a backup."""
    if manifest.backup is None:
        return None, None, None, None
    try:
        head = ProcessBackup(Location(manifest.backup.location), manifest.id, name).head()
    except UserError as error:
        return None, None, None, error.what
    if head is None:
        return None, None, None, f"{manifest.backup.location} holds no whole backup of it"
    age_s = max(0.0, time.time() - head.written_ms / 1e3)
    return head.number, age_s, max(0, batches - head.through), None
