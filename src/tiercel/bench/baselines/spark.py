"""Spark's own transformWithState with the same processor and the same keys.

Responsible for: a fair setting, batches of a fixed size, rates from the query's own progress.
Not responsible for: Tiercel's figure (throughput.py).

Fair: RocksDB state store with changelog checkpointing, as many task slots and state partitions as the
machine has cores, files that are written before, a sink that does nothing, and warm batches.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tiercel.bench.operators import READING
from tiercel.bench.report import Line

WARM_BATCHES = 3
LOW_LATENCY_S = 2.0
CHANGELOG = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"
KEPT_PROGRESS = "spark.sql.streaming.numRecentProgressUpdates"


def measure(
    spark: Any, processor: Any, output_schema: str, order: Sequence[int], rows: int, batches: int
) -> Line:
    """Rows a second over `batches` micro-batches of `rows` rows, after three that do not count."""
    cores = os.cpu_count() or 1
    spark.conf.set("spark.sql.shuffle.partitions", str(cores))
    spark.conf.set(CHANGELOG, "true")
    spark.conf.set(KEPT_PROGRESS, str(WARM_BATCHES + batches + 10))
    with tempfile.TemporaryDirectory(prefix="tiercel-spark-", ignore_cleanup_errors=True) as place:
        files = Path(place) / "readings"
        files.mkdir()
        _write_files(files, order, rows, WARM_BATCHES + batches)
        frame = spark.readStream.schema(READING).option("maxFilesPerTrigger", 1).parquet(str(files))
        query = (
            frame.groupBy("sensor")
            .transformWithState(processor, output_schema, "update", "none")
            .writeStream.outputMode("update")
            .format("noop")
            .option("checkpointLocation", str(Path(place) / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        progress = [p for p in query.recentProgress if p["numInputRows"]][WARM_BATCHES:]
    taken_ms = [p["durationMs"]["triggerExecution"] for p in progress]
    counted = sum(p["numInputRows"] for p in progress)
    return {
        "rows_per_batch": rows,
        "batches": len(progress),
        "events_per_s": round(counted / sum(taken_ms) * 1e3),
        "batch_p50_ms": sorted(taken_ms)[len(taken_ms) // 2],
        "batch_max_ms": max(taken_ms),
    }


def _write_files(place: Path, order: Sequence[int], rows: int, files: int) -> None:
    """The rows that Tiercel's producer sends, in the same order; one file is one batch."""
    sensors, keys = np.asarray(order, dtype=np.int64), len(order)
    for file in range(files):
        numbers = np.arange(file * rows, (file + 1) * rows)
        table = pa.table({"sensor": sensors[numbers % keys], "value": (numbers // keys + 1).astype(float)})
        path = place / f"part-{file:05}.parquet"
        pq.write_table(table, path)
        os.utime(path, (1_700_000_000 + file, 1_700_000_000 + file))  # read in this order


def best(lines: Sequence[Line]) -> Line:
    """Spark's figure: the best of the sizes; and the best whose batches stay below two seconds."""
    low = [line["events_per_s"] for line in lines if line["batch_max_ms"] < LOW_LATENCY_S * 1e3]
    return {
        "spark_events_per_s": max(line["events_per_s"] for line in lines),
        "spark_events_per_s_below_2s": max(low, default=None),
    }
