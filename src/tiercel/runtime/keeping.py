"""What a user says about where state is kept: `backup=` and `local=`, checked.

Responsible for: refusing what could not work, and what would lose state.
Not responsible for: keeping it (storing.py, shipping.py).
"""

from __future__ import annotations

from collections.abc import Mapping
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

    @classmethod
    def of(
        cls, backup: str | Mapping[str, Any] | None, local: str | Path | None, durability: str = "os"
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
        return cls(plan, place)

    def applied(self, manifest: Manifest, found: Manifest | None) -> Manifest:
        """The manifest with this in it. With `local`, a backup is where a process finds its state."""
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
        return msgspec.structs.replace(manifest, backup=self.backup, local=self.local, replicas=self.replicas)


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
