"""A look from an executor, before anything is written: the driver's Python, our package, the same storage.

Responsible for: one small task, and what is wrong if it fails or finds something else than the driver does.
Not responsible for: room for the processes (slots.py), starting them (hosting.py).
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
from tiercel.spark.hosting import reason_of

if TYPE_CHECKING:
    import pyarrow

SCHEMA = "executable string, ours string, seen string"

_VERSIONS = re.compile(r"PYTHON_VERSION_MISMATCH.*?version: (\S+) than", re.DOTALL)  # PySpark looks before us


def probe(spark: SparkSession, directory: Path) -> None:
    """A task looks around."""
    token = uuid.uuid4().hex
    path = directory / ".probe"

    def look(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow as pa

        for _ in batches:
            try:
                import tiercel  # noqa: F401

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
        found = spark.range(0, 1, 1, 1).mapInArrow(look, SCHEMA).collect()[0]
    except Exception as error:  # of Spark, of its worker, or of what lies between them
        raise not_run(error) from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    judge(found, directory, token)


def not_run(error: Exception) -> UserError:
    """Why a worker could not even look."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    theirs = _VERSIONS.search(str(error))
    if theirs is not None:
        what = f"Spark's workers run Python {theirs[1]}, the driver runs {here}"
    else:
        what = f"Spark's workers cannot run a task in Python: {reason_of(error)}"
    return UserError(
        what, expected=f"Python {here} with PySpark and pyarrow, as the driver has it", hint=_HINT
    )


def judge(found: Row, directory: Path, token: str) -> None:
    """Whether what the task has seen is what the driver sees."""
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
