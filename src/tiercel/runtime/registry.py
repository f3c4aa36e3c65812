"""Who listens where: one small file per process in a directory that all of a deployment see.

Responsible for: finding a peer's address, signs of life, and telling a process that it is no longer wanted.
Not responsible for: trust (link.py proves who is at an address), starting processes (spark/).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec


class Address(msgspec.Struct, frozen=True):
    """Where a process listens, and which Spark task it is."""

    name: str
    host: str
    port: int
    pid: int
    life: int
    local: str = ""  # a Unix socket of the same process: half the cost of TCP where both share a machine
    stage: int = -1  # -1: not a Spark task
    attempt: int = -1
    task: int = -1
    executor: str = ""
    machine: str = ""  # executors of one machine have the same; empty: nobody knows


class Registry:
    """The directory. A file appears whole or not at all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def publish(self, address: Address) -> None:
        self._sweep(address.name)
        place = self._place(address.name, "address")
        draft = place.with_suffix(f".{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(address))
        draft.replace(place)

    def find(self, name: str) -> Address | None:
        try:
            return msgspec.json.decode(self._place(name, "address").read_bytes(), type=Address)
        except (FileNotFoundError, msgspec.DecodeError):  # a power loss may leave it empty: nobody is there
            return None

    def since(self, name: str) -> int:
        """When it said where it listens, in ns by its machine's clock; 0: it has not."""
        try:
            return self._place(name, "address").stat().st_mtime_ns
        except OSError:
            return 0

    def names(self) -> list[str]:
        """Everyone who has said where they listen, in order."""
        found = self._directory.glob("*.address")
        return sorted(unquote(place.name.removesuffix(".address")) for place in found)

    def withdraw(self, name: str) -> None:
        self._sweep(name)
        self._place(name, "address").unlink(missing_ok=True)

    def _sweep(self, name: str) -> None:
        """Who was killed could not take its socket along."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            found = self.find(name)
            if found is not None and found.local:
                Path(found.local).unlink(missing_ok=True)
                Path(found.local).parent.rmdir()  # its own; it is empty now

    def beat(self, name: str) -> None:
        """A sign of life."""
        with contextlib.suppress(OSError):  # the disk may have a bad moment, or be full
            self._place(name, "beat").touch()

    def last_beat(self, name: str) -> int:
        """Changes with every sign of life; 0: there was none."""
        try:
            return self._place(name, "beat").stat().st_mtime_ns
        except OSError:
            return 0

    def lists(self, name: str, life: int) -> bool:
        """Whether that life is the one to be found here; else another one runs, or will soon."""
        found = self.find(name)
        return found is not None and found.life == life

    def leave(self, name: str, life: int) -> None:
        """A life has ended well: nobody looks for it any more, and nobody takes it for lost."""
        if self.lists(name, life):
            self.withdraw(name)

    def dismiss(self, name: str) -> None:
        """Ask a process to end; it looks here a few times a second."""
        self._place(name, "dismissed").touch()

    def welcome(self, name: str) -> None:
        """Take a dismissal back, and forget where an earlier life listened: nobody is there."""
        self._place(name, "dismissed").unlink(missing_ok=True)
        self._place(name, "beat").unlink(missing_ok=True)
        self.withdraw(name)

    def clear(self) -> None:
        """Forget everyone: no process of this deployment is meant to run yet."""
        for name in self.names():
            self._sweep(name)
        for kind in ("address", "beat", "dismissed"):
            for path in self._directory.glob(f"*.{kind}"):
                path.unlink(missing_ok=True)

    def dismissed(self, name: str) -> bool:
        return self._place(name, "dismissed").exists()

    def unwanted(self, name: str, life: int, parent: int = 0) -> str:
        """Why nobody needs this life any more: others decide that; empty: it is wanted."""
        if self.dismissed(name):
            return "dismissed"
        if not self.lists(name, life):
            return "succeeded"  # routers hear only the latest life; who stays blocks the task that it is
        return "orphaned" if parent and os.getppid() != parent else ""

    def ask_checkpoint(self, name: str) -> None:
        """Ask an instance for a checkpoint; it looks here a few times a second."""
        self._place(name, "checkpoint").touch()

    def checkpoint_asked(self, name: str) -> bool:
        """Whether one was asked for since this was asked last."""
        try:
            self._place(name, "checkpoint").unlink()
        except FileNotFoundError:
            return False
        return True

    def _place(self, name: str, kind: str) -> Path:
        return self._directory / f"{quote(name, safe='')}.{kind}"
