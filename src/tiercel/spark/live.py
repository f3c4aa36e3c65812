"""A running deployment, as the driver of a Spark application holds it.

Responsible for: from declarations to processes and back: start, move, scale, status, stop.
Not responsible for: what was declared (graph.py, streams.py), the processes (hosting.py), deciding
    moves (core/), seeing them through (control/).

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
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from tiercel.core.faults import InvalidRequest
from tiercel.core.settings import Settings
from tiercel.core.topology import operator_of
from tiercel.errors import UserError
from tiercel.runtime.background import Client
from tiercel.runtime.copies import describe
from tiercel.runtime.keeping import Keeping
from tiercel.runtime.lives import Lives
from tiercel.runtime.locking import StorageLock
from tiercel.runtime.place import Durability, Place
from tiercel.runtime.tls import TlsWish
from tiercel.spark.backend import backend_of
from tiercel.spark.border import InputPlan
from tiercel.spark.companions import check_durability, names_of, replica_plan, start_replicas
from tiercel.spark.console import Console
from tiercel.spark.datasource import register
from tiercel.spark.decommission import Handover, Watch
from tiercel.spark.ends import end_client
from tiercel.spark.entering import check_feed_name, give_initial_state, is_given, start_feed, wait_attached
from tiercel.spark.graph import Graph, Listening, StreamDeclaration, columns_of, parse_delay, parse_sites
from tiercel.spark.hosting import Build, Hosting, build_host, hosted
from tiercel.spark.moves import Moving, Scaling
from tiercel.spark.probing import probe
from tiercel.spark.schema import Schema
from tiercel.spark.session import open_session
from tiercel.spark.slots import SPARE_SLOTS, check_slots
from tiercel.spark.spare import Spare, check_count
from tiercel.spark.status import Status, collect_status
from tiercel.spark.streams import Feed, LiveStream, union_of
from tiercel.spark.upgrading import try_upgrade
from tiercel.spark.vigil import Vigil
from tiercel.spark.wishes import Wishes


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
    tls: TlsWish = None,
    backup: str | Mapping[str, Any] | None = None,
    local: str | Path | None = None,
    copies_at: Mapping[str, str] | None = None,
    spare_workers: int = 1,
) -> Live:
    """A deployment in this Spark application; nothing runs before it is used. Use it in a `with`.

    `storage` is a directory that the driver and every executor can write; what runs there before is
    continued. Without one, a temporary directory is used and removed at the end. `ports` says where
    routers listen, by site, for whoever comes through a firewall; else each takes any that is free.
    `advertise` says at which address a site's router is reached, where that is not what it binds to; with
    `bind="0.0.0.0"` everyone is reached at the address of its machine toward the driver. `tls` encrypts every
    connection: a mapping with `certificate`, `key` and `authority`, PEM files that every machine has at these
    paths. A storage that has it keeps it, until it is given other files, or `tls=False`.

    `backup` is where a copy of everything durable goes: a directory or a URL of fsspec, or a mapping with
    `location`, `every_s`, `keep` and `strict`. With `local`, routers and instances store on a disk of their
    executor, and are restored from the backup wherever they come back; `{executor}` in it is its id.

    `durability` is what an acknowledgement means: `os`, the process may die; `disk`, the power may fail;
    `replica`, the disk may be lost: another task, on another executor, holds it too. `copies_at` says for
    some sites that the replicas of another site hold their copies, as in `{"edge-1": "cloud"}`; a site that
    is not named has its own. Without it, all is as it was on this storage.

    `spare_workers` wait warm on each executor for a death; as many as `recover(over=)` let all begin at once.
    """
    check_durability(durability)
    check_count(spare_workers)
    spark = spark or open_session("tiercel")
    sites = parse_sites(sites)
    listening = Listening.of(bind, ports, advertise, tls, sites)
    keeping = Keeping.of(backup, local, durability, copies_at, sites)
    return Live(spark, sites, storage, durability, settings, listening, keeping, spare_workers)


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
        keeping: Keeping | None = None,
        spare_workers: int = 1,
    ) -> None:
        self.backend = backend_of(spark)  # a session that is stopped is told at once
        check_durability(durability)
        self.spark = spark
        self.graph = Graph(sites)
        self._listening = listening
        self._keeping = (keeping or Keeping())._replace(replicas=replica_plan(self.backend, durability))
        self._spare_workers = spare_workers
        self._temporary = storage is None
        self.place = Place(storage if storage is not None else tempfile.mkdtemp(prefix="tiercel-"))
        self._durability = durability
        try:
            self._settings = (settings or Settings()).validate()
        except InvalidRequest as refusal:
            raise UserError.of(refusal) from refusal
        self.build: Build = build_host  # what a task hosts; benchmarks put other machines there
        self._feeds: list[Feed] = []
        self._clients: weakref.WeakSet[Client] = weakref.WeakSet()
        self._lock: StorageLock | None = None
        self._wanting = threading.Lock()  # which instances should run
        self._deploying = threading.RLock()  # two threads may both be the first to use it
        self._hosting: Hosting | None = None
        self._console: Console | None = None
        self._watch: Watch | None = None
        self._vigil: Vigil | None = None
        self._spare: Spare | None = None
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
        if self._hosting is not None:
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
    ) -> LiveStream:
        """Declare a stream that producers and DataFrames write. Rows of one key stay in order.

        With `event_time`, a site's watermark is the newest event time it has seen, less `delay`. A site
        that has seen rows is waited for; with `idle`, no longer than that after its last one.
        """
        self.check_declaring()
        if not key or not isinstance(key, Sequence):
            hint = "rows of one key stay in order, and state is kept by key: name a column of the schema"
            what = f"stream {name!r} has no key: {key!r}"
            raise UserError(what, expected="key='column' or several", hint=hint)
        columns = columns_of(f"stream {name!r}", schema, key, event_time)
        delay_ms = parse_delay(delay) if event_time else None
        idle_ms = None if idle is None else parse_delay(idle, "idle")
        if idle_ms == 0 or (idle_ms is not None and not event_time):
            raise UserError(
                f"stream {name!r}: idle = {idle!r}",
                expected="a time above 0, of a stream with event_time=...",
                hint="without idle= a site that has seen rows is waited for",
            )
        declared = StreamDeclaration(name, columns, self.graph.root, delay_ms, idle_ms=idle_ms)
        self.graph.add_input(declared)
        return LiveStream(self, [(name, InputPlan(columns))], columns)

    def declare(self, declared: StreamDeclaration) -> LiveStream:
        self.graph.add_stream(declared)
        return LiveStream(self, [(declared.name, InputPlan(declared.columns))], declared.columns)

    def union(self, first: LiveStream, *others: LiveStream) -> LiveStream:
        """Several streams as the input of one operator. Keys must have the same columns."""
        return union_of(self, (first, *others))

    def add_feed(self, feed: Feed) -> None:
        if feed.site:
            self.graph.check_site(feed.site)
        check_feed_name(feed, self._feeds)
        if self._hosting is not None:
            start_feed(self.place, feed)
        self._feeds.append(feed)

    def look_after(self, client: Client) -> None:
        """A client that was made here ends with the deployment: nobody shall wait for what cannot come."""
        self._clients.add(client)

    def note_delay(self, stream: str, delay_ms: int) -> None:
        """The DataFrame that feeds it has a watermark: the stream takes over its delay."""
        if self._hosting is None:
            declared = self.graph.streams[stream]
            self.graph.streams[stream] = dataclasses.replace(declared, delay_ms=delay_ms)

    # -- from declarations to processes ---------------------------------------------------------

    def deploy(self) -> Live:
        """Start the routers and instances that were declared, then the feeds. Done by the first use."""
        with self._deploying:
            self._check_not_stopped()
            self.backend.check()
            if self._hosting is None:
                self._deploy()
        return self

    def _deploy(self) -> None:
        if not self.graph.operators:
            raise UserError("no operator was declared", hint="stream.transform_with_state(...)")
        lock = StorageLock(self.place)
        try:
            found = self.place.manifest() if self.place.taken else None
            if found is not None:
                self.graph.keep_initial(found, lambda operator: is_given(self.place, operator))
            listening = self._listening.applied(self.spark.conf.get("spark.driver.host") or "", found)
            manifest = self._keeping.applied(
                self.graph.manifest(self._settings, self._durability, listening, found), found
            )
            instances = self.place.wanted() if found is not None else []
            for name, declared in self.graph.operators.items():
                if not any(operator_of(i) == name for i in instances):
                    instances += declared.operator.instances
            new = len(manifest.topology.sites) + len(instances) + len(names_of(manifest))
            spare = SPARE_SLOTS if found is None else 0  # what has grown where it was can go on there
            check_slots(self.backend, new, running=hosted(self.backend.application), spare=spare)
            for name, declared in self.graph.operators.items() if found is not None else ():
                mine = [instance for instance in instances if operator_of(instance) == name]
                try_upgrade(self.place, name, declared.plan.state, mine)
            probe(self.spark, self.place.directory)
            describe(manifest)
            self.place.write(manifest)
            self.place.want(instances)
        except BaseException:
            lock.release()
            raise
        self._lock = lock
        register(self.spark)
        self._hosting = hosting = Hosting(self.backend, self.place, self.build)
        try:
            hosting.evict()
            self.place.registry.clear()
            others = len(manifest.topology.sites) + len(instances)
            start_replicas(self.backend, self.place, manifest, hosting, others)
            for site in manifest.topology.sites:
                hosting.start(site)
            for instance in instances:
                hosting.start(instance, self.graph.plan_of(operator_of(instance)))
            for name in [*manifest.topology.sites, *instances]:
                hosting.wait(name)
            self._console = Console(self.place, self._launch, self._retire)
            wait_attached(self.place, hosting, self._console, instances)
            self._watch = Watch(self.backend, self.place, manifest.topology, hosting, self._console)
            apart = manifest.replicas is not None and manifest.replicas.apart
            self._vigil = Vigil(self.backend, self.place, hosting, apart=apart)
            self._spare = Spare(self.backend, self.place, self._spare_workers)
            for name, declared in self.graph.operators.items():
                if declared.initial is not None:
                    columns = self.graph.streams[f"{name}.initial"].columns
                    give_initial_state(self.place, name, columns, declared.initial)
            for feed in self._feeds:
                start_feed(self.place, feed)
        except BaseException:
            self.stop()
            raise

    def read_stream(self, stream: str, options: Mapping[str, Any]) -> DataFrame:
        reader = self.spark.readStream.format("tiercel").option("storage", str(self.place.directory))
        return reader.option("stream", stream).options(**dict(options)).load()

    # -- moving and scaling ---------------------------------------------------------------------

    def move(
        self,
        operator: str,
        *,
        to: str,
        keys: Iterable[Any] | None = None,
        slots: Iterable[int] | None = None,
        source: str = "",
        strategy: str = "live",
        retries: int = 0,
        deadline_s: float | None = None,
    ) -> Moving:
        """Move keys, slots, or everything of an instance to an instance or a site. Returns at once.

        Keys are as users know them: values, or tuples of them. A site with no instance of the
        operator gets one.
        """
        wanted = self._wishes.owners(operator, keys, slots, source)
        destination = self._wishes.destination(operator, to)
        return self._wishes.move(operator, wanted, destination, strategy, retries, deadline_s)

    def scale(self, operator: str, instances: Mapping[str, int], *, strategy: str = "live") -> Scaling:
        """So many instances at each site, with an even share of the slots each. Returns at once."""
        return self._wishes.scale(operator, instances, strategy)

    def owners(self, operator: str, keys: Iterable[Any]) -> dict[Any, str]:
        """Key -> the instance that owns it now. Keys are as users know them: values, or tuples of them."""
        return self._wishes.owner_by_key(operator, keys)

    def recover(self, instance: str, *, over: int = 2) -> list[str]:
        """An instance is dead: new ones take over, each a share of its slots, and restore that by themselves.

        Without this Spark starts it again, and it restores everything alone. Returns their names when they
        work. What an instance of a live move or a restart owes must be settled first.
        """
        return self._wishes.recover(instance, over)

    def drain(self, instance: str) -> Moving:
        """Move everything off an instance, as before its executor is taken away."""
        return self._wishes.drain(instance)

    @property
    def _wishes(self) -> Wishes:
        self.deploy()
        assert self._console is not None and self._hosting is not None  # noqa: PT018
        return Wishes(self.backend, self.graph, self._console, self._hosting, self._launch_attached)

    def _launch_attached(self, instance: str) -> None:
        assert self._console is not None and self._hosting is not None  # noqa: PT018
        self._launch(instance)
        self._hosting.wait(instance)
        wait_attached(self.place, self._hosting, self._console, [instance])

    def _launch(self, instance: str) -> None:
        """The controller wants it; asked again while it starts."""
        assert self._hosting is not None
        if instance not in self._hosting.names:
            with self._wanting:
                self.place.want([*self.place.wanted(), instance])
            self._hosting.start(instance, self.graph.plan_of(operator_of(instance)))

    def _retire(self, instance: str) -> None:
        assert self._hosting is not None
        with self._wanting:
            self.place.want([i for i in self.place.wanted() if i != instance])
        self._hosting.dismiss(instance)
        Lives(self.place.lives, instance).forget_held()

    # -- seeing ---------------------------------------------------------------------------------

    def status(self) -> Status:
        """What runs where, printable and as a dict."""
        self.deploy()
        assert self._hosting is not None
        assert self._console is not None
        if not self.graph.sites.keys() & self.failures.keys():  # a router that was given up does not answer
            self._console.refresh()
        assert self._watch is not None
        return collect_status(self.place, self._hosting, self._console, self._watch, self._feeds)

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def failures(self) -> dict[str, str]:
        """Routers and instances that were given up, each with the reason."""
        return {} if self._hosting is None else dict(self._hosting.failures)

    @property
    def handovers(self) -> list[Handover]:
        """Executors that were decommissioned, and what of the deployment has left them."""
        return [] if self._watch is None else list(self._watch.handovers.values())

    # -- the end --------------------------------------------------------------------------------

    def stop(self) -> None:
        """End feeds and processes cleanly. What was stored stays, unless it was temporary."""
        if self._stopped:
            return
        self._stopped = True
        with contextlib.ExitStack() as ending:  # from the last to the first; one that fails stops no other
            if self._temporary:
                ending.callback(shutil.rmtree, self.place.directory, ignore_errors=True)
            if self._lock is not None:
                ending.callback(self._lock.release)
            if self._hosting is not None:
                ending.callback(self._hosting.end)
            if self._console is not None:
                ending.callback(self._console.end)
            if self._watch is not None:
                ending.callback(self._watch.end)
            if self._vigil is not None:
                ending.callback(self._vigil.end)
            if self._spare is not None:
                ending.callback(self._spare.end)
            for client in list(self._clients):
                ending.callback(end_client, client)
            for feed in self._feeds if not self.backend.is_stopped() else ():
                ending.callback(feed.stop)
