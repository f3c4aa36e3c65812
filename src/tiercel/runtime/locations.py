"""A place for backups: a directory, an object store, memory; whatever fsspec knows.

Responsible for: putting, getting, listing and deleting whole files, and saying clearly what did not work.
Not responsible for: what is in the files (pieces.py), which of them belong together (backups.py).

A file appears whole or not at all: object stores do that by themselves, a local directory by renaming.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiercel.errors import UserError

PACKAGES = {  # what fsspec needs besides itself, of locations that people back up to
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs"), "adlfs"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
}
BURST_S = 0.002  # that readers may be ahead of their speed
SLICE_BYTES = 16 * 1024  # that a thread reads in its turn, where speed is limited


class Location:
    """One URL: `file:///backups/app`, a plain path, `s3://bucket/app`, `memory://app`.

    With `read_mb_s`, whoever holds this object reads no faster than that.
    """

    def __init__(self, url: str, read_mb_s: float = 0.0) -> None:
        import fsspec  # late: a tenth of what a task imports before it runs, and most have no backup

        self.url = url.rstrip("/") or url
        self._read_mb_s = read_mb_s
        self._turn = threading.Lock()  # of threads that are not to be too fast together
        self._busy_until_s = 0.0
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, OSError, ValueError) as error:
            raise UserError(
                f"backup location {url!r}: {error}",
                expected="a directory or a URL of fsspec, as file:///backups/app or s3://bucket/app",
                hint=_missing(self.url, error),
            ) from error
        protocols = self._files.protocol
        self._local = "file" in ((protocols,) if isinstance(protocols, str) else protocols)

    def __repr__(self) -> str:
        return f"Location({self.url!r})"

    def put(self, name: str, data: bytes) -> None:
        """Write a file; one of that name is replaced."""
        try:
            if self._local:
                _replace(Path(self._path(name)), data)
            else:
                self._files.pipe_file(self._path(name), data)
        except Exception as error:  # each kind of store has errors of its own
            raise self._refusal("written", name, error) from error

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """The content of a file, or a part of it; FileNotFoundError if there is none."""
        found = self._get(name, start, end)
        if self._read_mb_s:
            self._take_time(len(found))
        return found

    def _take_time(self, size: int) -> None:
        """As long as so many bytes take; who reads little does not wait for all of who reads much."""
        for at in range(0, size, SLICE_BYTES):
            with self._turn:
                now = time.monotonic()
                self._busy_until_s = (
                    max(now, self._busy_until_s) + min(SLICE_BYTES, size - at) / 1e6 / self._read_mb_s
                )
                if self._busy_until_s - now > BURST_S:  # a sleep is longer than it should be, each time
                    time.sleep(self._busy_until_s - now)

    def _get(self, name: str, start: int | None, end: int | None) -> bytes:
        try:
            found = bytes(self._files.cat_file(self._path(name), start=start, end=end))
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self._refusal("read", name, error) from error
        return found

    def names(self, folder: str) -> list[str]:
        """Names in a folder, in order; none if there is no such folder."""
        try:
            self._files.invalidate_cache()  # others write here as well
            found: list[Any] = self._files.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._refusal("read", folder, error) from error
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                self._files.rm_file(self._path(name))
            except FileNotFoundError:
                continue
            except Exception as error:
                raise self._refusal("deleted", name, error) from error

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def _refusal(self, how: str, name: str, error: Exception) -> UserError:
        where = f"{self.url}/{name}" if name else self.url
        return UserError(
            f"{where} cannot be {how}: {type(error).__name__}: {error}",
            expected="a backup location that can be read and written from here",
            hint="see that it is there, and that you may use it; nothing that lies there was changed",
        )


def _missing(url: str, error: Exception) -> str | None:
    """Which package knows this kind of URL, if only that is missing."""
    package = PACKAGES.get(url.partition("://")[0])
    if package is None or not isinstance(error, ImportError):
        return None
    return f"pip install {package}, for the driver and every executor"


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
