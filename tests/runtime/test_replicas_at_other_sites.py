"""Replicas at another site: a process that loses its disk is restored from there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from deployment_in_process import (
    INPUT,
    OPERATOR,
    OUTPUT,
    Hosted,
    Running,
    assert_once_and_in_order,
    instance_host,
    make_place,
    payloads,
    replica_host,
    router_host,
    rows,
    until,
)
from tiercel.cli.main import run_app
from tiercel.core.model.topology import Stream, Topology, instance_name
from tiercel.errors import UserError
from tiercel.runtime.client.producer import Producer
from tiercel.runtime.client.subscriber import Subscriber
from tiercel.runtime.config import DurabilityConfig
from tiercel.runtime.deployment import DeploymentDir, Manifest, ReplicaPlan, StreamFacts
from tiercel.runtime.process.host import Host
from tiercel.runtime.process.metrics import last_lines
from tiercel.runtime.replication.primary import ReplicationPhase, replica_name, replicas_of
from tiercel.runtime.replication.replica import Replica
from tiercel.runtime.storage.incarnations import IncarnationClaims
from tiercel.spark.cluster.replica_placement import replica_names

CLOUD, EDGE = "cloud", "edge-1"
SITES = (CLOUD, EDGE)
INSTANCE = instance_name(OPERATOR, EDGE, 1)
AT_CLOUD, AT_EDGE = replica_name(CLOUD, 1), replica_name(EDGE, 1)


def two_sites(directory: Path, local: str, at: dict[str, str]) -> DeploymentDir:
    """Rows enter and are counted at the edge, and come out at the cloud."""
    place = make_place(directory, None, local, ReplicaPlan(at=at), checkpoint_ms=50)
    made = place.manifest()
    operator = msgspec.structs.replace(made.topology.operators[OPERATOR], instances=(INSTANCE,))
    streams = {OUTPUT: Stream(OUTPUT, CLOUD)}
    topology = Topology({CLOUD: None, EDGE: CLOUD}, streams, {OPERATOR: operator})
    facts = made.streams | {INPUT: StreamFacts("{}", ("key",), sites=SITES)}
    place.write(msgspec.structs.replace(made, topology=topology, streams=facts))
    return place


class Deployment(Hosted):
    """Two sites, a router each, an instance, and replicas where they are asked for."""

    def __init__(self, directory: Path, at: dict[str, str], *, local: bool) -> None:
        super().__init__()
        disks = str(directory / "disks" / "{executor}") if local else ""
        self.place = two_sites(directory / "storage", disks, at)
        self.executors = {CLOUD: "1", EDGE: "2", INSTANCE: "3"}

    def start(self, *names: str) -> None:
        options = {"metrics": self.place.metrics}
        makers: dict[str, Callable[[], Host]] = {
            AT_CLOUD: lambda: replica_host(self.place),
            AT_EDGE: lambda: replica_host(self.place, site=EDGE),
            CLOUD: lambda: router_host(self.place, self.executors[CLOUD], CLOUD, **options),
            EDGE: lambda: router_host(self.place, self.executors[EDGE], EDGE, **options),
            INSTANCE: lambda: instance_host(self.place, self.executors[INSTANCE], INSTANCE, **options),
        }
        for name in names:
            self.hosts[name] = Running(makers[name]())

    def lose(self, *names: str) -> None:
        """They die, their disks with them, and come back on other executors."""
        for name in names:
            if name in self.hosts:
                self.hosts.pop(name).end()
            self.lose_disk(name)

    def change(self, at: dict[str, str]) -> None:
        """As a start with another `replicas_at=` does; nobody runs meanwhile."""
        found = self.place.manifest()
        plan = DurabilityConfig(local=found.local, replicas=ReplicaPlan(), replicas_at=at)
        self.place.write(plan.applied(found, found))
        self.place.registry.clear()

    def held_by(self, replica: str) -> set[str]:
        machine = self.hosts[replica].host.machine
        assert isinstance(machine, Replica)
        return {name for name, copy in machine.stores.items() if copy.through >= 0}

    def until_followed(self, *names: str) -> None:
        for name in names:
            replication = self.hosts[name].host._replication
            assert replication is not None
            until(lambda r=replication: r.phase is ReplicationPhase.FOLLOWING, f"no replica follows {name}")  # type: ignore[misc]

    def work(self) -> None:
        """Rows go in at the edge and come out at the cloud."""
        with (
            Producer(self.place, INPUT, name="p", site=EDGE) as producer,
            Subscriber(
                self.place, OUTPUT, after=self.entries[-1].offset if self.entries else 0
            ) as subscriber,
        ):
            self.send(producer)
            self.read(subscriber)


@contextlib.contextmanager
def deployed(directory: Path, at: dict[str, str], *, local: bool = True) -> Iterator[Deployment]:
    deployment = Deployment(directory, at, local=local)
    try:
        deployment.start(*replica_names(deployment.place.manifest()), CLOUD, EDGE, INSTANCE)
        yield deployment
    finally:
        deployment.end()


def test_site_lost_with_its_disks_is_restored_from_the_replica_of_another_site(
    tmp_path: Path,
) -> None:
    with deployed(tmp_path, {EDGE: CLOUD}) as deployment:
        for lost in ((INSTANCE,), (EDGE,), (CLOUD,), (EDGE, INSTANCE)):
            deployment.work()
            deployment.until_followed(CLOUD, EDGE, INSTANCE)
            assert deployment.held_by(AT_CLOUD) == {CLOUD, EDGE, INSTANCE}
            deployment.lose(*lost)
            deployment.start(*lost)
            deployment.work()
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)
        assert AT_EDGE not in deployment.place.registry.names()


def test_edge_acknowledges_nothing_while_its_replica_site_holds_no_copy(tmp_path: Path) -> None:
    with deployed(tmp_path, {EDGE: CLOUD}) as deployment:
        deployment.work()
        with Producer(deployment.place, INPUT, name="p", site=EDGE) as producer:
            deployment.hosts.pop(AT_CLOUD).end()
            deployment.start(AT_EDGE)  # its own would be there, but is not asked
            producer.send(rows(deployment.sent, 50))
            with pytest.raises(UserError):
                producer.flush(1.0)
            assert deployment.held_by(AT_EDGE) == set()
            deployment.start(AT_CLOUD)
            producer.flush(30)
        deployment.sent += 50
        deployment.work()
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)


def test_two_sites_can_host_replicas_of_each_other(tmp_path: Path) -> None:
    with deployed(tmp_path, {EDGE: CLOUD, CLOUD: EDGE}) as deployment:
        deployment.work()
        deployment.until_followed(CLOUD, EDGE, INSTANCE)
        assert deployment.held_by(AT_CLOUD) == {EDGE, INSTANCE}
        assert deployment.held_by(AT_EDGE) == {CLOUD}
        deployment.lose(CLOUD)
        deployment.start(CLOUD)
        deployment.work()
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)


@pytest.mark.parametrize(("before", "after"), [({EDGE: CLOUD}, {}), ({}, {EDGE: CLOUD})])
def test_processes_continue_from_their_disks_after_replica_sites_changed(
    tmp_path: Path, before: dict[str, str], after: dict[str, str]
) -> None:
    """Also on another executor of the same host: the replica that followed does not run any more."""
    with deployed(tmp_path, before) as deployment:
        deployment.work()
        for at in (after, before):
            deployment.until_followed(CLOUD, EDGE, INSTANCE)
            deployment.end()
            deployment.change(at)
            deployment.executors[EDGE] = str(int(deployment.executors[EDGE]) + 10)
            deployment.start(*replica_names(deployment.place.manifest()), CLOUD, EDGE, INSTANCE)
            deployment.work()
        assert_once_and_in_order(payloads(deployment.entries), deployment.sent)


@pytest.mark.parametrize(
    ("before", "after", "was", "now"),
    [({EDGE: CLOUD}, {}, AT_CLOUD, AT_EDGE), ({}, {EDGE: CLOUD}, AT_EDGE, AT_CLOUD)],
)
def test_process_without_disk_reports_that_its_former_replica_does_not_run_any_more(
    tmp_path: Path, before: dict[str, str], after: dict[str, str], was: str, now: str
) -> None:
    with deployed(tmp_path, before) as deployment:
        deployment.work()
        deployment.until_followed(EDGE)
        deployment.end()
        deployment.change(after)
        deployment.lose(EDGE)
        deployment.start(*replica_names(deployment.place.manifest()))
        says = f"{was} does not run any more: since this start {now} hold copies"
        with pytest.raises(UserError, match=f"both copies of {EDGE} are gone: .* and {says}"):
            router_host(deployment.place, deployment.executors[EDGE], EDGE)


def test_metrics_of_each_process_name_its_replica(tmp_path: Path) -> None:
    def holders() -> dict[str, tuple[str | None, int | None]]:
        lines = last_lines(deployment.place.metrics)
        return {name: (line.replica, line.replica_behind) for name, line in lines.items()}

    with deployed(tmp_path, {EDGE: CLOUD}) as deployment:
        deployment.work()
        deployment.until_followed(CLOUD, EDGE, INSTANCE)
        everyone = dict.fromkeys((CLOUD, EDGE, INSTANCE), (AT_CLOUD, 0))
        until(lambda: holders() == everyone, "they do not say who holds their copies")
        with Producer(deployment.place, INPUT, name="p", site=EDGE) as producer:
            deployment.hosts.pop(AT_CLOUD).end()
            producer.send(rows(deployment.sent, 1))
            until(
                lambda: holders()[EDGE][0] == "" and bool(holders()[EDGE][1]),
                "it does not say that none does",
            )
            deployment.start(AT_CLOUD)
            producer.flush(30)
        assert IncarnationClaims(deployment.place.incarnations, EDGE).holder() == AT_CLOUD


def test_state_show_names_the_replica_and_its_lag_while_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown() -> dict[str, tuple[str | None, int | None]]:
        assert run_app(["state", "show", str(deployment.place.directory), "--json"]) == 0
        lines = msgspec.json.decode(capsys.readouterr().out)
        return {line["process"]: (line["replica"], line["replica_behind"]) for line in lines}

    with deployed(tmp_path, {EDGE: CLOUD}, local=False) as deployment:
        deployment.work()
        deployment.until_followed(CLOUD, EDGE, INSTANCE)
        everyone = dict.fromkeys((CLOUD, EDGE, INSTANCE), (AT_CLOUD, 0))
        until(lambda: shown() == everyone, "it is not shown")
        deployment.end()
        assert shown() == dict.fromkeys((CLOUD, EDGE, INSTANCE), (AT_CLOUD, None))  # it held them last


# -- what a user says -------------------------------------------------------------------------------------


def applied(replicas_at: dict[str, str] | None, found: Manifest, durability: str = "replica") -> Manifest:
    keeping = DurabilityConfig.of(None, None, durability, replicas_at, SITES)
    plan = ReplicaPlan(per_site=2, apart=True) if durability == "replica" else None
    return keeping._replace(replicas=plan).applied(found, found)


def test_replica_sites_stay_as_configured_until_changed(tmp_path: Path) -> None:
    manifest = two_sites(tmp_path, "", {}).manifest()
    configured = applied({EDGE: CLOUD}, manifest)
    assert (
        replicas_of(configured, EDGE) == replicas_of(configured, CLOUD) == [AT_CLOUD, replica_name(CLOUD, 2)]
    )
    assert replica_names(configured) == replicas_of(configured, CLOUD)
    assert applied(None, configured) == configured
    for own in ({}, {EDGE: EDGE}):
        again = applied(own, configured)
        assert again == applied(None, manifest)
        assert replicas_of(again, EDGE) == [AT_EDGE, replica_name(EDGE, 2)]
    assert applied(None, configured, "os").replicas is None


def test_manifest_without_replica_sites_can_be_read(tmp_path: Path) -> None:
    place = two_sites(tmp_path, "", {})
    path = place.directory / "deployment.json"
    written = msgspec.json.decode(path.read_bytes())
    del written["replicas"]["at"]
    path.write_bytes(msgspec.json.encode(written))
    assert replicas_of(place.manifest(), EDGE) == [AT_EDGE]


@pytest.mark.parametrize(
    ("replicas_at", "durability", "says"),
    [
        (
            {EDGE: "clowd"},
            "replica",
            "unknown site 'clowd'\nexpected: sites of this deployment: cloud, edge-1",
        ),
        ({"edge-2": CLOUD}, "replica", "unknown site 'edge-2'"),
        ({EDGE: [CLOUD]}, "replica", r"unknown site \['cloud'\]"),
        ("cloud", "replica", "replicas_at = 'cloud'\nexpected: a site and the site of its replicas"),
        ({EDGE: CLOUD}, "os", "with durability 'os'\nexpected: durability 'replica'"),
        ({EDGE: CLOUD}, "disk", "with durability 'disk'"),
    ],
)
def test_invalid_replica_sites_are_refused(replicas_at: dict[str, str], durability: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        DurabilityConfig.of(None, None, durability, replicas_at, SITES)
