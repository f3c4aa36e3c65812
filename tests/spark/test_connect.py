"""Deployments through Spark Connect: without a SparkContext and a JVM of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tiercel
from tiercel.spark.cluster.backend import ThroughConnect, ThroughContext, backend_of

pytest.importorskip("grpc", reason="Spark Connect needs the extra tiercel[connect]")

HERE = Path(__file__).resolve().parent
SOURCES = Path(tiercel.__file__).resolve().parent.parent


def client(what: str, url: str, storage: Path, *more: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(HERE / "connected.py"), what, url, str(storage), *more]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=os.environ | {"PYTHONPATH": path}
    )


def ended(program: subprocess.Popen[str]) -> tuple[list[str], str]:
    out, said = program.communicate()
    assert program.returncode == 0, said
    return out.splitlines(), said


def test_deployment_works_through_spark_connect(
    spark: SparkSession, connect_url: str, tmp_path: Path
) -> None:
    told, said = ended(client("everything", connect_url, tmp_path))
    assert told == ["the Spark session is stopped"]
    assert said.startswith("through Spark Connect: ")
    for lack in ThroughConnect.lacks:
        assert lack in said
    assert spark.sparkContext.statusTracker().getActiveStageIds() == []


def test_next_client_stops_processes_of_a_killed_client(
    spark: SparkSession, connect_url: str, tmp_path: Path
) -> None:
    """Its tasks went on, and held the storage against everyone, until the server gave their client up."""
    first = client("begin_and_wait_to_be_killed", connect_url, tmp_path / "storage")
    assert first.stdout is not None
    rounds = first.stdout.readline().strip()
    first.kill()
    first.communicate()
    assert spark.sparkContext.statusTracker().getActiveStageIds() != []
    told, _ = ended(client("take_over", connect_url, tmp_path / "storage", rounds))
    assert int(told[0]) > int(rounds)
    assert spark.sparkContext.statusTracker().getActiveStageIds() == []


def test_classic_session_lacks_no_feature(spark: SparkSession) -> None:
    backend = backend_of(spark)
    assert isinstance(backend, ThroughContext)
    assert backend.lacks == ()
    assert backend.slots() == 16
    assert not backend.decommissions  # one machine: no executor can leave
