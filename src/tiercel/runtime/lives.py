"""Lives of a process whose own disk is not the only copy: claimed where everyone of a deployment sees them.

Responsible for: a life that nobody else has, wherever a process runs; where earlier lives stored; which
    replica holds all that was ever promised.
Not responsible for: lives in a backup (backups.py), refusing earlier ones (keeper.py).

    lives/count%40cloud%231/
      00000002       life 2 has begun; in it: where it stores
      held.00000002  the replica that holds everything since life 2; another may have an older copy
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

CLAIMS_KEPT = 64


class Claim(NamedTuple):
    """A life that is ours alone."""

    life: int
    elsewhere: bool  # a life after the one that we have the storage of may have stored elsewhere


class Lives:
    """The lives of one process."""

    def __init__(self, directory: Path, process: str) -> None:
        self._directory = directory / quote(process, safe="")

    def last(self) -> int:
        """The highest life that ever began; 0: none."""
        return max(self._all(), default=0)

    def claim(self, after: int, here: str = "") -> Claim:
        """A life above all others. `after`: the last one that is stored here, 0 if none is."""
        self._directory.mkdir(parents=True, exist_ok=True)
        while True:
            before = self._all()
            life = max(after, *before, 0) + 1
            try:
                handle = os.open(self._place(life), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                continue  # another one was started at the same time; its claim counts as one before ours
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(here)
            for old in sorted(before)[:-CLAIMS_KEPT]:
                self._place(old).unlink(missing_ok=True)
            return Claim(life, any(self._where(each) != here for each in before if each > after))

    def note_held(self, life: int, replica: str) -> None:
        """From here on something may be acknowledged because this replica holds it."""
        draft = self._directory / f".held.{os.getpid()}"
        draft.write_text(replica, encoding="utf-8")
        draft.replace(self._directory / f"held.{life:08d}")
        for older in self._held()[:-1]:
            older.unlink(missing_ok=True)

    def holder(self) -> str:
        """The replica that must hold what was acknowledged; empty: nothing ever was."""
        while held := self._held():
            with contextlib.suppress(FileNotFoundError):  # a newer note has come since we looked
                return held[-1].read_text(encoding="utf-8")
        return ""

    def held_since(self) -> int:
        """The last life in which something was acknowledged; a store of an earlier life lacks it."""
        held = self._held()
        return int(held[-1].suffix[1:]) if held else 0

    def held_at(self) -> int:
        """When it began to hold everything, in ns; 0: it has not."""
        while held := self._held():
            with contextlib.suppress(FileNotFoundError):  # as above
                return held[-1].stat().st_mtime_ns
        return 0

    def places(self) -> set[str]:
        """Where lives have stored that began not before that one."""
        return {self._where(life) for life in self._all() if life >= self.held_since()} - {""}

    def forget_held(self) -> None:
        """It is retired: it has no key, and owes nothing."""
        for held in self._held():
            held.unlink(missing_ok=True)

    def _held(self) -> list[Path]:
        return sorted(self._directory.glob("held.*"))

    def _all(self) -> list[int]:
        try:
            return [int(name) for name in os.listdir(self._directory) if name.isdecimal()]
        except FileNotFoundError:
            return []

    def _place(self, life: int) -> Path:
        return self._directory / f"{life:08d}"

    def _where(self, life: int) -> str:
        try:
            return self._place(life).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
