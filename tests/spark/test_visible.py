"""A deployment seen from Spark: descriptions of jobs, rows that tasks yield, listeners."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driver import OUTPUT, Chain
from oracle import kill, until
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests
from pyspark.sql import SparkSession

import tiercel
from tiercel.spark.listener import ProgressEvent


class Heard(tiercel.Listener):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.progress: list[ProgressEvent] = []
        self.started: list[tuple[str, int]] = []
        self.ended: list[str] = []
        self.moves: list[tuple[str, str]] = []

    def onProgress(self, event: ProgressEvent) -> None:
        self.progress.append(event)

    def onProcessStarted(self, process: Any) -> None:
        self.started.append((process.name, process.incarnation))

    def onProcessTerminated(self, process: Any) -> None:
        self.ended.append(process.name)

    def onMove(self, move: str, state: str) -> None:
        self.moves.append((move, state))


@pytest.fixture(scope="module")
def live(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tiercel.Live]:
    one = ResourceProfileBuilder().require(TaskResourceRequests().cpus(1)).build
    with tiercel.start(spark, ["cloud"], tmp_path_factory.mktemp("visible") / "storage") as running:
        cars = running.stream("cars", "car string, seq long", key="car")
        cars.transform_with_state(Chain(), OUTPUT, name="mean", instances={"cloud": 2}, resources=one)
        running.deploy()
        yield running


def rest(spark: SparkSession, what: str) -> Any:
    context = spark.sparkContext
    address = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}/{what}"
    with urllib.request.urlopen(address) as found:
        return json.load(found)


def test_jobs_say_which_process_they_are(spark: SparkSession, live: tiercel.Live) -> None:
    described = {job.get("description") for job in rest(spark, "jobs?status=running")}
    assert {
        "Tiercel: router of site cloud",
        "Tiercel: instance mean@cloud#1 of operator mean at site cloud",
        "Tiercel: instance mean@cloud#2 of operator mean at site cloud",
    } <= described


def test_listener_hears_seconds_processes_and_moves(live: tiercel.Live) -> None:
    heard = Heard()
    listening = live.listener(heard)
    until(lambda: len(heard.progress) >= 2, lambda: "no progress")
    assert {name for name, _ in heard.started} == {"cloud", "mean@cloud#1", "mean@cloud#2"}
    slots = list(range(8))
    live.move("mean", slots=slots, to="mean@cloud#2").wait()
    until(lambda: any(state == "done" for _, state in heard.moves), lambda: str(heard.moves))
    kill(live, "mean@cloud#1")
    until(lambda: ("mean@cloud#1", 2) in heard.started, lambda: str(heard.started))
    assert set(heard.progress[-1].processes) <= {"cloud", "mean@cloud#1", "mean@cloud#2"}
    listening.stop()
    count = len(heard.progress)
    time.sleep(1.5)
    assert len(heard.progress) == count


def test_resources_that_are_no_profile_are_refused(live: tiercel.Live, tmp_path: Path) -> None:
    with tiercel.start(live.spark, ["cloud"], tmp_path / "other") as other:
        cars = other.stream("cars", "car string, seq long", key="car")
        with pytest.raises(tiercel.UserError, match="resources of operator 'mean'"):
            cars.transform_with_state(Chain(), OUTPUT, name="mean", resources=1)  # type: ignore[arg-type]
