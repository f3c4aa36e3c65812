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
from tiercel.spark.backend import Backend

if TYPE_CHECKING:
    import pyarrow

EXECUTORS_S_MAX = 30.0
ALLOCATION_S_MAX = 300.0  # dynamic allocation: executors are asked for, granted and started first
SPARE_SLOTS = 2  # for the micro-batches of feeds and sinks: with none they would wait for ever


def _slots_soon(backend: Backend, needed: int) -> int | None:
    """On a cluster, executors may still be on their way when the session is there already."""
    give_up = time.monotonic() + EXECUTORS_S_MAX
    slots = backend.slots()
    while slots is not None and slots < needed and not backend.local and time.monotonic() < give_up:
        time.sleep(0.1)
        slots = backend.slots()
    return slots


def slots_at_most(backend: Backend) -> int | None:
    """As far as dynamic allocation may go; None: nobody has set a limit."""
    executors = backend.setting("spark.dynamicAllocation.maxExecutors")
    cores = backend.setting("spark.executor.cores")
    cpus = backend.setting("spark.task.cpus", "1")
    if not all(number.isdecimal() and int(number) > 0 for number in (executors, cores, cpus)):
        return None
    return int(executors) * (int(cores) // int(cpus))


def check_slots(backend: Backend, new: int, *, running: int, spare: int = SPARE_SLOTS) -> None:
    """Refuse before anything starts: each process holds one slot for as long as it lives.

    `running` are those that hold one already, of whichever deployment. Where executors come when tasks
    wait for them, only what can never fit is refused; ALLOCATION_S_MAX says how long the rest may take.
    """
    needed = running + new + spare
    slots = slots_at_most(backend) if backend.allocates else _slots_soon(backend, needed)
    if slots is not None and slots < needed:
        has = "may grow to" if backend.allocates else "has"
        what = (
            f"{new} routers, replicas and instances need a task slot each, {running} run already, and feeds "
            f"and sinks need {spare}: {needed} in all, but this Spark application {has} {slots}"
        )
        hint = f"tiercel.session(slots={needed}), or --master 'local[{needed},4]', or more executor cores"
        if backend.allocates:
            hint = "a higher spark.dynamicAllocation.maxExecutors, or more executor cores"
        raise UserError(what, expected=f"at least {needed} task slots", hint=hint)


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
