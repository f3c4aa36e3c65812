"""Where the deployment that chaos is done to keeps what it must not lose, and how safe that is.

Responsible for: what a choice means to `tiercel.start`, and whether executors have disks that can be lost.
Not responsible for: striking (supervisor.py), what `start` does with it (runtime/keeping.py).

    os       everything in the storage directory; a lost disk would take rows along, so none is lost
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


_KEEPING: Mapping[str, Callable[[Path, Path], Arguments]] = {
    "os": lambda disks, elsewhere: {"durability": "os"},
    "disk": lambda disks, elsewhere: {"durability": "disk"},
    "backup": _backup,
    "replica": lambda disks, elsewhere: {"durability": "replica", "local": str(disks / "{executor}")},
}
DURABILITIES = tuple(_KEEPING)
DEFAULT = "backup"


def check_durability(durability: str) -> str:
    if durability not in _KEEPING:
        raise UserError(f"--durability {durability!r}", expected=f"one of: {', '.join(DURABILITIES)}")
    return durability


def arguments(durability: str, storage: Path) -> Arguments:
    """What to give to `start`. Disks are beside the storage; what must survive them is not on its disk."""
    return _KEEPING[durability](disks_of(storage), storage.parent.parent / "elsewhere")


def disks_of(storage: Path) -> Path:
    """Where the disks of executors are, each under the executor's name."""
    return storage.parent / "disks"


def own_disks(durability: str) -> bool:
    """Whether each executor has a disk, and losing it loses nothing."""
    return "local" in arguments(durability, Path("/disk/storage"))
