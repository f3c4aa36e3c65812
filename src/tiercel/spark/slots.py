"""Whether a Spark application has room for a deployment, and runs the Python we run.

Responsible for: counting task slots before anything starts, and a probe task that looks from an executor.
Not responsible for: starting processes (hosting.py).
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from tiercel.errors import UserError
from tiercel.spark import __name__ as _package

if TYPE_CHECKING:
    import pyarrow

EXECUTORS_S_MAX = 30.0
SPARE_SLOTS = 2  # for the micro-batches of feeds and sinks: with none they would wait for ever


def task_slots(spark: SparkSession) -> int:
    """How many tasks can run at once. Needs a live session."""
    if ".connect." in type(spark).__module__:
        raise UserError(
            "this is a Spark Connect session, which has no SparkContext: long-lived tasks cannot be tagged, "
            "counted and ended through it",
            expected="a session of the application itself",
            hint="run the deployment where the driver runs; producers, subscribers and the data sources "
            "need only its storage directory",
        )
    try:
        return spark.sparkContext.defaultParallelism
    except Exception as error:
        what = "the Spark session is stopped"
        raise UserError(what, expected="a running session", hint="make one with tiercel.session()") from error


def _task_slots_soon(spark: SparkSession, needed: int) -> int:
    """On a cluster, executors may still be on their way when the session is there already."""
    give_up = time.monotonic() + EXECUTORS_S_MAX
    slots = task_slots(spark)
    while (
        slots < needed
        and not (spark.sparkContext.master or "").startswith("local[")
        and time.monotonic() < give_up
    ):
        time.sleep(0.1)
        slots = task_slots(spark)
    return slots


def is_stopped(spark: SparkSession) -> bool:
    try:
        task_slots(spark)
    except UserError:
        return True
    return False


def check_slots(spark: SparkSession, processes: int, *, spare: int = SPARE_SLOTS) -> None:
    """Refuse before anything starts: each process holds one slot for as long as it lives."""
    if spark.conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        return  # executors come when tasks wait for them; hosting.START_S_MAX says how long that may take
    needed = processes + spare
    slots = _task_slots_soon(spark, needed)
    if slots < needed:
        what = (
            f"{processes} routers and instances need a task slot each, and feeds and sinks {spare}: "
            f"{needed} in all, but this Spark application has {slots}"
        )
        raise UserError(
            what,
            expected=f"at least {needed} task slots",
            hint=f"tiercel.session(slots={needed}), or --master 'local[{needed},4]', or more executor cores",
        )


def probe(spark: SparkSession, directory: Path) -> None:
    """A task looks around: same Python as the driver, our package, and the same storage."""
    token = uuid.uuid4().hex
    (directory / ".probe").write_text(token, encoding="ascii")

    def look(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow as pa

        for _ in batches:
            try:
                import tiercel  # noqa: F401

                ours = "yes"
            except ImportError as error:
                ours = str(error)
            try:
                seen = (directory / ".probe").read_text(encoding="ascii")
                (directory / ".probe").write_text(seen, encoding="ascii")
            except OSError as error:
                seen = f"{error.strerror}"
            row = {
                "python": [f"{sys.version_info[0]}.{sys.version_info[1]}"],
                "executable": [sys.executable],
                "ours": [ours],
                "seen": [seen],
            }
            yield pa.RecordBatch.from_pydict(row)

    schema = "python string, executable string, ours string, seen string"
    found = spark.range(0, 1, 1, 1).mapInArrow(look, schema).collect()[0]
    (directory / ".probe").unlink(missing_ok=True)
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if found.python != here:
        what = f"Spark's workers run Python {found.python} ({found.executable}), the driver runs {here}"
        raise UserError(what, expected="the same Python", hint=f"set PYSPARK_PYTHON={sys.executable}")
    if found.ours != "yes":
        what = f"{_package.partition('.')[0]} cannot be imported by {found.executable}: {found.ours}"
        raise UserError(what, expected="the package installed for the workers too")
    if found.seen != token:
        what = f"an executor cannot use {directory}: it found {found.seen!r}"
        raise UserError(
            what,
            expected="one directory that the driver and every executor can read and write",
            hint="a shared file system, or one machine",
        )
