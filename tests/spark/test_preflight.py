"""Workers with another Python, or without our package, are refused before anything is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import other_python
import pytest
from pyspark.sql import Row

from tiercel.errors import UserError
from tiercel.spark.cluster.preflight import check_findings, probe

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
HINT = f"set PYSPARK_PYTHON={sys.executable} (or spark.pyspark.python) before the session is made"

OTHER_VERSION = """
import sys
class Version(tuple):
    major, minor, micro = 3, 99, 0
sys.version_info = Version((3, 99, 0, "final", 0))
"""
NO_PACKAGE = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tiercel":
            raise ImportError("No module named 'tiercel'")
sys.meta_path.insert(0, Without())
"""


def wrapper(directory: Path, customized: str) -> str:
    """A Python that does this when it starts."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(customized, encoding="ascii")
    path = directory / "python"
    path.write_text(
        f'#!/bin/sh\nPYTHONPATH="{directory}:$PYTHONPATH" exec "{sys.executable}" "$@"\n', encoding="utf-8"
    )
    path.chmod(0o755)
    return str(path)


def test_unusable_python_of_the_workers_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    pythons = [
        wrapper(tmp_path / "other", OTHER_VERSION),
        wrapper(tmp_path / "without", NO_PACKAGE),
        str(tmp_path / "missing"),
    ]
    program = [sys.executable, other_python.__file__, str(tmp_path), *pythons]
    ran = subprocess.run(program, capture_output=True, text=True, check=False, env=os.environ)
    assert ran.returncode == 0, ran.stderr
    other, without, missing = json.loads(ran.stdout.splitlines()[-1])
    needed = f"expected: Python {HERE} with PySpark and pyarrow, as the driver has it\nhint: {HINT}"
    assert other == f"Spark's workers run Python 3.99, the driver runs {HERE}\n{needed}"
    first, expected, hint = without.splitlines()
    assert first == f"tiercel cannot be imported by {sys.executable}: No module named 'tiercel'"
    assert expected == "expected: the package installed for the workers too"
    assert hint == f"hint: install it there, or {HINT}"
    first, _, rest = missing.partition("\n")
    assert first.startswith("Spark's workers cannot run a task in Python: ")
    assert pythons[2] in first
    assert rest == needed


def test_storage_that_executors_do_not_share_is_refused(tmp_path: Path) -> None:
    check_findings(Row(executable="python", ours="yes", seen="token"), tmp_path, "token")
    for seen in ("No such file or directory", "a token of another storage"):
        with pytest.raises(UserError) as caught:
            check_findings(Row(executable="python", ours="yes", seen=seen), tmp_path, "token")
        assert str(tmp_path) in caught.value.what
        assert seen in caught.value.what
        assert caught.value.expected == "one directory that the driver and every executor can read and write"
        assert caught.value.hint


def test_unwritable_storage_is_refused_before_any_task_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written: Not a directory\nexpected: .*\nhint: choose"):
        probe(None, tmp_path / "file")  # type: ignore[arg-type]
