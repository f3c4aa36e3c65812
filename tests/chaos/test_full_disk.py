"""A full disk, mounted or by a limit on file sizes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiercel.chaos.full_disk import Disk, limited


def test_mounted_disk_is_full_for_the_given_time(tmp_path: Path) -> None:
    with Disk(tmp_path / "disk") as disk:
        if not disk.mounted:
            pytest.skip("nothing can be mounted here")
        place = disk.directory / "file"
        with disk.without_space():
            while os.statvfs(disk.directory).f_bavail:
                time.sleep(0.01)
            with pytest.raises(OSError, match="No space left") as failure:
                place.write_bytes(bytes(100_000))
            assert failure.value.errno == errno.ENOSPC
        place.write_bytes(bytes(100_000))
        assert [path.name for path in disk.directory.iterdir()] == ["file"]
    assert not disk.directory.exists()


def test_without_mount_a_process_cannot_write_for_the_given_time(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "for line in sys.stdin:\n"
        "    try:\n"
        "        open(sys.argv[1], 'wb', buffering=0).write(b'x')\n"
        "        print('written', flush=True)\n"
        "    except OSError as error:\n"
        "        print(error.strerror, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "file")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None

        def tried() -> str:
            assert writer.stdin is not None
            assert writer.stdout is not None
            writer.stdin.write("\n")
            return writer.stdout.readline().strip()

        assert tried() == "written"
        with limited([writer.pid]):
            assert tried() == "File too large"
        assert tried() == "written"
        writer.stdin.close()
