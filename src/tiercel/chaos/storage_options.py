"""The durability options of a chaos run: where the deployment stores its data, and which disks it may lose.

Responsible for: the arguments of `tiercel.start` for each option, and whether executors have disks to lose.
Not responsible for: injecting faults (supervisor.py), durability itself (runtime/).

    os       everything in the storage directory; a lost disk would lose rows, so no disk is lost
    disk     the same, and synced
    backup   routers and instances store on a disk of their executor; strict: nothing is acknowledged before
             a backup elsewhere has it

    replica  the same disks; nothing is acknowledged before a task on another executor holds it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tiercel.errors import UserError

SHIP_S = 0.1  # between two shipments: how much later an acknowledgement comes

Arguments = Mapping[str, Any]  # of `start`


def _backup(disks: Path, elsewhere: Path) -> Arguments:
    backup = {"location": elsewhere.as_uri(), "every_s": SHIP_S, "strict": True}
    return {"local": str(disks / "{executor}"), "backup": backup}


_ARGUMENTS: Mapping[str, Callable[[Path, Path], Arguments]] = {
    "os": lambda disks, elsewhere: {"durability": "os"},
    "disk": lambda disks, elsewhere: {"durability": "disk"},
    "backup": _backup,
    "replica": lambda disks, elsewhere: {"durability": "replica", "local": str(disks / "{executor}")},
}
DURABILITIES = tuple(_ARGUMENTS)
DEFAULT = "backup"


def check_durability(durability: str) -> str:
    if durability not in _ARGUMENTS:
        raise UserError(f"--durability {durability!r}", expected=f"one of: {', '.join(DURABILITIES)}")
    return durability


def arguments(durability: str, storage: Path) -> Arguments:
    """The arguments for `start`. The disks are next to the storage; backups are not on them."""
    return _ARGUMENTS[durability](disks_of(storage), storage.parent.parent / "elsewhere")


def disks_of(storage: Path) -> Path:
    """The directory of the executors' disks, one per executor name."""
    return storage.parent / "disks"


def own_disks(durability: str) -> bool:
    """Whether each executor has a disk of its own that it can lose without losing rows."""
    return "local" in arguments(durability, Path("/disk/storage"))
