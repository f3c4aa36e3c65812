"""Certificates, made with the commands of the guide."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tiercel.runtime.net.tls import TlsFiles

GUIDE = Path(__file__).resolve().parent.parent / "docs" / "guide.md"

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the CA")


def run(commands: str, directory: Path) -> None:
    subprocess.run(["sh", "-e", "-c", commands], check=True, capture_output=True, cwd=directory)


def make_authority(directory: Path) -> TlsFiles:
    """An authority and one certificate of it, for everyone."""
    directory.mkdir()
    commands = re.search(
        r"## Encrypted connections\n.*?```console\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL
    )
    assert commands is not None
    run(re.sub(r"^\$ ", "", commands[1], flags=re.MULTILINE), directory)
    return TlsFiles(*(str(directory / name) for name in ("member.pem", "member.key", "authority.pem")))
