"""One query on Tiercel and in plain PySpark Structured Streaming, on the same events, in turn.

Responsible for: events as fast as each takes them, the time until the last result, all results compared
    with the batch job.
Not responsible for: the queries (queries.py, plain.py).

    runs           two of each, in turn; the better one counts, so a moment in which other programs need the
                   machine harms neither
    events         in memory, sent by producers      |  in parquet files, of one micro-batch for each core
    measured       from the first row sent to the    |  the micro-batches' own durations, without the first
                   last result received              |  one, in which code is compiled
    chances        -                                 |  small and large micro-batches; the state store that
                                                     |  Spark has by default, where the query can use it
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

import tiercel
from tiercel import UserError
from tiercel.apps.app import POSITION, SITE, Event
from tiercel.apps.nexmark.app import NexmarkApp, NexmarkOptions
from tiercel.apps.nexmark.plain import PLAIN
from tiercel.apps.nexmark.queries import QUERIES
from tiercel.apps.verdict import HEAP, compare, frame_of

BATCHES = (20_000, 100_000)  # events of a micro-batch, in the runs of plain Spark
BATCH = BATCHES[0]
CHUNK = 2_000
WAIT_S_MAX = 300.0
EVENTS_MAX = 5_000_000
EVENT_RATE = 2_000  # events in a second of event time
CORES = os.cpu_count() or 1
WITH_PROCESSORS = ("q4", "q6")  # transformWithState needs RocksDB
PROVIDER = "spark.sql.streaming.stateStore.providerClass"
PROVIDERS = "org.apache.spark.sql.execution.streaming.state"

ShowProgress = Callable[[str], None]


class PlainRun(NamedTuple):
    """A run of plain Spark."""

    events_per_s: float
    with_start_events_per_s: float
    batch: int
    batch_s: float  # the median duration of a micro-batch: no result is newer


class Beside(msgspec.Struct, frozen=True):
    """Both on the same events: the better run of each, and the faults of all runs."""

    query: str
    events: int
    tiercel_events_per_s: float
    slower_tiercel_events_per_s: float
    plain: PlainRun
    slower_plain: PlainRun
    expected: int
    tiercel_faults: int
    spark_faults: int

    @property
    def line(self) -> dict[str, Any]:
        """For a table."""
        return {
            "query": self.query,
            "tiercel_events_per_s": self.tiercel_events_per_s,
            "spark_events_per_s": self.plain.events_per_s,
            "ratio": round(self.tiercel_events_per_s / self.plain.events_per_s, 3),
            "spark_batch": self.plain.batch,
            "spark_batch_s": self.plain.batch_s,
            "tiercel_other_run": self.slower_tiercel_events_per_s,
            "spark_other_run": self.slower_plain.events_per_s,
            "spark_with_start_events_per_s": self.plain.with_start_events_per_s,
            "rows": self.expected,
            "tiercel_faults": self.tiercel_faults,
            "spark_faults": self.spark_faults,
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
        self._schemas: dict[str, StructType] = {}
        self._expected: DataFrame | None = None
        self._wanted = 0
        self._key: tuple[str, ...] = ()

    def run(self) -> Beside:
        ours, theirs, faults = [], [], [0, 0]
        for n, batch in enumerate(BATCHES):
            rate, found = self._on_tiercel(n)
            ours.append(rate)
            faults[0] += found
            if n == 0:
                self._show(f"{self._query} in plain Spark: warm-up")
                self._in_plain_spark(batch, self._events[: 2 * batch])
            self._show(f"{self._query} in plain Spark: {batch:,} events in a micro-batch")
            run, result = self._in_plain_spark(batch, self._events)
            theirs.append(run)
            faults[1] += self._faults(
                result.withColumn(POSITION, result[result.columns[0]].isNull().cast("long"))
            )
        slower, faster = sorted(ours)
        slow, fast = sorted(theirs)
        return Beside(
            self._query, len(self._events), faster, slower, fast, slow, self._wanted, faults[0], faults[1]
        )

    def _on_tiercel(self, n: int) -> tuple[float, int]:
        """Events a second, and how many rows are wrong."""
        self._show(f"{self._query} on Tiercel")
        with tiercel.start(self._spark, [SITE]) as live:
            built = self._app.build(live, self._options, {SITE: 2})
            stream = built.outputs[self._query]
            if self._expected is None:
                self._schemas = {kind: one.schema for kind, one in built.inputs.items()}
                inputs = {kind: self._frame(kind, schema) for kind, schema in self._schemas.items()}
                self._expected = self._app.oracle(self._spark, inputs, self._options)[self._query].cache()
                self._wanted, self._key = self._expected.count(), stream.codec.key
            subscriber = stream.subscribe(after=0)
            rows: list[Any] = []
            producers = {kind: one.producer(f"beside-{kind}") for kind, one in built.inputs.items()}
            begun = time.monotonic()
            for part in _parts([*self._events, *self._last]):
                for kind, values in part.items():
                    producers[kind].send_many(values)
                rows += subscriber.poll_values(0)
            while len(rows) < self._wanted and time.monotonic() - begun < WAIT_S_MAX:
                rows += subscriber.poll_values(0.1)
            taken = time.monotonic() - begun
            schema = stream.schema
        found = frame_of(self._spark, [(*values, n) for n, values in enumerate(rows)], schema)
        return round(len(self._events) / taken, 1), self._faults(found)

    def _faults(self, found: DataFrame) -> int:
        assert self._expected is not None
        return compare(self._expected, found, QUERIES[self._query].output, self._key).faults

    def _frame(self, kind: str, schema: Any) -> DataFrame:
        rows = [row for _, stream, row in [*self._events, *self._last] if stream == kind]
        return frame_of(self._spark, [(*row, n) for n, row in enumerate(rows)], schema)

    def _in_plain_spark(self, batch: int, events: list[Event]) -> tuple[PlainRun, DataFrame]:
        """One run from the first file to the last, and its rows."""
        with tempfile.TemporaryDirectory(prefix="tiercel-nexmark-", ignore_cleanup_errors=True) as place:
            kinds = self._files(Path(place), batch, events)
            self._spark.conf.set("spark.sql.shuffle.partitions", str(CORES))
            provider = "RocksDB" if self._query in WITH_PROCESSORS else "HDFSBacked"
            self._spark.conf.set(PROVIDER, f"{PROVIDERS}.{provider}StateStoreProvider")
            begun = time.monotonic()
            query = (
                PLAIN[self._query](kinds)
                .writeStream.format("memory")
                .queryName("nexmark_plain")
                .outputMode("append")
                .option("checkpointLocation", f"{place}/checkpoint")
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
            with_start = time.monotonic() - begun
            batches = [(p["numInputRows"], p["durationMs"]["triggerExecution"]) for p in query.recentProgress]
            result = self._without_last().localCheckpoint()
        counted = batches[1:] if len(events) > batch else batches
        seconds = sum(ms for _, ms in counted) / 1e3
        full = [ms / 1e3 for count, ms in counted if count > len(self._last)]
        run = PlainRun(
            round(sum(count for count, _ in counted) / seconds, 1),
            round(len(events) / with_start, 1),
            batch,
            round(statistics.median(full), 3),
        )
        return run, result

    def _files(self, place: Path, batch: int, events: list[Event]) -> dict[str, DataFrame]:
        """A file for each core and micro-batch, and a stream of each kind of event."""
        kinds = {}
        parts = [events[n : n + batch] for n in range(0, len(events), batch)]
        for kind, schema in self._schemas.items():
            (place / kind).mkdir()
            for n, part in enumerate([*parts, self._last]):
                rows = [row for _, stream, row in part if stream == kind]
                for core in range(CORES):  # a file without rows is a file of the micro-batch, too
                    columns = list(zip(*rows[core::CORES], strict=True)) or [()] * len(schema.fields)
                    arrow = to_arrow_schema(schema, timezone="UTC")
                    table = pa.table(
                        [pa.array(c, arrow.field(n).type) for n, c in enumerate(columns)], schema=arrow
                    )
                    pq.write_table(table, place / kind / f"{n:05d}-{core}.parquet", coerce_timestamps="us")
            frame = self._spark.readStream.schema(schema).option("maxFilesPerTrigger", CORES)
            name = QUERIES[self._query].sources[kind].id
            read = frame.parquet(str(place / kind))
            kinds[kind] = read if name == "id" else read.withColumnRenamed(name, "id")
        return kinds

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
