"""`tiercel bench pipeline`: one DataFrame to one sink, by plain Spark and by the drop-in operator.

Responsible for: the same processor, files, sink and session for both; rows a second and latency of each;
    a live move and a scale-out inside; checking every row.
Not responsible for: files (loadgen/files.py), the operator (spark/api/drop_in.py).

    files --> [coalesce] --> transformWithState, or tiercel.transform_with_state --> observe --> sink

Latency is from the time at which a row was due to the commit of its batch, which the query's own progress
says. The highest rate is that of batches of one size after the other, each as soon as the last has ended, for
as long as the option says: what the system keeps up with.
"""

from __future__ import annotations

import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

import tiercel
from tiercel.bench.baselines.spark_rescale import stop_repartition_restart
from tiercel.bench.loadgen import files
from tiercel.bench.report import Line, our_cpu_s, percentile
from tiercel.spark.observed import observe, observed
from tiercel.spark.operators.processor_adapter import Row, StatefulProcessor, StatefulProcessorHandle

ShowProgress = Callable[[str], None]

PLAIN, DROP_IN, MOVED, SCALED = "spark", "tiercel", "tiercel, half of the keys move", "tiercel, scale-out"
RESTARTED = "spark, stop, repartition, restart"
CHANGED = (RESTARTED, MOVED, SCALED)
HALF = "half"  # a rate: half of plain Spark's highest
SINKS = ("noop", "parquet")
OUTPUT = "sensor bigint, count bigint, average double, created_us bigint"
SLOTS = 12
WARM_BATCHES = 3
FILES_A_BATCH = 4
BATCHES_AHEAD = 4  # that are written before they are read
WARM_S = 4.0
SAMPLES = 200  # of the rows of a batch, whose times are even
CHANGE_AT = 0.5  # of the measured time
DRAIN_S_MAX = 120.0
OPERATOR = "average"


class CreatedAverage(StatefulProcessor):
    """Emits for each row the average of its key's values so far, and when the row was due."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._average = handle.getValueState("average", "count long, total double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        count, total = self._average.get() or (0, 0.0)
        for row in rows:
            count += 1
            total += row.value
            yield Row(sensor=key[0], count=count, average=total / count, created_us=row.created_us)
        self._average.update((count, total))

    def close(self) -> None:
        """Holds no resources."""


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    keys: Sequence[int]
    rates: Sequence[int | str]  # or HALF
    sinks: Sequence[str]
    batches: Sequence[int]  # rows of a batch for the highest rate; none: it is left out
    seconds: float
    changes: bool  # once more with a live move, and once with a scale-out


def measure(options: Options, show_progress: ShowProgress) -> tuple[list[Line], Line]:
    """A line for each system, number of keys, sink and rate; and the batches behind the highest rates."""
    cores = os.cpu_count() or 1
    config = {
        "spark.sql.shuffle.partitions": str(cores),
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        "spark.sql.streaming.numRecentProgressUpdates": "100000",
    }
    spark = tiercel.session("tiercel-bench-pipeline", slots=SLOTS, config=config)
    lines: list[Line] = []
    sizes: list[Line] = []
    try:
        for keys in options.keys:
            for sink in options.sinks:
                half = None
                if options.batches:
                    found = _highest(spark, keys, sink, options, show_progress)
                    sizes += [size for each in found for size in each]
                    best = _best(found)
                    lines += best
                    half = best[0]["rows_per_s"] // 2
                for rate in options.rates:
                    offered = half if rate == HALF else int(rate)
                    if offered:
                        lines += _at_rate(spark, keys, sink, offered, options, show_progress)
    finally:
        spark.stop()
    return lines, {"batches": sizes}


# -- both pipelines ----------------------------------------------------------------------------


@contextmanager
def pipeline(
    spark: Any, system: str, source: Path, place: Path, sink: str, **reading: Any
) -> Iterator[Callable[..., Any]]:
    """A function that starts the query of one system; `reading` are options of the file source."""
    frame = spark.readStream.schema(files.CREATED).options(**reading).parquet(str(source))
    grouped = frame.coalesce(os.cpu_count() or 1).groupBy("sensor")
    try:
        out = _transform(grouped, system)
        watched = observe(
            out,
            "rows",
            rows="count(*)",
            counts="sum(count)",
            first_us="min(created_us)",
            last_us="max(created_us)",
        )

        def start(**trigger: Any) -> Any:
            writer = watched.writeStream.outputMode("append").format(sink)
            writer = writer.option("checkpointLocation", str(place / "checkpoint"))
            if sink != "noop":
                writer = writer.option("path", str(place / "sink"))
            return (writer.trigger(**trigger) if trigger else writer).start()

        yield start
    finally:
        tiercel.stop_all()


def _transform(grouped: Any, system: str) -> Any:
    if system in (PLAIN, RESTARTED):
        return grouped.transformWithState(CreatedAverage(), OUTPUT, "append", "none")
    instances = 2 if system == MOVED else 1
    return tiercel.transform_with_state(
        grouped, CreatedAverage(), OUTPUT, "append", "none", name=OPERATOR, instances=instances
    )


def observed_rows(progress: Any) -> dict[str, Any]:
    """What the sink was given in one batch; empty if nothing."""
    found = observed(progress, "rows")
    return found if found.get("rows") else {}


def committed_us(progress: Any) -> float:
    """When a batch was committed."""
    began = datetime.fromisoformat(progress["timestamp"].replace("Z", "+00:00")).timestamp()
    return float((began + progress["durationMs"]["triggerExecution"] / 1e3) * 1e6)


def wrong_rows(progress: Sequence[Any], runs: Sequence[int], keys: int) -> int:
    """Rows lost, doubled, or with a count that is not their place among the rows of their key.

    `runs` has the lengths of the runs of rows; each begins again with the first key.
    """
    got = [found for found in map(observed_rows, progress) if found]
    counts = np.sum([files.keys_of(0, rows, keys) for rows in runs], axis=0)
    expected = int((counts * (counts + 1) // 2).sum())
    missing: int = abs(sum(g["rows"] for g in got) - sum(runs))
    return max(missing, int(sum(g["counts"] for g in got) != expected))


# -- the highest rate --------------------------------------------------------------------------


def _highest(
    spark: Any, keys: int, sink: str, options: Options, show_progress: ShowProgress
) -> list[list[Line]]:
    """Rows a second for each size of a batch, of both systems, which take turns."""
    found: list[list[Line]] = [[], []]
    for rows in options.batches:
        for lines, system in zip(found, (PLAIN, DROP_IN), strict=True):
            show_progress(f"{keys:,} keys, {sink}: {system}, batches of {rows:,} rows")
            lines.append(_one_size(spark, system, keys, sink, rows, options.seconds))
    return found


def _one_size(spark: Any, system: str, keys: int, sink: str, rows: int, seconds: float) -> Line:
    """Batches of one size, each as soon as the last has ended, for so many seconds behind the first ones."""
    with _directory() as place:
        source = place / "source"
        source.mkdir()
        part = rows // FILES_A_BATCH
        writing = threading.Event()
        written = [0]

        def write_ahead(limit: int = 10**9) -> None:
            while not writing.is_set() and written[0] < limit:
                if written[0] < (done[0] + BATCHES_AHEAD) * FILES_A_BATCH:
                    files.write(source, written[0], files.table(written[0] * part, part, keys, 0.0, 1.0))
                    written[0] += 1
                else:
                    time.sleep(0.01)

        done = [0]
        write_ahead(BATCHES_AHEAD * FILES_A_BATCH)
        with pipeline(spark, system, source, place, sink, maxFilesPerTrigger=FILES_A_BATCH) as start:
            writer = threading.Thread(target=write_ahead, daemon=True)
            writer.start()
            query = start()
            began = 0.0
            give_up = time.monotonic() + DRAIN_S_MAX + 4 * seconds
            while time.monotonic() < give_up and query.isActive:
                done[0] = sum(1 for p in query.recentProgress if p["numInputRows"])
                began = began or (time.monotonic() if done[0] > WARM_BATCHES else 0.0)
                if began and time.monotonic() > began + seconds:
                    break
                time.sleep(0.05)
            writing.set()
            writer.join()
            query.processAllAvailable()
            query.stop()
        progress = list(query.recentProgress)
        batches = [p for p in progress if p["numInputRows"]][WARM_BATCHES:]
    full = [p for p in batches if p["numInputRows"] == part * FILES_A_BATCH]
    taken_ms = [p["durationMs"]["triggerExecution"] for p in full]
    return {
        "system": system,
        "keys": keys,
        "sink": sink,
        "rows_a_batch": rows,
        "rows_per_s": round(sum(p["numInputRows"] for p in full) / max(1, sum(taken_ms)) * 1e3),
        "batch_p50_ms": float(sorted(taken_ms)[len(taken_ms) // 2]) if taken_ms else None,
        "batch_max_ms": float(max(taken_ms)) if taken_ms else None,
        "spark_ms": _spark_ms(full),
        "wrong": wrong_rows(progress, [written[0] * part], keys),
    }


def _spark_ms(progress: Sequence[Any]) -> float | None:
    """The median time of a batch for Spark itself: planning, write-ahead log, commit of offsets."""
    own = ("queryPlanning", "walCommit", "commitOffsets", "getBatch")
    spent = sorted(sum(p["durationMs"].get(step, 0) for step in own) for p in progress)
    return float(spent[len(spent) // 2]) if spent else None


def _best(found: Sequence[Sequence[Line]]) -> list[Line]:
    """The best size of each system, and how it compares with plain Spark's best."""
    lines = []
    best = [max(sizes, key=lambda size: int(size["rows_per_s"])) for sizes in found]
    for of_system, sizes in zip(best, found, strict=True):
        lines.append(
            {
                "system": of_system["system"],
                "keys": of_system["keys"],
                "sink": of_system["sink"],
                "rate": "highest",
                "rows_per_s": of_system["rows_per_s"],
                "p50_ms": of_system["batch_p50_ms"],
                "p95_ms": of_system["batch_max_ms"],
                "spark_ms": of_system["spark_ms"],
                "cores": None,
                "wrong": sum(size["wrong"] for size in sizes),
                "ratio": round(of_system["rows_per_s"] / max(1, best[0]["rows_per_s"]), 2),
                "during_p95_ms": None,
                "stopped_ms": None,
            }
        )
    return lines


# -- latency at a rate -------------------------------------------------------------------------


def _at_rate(
    spark: Any, keys: int, sink: str, rate: int, options: Options, show_progress: ShowProgress
) -> list[Line]:
    systems = [PLAIN, DROP_IN, *(CHANGED if options.changes else ())]
    lines: list[Line] = []
    for system in systems:
        show_progress(f"{keys:,} keys, {sink}: {system} at {rate:,} rows/s, {options.seconds:g} s")
        line = _steady(spark, system, keys, sink, rate, options.seconds)
        line["ratio"] = round(line["p50_ms"] / lines[0]["p50_ms"], 2) if lines and line["p50_ms"] else 1.0
        lines.append(line)
    return lines


def _steady(spark: Any, system: str, keys: int, sink: str, rate: int, seconds: float) -> Line:
    """One system at one rate: warm up, measure, drain, compare."""
    with _directory() as place:
        source = place / "source"
        source.mkdir()
        warm = max(keys, 1_000)
        files.write(source, 0, files.table(0, warm, keys, 0.0, 0.0))
        with pipeline(spark, system, source, place, sink) as start:
            query = start()
            query.processAllAvailable()  # every key has state, every worker runs
            load = files.start(source, keys, rate, WARM_S + seconds)
            began = time.time()
            time.sleep(WARM_S)
            used = our_cpu_s()
            queries = [query]
            stopped: list[float] = []
            work = functools.partial(_change, system, seconds, queries, stopped, spark, start, place)
            change = threading.Thread(target=work)
            if system in CHANGED:
                change.start()
            load.wait()
            if change.is_alive():
                change.join(DRAIN_S_MAX)
            spent = our_cpu_s() - used
            ended = time.time()
            queries[-1].processAllAvailable()
            queries[-1].stop()
        progress = [p for query in queries for p in query.recentProgress]
    warmed = began + WARM_S
    latencies, during, counted = _latencies(progress, warmed * 1e6, warmed + CHANGE_AT * seconds)
    return {
        "system": system,
        "keys": keys,
        "sink": sink,
        "rate": rate,
        "rows_per_s": round(counted / seconds),
        "p50_ms": round(percentile(latencies, 0.5), 1),
        "p95_ms": round(percentile(latencies, 0.95), 1),
        "spark_ms": _spark_ms([p for p in progress if observed_rows(p)]),
        "cores": round(spent / (ended - began - WARM_S), 2),
        "wrong": wrong_rows(progress, [warm, round((WARM_S + seconds) * rate)], keys),
        "ratio": None,
        "during_p95_ms": round(percentile(during, 0.95), 1) if system in CHANGED else None,
        "stopped_ms": round(stopped[0] * 1e3) if stopped else None,
    }


def _change(
    system: str,
    seconds: float,
    queries: list[Any],
    stopped: list[float],
    spark: Any,
    start: Callable[..., Any],
    place: Path,
) -> None:
    """Halfway: half of the keys move, or there is one more instance; or Spark does what it can do."""
    time.sleep(CHANGE_AT * seconds)
    if system == RESTARTED:
        partitions = (os.cpu_count() or 1) + 1
        ran, took_s = stop_repartition_restart(spark, queries[-1], start, place / "checkpoint", partitions)
        queries += ran
        stopped.append(took_s)
        return
    [live] = tiercel.deployments()
    if system == SCALED:
        live.scale(OPERATOR, {"local": 2}).wait()
    else:
        live.move(OPERATOR, source=f"{OPERATOR}@local#1", to=f"{OPERATOR}@local#2").wait()


def _latencies(progress: Sequence[Any], from_us: float, change_s: float) -> tuple[Any, Any, int]:
    """Latencies in ms of rows that were due after the warm-up, sorted; of those in batches at the change."""
    found, during = [], []
    counted = 0
    for batch in progress:
        rows = observed_rows(batch)
        if not rows or rows["last_us"] < from_us:
            continue
        at_us = committed_us(batch)
        began = at_us / 1e6 - batch["durationMs"]["triggerExecution"] / 1e3
        due = np.linspace(max(rows["first_us"], from_us), rows["last_us"], SAMPLES)
        share = max(1, round(rows["rows"] / 1_000))
        latencies = np.tile((at_us - due) / 1e3, share)
        found.append(latencies)
        counted += rows["rows"]
        if change_s <= at_us / 1e6 and began <= change_s + 3.0:
            during.append(latencies)
    empty = np.zeros(0)
    return np.sort(np.concatenate(found or [empty])), np.sort(np.concatenate(during or [empty])), counted


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tiercel-pipeline-", ignore_cleanup_errors=True) as place:
        yield Path(place)
