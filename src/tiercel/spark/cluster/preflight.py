"""The check of an executor before anything is written: the driver's Python, our package, the same storage.

Responsible for: one small task, and the error if it fails or finds something else than the driver does.
Not responsible for: room for the processes (task_slots.py), starting them (supervisor.py).
"""

from __future__ import annotations

import contextlib
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import Row, SparkSession

from tiercel.errors import UserError
from tiercel.spark import __name__ as _package
from tiercel.spark.job_errors import reason_of

if TYPE_CHECKING:
    import pyarrow

SCHEMA = "executable string, ours string, seen string"

_VERSIONS = re.compile(r"PYTHON_VERSION_MISMATCH.*?version: (\S+) than", re.DOTALL)  # PySpark checks first


def probe(spark: SparkSession, directory: Path) -> None:
    """Run the check on one executor; UserError if it finds a fault."""
    token = uuid.uuid4().hex
    path = directory / ".probe"

    def check(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import importlib

        import pyarrow as pa

        for _ in batches:
            try:
                importlib.import_module("tiercel")
                ours = "yes"
            except ImportError as error:
                ours = str(error)
            try:
                seen = path.read_text(encoding="ascii")
                path.write_text(seen, encoding="ascii")
            except OSError as error:
                seen = f"{error.strerror}"
            yield pa.RecordBatch.from_pydict({"executable": [sys.executable], "ours": [ours], "seen": [seen]})

    try:
        path.write_text(token, encoding="ascii")
    except OSError as error:
        what = f"{directory} cannot be written: {error.strerror}"
        expected = "a directory that the driver and every executor can write"
        raise UserError(what, expected=expected, hint="choose another with storage=") from error
    try:
        found = spark.range(0, 1, 1, 1).mapInArrow(check, SCHEMA).collect()[0]
    except Exception as error:  # of Spark, of its worker, or of their connection
        raise worker_failure(error) from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    check_findings(found, directory, token)


def worker_failure(error: Exception) -> UserError:
    """The error of a worker that could not run the task."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    theirs = _VERSIONS.search(str(error))
    if theirs is not None:
        what = f"Spark's workers run Python {theirs[1]}, the driver runs {here}"
    else:
        what = f"Spark's workers cannot run a task in Python: {reason_of(error)}"
    return UserError(
        what, expected=f"Python {here} with PySpark and pyarrow, as the driver has it", hint=_HINT
    )


def check_findings(found: Row, directory: Path, token: str) -> None:
    """Compare what the task has found with what the driver has."""
    if found.ours != "yes":
        what = f"{_package.partition('.')[0]} cannot be imported by {found.executable}: {found.ours}"
        expected = "the package installed for the workers too"
        raise UserError(what, expected=expected, hint=f"install it there, or {_HINT}")
    if found.seen != token:
        what = f"an executor cannot use {directory}: it found {found.seen!r}"
        raise UserError(
            what,
            expected="one directory that the driver and every executor can read and write",
            hint="a shared file system, or one machine",
        )


_HINT = f"set PYSPARK_PYTHON={sys.executable} (or spark.pyspark.python) before the session is made"
