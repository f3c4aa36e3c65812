"""A deployment as users hold it in the driver of a Spark application: `tiercel.start` and `Live`.

Responsible for: declaring streams, the first use that starts everything, move, scale, status, stop.
Not responsible for: what was declared (graph.py, streams.py), the start itself (cluster/bootstrap.py), moves
    (control/, core/).

    start --> declare streams and operators --> deploy (by the first use) --> move, scale --> stop
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, overload

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from tiercel.control.mobility import EndedHandOver, Mobility, Threshold
from tiercel.control.policies.policy import Decide
from tiercel.control.predict import AUTO, Choice
from tiercel.control.view import View
from tiercel.core.errors import InvalidRequest
from tiercel.core.migration.strategies import STRATEGIES, ordered
from tiercel.core.model.topology import operator_of, site_of
from tiercel.core.settings import Settings
from tiercel.errors import UserError
from tiercel.runtime.client.event_loop_thread import Client
from tiercel.runtime.config import DurabilityConfig, Listening, parse_sites
from tiercel.runtime.deployment import DeploymentDir, DriverLock, Durability
from tiercel.runtime.net.emulated_link import Link
from tiercel.runtime.net.tls import TlsOption
from tiercel.runtime.sites.deployment_file import DeploymentFile
from tiercel.runtime.sites.site_application import SiteApplication
from tiercel.spark.api.clients import RowProducer, end_client
from tiercel.spark.api.feeds import Feed, check_feed_name
from tiercel.spark.api.graph import (
    Graph,
    StreamDeclaration,
    check_choice,
    codec_of,
    parse_delay,
    parse_gap,
)
from tiercel.spark.api.initial_state import give_initial_state, is_given
from tiercel.spark.api.moves import MoveHandle, ScaleHandle
from tiercel.spark.api.policies import DeploymentPolicies, PolicyReport, PredictSite, predictor
from tiercel.spark.api.requests import DeploymentRequests
from tiercel.spark.api.status import Status, collect_status
from tiercel.spark.api.streams import LiveStream, union_of
from tiercel.spark.cluster.backend import backend_of
from tiercel.spark.cluster.bootstrap import Deployer, DeploymentPlan, RunningDeployment
from tiercel.spark.cluster.decommission import Handover
from tiercel.spark.cluster.replica_placement import DURABILITIES, replica_plan
from tiercel.spark.cluster.session import open_session
from tiercel.spark.cluster.task import Build, build_host
from tiercel.spark.cluster.warm_workers import check_count
from tiercel.spark.listener import Listener, ListenerThread
from tiercel.spark.move_history import MoveHistory, MoveReport
from tiercel.spark.operators.processor_adapter import InputPlan
from tiercel.spark.rows.row_codec import Schema
from tiercel.spark.sources.dead_letter_watch import DeadLetterWatch
from tiercel.spark.sources.stream_source import register
from tiercel.spark.sources.table_refresh import TableRefresh

HAND_OVERS_SHOWN = 5  # in the status
MOBILITY, WAIT = Threshold(tuples=3, seconds=1.0), Threshold(seconds=5.0)


def start(
    spark: SparkSession | None = None,
    sites: Sequence[str] | Mapping[str, str | None] = ("local",),
    storage: str | Path | None = None,
    *,
    durability: Durability = "os",
    settings: Settings | None = None,
    bind: str = "127.0.0.1",
    ports: Mapping[str, int] | None = None,
    advertise: Mapping[str, str] | None = None,
    tls: TlsOption = None,
    backup: str | Mapping[str, Any] | None = None,
    local: str | Path | None = None,
    replicas_at: Mapping[str, str] | None = None,
    warm_workers: int = 1,
    links: Mapping[str, Link] | None = None,
    deployment: str | Path | None = None,
    site: str = "",
) -> Live:
    """A deployment in this Spark application. Nothing runs before its first use. Use it in a `with`.

    `storage` is a directory that the driver and every executor can write. A deployment that it holds is
    continued. Without one, a temporary directory is used and removed at the end.

    `ports` sets the port of each site's router, for clients behind a firewall; otherwise a router takes any
    free port. `advertise` sets the address at which a site's router is reached, where it differs from the
    one that it binds to. With `bind="0.0.0.0"` processes are reached at the address of their machine toward
    the driver. `tls` encrypts every connection: a mapping with `certificate`, `key` and `authority`, PEM
    files that every machine has at these paths. A storage keeps its TLS files until it is given others, or
    `tls=False`.

    `backup` is the location of a copy of everything durable: a directory or a URL of fsspec, or a mapping
    with `location`, `every_s`, `keep` and `strict`. With `local`, routers and instances store on a disk of
    their executor, and are restored from the backup wherever they restart; `{executor}` in it is the
    executor's id.

    `durability` is what an acknowledgement means: `os`, the process may die; `disk`, the power may fail;
    `replica`, the disk may be lost, for a task on another executor holds a replica. `replicas_at` places
    the replicas of some sites at another site, as in `{"edge-1": "cloud"}`; other sites have their own.
    Without it, replicas stay where they were on this storage.

    `warm_workers` Python workers wait on each executor for a process that dies. With as many as
    `recover(over=)` all successors start at once.

    `links` emulates links between sites: `{"edge-1 cloud": Link(latency_ms=40, jitter_ms=2, mbit=100)}`.
    Every connection between processes of these two sites is delayed and limited, in both directions. The
    controller is at the first site.

    With `deployment`, a TOML file, and `site`, this application runs only that site. Every site runs the same
    program in an application and storage of its own. The application of the root has the controller.
    """
    check_choice("durability", durability, DURABILITIES)
    check_count(warm_workers)
    application = _application(deployment, site, sites, (bind, ports, advertise, tls), replicas_at)
    spark = spark or open_session("tiercel")
    if application is None:
        sites = parse_sites(sites)
        listening = Listening.of(bind, ports, advertise, tls, sites, links)
    else:
        sites, file = application.file.sites, application.file
        host, port = file.listen[site]
        listening = Listening.of(host, {site: port}, {site: file.reached[site][0]}, file.tls, sites, links)
    durability_config = DurabilityConfig.of(backup, local, durability, replicas_at, sites)
    return Live(
        *(spark, sites, storage, durability, settings, listening, durability_config, warm_workers),
        application=application,
    )


def _application(
    deployment: str | Path | None,
    site: str,
    sites: Sequence[str] | Mapping[str, str | None],
    addresses: tuple[Any, ...],
    replicas_at: Mapping[str, str] | None,
) -> SiteApplication | None:
    if deployment is None:
        if site:
            what = f"site={site!r} without deployment="
            hint = "sites of one application: tiercel.start(spark, sites=[...])"
            raise UserError(what, expected="the deployment file that names the site", hint=hint)
        return None
    given = {"sites": tuple(sites) != ("local",), "replicas_at": replicas_at is not None}
    given["bind, ports, advertise or tls"] = addresses != ("127.0.0.1", None, None, None)
    for what, is_named in given.items():
        if is_named:
            raise UserError(f"{what} beside deployment=", expected="one of them", hint="the file names it")
    file = DeploymentFile.read(deployment)
    if not site:
        raise UserError("deployment= without site=", expected=f"one of: {', '.join(file.sites)}")
    return SiteApplication(file, site)


class Live:
    """One deployment."""

    def __init__(
        self,
        spark: SparkSession,
        sites: Mapping[str, str | None],
        storage: str | Path | None,
        durability: Durability,
        settings: Settings | None,
        listening: Listening,
        durability_config: DurabilityConfig | None = None,
        warm_workers: int = 1,
        *,
        application: SiteApplication | None = None,
    ) -> None:
        self._application = application
        self.backend = backend_of(spark)  # refuses a session that is stopped
        self.spark = spark
        self.graph = Graph(sites)
        self._listening = listening
        self._durability_config = (durability_config or DurabilityConfig())._replace(
            replicas=replica_plan(self.backend, durability)
        )
        self._warm_worker_count = warm_workers
        self._temporary = storage is None
        self.deployment = DeploymentDir(
            storage if storage is not None else tempfile.mkdtemp(prefix="tiercel-")
        )
        self._durability = durability
        try:
            self._settings = (settings or Settings()).validate()
        except InvalidRequest as refusal:
            raise UserError.of(refusal) from refusal
        self.build: Build = build_host  # what a task hosts; benchmarks replace it
        self._feeds: list[Feed] = []
        self._refreshes: dict[str, TableRefresh] = {}  # by operator
        self._listeners: list[ListenerThread] = []
        self._dead_letter_watch: DeadLetterWatch | None = None
        self._clients: weakref.WeakSet[Client] = weakref.WeakSet()
        self._lock: DriverLock | None = None
        self._deploy_lock = threading.RLock()  # two threads may both be the first to use it
        self._deployer: Deployer | None = None
        self._running: RunningDeployment | None = None
        self._deployment_policies: DeploymentPolicies | None = None
        self._stopped = False
        if self.backend.lacks:
            print("through Spark Connect: " + "; ".join(self.backend.lacks), file=sys.stderr)

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *failure: object) -> None:
        self.stop()

    # -- declaring ------------------------------------------------------------------------------

    def check_declaring(self) -> None:
        self._check_not_stopped()
        if self._deployer is not None:
            raise UserError(
                "the deployment runs already: nothing more can be declared",
                expected="streams and operators before the first producer, subscription, DataFrame or move",
                hint="start again on the same storage with the new ones added",
            )

    def _check_not_stopped(self) -> None:
        if self._stopped:
            what, expected = "the deployment was stopped", "one that runs"
            raise UserError(what, expected=expected, hint="start it again on the same storage")

    def stream(
        self,
        name: str,
        schema: Schema,
        *,
        key: str | Sequence[str],
        event_time: str = "",
        delay: str | float | timedelta = 0,
        idle: str | float | timedelta | None = None,
        sequence: str = "",
        gap: str | float | timedelta | None = None,
        first_number: int = 1,
    ) -> LiveStream:
        """Declare a stream that producers and DataFrames write. Rows of one key stay in order.

        With `sequence`, devices number the rows of their key in this column, from `first_number` on without
        gaps, and any producer or feed at any site may bring them: they are processed in this order, each
        once. Rows that are missing for longer than `gap` (5 seconds), and rows under a number that another
        row has, are `dead_letters`.

        With `event_time`, a site's watermark is the newest event time it has seen, less `delay`. The
        watermark of the stream waits for every site that has seen rows; with `idle`, no longer than that
        after its last row.
        """
        self.check_declaring()
        if not key or not isinstance(key, Sequence):
            hint = "rows of one key stay in order, and state is kept by key: name a column of the schema"
            what = f"stream {name!r} has no key: {key!r}"
            raise UserError(what, expected="key='column' or several", hint=hint)
        columns = codec_of(f"stream {name!r}", schema, key, event_time, sequence)
        gap_ms = parse_gap(name, sequence, gap, first_number)
        delay_ms = parse_delay(delay) if event_time else None
        idle_ms = None if idle is None else parse_delay(idle, "idle")
        if idle_ms == 0 or (idle_ms is not None and not event_time):
            raise UserError(
                f"stream {name!r}: idle = {idle!r}",
                expected="a time above 0, of a stream with event_time=...",
                hint="without idle= the watermark waits for every site that has seen rows",
            )
        declared = StreamDeclaration(
            *(name, columns, self.graph.root, delay_ms),
            idle_ms=idle_ms,
            gap_ms=gap_ms,
            first_number=first_number,
        )
        self.graph.add_input(declared)
        return LiveStream(self, [(name, InputPlan(columns))], columns)

    def declare(self, declared: StreamDeclaration) -> LiveStream:
        self.graph.add_stream(declared)
        return LiveStream(self, [(declared.name, InputPlan(declared.codec))], declared.codec)

    def union(self, first: LiveStream, *others: LiveStream) -> LiveStream:
        """Several streams as the input of one operator. Keys must have the same columns."""
        return union_of(self, (first, *others))

    def add_feed(self, feed: Feed) -> None:
        if feed.site:
            self.graph.check_site(feed.site)
        check_feed_name(feed, self._feeds)
        if self._deployer is not None:
            feed.start(self.deployment)
        self._feeds.append(feed)

    def add_refresh(self, refresh: TableRefresh, schema: StructType, key: Sequence[str]) -> LiveStream:
        """Declare the stream of a table's changes, which the driver writes while the deployment runs."""
        self._refreshes[refresh.operator] = refresh
        return self.stream(refresh.stream, schema, key=key)

    def refresh(self, operator: str) -> int:
        """Read the table of `enrich(..., refresh=...)` now. Returns how many changes count from then on."""
        self._started()
        if operator not in self._refreshes:
            known = ", ".join(sorted(self._refreshes)) or "none is declared: enrich(..., refresh='1 minute')"
            raise UserError(f"operator {operator!r} has no table that is refreshed", expected=known)
        return self._refreshes[operator].refresh()

    def close_at_stop(self, client: Client) -> None:
        """Close a client when the deployment stops, so that it does not wait for what cannot come."""
        self._clients.add(client)

    def watch_dead_letters(self) -> None:
        """Warn about dead letters from now on, and count them in the status."""
        self.deploy()
        streams = [name for name, s in self.graph.streams.items() if s.logged and _holds_dead_letters(s)]
        self._dead_letter_watch = self._dead_letter_watch or DeadLetterWatch(self.deployment, streams)

    def note_delay(self, stream: str, delay_ms: int) -> None:
        """Use the watermark delay of the DataFrame that feeds a stream as the delay of the stream."""
        if self._deployer is None:
            declared = self.graph.streams[stream]
            self.graph.streams[stream] = dataclasses.replace(declared, delay_ms=delay_ms)

    # -- from declarations to processes ---------------------------------------------------------

    def deploy(self) -> Live:
        """Start the routers and instances that were declared, then the feeds. The first use calls this."""
        with self._deploy_lock:
            self._check_not_stopped()
            self.backend.check()
            if self._deployer is None:
                self._deploy()
        return self

    def _deploy(self) -> None:
        if not self.graph.operators:
            raise UserError("no operator was declared", hint="stream.transform_with_state(...)")
        lock = DriverLock(self.deployment)
        try:
            deployer = Deployer(
                self.backend,
                self.deployment,
                self._plan(),
                build=self.build,
                warm_workers=self._warm_worker_count,
            )
            deployer.prepare()
        except BaseException:
            lock.release()
            raise
        self._lock = lock
        register(self.spark)
        self._deployer = deployer
        try:
            self._running = deployer.start()
            for name, declared in self.graph.operators.items():
                if declared.initial is not None and not self._running.controller.is_agent:
                    codec = self.graph.streams[f"{name}.initial"].codec
                    give_initial_state(self.deployment, name, codec, declared.initial)
            for feed in self._feeds:
                feed.start(self.deployment)
            for name, refresh in self._refreshes.items():
                writer = RowProducer(self.deployment, refresh.stream, name=f"refresh-{name}")
                refresh.start(self.deployment.directory, writer)
        except BaseException:
            self.stop()
            raise

    def _plan(self) -> DeploymentPlan:
        """The declarations, merged with what the directory holds, and the instances that should run."""
        found = self.deployment.manifest() if self.deployment.exists else None
        if found is not None:
            self.graph.keep_initial(found, lambda operator: is_given(self.deployment, operator))
        listening = self._listening.applied(self.spark.conf.get("spark.driver.host") or "", found)
        manifest = self.graph.manifest(self._settings, self._durability, listening, found)
        manifest = self._durability_config.applied(manifest, found)
        if self._application is not None:
            manifest = msgspec.structs.replace(manifest, hosts=(self._application.site,))
        instances = self.deployment.desired_instances() if found is not None else []
        for name, declared in self.graph.operators.items():
            if not any(operator_of(i) == name for i in instances):
                instances += [i for i in declared.operator.instances if site_of(i) in manifest.sites_here]
        operators = {name: self.graph.plan_of(name) for name in self.graph.operators}
        facts = (found is not None, self._application, self.graph.resources())
        return DeploymentPlan(manifest, instances, operators, *facts)

    def listener(self, listener: Listener) -> ListenerThread:
        """Call a listener each second, and when a process or a move changes; `stop()` ends that."""
        self.deploy()
        thread = ListenerThread(listener, self.status, self.deployment.metrics)
        self._listeners.append(thread)
        thread.start()
        return thread

    def read_stream(self, stream: str, options: Mapping[str, Any]) -> DataFrame:
        reader = self.spark.readStream.format("tiercel").option("storage", str(self.deployment.directory))
        return reader.option("stream", stream).options(**dict(options)).load()

    # -- moving and scaling ---------------------------------------------------------------------

    @overload
    def move(
        self,
        operator: str,
        *,
        to: str,
        keys: Iterable[Any] | None = None,
        slots: Iterable[int] | None = None,
        source: str = "",
        strategy: str = "live",
        order: str = "",
        retries: int = 0,
        deadline_s: float | None = None,
        explain: Literal[True],
    ) -> Choice: ...

    @overload
    def move(
        self,
        operator: str,
        *,
        to: str,
        keys: Iterable[Any] | None = None,
        slots: Iterable[int] | None = None,
        source: str = "",
        strategy: str = "live",
        order: str = "",
        retries: int = 0,
        deadline_s: float | None = None,
        explain: Literal[False] = False,
    ) -> MoveHandle: ...

    def move(
        self,
        operator: str,
        *,
        to: str,
        keys: Iterable[Any] | None = None,
        slots: Iterable[int] | None = None,
        source: str = "",
        strategy: str = "live",
        order: str = "",
        retries: int = 0,
        deadline_s: float | None = None,
        explain: bool = False,
    ) -> MoveHandle | Choice:
        """Move keys, slots, or everything of an instance to an instance or a site. Returns at once.

        A key is a value, or a tuple of values. A site that has no instance of the operator gets one. Starts
        the deployment, if it does not run yet. `order` says in which order `strategy="push"` sends state.
        With `strategy="auto"` a model predicts the cost of each strategy and takes the one with the least
        stoppage. `explain=True` moves nothing: it returns the predictions and the choice, printable.
        """
        check_choice("strategy", strategy, (*STRATEGIES, AUTO))
        try:
            strategy = ordered(strategy, order)
        except InvalidRequest as refusal:
            raise UserError.of(refusal) from refusal
        requests = self._requests()
        wanted = requests.owners(operator, keys, slots, source)
        destination = requests.destination(operator, to)
        prediction = None
        if explain or strategy == AUTO:
            choice = requests.choice(operator, wanted, destination)
            if explain:
                return choice
            strategy, prediction = choice.strategy, choice.prediction
        return requests.move(operator, wanted, destination, strategy, retries, deadline_s, prediction)

    def moves(self) -> list[MoveReport]:
        """The reports of all moves that have ended, oldest first, also those under earlier drivers."""
        return MoveHistory(self.deployment.directory).reports()

    def scale(self, operator: str, instances: Mapping[str, int], *, strategy: str = "live") -> ScaleHandle:
        """Set the number of instances at each site; they share the slots evenly. Returns at once."""
        return self._requests().scale(operator, instances, strategy)

    def leave(self, site: str, *, strategy: str = "live") -> list[str]:
        """Move all keys away from a site, and end its instances. Then its application may end, too."""
        return self._requests().leave(site, strategy)

    def owners(self, operator: str, keys: Iterable[Any]) -> dict[Any, str]:
        """Key -> the instance that owns it now. A key is a value, or a tuple of values."""
        return self._requests().owner_by_key(operator, keys)

    def set_standby(self, instance: str, standby: str) -> None:
        """Let an instance hold a copy of another one's keys from now on; an empty name ends that.

        After each checkpoint `instance` sends what has changed. A move with `strategy="standby"` to its
        standby then sends only what has changed since. The copy is in the standby's memory.
        """
        self._requests().set_standby(instance, standby)

    def recover(self, instance: str, *, over: int = 2) -> list[str]:
        """Replace a dead instance by `over` successors. Each takes over a share of its slots and restores it.

        Without this call Spark restarts the instance, which restores everything alone. Returns the names of
        the successors when they work. Moves that the instance takes part in must end first.
        """
        return self._requests().recover(instance, over)

    def drain(self, instance: str) -> MoveHandle:
        """Move everything off an instance, for example before its executor is removed."""
        return self._requests().drain(instance)

    # -- policies -------------------------------------------------------------------------------

    def autoscale(
        self,
        operator: str,
        *,
        policy: str | Decide = "rate",
        min: int | Mapping[str, int] = 1,
        max: int | Mapping[str, int] = 8,
        spares: int | Mapping[str, int] = 0,
        strategy: str = "live",
        **options: Any,
    ) -> None:
        """Let a policy choose the number of instances of an operator, by its load, once a second.

        `policy` is "rate", "busy", "hot_keys", "failures" or a function of (view, memory). `min` and `max`
        hold at every site, or are given by site. `spares` instances are attached and own nothing, so that a
        scale-out need not wait for a start. Other options are those of the policy, such as `target=0.7`, and
        limits: `cool_down_s`, `scale_in_after_s`, `changes_per_hour_max`, `quiet=["22:00-06:00"]`, `pins`,
        `dry_run` and others. `live.policies()` says what was decided and why.
        """
        self._policies().autoscale(operator, policy, min, max, spares, strategy, options)

    def offload(
        self, operator: str, *, cost: float, home: str = "", edges: Sequence[str] = (), **options: Any
    ) -> None:
        """Move heavy keys to the edge at which their rows enter, while more than `cost` rows/s enter there.

        When demand falls below half of the cost, they return to `home`. Limits as in `autoscale`.
        """
        self._policies().offload(operator, cost, home, edges, options)

    def mobility(
        self,
        operator: str,
        *,
        mobility: Threshold = MOBILITY,
        wait: Threshold = WAIT,
        direct: bool = False,
        strategy: str = "live",
        predict: PredictSite | None = None,
        predicted: str | float | timedelta = "10 seconds",
    ) -> None:
        """Hand keys over to the site at which their rows enter, as their sources travel.

        A key whose rows enter elsewhere beyond the threshold `mobility` goes up to the lowest common ancestor
        of both sites, and down when its source has stayed at one site beyond the threshold `wait`. With
        `direct` it skips the ancestor. Routers report once a second which keys they have seen.

        `predict` is a function of a key and its visits, each with `site` and `since_s`. When a key has come
        to where its source is, a copy of it goes to the site that the function returns. The copy becomes the
        owner when a row enters there. If rows enter elsewhere, or none for as long as `predicted` says, the
        copy is dropped. While there is a copy, the watermark of the operator's outputs at its site waits.
        """
        self.graph.check_operator(operator)
        codec = self.graph.streams[self.graph.operators[operator].operator.inputs[0]].codec
        if predict is not None and not callable(predict):
            raise UserError(f"predict = {predict!r:.80}", expected="a function of (key, visits)")
        guess = None if predict is None else predictor(predict, codec.key_values, operator)
        follow = Mobility(self.graph.sites, mobility, wait, direct=direct, predict=guess)
        predicted_s = parse_delay(predicted, "predicted") / 1e3
        self._policies().follow_sources(operator, follow, strategy, predicted_s)

    def hand_overs(self) -> list[EndedHandOver]:
        """The last hand-overs of keys that followed their sources, each with its reason, phases and bytes."""
        return self._policies().thread.hand_overs

    def policy(self, decide: Decide, *, name: str = "", **limits: Any) -> None:
        """Run a function of (view, memory) once a second. It returns proposals and what it remembers."""
        self._policies().add(decide, name, limits)

    def remove_policy(self, name: str) -> None:
        """End a policy. What it has changed stays."""
        self._policies().remove(name)

    def policies(self) -> PolicyReport:
        """The policies that run, and every decision with its reason."""
        thread = self._policies().thread
        return PolicyReport(thread.policies, thread.history)

    def load(self) -> View:
        """The load of this second, as a policy sees it: from the gauges of every process at every site."""
        return self._policies().thread.view()

    def _policies(self) -> DeploymentPolicies:
        running = self._started()
        with self._deploy_lock:
            if self._deployment_policies is None:
                self._deployment_policies = DeploymentPolicies(self.graph, running, self._requests())
            return self._deployment_policies

    def _requests(self) -> DeploymentRequests:
        """What users can ask of the deployment. Starts it, if it does not run yet."""
        running = self._started()
        if running.controller.is_agent:
            root = self.graph.root
            raise UserError(
                f"site {running.controller.name.partition('@')[2]!r} does not run the controller",
                expected=f"requests in the application of the root site {root!r}",
                hint="an application moves, scales and recovers nothing by itself",
            )
        return DeploymentRequests(
            self.backend, self.graph, running.controller, running.supervisor, running.launch_and_wait
        )

    def _started(self) -> RunningDeployment:
        self.deploy()
        assert self._running is not None
        return self._running

    # -- status ---------------------------------------------------------------------------------

    def status(self) -> Status:
        """The processes and where they run, printable and as a dict. Starts the deployment first."""
        running = self._started()
        if not self.graph.sites.keys() & self.failures.keys():  # a router that was given up does not answer
            running.controller.refresh()
        return collect_status(
            self.deployment,
            running.supervisor,
            running.controller,
            running.decommission_watcher,
            self._feeds,
            {} if self._dead_letter_watch is None else self._dead_letter_watch.counts,
            [] if self._deployment_policies is None else self.hand_overs()[-HAND_OVERS_SHOWN:],
        )

    @property
    def running(self) -> bool:
        """Whether its processes have been started and not been stopped."""
        return self._running is not None and not self._stopped

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def failures(self) -> dict[str, str]:
        """Routers and instances that were given up, each with the reason."""
        return {} if self._deployer is None else dict(self._deployer.supervisor.failures)

    @property
    def suspicions(self) -> dict[str, int]:
        """How often each process sent no heartbeat for too long, and was restarted."""
        return {} if self._deployer is None else dict(self._deployer.supervisor.suspicions)

    @property
    def handovers(self) -> list[Handover]:
        """Executors that were decommissioned, and what of the deployment has left them."""
        return [] if self._running is None else list(self._running.decommission_watcher.handovers.values())

    def cancel(self, process: str) -> None:
        """Cancel the Spark job of a process, as a crash would: the supervisor restarts it."""
        self.backend.cancel(self._started().supervisor.tag(process))

    # -- the end --------------------------------------------------------------------------------

    def stop(self) -> None:
        """End feeds and processes cleanly. What was stored stays, unless it was temporary."""
        if self._stopped:
            return
        self._stopped = True
        with contextlib.ExitStack() as ending:  # from the last to the first; one that fails stops no other
            if self._temporary:
                ending.callback(shutil.rmtree, self.deployment.directory, ignore_errors=True)
            if self._lock is not None:
                ending.callback(self._lock.release)
            if self._running is not None:
                ending.callback(self._running.end)
            if self._dead_letter_watch is not None:
                ending.callback(self._dead_letter_watch.close)
            for client in list(self._clients):
                ending.callback(end_client, client)
            for feed in self._feeds if not self.backend.is_stopped() else ():
                ending.callback(feed.stop)
            for refresh in self._refreshes.values():
                ending.callback(refresh.stop)
            for listener in self._listeners:
                ending.callback(listener.stop)


def _holds_dead_letters(stream: StreamDeclaration) -> bool:
    return bool(stream.dead_letters_of) or stream.name == f"{stream.written_by}.dead"
