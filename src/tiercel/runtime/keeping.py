"""What a user says about where state is kept: `backup=`, `local=` and `copies_at=`, checked.

Responsible for: refusing what could not work, and what would lose state.
Not responsible for: keeping it (storing.py, shipping.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tiercel.errors import UserError
from tiercel.runtime.locations import Location
from tiercel.runtime.place import BackupPlan, Manifest, ReplicaPlan

EVERY_S = (0.01, 3_600.0)
KEEP = (1, 1_000)
READ_MB_S_MAX = 1e6


class Keeping(NamedTuple):
    """Where a deployment keeps what is durable, besides its storage directory."""

    backup: BackupPlan | None = None
    local: str = ""
    replicas: ReplicaPlan | None = None
    copies_at: dict[str, str] | None = None  # site -> the site that holds its copies; None: as before

    @classmethod
    def of(
        cls,
        backup: str | Mapping[str, Any] | None,
        local: str | Path | None,
        durability: str = "os",
        copies_at: Mapping[str, str] | None = None,
        sites: Collection[str] = (),
    ) -> Keeping:
        plan = parse_backup(backup)
        place = "" if local is None else str(local)
        if local is not None and not Path(place).is_absolute():
            raise UserError(f"local = {place!r}", expected="an absolute path, as /mnt/disk/tiercel")
        if place and plan is None and durability != "replica":
            raise UserError(
                "local= without backup=: an executor that is lost would take its state along",
                expected="a backup that processes are restored from elsewhere, or durability 'replica'",
                hint='tiercel.start(..., local="/mnt/disk", backup="file:///backups/app")',
            )
        return cls(plan, place, None, parse_copies_at(copies_at, durability, sites))

    def applied(self, manifest: Manifest, found: Manifest | None) -> Manifest:
        """The manifest with this in it. With `local`, a backup is where a process finds its state.

        Which site holds whose copies may change from start to start: replicas begin with nothing each time.
        """
        if found is not None and (found.local or self.local):
            places = [plan.location if plan is not None else None for plan in (found.backup, self.backup)]
            if places[0] != places[1]:
                raise UserError(
                    f"the deployment has its backup in {places[0]}, and is to have it in {places[1]}",
                    expected="the same location while local= is used: processes are restored from there",
                    hint="let it run once without local= where both can be seen",
                )
            if self.backup is None and found.local != self.local:
                raise UserError(
                    f"local = {self.local!r}, but what there is lies in {found.local or 'the storage'!r}",
                    expected="the same local= as before: replicas hold copies only while it runs",
                    hint="let it run once with backup= and the old local=, then with backup= and the new one",
                )
        replicas, at = self.replicas, self.copies_at
        if replicas is not None:
            if at is None:
                at = found.replicas.at if found is not None and found.replicas is not None else {}
            replicas = msgspec.structs.replace(replicas, at=at)
        return msgspec.structs.replace(manifest, backup=self.backup, local=self.local, replicas=replicas)


def parse_copies_at(
    copies_at: Mapping[Any, Any] | None, durability: str, sites: Collection[str]
) -> dict[str, str] | None:
    """`{"edge-1": "cloud"}`, without those that keep to their own replicas; None: nothing was said."""
    if copies_at is None:
        return None
    example = 'a site and the site that holds its copies, as in {"edge-1": "cloud"}'
    if not isinstance(copies_at, Mapping):
        raise UserError(f"copies_at = {copies_at!r}", expected=example)
    for site in itertools.chain.from_iterable(copies_at.items()):
        if not isinstance(site, str) or site not in sites:
            raise UserError(
                f"copies_at = {dict(copies_at)!r}: unknown site {site!r}",
                expected=f"sites of this deployment: {', '.join(sites)}",
            )
    if copies_at and durability != "replica":
        raise UserError(
            f"copies_at = {dict(copies_at)!r} with durability {durability!r}",
            expected="durability 'replica': only then another process holds a copy",
            hint='tiercel.start(..., durability="replica", copies_at=...)',
        )
    return {site: at for site, at in copies_at.items() if at != site}


def parse_backup(backup: str | Mapping[str, Any] | None) -> BackupPlan | None:
    """`"file:///backups/app"`, or a mapping with `location` and what differs from the defaults."""
    if backup is None:
        return None
    facts: dict[str, Any] = {"location": backup} if isinstance(backup, str) else dict(backup)
    allowed = BackupPlan.__struct_fields__
    for name in facts:
        if name not in allowed:
            raise UserError(f"backup: unknown {name!r}", expected=f"some of: {', '.join(allowed)}")
    try:
        plan = msgspec.convert(facts, BackupPlan)
    except msgspec.ValidationError as error:
        raise UserError(
            f"backup = {backup!r}: {error}", expected="a location, or a mapping with one"
        ) from error
    if not plan.location:
        raise UserError("backup: the location is empty", expected="a directory or a URL of fsspec")
    if not EVERY_S[0] <= plan.every_s <= EVERY_S[1]:
        raise UserError(
            f"backup: every_s = {plan.every_s:g}", expected=f"{EVERY_S[0]:g} to {EVERY_S[1]:g} seconds"
        )
    if not KEEP[0] <= plan.keep <= KEEP[1]:
        raise UserError(f"backup: keep = {plan.keep}", expected=f"{KEEP[0]} to {KEEP[1]} bases")
    if not 0 <= plan.read_mb_s <= READ_MB_S_MAX:
        raise UserError(
            f"backup: read_mb_s = {plan.read_mb_s:g}", expected=f"0 (no limit) to {READ_MB_S_MAX:g}"
        )
    location = plan.location
    if "://" not in location and not location.startswith("/"):
        location = str(Path(location).absolute())  # executors work in directories of their own
    Location(location)
    return msgspec.structs.replace(plan, location=location)
