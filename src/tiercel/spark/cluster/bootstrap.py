"""The start of a deployment in a Spark application, from a finished plan to processes that work.

Responsible for: checks before anything is written; the order in which processes and the driver's threads
    start; instances that come and go later; ending all of it in reverse order.
Not responsible for: what was declared (api/graph.py), initial state and feeds, which follow (api/).

    check room, upgrades, executors --> write the manifest --> stop leftovers of an earlier driver
    --> replicas --> routers and instances --> controller --> all attached --> watchers and warm workers
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from pyspark.resource import ResourceProfile

from tiercel.core.model.topology import operator_of
from tiercel.errors import UserError
from tiercel.runtime.backup.deployment_backup import write_backup_manifest
from tiercel.runtime.deployment import DeploymentDir, Manifest
from tiercel.runtime.net.gauge_messages import SiteReport
from tiercel.runtime.sites.site_application import SiteApplication
from tiercel.runtime.storage.incarnations import IncarnationClaims
from tiercel.spark.cluster.backend import Backend
from tiercel.spark.cluster.controller_thread import ControllerThread
from tiercel.spark.cluster.decommission import DecommissionWatcher
from tiercel.spark.cluster.liveness import LivenessMonitor
from tiercel.spark.cluster.policy_thread import CarryOut, PolicyThread
from tiercel.spark.cluster.preflight import probe
from tiercel.spark.cluster.replica_placement import replica_names, start_replicas
from tiercel.spark.cluster.supervisor import Supervisor, free_slots, running_processes
from tiercel.spark.cluster.task import Build, build_host
from tiercel.spark.cluster.task_slots import RESERVED_SLOTS, check_slots
from tiercel.spark.cluster.waiting import wait_until
from tiercel.spark.cluster.warm_workers import WarmWorkers
from tiercel.spark.job_errors import could_not_start
from tiercel.spark.operators.plans import OperatorPlan
from tiercel.spark.state.schema_evolution import try_upgrade

ATTACH_S_MAX = 60.0


class DeploymentPlan(NamedTuple):
    """All that a start needs to know."""

    manifest: Manifest
    instances: list[str]  # that should run
    operators: Mapping[str, OperatorPlan]  # what the instances of each operator run
    resumes: bool  # the directory holds this deployment already
    application: SiteApplication | None = None  # this application is one site of the deployment
    resources: Mapping[str, ResourceProfile] = MappingProxyType(
        {}
    )  # operator -> of the tasks of its instances


class InstanceLauncher:
    """Starts and retires instances as the controller asks, and records which of them should run."""

    def __init__(
        self, deployment: DeploymentDir, supervisor: Supervisor, operators: Mapping[str, OperatorPlan]
    ) -> None:
        self._deployment, self._supervisor, self._operators = deployment, supervisor, operators
        self._lock = threading.Lock()  # the record of instances has one writer at a time

    def launch(self, instance: str) -> None:
        """Start an instance. The controller may ask again while it starts."""
        if instance not in self._supervisor.names:
            with self._lock:
                self._deployment.set_desired_instances([*self._deployment.desired_instances(), instance])
            self._supervisor.start(instance, self._operators[operator_of(instance)])

    def retire(self, instance: str) -> None:
        with self._lock:
            self._deployment.set_desired_instances(
                [i for i in self._deployment.desired_instances() if i != instance]
            )
        self._supervisor.request_stop(instance)
        IncarnationClaims(self._deployment.incarnations, instance).clear_holder()


class RunningDeployment:
    """A started deployment: its supervisor, its controller, and the threads that watch its processes."""

    def __init__(
        self,
        backend: Backend,
        deployment: DeploymentDir,
        supervisor: Supervisor,
        controller: ControllerThread,
        launcher: InstanceLauncher,
        decommission_watcher: DecommissionWatcher,
        ending: contextlib.ExitStack,
    ) -> None:
        self._backend, self._deployment = backend, deployment
        self.supervisor, self.controller = supervisor, controller
        self.launcher, self.decommission_watcher = launcher, decommission_watcher
        self._ending = ending

    def launch_and_wait(self, instance: str) -> None:
        """Start an instance; returns when it is attached to its router."""
        if self.controller.is_elsewhere(instance):
            self.controller.launch_elsewhere(instance, ATTACH_S_MAX)
            return
        self.launcher.launch(instance)
        self.supervisor.wait(instance)
        wait_attached(self._deployment, self.supervisor, self.controller, [instance])

    def start_policies(self, carry_out: CarryOut) -> PolicyThread:
        """Start the thread that runs policies. It ends with the deployment, before everything else."""
        thread = PolicyThread(
            self._backend,
            self._deployment,
            self.controller,
            self.supervisor,
            carry_out,
        )
        self._ending.callback(thread.end)
        return thread

    def end(self) -> None:
        """End threads and processes, the last one first. A failure of one stops no other."""
        self._ending.close()


class Deployer:
    """Starts one deployment."""

    def __init__(
        self,
        backend: Backend,
        deployment: DeploymentDir,
        plan: DeploymentPlan,
        *,
        build: Build = build_host,
        warm_workers: int = 1,
    ) -> None:
        self._backend, self._deployment, self._plan = backend, deployment, plan
        self._warm_workers = warm_workers
        self._build = build

    @functools.cached_property
    def supervisor(self) -> Supervisor:
        """The supervisor of all processes. Its registry is written to: it must not exist before `prepare`."""
        return Supervisor(self._backend, self._deployment, self._build, self._plan.resources)

    def prepare(self) -> None:
        """Refuse what cannot work, then write the manifest. Nothing runs yet."""
        manifest, instances = self._plan.manifest, self._plan.instances
        counted = [i for i in instances if self._backend.local or operator_of(i) not in self._plan.resources]
        new = len(manifest.sites_here) + len(counted) + len(replica_names(manifest))  # others need no slot
        # A deployment that has grown to the last slot can be started again there.
        reserved = 0 if self._plan.resumes else RESERVED_SLOTS
        running = running_processes(self._backend.application)
        check_slots(self._backend, new, running=running, reserved=reserved)
        for operator, plan in self._plan.operators.items() if self._plan.resumes else ():
            of_operator = [instance for instance in instances if operator_of(instance) == operator]
            try_upgrade(self._deployment, operator, plan.state, of_operator)
        probe(self._backend.spark, self._deployment.directory)
        write_backup_manifest(manifest)
        if self._plan.application is not None:
            self._plan.application.join(self._deployment, manifest)
        self._deployment.write(manifest)
        self._deployment.set_desired_instances(instances)

    def start(self) -> RunningDeployment:
        """Start all processes; returns when every instance is attached. Ends them all if one cannot start."""
        deployment, supervisor = self._deployment, self.supervisor
        manifest, instances = self._plan.manifest, self._plan.instances
        with contextlib.ExitStack() as ending:
            ending.callback(supervisor.end)
            supervisor.stop_leftovers()
            deployment.registry.clear()
            sites = manifest.sites_here
            others = len(sites) + len(instances)
            start_replicas(self._backend, deployment, manifest, supervisor, others)
            for site in sites:
                supervisor.start(site)
            for instance in instances:
                supervisor.start(instance, self._plan.operators[operator_of(instance)])
            for name in [*sites, *instances]:
                supervisor.wait(name)
            launcher = InstanceLauncher(deployment, supervisor, self._plan.operators)
            controller = ControllerThread(deployment, launcher.launch, launcher.retire)
            ending.callback(controller.end)
            controller.report_site = functools.partial(_site_report, self._backend, supervisor, sites[0])
            wait_attached(deployment, supervisor, controller, instances)
            watcher = DecommissionWatcher(
                *(self._backend, deployment, manifest.topology, supervisor, controller),
                watches=manifest.is_root,
            )
            ending.callback(watcher.end)
            apart = manifest.replicas is not None and manifest.replicas.apart
            ending.callback(LivenessMonitor(self._backend, deployment, supervisor, apart=apart).end)
            ending.callback(WarmWorkers(self._backend, deployment, self._warm_workers).end)
            return RunningDeployment(
                self._backend, deployment, supervisor, controller, launcher, watcher, ending.pop_all()
            )


def _site_report(backend: Backend, supervisor: Supervisor, site: str) -> SiteReport:
    """What the agent of a site tells the controller."""
    failed = {name: why for name, why in supervisor.failures.items() if operator_of(name)}
    return SiteReport(site, free_slots(backend), failed)


def wait_attached(
    deployment: DeploymentDir, supervisor: Supervisor, controller: ControllerThread, instances: Iterable[str]
) -> None:
    """Returns when the routers report that these instances are attached."""
    missing = set(instances)

    def all_attached() -> bool:
        nonlocal missing
        if missing:
            for name in missing & set(supervisor.failures):
                raise could_not_start(name, supervisor.failures[name])
            controller.refresh()
            missing -= controller.running()
            missing &= set(deployment.desired_instances())  # the controller may have retired one meanwhile
        return not missing

    def failure() -> UserError:
        return UserError(
            f"{', '.join(sorted(missing))} did not attach within {ATTACH_S_MAX:g} s",
            expected="every instance connected to the router of its site",
            hint="the executors' logs say what they wait for; they must reach each other's ports",
        )

    wait_until(all_attached, ATTACH_S_MAX, failure)
