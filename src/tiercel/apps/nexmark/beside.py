"""One query on Tiercel and in plain PySpark Structured Streaming, on the same events, one after the other.

Responsible for: events as fast as each takes them, the time until the last result, both results compared
    with the batch job.
Not responsible for: the queries (queries.py, plain.py).

    events         in memory, sent by producers      |  in parquet files, of `BATCH` events each
    measured       from the first row sent to the    |  the micro-batches' own durations, without the
                   last result received              |  start of the query
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

import tiercel
from tiercel import UserError
from tiercel.apps.app import POSITION, SITE, Event
from tiercel.apps.nexmark.app import NexmarkApp, NexmarkOptions
from tiercel.apps.nexmark.plain import PLAIN
from tiercel.apps.nexmark.queries import QUERIES
from tiercel.apps.verdict import HEAP, Comparison, compare, frame_of

BATCH = 20_000
CHUNK = 2_000
WAIT_S_MAX = 300.0
EVENTS_MAX = 5_000_000
EVENT_RATE = 2_000  # events in a second of event time

ShowProgress = Callable[[str], None]


class Beside(msgspec.Struct, frozen=True):
    """Both on the same events."""

    query: str
    events: int
    tiercel_events_per_s: float
    spark_events_per_s: float
    spark_with_start_events_per_s: float
    ratio: float  # Tiercel's over Spark's
    tiercel: Comparison
    spark: Comparison

    @property
    def line(self) -> dict[str, Any]:
        """For a table."""
        return {
            "query": self.query,
            "tiercel_events_per_s": self.tiercel_events_per_s,
            "spark_events_per_s": self.spark_events_per_s,
            "spark_with_start_events_per_s": self.spark_with_start_events_per_s,
            "ratio": self.ratio,
            "rows": self.tiercel.expected,
            "tiercel_faults": self.tiercel.faults,
            "spark_faults": self.spark.faults,
        }


def measure(
    query: str, events: int, seed: int, show: ShowProgress, spark: SparkSession | None = None
) -> Beside:
    """One query on both; UserError if there is no such query, or too many events."""
    if query not in QUERIES:
        raise UserError(f"unknown query {query!r}", expected=f"one of: {', '.join(QUERIES)}")
    if not BATCH <= events <= EVENTS_MAX:
        raise UserError(f"events = {events:,}", expected=f"a number from {BATCH:,} to {EVENTS_MAX:,}")
    session = spark or tiercel.session("tiercel-nexmark", slots=32, config=HEAP)
    try:
        return _Measurement(query, events, seed, show, session).run()
    finally:
        if spark is None:
            session.stop()


class _Measurement:
    """The events of a run, and both runs."""

    def __init__(self, query: str, events: int, seed: int, show: ShowProgress, spark: SparkSession) -> None:
        self._query, self._show, self._spark = query, show, spark
        self._app, self._options = NexmarkApp(), NexmarkOptions(query=query)  # type: ignore[arg-type]
        show("generating events")
        self._events = list(islice(self._app.generate(self._options, seed, EVENT_RATE), events))
        self._last = self._app.last_events(self._options, self._events[-1][0])

    def run(self) -> Beside:
        output = QUERIES[self._query].output
        with tiercel.start(self._spark, [SITE]) as live:
            built = self._app.build(live, self._options, {SITE: 2})
            schemas = {kind: stream.schema for kind, stream in built.inputs.items()}
            stream = built.outputs[self._query]
            inputs = {kind: self._frame(kind, schema) for kind, schema in schemas.items()}
            expected = self._app.oracle(self._spark, inputs, self._options)[self._query].cache()
            wanted = expected.count()
            subscriber = stream.subscribe(after=0)
            self._show(f"{self._query} on Tiercel")
            rows: list[Any] = []
            producers = {kind: one.producer(f"beside-{kind}") for kind, one in built.inputs.items()}
            begun = time.monotonic()
            for part in _parts([*self._events, *self._last]):
                for kind, values in part.items():
                    producers[kind].send_many(values)
                rows += subscriber.poll_values(0)
            while len(rows) < wanted and time.monotonic() - begun < WAIT_S_MAX:
                rows += subscriber.poll_values(0.1)
            taken = time.monotonic() - begun
            found = frame_of(self._spark, [(*values, n) for n, values in enumerate(rows)], stream.schema)
            ours = compare(expected, found, output, stream.codec.key)
            key = stream.codec.key
        with tempfile.TemporaryDirectory(prefix="tiercel-nexmark-", ignore_cleanup_errors=True) as place:
            self._show(f"{self._query} in plain Spark")
            theirs_s, with_start_s, result = self._plain(Path(place), schemas)
            theirs = compare(
                expected,
                result.withColumn(POSITION, result[result.columns[0]].isNull().cast("long")),
                output,
                key,
            )
        count = len(self._events)
        return Beside(
            self._query,
            count,
            round(count / taken, 1),
            round(count / theirs_s, 1),
            round(count / with_start_s, 1),
            round(theirs_s / taken, 3),
            ours,
            theirs,
        )

    def _frame(self, kind: str, schema: Any) -> DataFrame:
        rows = [row for _, stream, row in [*self._events, *self._last] if stream == kind]
        return frame_of(self._spark, [(*row, n) for n, row in enumerate(rows)], schema)

    def _plain(self, place: Path, schemas: Mapping[str, Any]) -> tuple[float, float, DataFrame]:
        """Seconds of the micro-batches, seconds with the start of the query, and its rows."""
        spark, cores = self._spark, os.cpu_count() or 1
        spark.conf.set("spark.sql.shuffle.partitions", str(cores))
        provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        spark.conf.set("spark.sql.streaming.stateStore.providerClass", provider)
        kinds = {}
        sources = QUERIES[self._query].sources
        for kind, schema in schemas.items():
            (place / kind).mkdir()
            parts = [self._events[n : n + BATCH] for n in range(0, len(self._events), BATCH)]
            for n, part in enumerate([*parts, self._last]):
                columns = list(zip(*[row for _, stream, row in part if stream == kind], strict=True))
                if columns:
                    table = pa.table(
                        {f.name: pa.array(c) for f, c in zip(schema.fields, columns, strict=True)}
                    )
                    pq.write_table(table, place / kind / f"{n:05d}.parquet", coerce_timestamps="us")
            frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(place / kind))
            name = sources[kind].id
            kinds[kind] = frame if name == "id" else frame.withColumnRenamed(name, "id")
        begun = time.monotonic()
        query = (
            PLAIN[self._query](kinds)
            .writeStream.format("memory")
            .queryName("nexmark_plain")
            .outputMode("append")
            .option("checkpointLocation", str(place / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        with_start = time.monotonic() - begun
        batches = [p["durationMs"]["triggerExecution"] for p in query.recentProgress]
        return sum(batches) / 1e3, with_start, self._without_last()

    def _without_last(self) -> DataFrame:
        """The rows of the query, without those of the rows that close every window."""
        found = self._spark.table("nexmark_plain")
        key = next(
            name for name in ("auction", "id", "seller", "category", "bidder") if name in found.columns
        )
        return found.filter(f"{key} >= 0")


def _parts(events: list[Event]) -> Any:
    for n in range(0, len(events), CHUNK):
        part: dict[str, list[Any]] = {}
        for _, kind, row in events[n : n + CHUNK]:
            part.setdefault(kind, []).append(row)
        yield part
