"""Incarnation numbers of a process whose own disk is not the only copy, claimed in the deployment directory.

Responsible for: numbers that are used once, wherever a process runs; where earlier incarnations stored; which
    replica holds everything acknowledged.
Not responsible for: incarnations in a backup (backup/process_backup.py), refusing earlier ones
    (replication/replica.py).

    incarnations/count%40cloud%231/
      00000002       incarnation 2 has begun; the content says where it stores
      held.00000002  the replica that holds everything since incarnation 2; another one may have an older copy
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

CLAIMS_KEPT = 64


class Claim(NamedTuple):
    """An incarnation that no other process has."""

    incarnation: int
    elsewhere: bool  # an incarnation later than the local store may have stored elsewhere


class IncarnationClaims:
    """The incarnations of one process."""

    def __init__(self, directory: Path, process: str) -> None:
        self._directory = directory / quote(process, safe="")

    def last(self) -> int:
        """The highest incarnation that ever began; 0: none."""
        return max(self._all(), default=0)

    def claim(self, after: int, here: str = "") -> Claim:
        """Claim an incarnation above all others. `after` is the last one stored locally, 0 if none is."""
        self._directory.mkdir(parents=True, exist_ok=True)
        while True:
            before = self._all()
            incarnation = max(after, *before, 0) + 1
            try:
                handle = os.open(self._path(incarnation), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                continue  # another process claimed it first; its claim counts as an earlier one
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(here)
            for old in sorted(before)[:-CLAIMS_KEPT]:
                self._path(old).unlink(missing_ok=True)
            return Claim(incarnation, any(self._place_of(each) != here for each in before if each > after))

    def set_holder(self, incarnation: int, replica: str) -> None:
        """Note that this replica holds everything. Only then may something be acknowledged because of it."""
        draft = self._directory / f".held.{os.getpid()}"
        draft.write_text(replica, encoding="utf-8")
        draft.replace(self._directory / f"held.{incarnation:08d}")
        for older in self._holder_files()[:-1]:
            older.unlink(missing_ok=True)

    def holder(self) -> str:
        """The replica that holds everything acknowledged; empty: nothing was ever acknowledged."""
        while held := self._holder_files():
            with contextlib.suppress(FileNotFoundError):  # a newer note was written in between
                return held[-1].read_text(encoding="utf-8")
        return ""

    def holder_incarnation(self) -> int:
        """The last incarnation with acknowledged writes; stores of earlier ones lack them."""
        held = self._holder_files()
        return int(held[-1].suffix[1:]) if held else 0

    def holder_since_ns(self) -> int:
        """When the holder began to hold everything, in ns; 0: there is none."""
        while held := self._holder_files():
            with contextlib.suppress(FileNotFoundError):  # likewise
                return held[-1].stat().st_mtime_ns
        return 0

    def storage_places(self) -> set[str]:
        """Where this incarnation and later ones have stored."""
        return {
            self._place_of(incarnation)
            for incarnation in self._all()
            if incarnation >= self.holder_incarnation()
        } - {""}

    def clear_holder(self) -> None:
        """Forget the holder of a retired process, which has no keys any more."""
        for held in self._holder_files():
            held.unlink(missing_ok=True)

    def _holder_files(self) -> list[Path]:
        return sorted(self._directory.glob("held.*"))

    def _all(self) -> list[int]:
        try:
            return [int(name) for name in os.listdir(self._directory) if name.isdecimal()]
        except FileNotFoundError:
            return []

    def _path(self, incarnation: int) -> Path:
        return self._directory / f"{incarnation:08d}"

    def _place_of(self, incarnation: int) -> str:
        try:
            return self._path(incarnation).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""
