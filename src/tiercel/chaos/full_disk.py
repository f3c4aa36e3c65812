"""A disk that can be full: a small file system in memory, or a limit on what processes may write.

Responsible for: creating the directory of a deployment's storage, filling it, and removing it.
Not responsible for: when it is full (supervisor.py).

If this user may mount, the directory is a file system of its own, which is full for all processes (`ENOSPC`).
Otherwise the current processes get a limit on file sizes (`EFBIG`), until they are restarted.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

DISK_BYTES = 1 << 30
TOP_UP_S = 0.02  # space that others free is filled too


class Disk:
    """The place of a storage directory. Use it in a `with`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        mounting = [
            "mount",
            "-t",
            "tmpfs",
            "-o",
            f"size={DISK_BYTES},mode=700",
            "tiercel-chaos",
            str(directory),
        ]
        try:
            self.mounted = subprocess.run(mounting, capture_output=True, check=False).returncode == 0
        except OSError:  # no such command
            self.mounted = False

    @property
    def way(self) -> str:
        """The way in which the disk gets full."""
        return "a file system without space" if self.mounted else "a limit on file sizes"

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *failure: object) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.directory)], capture_output=True, check=False)
        shutil.rmtree(self.directory, ignore_errors=True)

    def fill(self, seconds: float, writers: Iterable[int]) -> None:
        """Make the disk full for this time."""
        with self.without_space() if self.mounted else limited(writers):
            time.sleep(seconds)

    @contextlib.contextmanager
    def without_space(self) -> Iterator[None]:
        """All that is free is taken, and all that becomes free."""
        ballast = self.directory / "ballast"
        ending = threading.Event()

        def top_up() -> None:
            with ballast.open("wb") as file:
                size = 0
                while not ending.wait(TOP_UP_S):
                    found = os.statvfs(self.directory)
                    free = found.f_bavail * found.f_frsize
                    if free:
                        with contextlib.suppress(OSError):  # another process took the last space
                            os.posix_fallocate(file.fileno(), size, free)
                            size += free

        thread = threading.Thread(target=top_up, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()
            ballast.unlink()


@contextlib.contextmanager
def limited(processes: Iterable[int]) -> Iterator[None]:
    """These processes can write to no file. Sockets and pipes are not concerned."""
    before: dict[int, tuple[int, int]] = {}
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            before[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        for pid, limits in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
