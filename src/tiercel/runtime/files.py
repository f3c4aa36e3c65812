"""Files that are replaced atomically, also across a power loss.

Responsible for: writing a whole file; forcing files and directories to disk.
Not responsible for: the content of files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, content: bytes) -> None:
    """Replace the content of a file atomically and durably."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(content)
        force(file)
    draft.replace(path)
    force_directory(path.parent)


def force(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def force_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
