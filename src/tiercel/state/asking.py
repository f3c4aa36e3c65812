"""Asking a running deployment for a checkpoint.

Responsible for: asking, and waiting until each instance has one that is newer than before.
Not responsible for: checkpoints (core/checkpoints.py).
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from tiercel.core.taken import Cursor
from tiercel.errors import UserError
from tiercel.runtime.place import Place
from tiercel.runtime.store import StoreView

WAIT_S_MAX = 30.0
LOOK_S = 0.05


def checkpoint(storage: str | Path, wait_s: float = WAIT_S_MAX) -> dict[str, int]:
    """Instance -> the log offset that its new checkpoint covers."""
    place = Place(storage)
    manifest = place.manifest()
    if manifest.local:
        raise UserError(
            "the instances of this deployment store on disks of their executors",
            expected="a deployment whose processes store in its directory",
            hint="they take a checkpoint every second by themselves",
        )
    names = [name for name in place.wanted() if place.registry.find(name) is not None]
    if not names:
        raise UserError(f"no instance of {place.directory} runs", expected="a deployment that runs")
    before = {name: cursor.generation if (cursor := _cursor(place, name)) else 0 for name in names}
    for name in names:
        place.registry.ask_checkpoint(name)
    found: dict[str, int] = {}
    give_up = time.monotonic() + wait_s
    while len(found) < len(names):
        for name in names:
            cursor = _cursor(place, name)
            if cursor is not None and cursor.generation > before[name]:
                found[name] = cursor.applied
        if len(found) < len(names) and time.monotonic() > give_up:
            silent = ", ".join(sorted(set(names) - found.keys()))
            raise UserError(
                f"no checkpoint of {silent} within {wait_s:g} s",
                expected="a checkpoint of every instance",
                hint="does it run? tiercel state show says how old its last one is",
            )
        time.sleep(LOOK_S)
    return dict(sorted(found.items()))


def _cursor(place: Place, name: str) -> Cursor | None:
    try:
        with contextlib.closing(StoreView(place.process(name), whole=False)) as view:
            found: Cursor | None = view.get(("cursor",))
            return found
    except Exception:  # it is being made, or files change under our eyes: we look again
        return None
