"""Spark's own transformWithState as the oracle: one case on both sides, outputs per key side by side.

Responsible for: feeding both sides the same batches, moves and kills under Tiercel, collecting outputs.
Not responsible for: the processors and their input (oracle_cases.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import reduce
from pathlib import Path
from typing import Any

from oracle_cases import MARKER, OUTPUT, Case
from plain_spark import run_until_worker_connects
from pyspark.sql import DataFrame, GroupedData, SparkSession
from pyspark.sql.types import StructType

import tiercel
from tiercel.core.model.topology import site_of
from tiercel.spark.api.moves import MoveHandle
from tiercel.spark.api.streams import LiveStream
from tiercel.spark.operators.folds import Fold

HANG_S = 180.0  # longer than anything takes: a test that hangs ends with what is missing

MARKERS = 40  # enough that each instance has one

Outputs = dict[str, list[tuple[int, str]]]


def until(done: Callable[[], bool], missing: Callable[[], str]) -> None:
    give_up = time.monotonic() + HANG_S
    while not done():
        if time.monotonic() > give_up:
            raise AssertionError(missing())
        time.sleep(0.01)


class Collected:
    """Outputs as they come, per key in order."""

    def __init__(self) -> None:
        self.of_key: Outputs = {}
        self.count = 0
        self.marked: set[str] = set()  # markers that have come

    def add(self, rows: Sequence[Any]) -> None:
        for row in rows:
            if row.told.startswith(f"{MARKER}: "):
                self.marked.add(row.k)
            else:
                self.of_key.setdefault(row.k, []).append((row.seq, row.told))
                self.count += 1


# -- under Spark ------------------------------------------------------------------------------


class Files:
    """A directory that Spark reads as a stream: one file is one batch."""

    def __init__(self, directory: Path, schema: str) -> None:
        self.directory = directory
        self.names = StructType.fromDDL(schema).names
        self.schema = schema
        directory.mkdir(parents=True)
        self._count = 0

    def write(self, rows: Sequence[Sequence[Any]]) -> None:
        """Whole from the first moment that Spark can see it; an empty one would be no file to Spark."""
        lines = [json.dumps(dict(zip(self.names, map(_in_json, row), strict=True))) for row in rows]
        draft = self.directory / f".{self._count}.draft"
        draft.write_text("\n".join(lines), encoding="utf-8")
        draft.rename(self.directory / f"{self._count:04}.json")
        self._count += 1

    def frame(self, spark: SparkSession) -> DataFrame:
        return spark.readStream.schema(self.schema).option("maxFilesPerTrigger", 1).json(str(self.directory))


def _in_json(value: Any) -> Any:
    return value.isoformat(timespec="milliseconds") if isinstance(value, datetime) else value


Transform = Callable[..., DataFrame]  # as `GroupedData.transformWithState`, with the grouped rows first


@run_until_worker_connects
def under_spark(
    directory: Path,
    spark: SparkSession,
    case: Case,
    transform: Transform = GroupedData.transformWithState,
    before: Callable[[int], object] = lambda n: None,
) -> tuple[Outputs, list[int]]:
    """Outputs per key, and how many there were after each batch."""
    files = {name: Files(directory / name, schema) for name, schema in case.streams.items()}
    frames = [each.frame(spark) for each in files.values()]
    if case.event_time:
        frames = [frame.withWatermark(case.event_time, f"{case.delay_ms} milliseconds") for frame in frames]
    frame = reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), frames)
    initial = None
    if case.initial is not None:
        initial = spark.createDataFrame(case.initial, case.initial_schema).groupBy("k")
    results = transform(frame.groupBy("k"), case.processor, OUTPUT, "update", case.time_mode, initial)
    collected = Collected()
    query = (
        results.writeStream.outputMode("update")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .foreachBatch(lambda batch, _: collected.add(batch.collect()))
        .start()
    )
    counts = []
    try:
        for n, batch in enumerate(case.batches):
            before(n)
            for name, rows in batch.items():
                files[name].write(rows)
            if case.outputs is None:
                query.processAllAvailable()  # a batch without data behind it, for timers, included
            else:
                wanted = case.outputs[n]
                until(
                    lambda wanted=wanted: collected.count >= wanted or query.exception() is not None,
                    lambda wanted=wanted: f"Spark: {collected.count} outputs of {wanted}",
                )
            if failure := query.exception():
                raise failure
            counts.append(collected.count)
            time.sleep(case.apart_s)
    finally:
        query.stop()
    return collected.of_key, counts


# -- under Tiercel ----------------------------------------------------------------------------


def kill(live: tiercel.Live, process: str) -> int:
    """Kill -9 of the Python worker that hosts it; returns its life while Spark is starting it again."""
    [found] = [p for p in live.status().processes if p.name == process]
    os.kill(found.pid, signal.SIGKILL)
    return found.incarnation


class Troubled:
    """A running case under Tiercel, with what is done to it while batches are under way."""

    def __init__(self, live: tiercel.Live, case: Case, kills: Sequence[str]) -> None:
        self.live, self.case = live, case
        self.kills = list(kills)
        self.incarnations: dict[str, int] = {}  # of those that were killed, the life that ended
        self.moves: list[str] = []  # where keys really went

    @contextlib.contextmanager
    def batch(self, n: int) -> Iterator[None]:
        """Around the sending of batch n: a move, a kill, then both at once."""
        half = self.case.keys[::2]
        match n:
            case 1:
                moving = self.live.move("op", keys=half, to="edge")
                yield
                self._has_moved(moving, half, "edge")
            case 2:
                yield
                self._kill(self.kills[0])
            case 3:
                moving = self.live.move("op", keys=half, to="cloud", retries=10)
                yield
                self._kill(self.kills[1])
                self._has_moved(moving, half, "cloud")
            case _:
                yield

    def _kill(self, process: str) -> None:
        self.incarnations[process] = kill(self.live, process)

    def _has_moved(self, moving: MoveHandle, keys: Sequence[str], to: str) -> None:
        reports = moving.wait(HANG_S)
        assert sum(report.keys for report in reports) > 0, reports
        assert {site_of(owner) for owner in self.live.owners("op", keys).values()} == {to}
        self.moves.append(to)

    def check(self) -> None:
        """All of it was done, and who was killed came back."""
        assert self.moves == ["edge", "cloud"]
        assert list(self.incarnations) == self.kills
        for process, incarnation in self.incarnations.items():
            until(
                lambda process=process, incarnation=incarnation: any(
                    p.incarnation > incarnation for p in self.live.status().processes if p.name == process
                ),
                lambda process=process, incarnation=incarnation: (
                    f"{process} did not come back after its life {incarnation}"
                ),
            )


def declared(spark: SparkSession, case: Case, inputs: Sequence[LiveStream]) -> LiveStream:
    """The case's operator on these streams; a fold by the call that people write it with."""
    first, *others = inputs
    read = first.union(*others) if others else first
    instances = {"cloud": 2, "edge": 1}
    if isinstance(case.processor, Fold):
        fold = case.processor
        schema = fold.state_schema
        return read.fold(fold.step, fold.initial, OUTPUT, state_schema=schema, name="op", instances=instances)
    return read.transform_with_state(
        case.processor,
        OUTPUT,
        name="op",
        time_mode=case.time_mode,
        initial_state=None
        if case.initial is None
        else spark.createDataFrame(case.initial, case.initial_schema),
        instances=instances,
    )


def under_tiercel(
    spark: SparkSession, case: Case, directory: Path, counts: Sequence[int], kills: Sequence[str]
) -> Outputs:
    """The same batches, one frame each, with two moves and two kills under way; outputs per key.

    Then a marker through every instance: what had come twice would have come before it.
    """
    with tiercel.start(spark, ["cloud", "edge"], directory) as live:
        inputs = {
            name: live.stream(name, schema, key="k", event_time=case.event_time, delay=case.delay_ms / 1000)
            for name, schema in case.streams.items()
        }
        operator = declared(spark, case, list(inputs.values()))
        troubled = Troubled(live, case, kills)
        collected = Collected()
        refused = operator.dead_letters.subscribe(after=0)
        with contextlib.ExitStack() as open_ends:
            open_ends.enter_context(refused)
            outputs = open_ends.enter_context(operator.subscribe(after=0))
            producers = {n: open_ends.enter_context(s.producer(f"producer-{n}")) for n, s in inputs.items()}

            def arrived(count: int) -> bool:
                collected.add([received.row for received in outputs.poll(0.05)])
                if letters := [received.row.reason for received in refused.poll(0)]:
                    raise AssertionError(f"refused: {letters[:3]}")
                return collected.count >= count

            for n, batch in enumerate(case.batches):
                with troubled.batch(n):
                    for name, rows in batch.items():
                        producers[name].send_many(rows)
                        producers[name].flush()
                until(
                    lambda n=n: arrived(counts[n]),
                    lambda n=n: f"Tiercel: {collected.count} outputs of {counts[n]} after batch {n}",
                )
                time.sleep(case.apart_s)
            troubled.check()
            keys = [f"{MARKER}-{n}" for n in range(MARKERS)]
            assert set(live.owners("op", keys).values()) == {"op@cloud#1", "op@cloud#2", "op@edge#1"}
            stream, markers = case.markers(keys)
            producers[stream].send_many(markers)
            producers[stream].flush()
            until(  # whatever an instance gives twice, it gives before its marker
                lambda: arrived(0) and collected.marked == set(keys),
                lambda: f"Tiercel: {len(collected.marked)} markers of {len(keys)}",
            )
    return collected.of_key


def differences(ours: Outputs, sparks: Outputs) -> list[str]:
    """In the words of a test that fails: key by key, the first output that differs."""
    found = []
    for key in sorted(ours.keys() | sparks.keys()):
        mine, wanted = ours.get(key, []), sparks.get(key, [])
        if mine != wanted:
            at = next((n for n, (a, b) in enumerate(zip(mine, wanted, strict=False)) if a != b), None)
            at = min(len(mine), len(wanted)) if at is None else at
            found.append(
                f"{key}, output {at}:\n  Spark   {wanted[at : at + 2]}\n  Tiercel {mine[at : at + 2]}"
            )
    return found
