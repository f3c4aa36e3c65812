"""Sinks of other systems: written by `_tiercel_id` each row is there once, though batches come twice.

A query is stopped in the middle of a sink's write, and again between a sink's write and Spark's commit of
the batch. Started again from its checkpoint, Spark gives the sink the same batch once more. Each sink is
also written without the identity, and must then hold rows twice: so the tests can fail.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from deltalake import DeltaTable, write_deltalake
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession

from averages import Averages, averages, reading
from tiercel.bench.operators import OUTPUT
from tiercel.spark.sources.stream_source import register

SENSORS, ROWS, ENTRIES_PER_BATCH = 5, 80, 3
SPLIT_BATCH, UNCOMMITTED_BATCH = 1, 2
WAIT_S_MAX = 30.0


class Sink(ABC):
    """A table of another system, and the two ways to write a batch to it."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self.spark, self.directory = spark, directory

    @abstractmethod
    def create(self, like: DataFrame) -> None: ...
    @abstractmethod
    def append(self, batch: DataFrame) -> None: ...
    @abstractmethod
    def merge(self, batch: DataFrame) -> None: ...
    @abstractmethod
    def rows(self) -> list[tuple[Any, ...]]: ...


class Sqlite(Sink):
    """A SQL database, through its Python driver: one transaction a batch."""

    def create(self, like: DataFrame) -> None:
        self.codec = like.columns
        with self._connected() as database:
            database.execute(f"create table plain ({', '.join(self.codec)})")
            database.execute(f"create table averages ({', '.join(self.codec)}, unique (_tiercel_id))")

    def append(self, batch: DataFrame) -> None:
        self._insert(batch, "insert into plain")

    def merge(self, batch: DataFrame) -> None:
        changed = ", ".join(f"{name} = excluded.{name}" for name in self.codec)
        self._insert(batch, "insert into averages", f"on conflict (_tiercel_id) do update set {changed}")

    def rows(self) -> list[tuple[Any, ...]]:
        with self._connected() as database:
            return database.execute("select * from averages union all select * from plain").fetchall()

    def _insert(self, batch: DataFrame, into: str, otherwise: str = "") -> None:
        marks = ", ".join("?" * len(self.codec))
        with self._connected() as database:
            database.executemany(f"{into} values ({marks}) {otherwise}", map(tuple, batch.collect()))

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self.directory / "sink.sqlite")) as database, database:
            yield database  # one transaction


class Jdbc(Sink):
    """A SQL database, through Spark's own JDBC writer: Derby, whose driver comes with Spark."""

    def create(self, like: DataFrame) -> None:
        system = self.spark.sparkContext._jvm.java.lang.System
        system.setProperty("derby.stream.error.file", str(self.directory / "derby.log"))
        self.target = {
            "url": f"jdbc:derby:{self.directory / 'derby'};create=true",
            "driver": "org.apache.derby.jdbc.EmbeddedDriver",
            "dbtable": "averages",
        }
        self.append(like)

    def append(self, batch: DataFrame) -> None:
        batch.write.format("jdbc").mode("append").options(**self.target).save()

    def merge(self, batch: DataFrame) -> None:
        known = self._table().select("_tiercel_id")
        self.append(batch.join(known, "_tiercel_id", "left_anti").select(batch.columns))

    def rows(self) -> list[tuple[Any, ...]]:
        return list(map(tuple, self._table().collect()))

    def _table(self) -> DataFrame:
        return self.spark.read.format("jdbc").options(**self.target).load()


class Delta(Sink):
    """A Delta table, through the package `deltalake`: one commit of the table a batch."""

    def create(self, like: DataFrame) -> None:
        self.table = str(self.directory / "delta")
        DeltaTable.create(self.table, like.toArrow().schema)

    def append(self, batch: DataFrame) -> None:
        write_deltalake(self.table, batch.toArrow(), mode="append")

    def merge(self, batch: DataFrame) -> None:
        merging = DeltaTable(self.table).merge(
            batch.toArrow(),
            "sink._tiercel_id = batch._tiercel_id",
            source_alias="batch",
            target_alias="sink",
        )
        merging.when_not_matched_insert_all().execute()

    def rows(self) -> list[tuple[Any, ...]]:
        found = DeltaTable(self.table).to_pyarrow_table().to_pylist()
        return [tuple(row.values()) for row in found]


class Kafka(Sink):
    """A topic of the broker that librdkafka brings for tests: the protocol is real, the broker is small.

    A topic keeps what it is given: the identity is the record's key, and who reads keeps one record per key.
    """

    def create(self, like: DataFrame) -> None:
        quiet = {"log_level": 0}
        self._broker = Producer({"test.mock.num.brokers": 1, **quiet})
        brokers = self._broker.list_topics(timeout=WAIT_S_MAX).brokers.values()
        at = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
        self._client = {"bootstrap.servers": at, **quiet}

    def append(self, batch: DataFrame) -> None:
        self._send([(None, row) for row in batch.collect()])

    def merge(self, batch: DataFrame) -> None:
        self._send([(row._tiercel_id, row) for row in batch.collect()])

    def _send(self, records: list[tuple[str | None, Row]]) -> None:
        producer = Producer({**self._client, "enable.idempotence": True})
        errors: list[Any] = []  # None for what was delivered
        for key, row in records:
            value = json.dumps(row.asDict())
            producer.produce("averages", value, key, on_delivery=lambda error, _: errors.append(error))
        assert producer.flush(WAIT_S_MAX) == 0
        assert errors == [None] * len(records)

    def rows(self) -> list[tuple[Any, ...]]:
        by_key: dict[Any, str] = {}
        for number, (key, value) in enumerate(self._records()):
            assert by_key.setdefault(key or number, value) == value, "an identity names one row for good"
        return [tuple(json.loads(value).values()) for value in by_key.values()]

    def _records(self) -> Iterator[tuple[bytes | None, str]]:
        reader = Consumer({**self._client, "group.id": "readers"})
        with contextlib.closing(reader):
            for n in reader.list_topics("averages", WAIT_S_MAX).topics["averages"].partitions:
                here = TopicPartition("averages", n, 0)
                _, end = reader.get_watermark_offsets(here, WAIT_S_MAX)
                reader.assign([here])
                for _ in range(end):
                    record = reader.poll(WAIT_S_MAX)
                    assert record is not None
                    assert record.error() is None
                    yield record.key(), record.value().decode()


class Stopped(Exception):
    """The driver of the query ends here."""


@pytest.fixture(scope="module")
def deployment(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Averages]:
    register(spark)
    with averages(tmp_path_factory.mktemp("sinks") / "storage", checkpoint_ms=50.0) as running:
        for first in range(0, ROWS, 20):
            running.produce([reading(f"s{n % SENSORS}", n) for n in range(first, first + 20)])
        yield running


def reference_rows() -> list[tuple[Any, ...]]:
    """What comes out when nothing fails, computed one row after the other."""
    rows = []
    for n in range(ROWS):
        values = [float(earlier) for earlier in range(n % SENSORS, n + 1, SENSORS)]
        rows.append((f"s{n % SENSORS}", n, len(values), sum(values) / len(values), 0))
    return sorted(rows)


def run(source: DataFrame, checkpoint: Path, write: Any) -> list[int]:
    """From the checkpoint to the end of what is there, again after each stop; returns what it began."""
    begun: list[int] = []

    def batch(frame: DataFrame, number: int) -> None:
        begun.append(number)
        first_time = begun.count(number) == 1
        if number == SPLIT_BATCH and first_time:
            write(frame.where("n % 2 = 0"))  # a sink without transactions: some of the rows are there
            raise Stopped
        write(frame)
        if number == UNCOMMITTED_BATCH and first_time:
            raise Stopped

    for _ in range(3):
        query = (
            source.writeStream.foreachBatch(batch)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        with contextlib.suppress(StreamingQueryException):
            query.awaitTermination()
    return begun


@pytest.mark.parametrize("kind", [pytest.param(Sqlite, marks=pytest.mark.long), Jdbc, Delta, Kafka])
def test_sink_written_by_identity_has_each_row_once(
    kind: type[Sink], spark: SparkSession, deployment: Averages, tmp_path: Path
) -> None:
    where = {"storage": str(deployment.place.directory), "stream": OUTPUT, "identity": "true"}
    history = spark.read.format("tiercel").options(**where).load()
    expected = Counter(map(tuple, history.collect()))
    assert sorted(row[:-1] for row in expected) == reference_rows()
    source = spark.readStream.format("tiercel").options(**where, maxEntriesPerBatch=ENTRIES_PER_BATCH).load()

    for way in ("merge", "append"):
        directory = tmp_path / way
        directory.mkdir()
        sink = kind(spark, directory)
        sink.create(history.limit(0))
        begun = run(source, directory / "checkpoint", getattr(sink, way))
        assert begun[:5] == [0, SPLIT_BATCH, SPLIT_BATCH, UNCOMMITTED_BATCH, UNCOMMITTED_BATCH]
        found = Counter(sink.rows())
        if way == "merge":
            assert found == expected
        else:
            assert found.keys() == expected.keys()
            assert found.total() > ROWS, "a batch that comes twice shows in a sink that only appends"
