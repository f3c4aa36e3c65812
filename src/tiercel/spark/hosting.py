"""Every router and every instance is one long-lived Spark task: starting, finding and ending them.

Responsible for: one Spark job per process, in a driver thread, tagged; what runs inside the task.
Not responsible for: what the process does once it runs (runtime/host.py drives it).

    driver: start(name) --> thread: spark.range(1).mapInArrow(task) --> worker: Host.run ... end
                              |                                             |
                              +-- job ends or fails <-- Spark retries <-----+

The secret and the code travel in the closure that Spark ships, never on a command line. A process
is ended by dismissing it in the registry; cancelling its job is what a crash looks like.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop
from pyspark import InheritableThread, TaskContext
from pyspark.sql import SparkSession

from tiercel.core.instance import Instance
from tiercel.core.router import Router
from tiercel.core.settings import Settings
from tiercel.core.topology import Topology, operator_of, site_of
from tiercel.errors import UserError
from tiercel.runtime.host import Host, Machine
from tiercel.runtime.registry import Address, Registry
from tiercel.runtime.store import Durability, Store
from tiercel.spark.border import Border

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)

START_S_MAX = 60.0  # a first Python worker on a busy machine takes a few seconds
END_S_MAX = 15.0
LOOK_S = 0.02

MakeBorder = Callable[[], Border]


class Deployment(msgspec.Struct, frozen=True):
    """What every process of a deployment must know."""

    topology: Topology
    settings: Settings
    directory: Path  # registry and storage
    secret: bytes
    durability: Durability = "os"

    @property
    def registry(self) -> Registry:
        return Registry(self.directory / "registry")

    def __repr__(self) -> str:
        return f"Deployment({self.directory})"  # the secret is not for logs


# -- inside the task --------------------------------------------------------------------------


def build_host(deployment: Deployment, name: str, make_border: MakeBorder | None) -> Host:
    """The machine of that name in its host: a site's router, or an instance."""
    store = Store(deployment.directory / "storage" / name, deployment.durability)
    topology, settings = deployment.topology, deployment.settings
    machine: Machine
    if make_border is None:
        machine = Router(name, topology, settings, store.life, store.items())
        dials = [site for site in topology.sites if site > name]
    else:
        operator = topology.operator(operator_of(name))
        machine = Instance(name, operator, make_border(), settings, store.life)
        dials = [site_of(name), *(other for other in operator.instances if other > name)]
    return Host(name, machine, deployment.registry, deployment.secret, dials=dials, store=store)


def task(
    deployment: Deployment, name: str, make_border: MakeBorder | None
) -> Callable[[Iterator[pyarrow.RecordBatch]], Iterator[pyarrow.RecordBatch]]:
    """What Spark runs for one process; its one row comes out when the process has ended."""

    def run(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        logging.basicConfig(level=logging.WARNING)
        for batch in batches:
            context = TaskContext.get()
            assert context is not None
            host = build_host(deployment, name, make_border)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(host.run(context.stageId(), context.attemptNumber(), context.taskAttemptId()))
            yield batch

    return run


# -- in the driver ----------------------------------------------------------------------------


class Hosting:
    """The processes of one deployment in one Spark application."""

    def __init__(self, spark: SparkSession, deployment: Deployment) -> None:
        self._spark = spark
        self._deployment = deployment
        self._threads: dict[str, InheritableThread] = {}
        self.failures: dict[str, BaseException] = {}

    def start(self, name: str, make_border: MakeBorder | None = None) -> None:
        """Ask Spark for a task that hosts this process: a router, or with a border an instance."""
        work = task(self._deployment, name, make_border)

        def job() -> None:
            self._spark.sparkContext.addJobTag(f"tiercel:{name}")
            try:
                self._spark.range(0, 1, 1, 1).mapInArrow(work, "id long").collect()
            except Exception as error:
                self.failures[name] = error
                log.warning("the job of %s failed: %s", name, str(error)[:500])

        thread = InheritableThread(target=job, name=f"tiercel-{name}", daemon=True)
        self._threads[name] = thread
        thread.start()

    def wait(self, name: str) -> Address:
        """Where a process listens, as soon as it does."""
        give_up = time.monotonic() + START_S_MAX
        while time.monotonic() < give_up:
            address = self._deployment.registry.find(name)
            if address is not None:
                return address
            if name in self.failures:
                what = f"{name} could not be started: {self.failures[name]}"
                raise UserError(what)
            time.sleep(LOOK_S)
        what = f"{name} did not start within {START_S_MAX:g} s"
        raise UserError(what, hint="see the log of Spark's executor")

    def end(self) -> None:
        """Dismiss every process; cancel the jobs of those that do not listen."""
        for name in self._threads:
            self._deployment.registry.dismiss(name)
        give_up = time.monotonic() + END_S_MAX
        for name, thread in self._threads.items():
            thread.join(max(0.0, give_up - time.monotonic()))
            if thread.is_alive():
                self._spark.sparkContext.cancelJobsWithTag(f"tiercel:{name}")
