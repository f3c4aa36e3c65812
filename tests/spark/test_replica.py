"""Durability `replica` and the liveness monitor on Spark: lost disks, processes that stop and continue."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import tiercel
from tiercel.bench.operators import INPUT, INPUT_SCHEMA
from tiercel.chaos.outages import check_ours
from tiercel.chaos.steady_traffic import OPERATOR, Traffic, declare
from tiercel.core.settings import Settings
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.net.registry import Address
from tiercel.runtime.storage.directory import directory_of
from tiercel.runtime.storage.incarnations import IncarnationClaims
from tiercel.spark.api.deployment import Live
from tiercel.spark.api.status import ProcessStatus
from tiercel.spark.cluster.liveness import FailureDetector
from tiercel.spark.cluster.replica_placement import MACHINE_TRIES, AntiAffinity, colocated

INSTANCES = [f"{OPERATOR}@cloud#1", f"{OPERATOR}@cloud#2"]
REPLICA = "replica 1 of cloud"
SUSPECT_MS = 4_000.0
SOURCES = str(Path(tiercel.__file__).resolve().parent.parent)


def process(live: Live, name: str) -> ProcessStatus:
    return next(found for found in live.status().processes if found.name == name)


def until_reborn(live: Live, before: ProcessStatus) -> None:
    while (
        found := live.deployment.registry.find(before.name)
    ) is None or found.incarnation <= before.incarnation:
        assert live.failures == {}
        time.sleep(0.05)


def ours(live: Live, name: str) -> int:
    address = live.deployment.registry.find(name)
    assert address is not None
    return check_ours(address.pid, [os.getpid()])


@pytest.fixture
def deployment(spark: SparkSession, tmp_path: Path) -> Iterator[tuple[Live, Traffic]]:
    local = str(tmp_path / "disks" / "{executor}")
    request: dict[str, Any] = {"durability": "replica", "settings": Settings(suspect_ms=SUSPECT_MS)}
    with tiercel.start(spark, ["cloud"], tmp_path / "storage", local=local, **request) as live:
        traffic = Traffic(*declare(live, instances={"cloud": 2}))
        traffic.go_on()
        yield live, traffic


def test_process_that_lost_its_disk_is_restored_from_its_replica(
    deployment: tuple[Live, Traffic], tmp_path: Path
) -> None:
    live, traffic = deployment
    assert [p.name for p in live.status().processes if p.kind == "replica"] == [REPLICA]
    assert "it is the only one" in str(live.status())
    for name in (INSTANCES[0], "cloud", REPLICA, "cloud"):
        before = process(live, name)
        disk = directory_of(live.deployment, live.deployment.manifest(), name, before.executor)
        os.kill(ours(live, name), signal.SIGKILL)
        if name != REPLICA:
            disk.rename(tmp_path / f"gone {name} {before.incarnation}")
        until_reborn(live, before)
        traffic.go_on()
    traffic.finish()


def test_site_with_replicas_at_another_site_is_restored_and_may_change_that(
    spark: SparkSession, tmp_path: Path
) -> None:
    local = str(tmp_path / "disks" / "{executor}")
    counter = f"{OPERATOR}@edge-1#1"
    request: dict[str, Any] = {"durability": "replica", "local": local}
    rounds = 0

    def replicas() -> list[str]:
        return [found.name for found in live.status().processes if found.kind == "replica"]

    for replicas_at, held in (({"edge-1": "cloud"}, True), (None, True), ({}, False)):
        with tiercel.start(
            spark, ["cloud", "edge-1"], tmp_path / "storage", replicas_at=replicas_at, **request
        ) as live:
            traffic = Traffic(*declare(live, instances={"edge-1": 1}), begin=rounds)
            traffic.go_on(5)
            assert replicas() == ([REPLICA] if held else [REPLICA, "replica 1 of edge-1"])
            holder = REPLICA if held else "replica 1 of edge-1"
            while process(live, counter).replica_behind is None:  # it is said once a second
                time.sleep(0.1)
            assert process(live, "edge-1").replica == process(live, counter).replica == holder
            assert f"{holder} follows: {counter} (" in str(live.status())
            if not rounds:
                for name in ("edge-1", counter):
                    before = process(live, name)
                    disk = directory_of(live.deployment, live.deployment.manifest(), name, before.executor)
                    os.kill(ours(live, name), signal.SIGKILL)
                    disk.rename(tmp_path / f"gone {name}")
                    until_reborn(live, before)
                    traffic.go_on(5)
            rounds = traffic.finish()


@pytest.mark.parametrize("name", [INSTANCES[0], "cloud", pytest.param(REPLICA, marks=pytest.mark.long)])
def test_silent_process_is_suspected_and_restarted(deployment: tuple[Live, Traffic], name: str) -> None:
    live, traffic = deployment
    before = process(live, name)
    os.kill(ours(live, name), signal.SIGSTOP)
    until_reborn(live, before)
    traffic.go_on()
    assert process(live, name).suspicions == 1
    while Path(f"/proc/{before.pid}").exists():  # Spark kills it, stopped as it is
        time.sleep(0.05)
    traffic.finish()


@pytest.mark.parametrize("name", [INSTANCES[0], "cloud", pytest.param(REPLICA, marks=pytest.mark.long)])
def test_suspected_process_that_is_alive_is_fenced(deployment: tuple[Live, Traffic], name: str) -> None:
    """It wakes up while the next life begins; Spark kills it within two seconds, till then it is fenced."""
    live, traffic = deployment
    before = process(live, name)
    pid = ours(live, name)
    os.kill(pid, signal.SIGSTOP)
    while not live.suspicions.get(name):
        time.sleep(0.01)
    os.kill(pid, signal.SIGCONT)
    until_reborn(live, before)
    traffic.go_on()
    traffic.finish()


@pytest.mark.parametrize(
    "name", [INSTANCES[0], *(pytest.param(n, marks=pytest.mark.long) for n in ("cloud", REPLICA))]
)
def test_process_with_a_short_pause_is_not_suspected(deployment: tuple[Live, Traffic], name: str) -> None:
    live, traffic = deployment
    before = process(live, name)
    for _ in range(2):
        os.kill(ours(live, name), signal.SIGSTOP)
        time.sleep(SUSPECT_MS / 1e3 / 4)
        os.kill(ours(live, name), signal.SIGCONT)
        traffic.go_on()
    assert (process(live, name).incarnation, process(live, name).suspicions) == (before.incarnation, 0)
    traffic.finish()


def test_a_feed_commits_its_offsets_only_when_a_replica_holds_the_rows(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The source is the upstream backup: until the rows are as safe as was asked for, they stay its own."""
    source, commits = tmp_path / "source", tmp_path / "checkpoint" / "commits"
    source.mkdir()

    def add(batch: int) -> None:
        draft = tmp_path / f".{batch}"
        draft.write_text("".join(f'{{"sensor":{k},"n":{batch},"due":0,"value":1.0}}\n' for k in range(5)))
        draft.rename(source / f"{batch}.json")

    def committed() -> set[str]:
        return {path.name for path in commits.glob("[0-9]*")} if commits.exists() else set()

    settings = Settings(suspect_ms=600_000)  # nobody starts it again while it is stopped
    with tiercel.start(
        spark, ["cloud"], tmp_path / "storage", durability="replica", settings=settings
    ) as live:
        _, averages = declare(live)
        live.deploy()
        subscriber = averages.subscribe(after=0)
        rows = spark.readStream.schema(INPUT_SCHEMA).json(str(source))
        query = (
            rows.writeStream.format("tiercel")
            .option("storage", str(live.deployment.directory))
            .option("stream", INPUT)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )
        try:
            add(0)
            while committed() != {"0"}:
                assert query.exception() is None
                time.sleep(0.05)
            stopped = ours(live, REPLICA)
            os.kill(stopped, signal.SIGSTOP)
            try:
                add(1)
                while not (tmp_path / "checkpoint" / "offsets" / "1").exists():  # planned, not published
                    assert query.exception() is None
                    time.sleep(0.05)
                time.sleep(4.0)
                assert committed() == {"0"}
                assert len(subscriber.poll(0.1)) == 5  # of the first batch
            finally:
                os.kill(stopped, signal.SIGCONT)
            while committed() != {"0", "1"}:
                assert query.exception() is None
                time.sleep(0.05)
        finally:
            query.stop()
            subscriber.close()


def test_unknown_durability_and_too_few_slots_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(tiercel.UserError, match="durability 'replicas'\nexpected: one of: os, disk, replica"):
        tiercel.start(spark, durability="replicas")  # type: ignore[arg-type]
    with tiercel.start(spark, [f"site-{n}" for n in range(7)], tmp_path / "s", durability="replica") as live:
        declare(live)
        with pytest.raises(tiercel.UserError, match="15 routers, replicas and instances need a"):
            live.deploy()


@pytest.mark.long
@pytest.mark.parametrize("site", ["cloud", "edge-1"])
def test_killed_executor_with_lost_disk_loses_and_doubles_nothing(tmp_path: Path, site: str) -> None:
    """Copies are at the cloud, also those of the edge."""
    program = Path(__file__).with_name("lost_executor.py")
    command = [sys.executable, str(program), str(tmp_path), site]
    environment = os.environ | {"PYTHONPATH": SOURCES}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    report = json.loads(ended.stdout.splitlines()[-1])
    assert report["rounds"] > 60
    assert report["warm_on"] == 2  # a worker waits on each executor, whichever dies
    assert [(site in lost, "replica 1 of cloud" in lost) for lost in report["lost"]].count(
        (False, False)
    ) == 0
    assert set(report["replicas"]) == {"replica 1 of cloud", "replica 2 of cloud"}
    assert set(report["holders"]) <= set(report["replicas"])


@pytest.mark.long
@pytest.mark.parametrize("machines", ["112", "111"])
def test_replicas_of_a_site_are_on_different_machines_if_there_are_two(tmp_path: Path, machines: str) -> None:
    """Three executors play machines; where there is one machine only, everything starts all the same."""
    program = Path(__file__).with_name("several_machines.py")
    command = [sys.executable, str(program), str(tmp_path), machines]
    environment = os.environ | {"PYTHONPATH": SOURCES}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    report = json.loads(ended.stdout.splitlines()[-1])
    executors, used = zip(*report["replicas"], strict=True)
    assert len(set(executors)) == 2
    assert len(set(used)) == len(set(machines))
    assert report["with_copy_elsewhere"] == (report["processes"] if len(set(machines)) > 1 else [])


def test_younger_of_two_replicas_on_one_executor_moves(tmp_path: Path) -> None:
    """The older one moved: it held the only copies of an executor that had just been lost."""
    place = DeploymentDir(tmp_path)
    for name in ("replica 2 of cloud", "replica 1 of cloud", "replica 1 of edge", "cloud"):
        place.registry.publish(Address(name, "127.0.0.1", 1, 1, 1, executor="7"))
        time.sleep(0.01)
    assert colocated(place, place.registry.names()) == ["replica 1 of cloud"]


def publish(place: DeploymentDir, **where: tuple[str, str]) -> None:
    """Who is on which executor of which machine: `a1` is replica 1 of site a, `a` its router."""
    for name, (executor, machine) in where.items():
        full = f"replica {name[1]} of {name[0]}" if name[1:] else name
        place.registry.publish(Address(full, "127.0.0.1", 1, 1, 1, executor=executor, machine=machine))
        time.sleep(0.01)


def test_younger_of_two_replicas_on_one_machine_moves_if_there_is_another(tmp_path: Path) -> None:
    place, anti_affinity = DeploymentDir(tmp_path), AntiAffinity()

    def look() -> list[str]:
        return anti_affinity.pick_mover(place, place.registry.names())

    publish(place, a1=("1", "m"), a2=("2", "m"), b1=("1", "m"), a=("3", "m"))
    assert colocated(place, place.registry.names()) == []
    assert look() == []  # there is no other machine
    publish(place, a=("4", "n"))
    assert look() == ["replica 2 of a"]
    publish(place, a2=("4", "n"))
    assert look() == []
    publish(place, a2=("2", "m"))
    assert [look() for _ in range(MACHINE_TRIES + 2)] == [["replica 2 of a"]] * MACHINE_TRIES + [[], []]
    publish(place, b=("5", "o"))  # a machine that is new: it is worth another try
    assert look() == ["replica 2 of a"]


def test_replica_that_holds_the_only_copy_does_not_move(tmp_path: Path) -> None:
    place, anti_affinity = DeploymentDir(tmp_path), AntiAffinity()
    publish(place, a1=("1", "m"), a2=("2", "m"), a=("4", "n"))
    incarnations = IncarnationClaims(place.incarnations, "a")
    incarnations.claim(0)
    incarnations.set_holder(1, "replica 2 of a")
    assert anti_affinity.pick_mover(place, place.registry.names()) == ["replica 2 of a"]
    time.sleep(0.01)
    publish(place, a=("4", "n"))  # it has come back just now, and does not follow yet
    assert anti_affinity.pick_mover(place, place.registry.names()) == []


def test_silence_is_not_counted_while_the_driver_itself_was_asleep() -> None:
    silence = FailureDetector(suspect_s=2.0, check_s=0.5)
    assert silence.observe({"a": 1, "b": 1, "starting": 0}, 100.0) == {}
    for n in range(1, 5):
        assert silence.observe({"a": 1 + n, "b": 1, "starting": 0}, 100.0 + n / 2) == {}
    assert silence.observe({"a": 9, "b": 1, "starting": 0}, 102.5) == {"b": 2.5}
    assert silence.observe({"a": 9, "b": 1}, 103.0) == {}  # counted from zero: it is being restarted
    assert silence.observe({"a": 9, "b": 1}, 200.0) == {}  # the driver itself was asleep
    assert silence.observe({"a": 9, "b": 1}, 200.5) == {}
