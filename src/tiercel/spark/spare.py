"""A Python worker that waits, warm, for a process that dies: it starts there without importing anything.

Responsible for: idle workers with our modules loaded, in Spark's own pool, on each executor that we use,
    and on another one where everything of ours runs on one.
Not responsible for: starting processes (hosting.py). Which worker a task gets is Spark's choice.

Spark keeps a Python worker whose task has ended well for the next task, for a minute. A new one has to load
PySpark, pandas and us first: most of what a death costs where there is little state. So a task that does
nothing but that ends well again and again, and at once when somebody was started and may have taken it.
Even such a job costs Spark a tenth of a second or more of a core, which a busy machine notices: deployments
of one application share the pool, and so they share the job.
`spark.python.worker.reuse=false` turns it off, as it does Spark's pool.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tiercel.errors import UserError
from tiercel.runtime.place import Place
from tiercel.spark.backend import Backend

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

NAME = "spare worker"
LOADED = ("tiercel.spark.hosting", "fsspec.implementations.local")  # what a process would load when it starts
KEEP_S = 50.0  # Spark ends workers when none was used for a minute
LOOK_S = 1.0
HOLD_S = 0.1  # by each of several: else one worker would take them all, one after the other

COUNT_MAX = 64
EXECUTORS_MIN = 2  # on a cluster: one that dies takes its own along, and what ran there goes elsewhere

Pool = tuple[str, frozenset[str]]  # an application, and its executors that we use
_next_s: dict[Pool, float] = {}  # when its workers are to be used again, whichever deployment does it
_lock = threading.Lock()


def warm(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """The task."""
    for module in LOADED:
        importlib.import_module(module)
    yield from batches


def warm_one_of_several(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    yield from warm(batches)
    time.sleep(HOLD_S)


def check_count(count: int) -> None:
    if not 0 <= count <= COUNT_MAX:
        raise UserError(f"spare_workers={count}", expected=f"0 to {COUNT_MAX}")


class Spare:
    """One thread of the driver."""

    def __init__(self, backend: Backend, place: Place, count: int = 1) -> None:
        self._backend, self._registry, self._count = backend, place.registry, count
        self._ending = threading.Event()
        self._thread = backend.thread(self._run, "tiercel-spare")
        if count and backend.setting("spark.python.worker.reuse", "true") == "true":
            self._thread.start()

    def end(self) -> None:
        self._ending.set()
        if self._thread.is_alive() and not self._backend.is_stopped():
            self._backend.cancel(NAME)  # it may wait for a slot
            self._thread.join(10.0)

    def _run(self) -> None:
        self._backend.enter(NAME)
        jobs: dict[int, DataFrame] = {}
        seen: set[int] = set()
        while not self._ending.wait(LOOK_S):
            found = [self._registry.find(name) for name in self._registry.names()]
            workers = {address.pid: address.executor for address in found if address is not None}
            executors = frozenset(workers.values()) - {""}
            if _is_due((self._backend.application, executors), taken=not workers.keys() <= seen):
                tasks = self._count * max(1 if self._backend.local else EXECUTORS_MIN, len(executors))
                try:
                    if tasks not in jobs and not self._backend.is_stopped():
                        jobs[tasks] = self._backend.job(warm if tasks == 1 else warm_one_of_several, tasks)
                    jobs[tasks].collect()
                except Exception as error:  # cancelled, or an executor went: nobody depends on it
                    log.debug("no spare worker: %s", error)
                seen = set(workers)


def _is_due(pool: Pool, *, taken: bool) -> bool:
    """Whether the caller is to use its workers now; if so, nobody else has to for a while."""
    now_s = time.monotonic()
    with _lock:
        due = taken or now_s > _next_s.get(pool, 0.0)
        if due:
            _next_s[pool] = now_s + KEEP_S
    return due
