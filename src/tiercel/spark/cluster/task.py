"""The code inside a Spark task: one router, instance or replica in its host.

Responsible for: building the machine of a process with its storage, backup and replication; running it
    until it ends; the executor's id.
Not responsible for: submitting the task and restarting it (supervisor.py), what the process does once it runs
    (runtime/process/host.py).

Spark ships only the directory and the user's code in the closure. The task reads the secret from the
directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop
from pyspark import TaskContext

from tiercel.core.instance.instance import Instance
from tiercel.core.model.topology import Topology, operator_of, site_of
from tiercel.core.router.router import Router
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.process.heartbeat import Heartbeat
from tiercel.runtime.process.host import Host, HostConfig
from tiercel.runtime.process.machine import Machine
from tiercel.runtime.process.metrics import MetricsLine
from tiercel.runtime.recovery.recover import open_replicated_storage
from tiercel.runtime.recovery.takeover import ShareLoader
from tiercel.runtime.replication.primary import is_replica, site_of_replica
from tiercel.runtime.replication.replica import Replica
from tiercel.runtime.storage.directory import EXECUTOR, directory_of
from tiercel.runtime.storage.incarnations import IncarnationClaims
from tiercel.spark.operators.plans import OperatorPlan
from tiercel.spark.operators.processor_adapter import ProcessorAdapter
from tiercel.spark.rows.ddl import parse_ddl
from tiercel.spark.state.schema_evolution import StatePlan, upgrade_items, upgrade_store

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)

NO_PARENT = 1  # the parent of processes whose parent has died
PROGRESS_S = 1.0
FILLING = b" " * 64 * 1024
PROGRESS_SCHEMA = (
    "process string, rows_in double, rows_out double, busy double, lag bigint, state_bytes bigint, "
    "moves int, filling binary"
)


def build_host(
    deployment: DeploymentDir,
    name: str,
    plan: OperatorPlan | None,
    make_router: Callable[..., Router] = Router,
    make_instance: Callable[..., Instance] = Instance,
) -> Host:
    """The machine of that name in its host: a site's router, with a plan an instance, or a replica."""
    if is_replica(name):
        return build_replica(deployment, name)
    manifest = deployment.manifest()
    topology, settings, registry = manifest.topology, manifest.settings, deployment.registry
    executor = executor_here() if EXECUTOR in manifest.local or manifest.replicas is not None else ""
    directory = directory_of(deployment, manifest, name, executor)
    state = plan.state if plan is not None else StatePlan()
    prepare = functools.partial(upgrade_store, plan=state)
    lazily = plan is not None and not state.renamed  # an upgrade goes through all of it first
    storage = open_replicated_storage(
        *(deployment, manifest, name, directory, executor),
        is_instance=plan is not None,
        lazily=lazily,
        prepare=prepare,
    )
    store = storage.store
    shares = ShareLoader(
        *(deployment, manifest, storage),
        upgrade=functools.partial(upgrade_items, plan=state),
        lazily=lazily and storage.replication is None,  # a replica would not get what comes later
    )
    machine: Machine
    peers: Callable[[], Iterable[str]]
    if plan is None:
        machine = make_router(name, topology, settings, store.incarnation, store.items())
        sites = [site for site in topology.sites if dials(topology, name, site)]

        def peers() -> Iterable[str]:
            return sites
    else:
        operator = topology.operator(operator_of(name))
        code = ProcessorAdapter(plan)
        try:
            machine = make_instance(name, operator, code, settings, store.incarnation)
        except Exception as error:  # user code: nothing but `init` was called
            what = f"init of {type(plan.processor).__name__} failed: {type(error).__name__}: {error}"
            hint = "files, models and services that it opens must be there on every executor"
            raise UserError(
                what, expected="an init that works on Spark's executors too", hint=hint
            ) from error
        router = site_of(name)

        def peers() -> Iterable[str]:
            """Its router and its siblings: state moves directly between them."""
            siblings = [n for n in registry.names() if n > name and operator_of(n) == operator.name]
            return [router, *siblings]

    return Host(
        name,
        machine,
        HostConfig(
            registry=registry,
            secret=deployment.secret,
            dials=peers,
            bind=manifest.bind,
            advertise=manifest.address_of(name),
            port=manifest.ports.get(name, 0),
            tls=manifest.tls,
            site=name if plan is None else site_of(name),
            links=manifest.links,
            manifest=msgspec.json.encode(manifest) if plan is None else b"",
            metrics=deployment.metrics,
            load_share=shares.load,
            parent=os.getppid(),
            storage=storage,
        ),
    )


def dials(topology: Topology, site: str, other: str) -> bool:
    """Whether the router of a site dials that of another one: a child its parent, which may not reach it."""
    if topology.is_above(other, site) or topology.is_above(site, other):
        return topology.is_above(other, site)
    return other > site


def build_replica(deployment: DeploymentDir, name: str) -> Host:
    """A replica in its host. It stores nothing on disk and opens no connection."""
    manifest = deployment.manifest()
    return Host(
        name,
        Replica(lambda process: IncarnationClaims(deployment.incarnations, process).last()),
        HostConfig.of(
            deployment,
            incarnation=IncarnationClaims(deployment.incarnations, name).claim(0).incarnation,
            bind=manifest.bind,
            advertise=manifest.address_of(name),
            tls=manifest.tls,
            site=site_of_replica(name),
            links=manifest.links,
            metrics=deployment.metrics,
            parent=os.getppid(),
        ),
    )


Build = Callable[[DeploymentDir, str, OperatorPlan | None], Host]


def executor_here() -> str:
    """The executor of this task.

    Spark does not tell Python. The id is an argument of the JVM above this worker. Without /proc, the working
    directory has it: on a standalone cluster it is named after the executor.
    """
    with contextlib.suppress(OSError, ValueError):  # no /proc, or no such argument
        pid = os.getpid()
        while pid > 1:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"--executor-id" in words:
                return words[words.index(b"--executor-id") + 1].decode()
            pid = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    here = Path.cwd()
    return here.name if here.parent.name.startswith("app-") else "driver"


def task(
    directory: Path, name: str, plan: OperatorPlan | None, build: Build = build_host
) -> Callable[[Iterator[pyarrow.RecordBatch]], Iterator[pyarrow.RecordBatch]]:
    """The function that Spark runs for one process. It yields a row of figures a second."""

    def run(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        logging.basicConfig(level=logging.WARNING)
        if os.getppid() == NO_PARENT:
            return  # the executor that started this worker is dead, and would not see the result
        for _ in batches:
            context = TaskContext.get()
            assert context is not None
            deployment = DeploymentDir(directory)
            if deployment.registry.is_stop_requested(name):
                continue  # during the start: successors may have taken over
            facts = (context.stageId(), context.attemptNumber(), context.taskAttemptId(), executor_here())
            with Heartbeat(deployment.registry, name, deployment.manifest().settings.suspect_ms):
                make = functools.partial(build, deployment, name, plan)
                yield from progress_of(HostThread(make, facts), name)

    return run


class HostThread:
    """Runs a host in a thread of its own, so that what Spark reads, and when, delays no row."""

    def __init__(self, build: Callable[[], Host], facts: tuple[int, int, int, str]) -> None:
        self._build, self._facts = build, facts
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tiercel-host", daemon=True)
        self.host: Host | None = None
        self._thread.start()

    def _run(self) -> None:
        try:
            self.host = self._build()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self.host.run(*self._facts))
        except BaseException as failure:
            self._failure = failure

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end; whatever the host has raised is raised here."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        if self._failure is not None:
            raise self._failure
        return True


def progress_of(host: HostThread, name: str) -> Iterator[pyarrow.RecordBatch]:
    """A row of figures a second, until the host has ended."""
    while not host.ends_within(PROGRESS_S):
        line = host.host.last_line if host.host is not None else None
        if line is not None:
            yield progress_row(name, line)


def progress_row(name: str, line: MetricsLine) -> pyarrow.RecordBatch:
    """The row of one second. PySpark holds back 64 KiB of what a task yields, so a row is that large."""
    import pyarrow
    from pyspark.sql.pandas.types import to_arrow_schema

    values = [name, line.rate, line.outputs, line.busy, line.lag, line.state_bytes, line.moves, FILLING]
    schema = to_arrow_schema(parse_ddl(PROGRESS_SCHEMA))
    arrays = [pyarrow.array([value], field.type) for value, field in zip(values, schema, strict=True)]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


# -- in the driver ----------------------------------------------------------------------------
