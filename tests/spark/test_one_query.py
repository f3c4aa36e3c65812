"""The drop-in operator inside the user's own query: exactly once through kills, while keys move."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import one_query_driver
import pytest
from driver import OUTPUT, Chain, chained
from oracle import Files, differences, kill, under_spark, until
from oracle_cases import CASES
from pyspark.sql import DataFrame, SparkSession

import tiercel
from tiercel.spark.api import drop_in
from tiercel.spark.sources.batch_step import BatchStep, this_task

INPUT = one_query_driver.INPUT
CARS = 7


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    tiercel.stop_all()


class Killed(BatchStep, frozen=True):
    """A step whose Python worker is killed in some batches: once before, and once while it yields outputs."""

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        batch = this_task().batch
        marks = self.deployment.directory.parent / "marks"

        def die(mark: str) -> None:
            path = marks / f"{mark}-{batch}"
            if not path.exists():
                path.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        outputs = super().__call__(batches)
        for n, found in enumerate(outputs):
            if batch in (2, 6):
                die("sent")  # all rows are sent, and nothing is yielded
            yield found
            if batch in (4, 6) and n == 0:
                die("yielded")


class Expected:
    """Rows of all cars, and what comes out when nothing fails."""

    def __init__(self) -> None:
        self.state: dict[str, tuple[int, str]] = {}
        self.rows: list[tuple[str, int, int, str]] = []

    def next(self, count: int) -> list[tuple[str, int]]:
        given = []
        for _ in range(count):
            seq = len(self.rows)
            car = f"car-{seq % CARS}"
            done, chain = self.state.get(car, (0, ""))
            self.state[car] = done + 1, chained(chain, seq)
            self.rows.append((car, seq, *self.state[car]))
            given.append((car, seq))
        return given


def test_each_row_is_in_the_sink_once_while_tasks_and_processes_are_killed_and_keys_move(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setattr(drop_in, "BatchStep", Killed)
    files, expected = Files(tmp_path / "files", INPUT), Expected()
    sink = str(tmp_path / "sink")
    chains = tiercel.transform_with_state(
        files.frame(spark).groupBy("car"),
        Chain(),
        OUTPUT,
        "append",
        "none",
        storage=tmp_path / "storage",
        name="chain",
    )
    [live] = tiercel.deployments()
    writer = chains.writeStream.option("checkpointLocation", str(tmp_path / "out")).queryName("chains")
    query = writer.start(sink, format="parquet")
    moved = []
    for n in range(9):
        files.write(expected.next(60))
        if n == 3:
            live.scale("chain", {"local": 2}).wait()
        if n == 5:
            keys = [f"car-{k}" for k in range(CARS)]
            owners = live.owners("chain", keys)
            source = owners[keys[0]]
            to = next(i for i in ("chain@local#1", "chain@local#2") if i != source)
            moved = [key for key in keys if owners[key] == source]
            live.move("chain", keys=moved, to=to).wait()
            assert set(live.owners("chain", moved).values()) == {to}
        if n == 6:
            kill(live, "chain@local#1")
        if n == 7:
            kill(live, "local")
        query.processAllAvailable()
    query.stop()
    assert moved
    assert sorted(path.name for path in marks.iterdir()) == ["sent-2", "sent-6", "yielded-4", "yielded-6"]
    found = sorted(map(tuple, spark.read.schema(OUTPUT).parquet(sink).collect()))
    assert found == sorted(expected.rows)


def test_rows_that_differ_in_a_second_attempt_fail_the_query_by_name(
    spark: SparkSession, tmp_path: Path
) -> None:
    files = Files(tmp_path / "files", INPUT)
    storage, out = tmp_path / "storage", str(tmp_path / "out")

    def run(files: Files) -> Any:
        chains = tiercel.transform_with_state(
            files.frame(spark).groupBy("car"), Chain(), OUTPUT, "append", "none", storage=storage
        )
        return chains.writeStream.option("checkpointLocation", out).format("noop").start()

    files.write([("a", 1), ("b", 2)])
    query = run(files)
    query.processAllAvailable()
    query.stop()
    tiercel.stop_all()
    last = max(int(path.name) for path in Path(out, "commits").glob("*") if path.name.isdecimal())
    for path in Path(out, "commits").glob(f"*{last}*"):
        path.unlink()  # as if the driver had died before it committed the batch
    (files.directory / "0000.json").write_text('{"car": "a", "seq": 9}\n', encoding="utf-8")
    query = run(files)
    until(lambda: not query.isActive, lambda: "the query goes on")
    said = str(query.exception())
    assert "has other rows than at its first attempt" in said
    assert f"batch {last} of query" in said


@pytest.mark.long
def test_a_second_query_from_one_operator_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    files = Files(tmp_path / "files", INPUT)
    files.write([("a", 1)])
    chains = tiercel.transform_with_state(
        files.frame(spark).groupBy("car"), Chain(), OUTPUT, "append", "none"
    )
    first = chains.writeStream.format("noop").start()
    first.processAllAvailable()
    second = chains.writeStream.format("noop").start()
    until(lambda: not second.isActive, lambda: "the second query goes on")
    assert "expected one query" in str(second.exception())
    first.stop()


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(n, marks=pytest.mark.long) for n in ("value state", "list state", "map state")),
        pytest.param("initial state", marks=pytest.mark.long),
        pytest.param("time to live", marks=pytest.mark.long),
        pytest.param("processing-time timers", marks=pytest.mark.long),
        "event-time timers",
    ],
)
def test_outputs_of_each_key_equal_those_of_spark(name: str, spark: SparkSession, tmp_path: Path) -> None:
    case = CASES[name]()
    expected, counts = under_spark(tmp_path / "spark", spark, case)

    def trouble(n: int) -> None:
        [live] = tiercel.deployments()
        if n == 1:
            live.scale("op", {"local": 2}).wait()
        if n == 3:
            kill(live, "op@local#2")

    def transform(*arguments: Any) -> DataFrame:
        return tiercel.transform_with_state(*arguments, name="op")

    found, of_batches = under_spark(tmp_path / "tiercel", spark, case, transform, trouble)
    assert of_batches == counts
    assert not differences(found, expected)[:3]


@pytest.mark.long
def test_sink_has_each_row_once_in_order_after_the_driver_was_killed(tmp_path: Path) -> None:
    files, expected = Files(tmp_path / "files", INPUT), Expected()
    for n in range(12):
        files.write(expected.next(50))
        path = files.directory / f"{n:04}.json"
        os.utime(path, (1_700_000_000 + n, 1_700_000_000 + n))  # Spark reads the oldest first

    def numbers(kind: str) -> set[int]:
        return {int(p.name) for p in (tmp_path / "out" / kind).glob("*") if p.name.isdecimal()}

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "driver.log").open("ab") as log:
            arguments = [sys.executable, one_query_driver.__file__, str(tmp_path), str(len(expected.rows))]
            return subprocess.Popen(arguments, stdout=log, stderr=log, start_new_session=True)

    for least in (1, 4):
        process = start()
        until(
            lambda least=least: any(n >= least for n in numbers("offsets") - numbers("commits")),
            lambda: (tmp_path / "driver.log").read_text(encoding="utf-8")[-3000:],
        )
        os.killpg(process.pid, signal.SIGKILL)  # the driver and its JVM, in the middle of a batch
        process.wait()
    process = start()
    assert process.wait(300) == 0, (tmp_path / "driver.log").read_text(encoding="utf-8")[-3000:]
    found = json.loads((tmp_path / one_query_driver.FOUND).read_text(encoding="utf-8"))
    assert sorted(map(tuple, found)) == sorted(expected.rows)


class Choosy(Chain):
    """Raises on some rows."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        kept = list(rows)
        if any(row.seq % 10 == 3 for row in kept):
            raise ValueError(f"rows of {key[0]} end in 3")
        yield from super().handleInputRows(key, iter(kept), timerValues)


def test_dead_letters_that_nobody_reads_are_counted_and_a_warning_says_why(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Files(tmp_path / "files", INPUT)
    files.write([("car-1", seq) for seq in range(40)])
    grouped = files.frame(spark).groupBy("car")
    chosen = tiercel.transform_with_state(grouped, Choosy(), OUTPUT, "append", "none")
    running = chosen.writeStream.format("noop").start()
    running.processAllAvailable()
    [live] = tiercel.deployments()
    until(lambda: live.status().dead_letters["choosy.dead"] >= 4, lambda: str(live.status()))
    running.stop()
    assert live.status().dead_letters == {"input/dead": 0, "choosy.dead": 4}
    assert "dead letters of choosy.dead: 4" in str(live.status())
    assert "the first reason: ValueError: rows of car-1 end in 3" in caplog.text
