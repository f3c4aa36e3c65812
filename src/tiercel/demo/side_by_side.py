"""The second half of the demonstration: one load, by plain Spark and by Tiercel, both rescaled in the middle.

Responsible for: running both pipelines on the same files at once, their latency over time, their figures.
Not responsible for: the pipelines and their rows (bench/), Spark's rescaling (bench/baselines), the picture.

    files --> transformWithState          --> parquet     stop, repartition the state, start again
      |
      +-----> tiercel.transform_with_state --> parquet     live.scale

Latency is from the time at which a row was due to the commit of its batch in the sink.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiercel
from tiercel.bench.baselines.spark_rescale import stop_repartition_restart
from tiercel.bench.loadgen import files
from tiercel.bench.report import Line, percentile
from tiercel.bench.scenarios.pipeline import (
    DROP_IN,
    OPERATOR,
    PLAIN,
    committed_us,
    observed_rows,
    pipeline,
    wrong_rows,
)

KEYS, RATE = 300, 2_000
WARM_S = 3.0
PARTITIONS = 3  # of Spark's state, afterwards; 2 before
CHANGED_S_MAX = 120.0


@dataclass
class Pipeline:
    """One of the two: its latency over time."""

    name: str
    due_s: list[float] = field(default_factory=list)  # two points a batch: its first and its last row
    latency_ms: list[float] = field(default_factory=list)
    wrong: int = 0
    changed_s: float = 0.0  # how long its rescaling took
    figures: Line = field(default_factory=dict)


@dataclass
class SideBySide:
    """Both pipelines; times are seconds since the load was warm."""

    pipelines: list[Pipeline]
    change_s: float
    end_s: float

    @property
    def wrong(self) -> int:
        return sum(each.wrong for each in self.pipelines)


def run(spark: Any, seconds: float) -> SideBySide:
    """Steady load for so long, both rescalings, and as long again behind the slower of them."""
    found = [Pipeline("Spark"), Pipeline("Tiercel")]
    with tempfile.TemporaryDirectory(prefix="tiercel-demo-", ignore_cleanup_errors=True) as directory:
        place = Path(directory)
        source = place / "source"
        for part in (source, place / "spark", place / "tiercel"):
            part.mkdir()
        warm = KEYS * 4
        files.write(source, 0, files.table(0, warm, KEYS, 0.0, 0.0))
        with (
            pipeline(spark, PLAIN, source, place / "spark", "parquet") as start_plain,
            pipeline(spark, DROP_IN, source, place / "tiercel", "parquet") as start_live,
        ):
            plain, live = [start_plain()], start_live()
            plain[0].processAllAvailable()
            live.processAllAvailable()  # every key has state, every worker runs
            load = _Load(source)
            time.sleep(WARM_S)
            began = time.time()
            time.sleep(seconds)
            changed_at = time.time()
            rescale = threading.Thread(
                target=_rescale_spark, args=(spark, plain, start_plain, place / "spark", found[0])
            )
            rescale.start()
            _rescale_tiercel(found[1])
            rescale.join(CHANGED_S_MAX)
            time.sleep(seconds)
            rows = load.end()
            ended = time.time()
            for query in (plain[-1], live):
                query.processAllAvailable()
                query.stop()
        progress = [[p for query in plain for p in query.recentProgress], live.recentProgress]
    for each, batches in zip(found, progress, strict=True):
        _points(each, batches, began, ended)
        each.wrong = wrong_rows(batches, [warm, rows], KEYS)
        each.figures = _figures(each, changed_at - began)
    return SideBySide(found, changed_at - began, ended - began)


class _Load:
    """Writes a file every 100 ms until it is told to end."""

    def __init__(self, source: Path) -> None:
        self._source, self._ending = source, threading.Event()
        self._rows = 0
        self._thread = threading.Thread(target=self._run, name="demo-load", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began, number = time.time(), 0
        while not self._ending.is_set():
            number += 1
            time.sleep(max(0.0, began + number * files.FILE_S - time.time()))
            due = round(number * files.FILE_S * RATE)
            begin_us = (began + self._rows / RATE) * 1e6
            made = files.table(self._rows, due - self._rows, KEYS, begin_us, 1e6 / RATE)
            files.write(self._source, number, made)
            self._rows = due

    def end(self) -> int:
        self._ending.set()
        self._thread.join()
        return self._rows


def _rescale_spark(
    spark: Any, queries: list[Any], start: Callable[..., Any], place: Path, found: Pipeline
) -> None:
    ran, found.changed_s = stop_repartition_restart(
        spark, queries[-1], start, place / "checkpoint", PARTITIONS
    )
    queries += ran


def _rescale_tiercel(found: Pipeline) -> None:
    begun = time.monotonic()
    [live] = tiercel.deployments()
    live.scale(OPERATOR, {"local": 2}).wait()
    found.changed_s = time.monotonic() - begun


def _points(found: Pipeline, progress: Sequence[Any], began: float, ended: float) -> None:
    """The first and the last row of each batch: between them latency falls evenly."""
    for batch in progress:
        rows = observed_rows(batch)
        if rows and began * 1e6 <= rows["last_us"] <= ended * 1e6:
            for due_us in (max(rows["first_us"], began * 1e6), rows["last_us"]):
                found.due_s.append(due_us / 1e6 - began)
                found.latency_ms.append((committed_us(batch) - due_us) / 1e3)


def _figures(found: Pipeline, change_s: float) -> Line:
    """Before the rescaling and from it on; the stoppage is what the slowest row has above the floor.

    The floor is the slowest row before: a micro-batch makes every row wait, with and without a change.
    """
    before = sorted(ms for at, ms in zip(found.due_s, found.latency_ms, strict=True) if at < change_s)
    after = [ms for at, ms in zip(found.due_s, found.latency_ms, strict=True) if at >= change_s]
    floor = before[-1] if before else 0.0
    return {
        "pipeline": found.name,
        "steady_p50_ms": round(percentile(before, 0.5), 1) if before else None,
        "floor_ms": round(floor, 1),
        "slowest_ms": round(max(after), 1) if after else None,
        "stoppage_ms": round(max(0.0, max(after) - floor), 1) if after else None,
        "rescaling_ms": round(found.changed_s * 1e3),
        "wrong": found.wrong,
    }
