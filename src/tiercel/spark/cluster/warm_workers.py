"""Warm workers: idle Python workers with our modules loaded, for processes that restart after a crash.

Responsible for: idle workers in Spark's own pool, on each executor that the deployment uses, and on one more
    executor where the deployment uses only one.
Not responsible for: starting processes (supervisor.py). Spark chooses the worker of a task.

Spark keeps a Python worker for a minute after its task has ended, for the next task. A new worker has to
import PySpark, pandas and Tiercel first: that is most of the restart time of a process with little state.
So a thread runs a task that only imports them, again and again, and at once when a process was started and
may have taken a worker. Such a job costs a tenth of a second of a core or more. Deployments of one
application share the pool, and so they share the job. With dynamic allocation it runs only when a process was
started: on an idle executor it would keep Spark from releasing it. `spark.python.worker.reuse=false` turns
Spark's pool off, and the warm workers with it.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.cluster.backend import Backend

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

NAME = "warm worker"
LOADED = (
    "tiercel.spark.cluster.task",
    "fsspec.implementations.local",
)  # what a process imports when it starts
KEEP_S = 50.0  # Spark ends workers when none was used for a minute
POLL_S = 1.0
HOLD_S = 0.1  # for each of several tasks: otherwise one worker would run them all in turn

COUNT_MAX = 64
EXECUTORS_MIN = 2  # on a cluster: an executor that dies loses its workers, and its processes move to another

Pool = tuple[str, frozenset[str]]  # an application, and those of its executors that the deployment uses
_next_s: dict[Pool, float] = {}  # when its workers are due again, for all deployments
_lock = threading.Lock()


def warm(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """The task: imports what a process needs."""
    for module in LOADED:
        importlib.import_module(module)
    yield from batches


def warm_one_of_several(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    yield from warm(batches)
    time.sleep(HOLD_S)


def check_count(count: int) -> None:
    if not 0 <= count <= COUNT_MAX:
        raise UserError(f"warm_workers={count}", expected=f"0 to {COUNT_MAX}")


class WarmWorkers:
    """A thread of the driver that keeps the workers warm."""

    def __init__(self, backend: Backend, deployment: DeploymentDir, count: int = 1) -> None:
        self._backend, self._registry, self._count = backend, deployment.registry, count
        self._ending = threading.Event()
        self._thread = backend.thread(self._run, "tiercel-warm-workers")
        if count and backend.setting("spark.python.worker.reuse", "true") == "true":
            self._thread.start()

    def end(self) -> None:
        self._ending.set()
        if self._thread.is_alive() and not self._backend.is_stopped():
            self._backend.cancel(NAME)  # the job may wait for a slot
            self._thread.join(10.0)

    def _run(self) -> None:
        self._backend.enter(NAME)
        jobs: dict[int, DataFrame] = {}
        seen: set[int] = set()
        while not self._ending.wait(POLL_S):
            found = [self._registry.find(name) for name in self._registry.names()]
            workers = {address.pid: address.executor for address in found if address is not None}
            executors = frozenset(workers.values()) - {""}
            pool, taken = (self._backend.application, executors), not workers.keys() <= seen
            if _is_due(pool, taken=taken) and (taken or not self._backend.allocates):
                tasks = self._count * max(1 if self._backend.local else EXECUTORS_MIN, len(executors))
                try:
                    if tasks not in jobs and not self._backend.is_stopped():
                        jobs[tasks] = self._backend.job(warm if tasks == 1 else warm_one_of_several, tasks)
                    jobs[tasks].collect()
                except Exception as error:  # cancelled, or an executor is gone: nothing depends on this job
                    log.debug("no warm worker: %s", error)
                seen = set(workers)


def _is_due(pool: Pool, *, taken: bool) -> bool:
    """Whether the caller has to run the job now. If so, it is not due again for KEEP_S."""
    now_s = time.monotonic()
    with _lock:
        due = taken or now_s > _next_s.get(pool, 0.0)
        if due:
            _next_s[pool] = now_s + KEEP_S
    return due
