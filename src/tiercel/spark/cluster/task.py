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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop
from pyspark import TaskContext

from tiercel.core.instance.instance import Instance
from tiercel.core.model.topology import operator_of, site_of
from tiercel.core.router.router import Router
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.process.heartbeat import Heartbeat
from tiercel.runtime.process.host import Host, HostConfig
from tiercel.runtime.process.machine import Machine
from tiercel.runtime.recovery.recover import open_replicated_storage
from tiercel.runtime.recovery.takeover import ShareLoader
from tiercel.runtime.replication.primary import is_replica, site_of_replica
from tiercel.runtime.replication.replica import Replica
from tiercel.runtime.storage.directory import EXECUTOR, directory_of
from tiercel.runtime.storage.incarnations import IncarnationClaims
from tiercel.spark.operators.plans import OperatorPlan
from tiercel.spark.operators.processor_adapter import ProcessorAdapter
from tiercel.spark.state.schema_evolution import StatePlan, upgrade_items, upgrade_store

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)

NO_PARENT = 1  # the parent of processes whose parent has died


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
        sites = [site for site in topology.sites if site > name]

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
    """The function that Spark runs for one process. It yields its one row when the process has ended."""

    def run(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        logging.basicConfig(level=logging.WARNING)
        if os.getppid() == NO_PARENT:
            return  # the executor that started this worker is dead, and would not see the result
        for batch in batches:
            context = TaskContext.get()
            assert context is not None
            deployment = DeploymentDir(directory)
            if deployment.registry.is_stop_requested(
                name
            ):  # during the start: successors may have taken over
                yield batch
                continue
            facts = (context.stageId(), context.attemptNumber(), context.taskAttemptId(), executor_here())
            with Heartbeat(deployment.registry, name, deployment.manifest().settings.suspect_ms):
                host = build(deployment, name, plan)
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(host.run(*facts))
            yield batch

    return run


# -- in the driver ----------------------------------------------------------------------------
