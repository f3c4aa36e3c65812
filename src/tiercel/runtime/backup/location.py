"""A backup location: a directory, an object store or memory, by fsspec.

Responsible for: writing, reading, listing and deleting whole files; errors that name the file.
Not responsible for: the content of files (segment_file.py), which files belong together (process_backup.py).

Files appear atomically: object stores guarantee that, and a local directory does it by renaming.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiercel.errors import UserError

PACKAGES = {  # extra packages that fsspec needs for these URLs
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs"), "adlfs"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
}
BURST_S = 0.002  # readers may be ahead of the limit by this much
SLICE_BYTES = 16 * 1024  # one turn of a thread, with a limit


class Location:
    """One URL: `file:///backups/app`, a plain path, `s3://bucket/app`, `memory://app`.

    With `read_mb_s`, reads through this object are limited to that speed.
    """

    def __init__(self, url: str, read_mb_s: float = 0.0) -> None:
        import fsspec  # late: the import is slow, and most deployments have no backup

        self.url = url.rstrip("/") or url
        self._read_mb_s = read_mb_s
        self._speed_lock = threading.Lock()  # threads share the limit
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
        except Exception as error:  # each kind of store has its own errors
            raise self._refusal("written", name, error) from error

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """The content of a file, or a part of it; FileNotFoundError if there is none."""
        found = self._get(name, start, end)
        if self._read_mb_s:
            self._limit_speed(len(found))
        return found

    def _limit_speed(self, size: int) -> None:
        """Wait as long as this many bytes may take, in slices, so that small reads pass large ones."""
        for at in range(0, size, SLICE_BYTES):
            with self._speed_lock:
                now = time.monotonic()
                self._busy_until_s = (
                    max(now, self._busy_until_s) + min(SLICE_BYTES, size - at) / 1e6 / self._read_mb_s
                )
                if self._busy_until_s - now > BURST_S:  # short sleeps take longer than asked
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
        """Names in a folder, sorted; none if there is no such folder."""
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
            hint="check that it exists and that you have access; nothing there was changed",
        )


def _missing(url: str, error: Exception) -> str | None:
    """A hint that names the missing package for this kind of URL."""
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
