"""Streams, state and metrics as DataFrames, in a Spark session, of a running deployment."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import DataStreamReader

from averages import OPERATOR, Averages, averages, reading
from tiercel.bench.operators import INPUT, OUTPUT, SITE
from tiercel.core.messages import BatchTask, StagedPart
from tiercel.errors import UserError
from tiercel.runtime.client.batch_task import BatchTaskClient
from tiercel.spark.api.clients import RowProducer, RowSubscriber
from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.sources.stream_reader import EARLIEST, ReadRequest, StreamReader
from tiercel.spark.sources.stream_source import register
from tiercel.spark.sources.stream_writer import Columns, StagedRows, StreamWriter, Target

SENSORS = 5


@pytest.fixture(scope="module")
def spark(spark: SparkSession) -> SparkSession:
    register(spark)
    return spark


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Averages]:
    with averages(tmp_path / "storage", checkpoint_ms=50.0) as running:
        yield running


def some(first: int, count: int) -> list[dict[str, Any]]:
    return [reading(f"s{n % SENSORS}", n) for n in range(first, first + count)]


def history(spark: SparkSession, deployment: Averages, **options: Any) -> DataFrame:
    source = spark.read.format("tiercel").option("storage", str(deployment.place.directory))
    return source.option("stream", OUTPUT).options(**options).load()


def stream(spark: SparkSession, deployment: Averages) -> DataStreamReader:
    source = spark.readStream.format("tiercel").option("storage", str(deployment.place.directory))
    return source.option("stream", OUTPUT)


def run_all(frame: DataFrame, sink: str, checkpoint: Path, **options: str) -> list[dict[str, Any]]:
    """Everything that is there now, into a sink; returns the progress of each batch."""
    query = (
        frame.writeStream.format(sink)
        .options(checkpointLocation=str(checkpoint), **options)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return [json.loads(progress.json) for progress in query.recentProgress]


def assert_each_once(rows: list[Any], count: int) -> None:
    """Each row came out once, and found its key as all rows before it had left it."""
    assert sorted(row["n"] for row in rows) == list(range(count))
    assert all(row["count"] == row["n"] // SENSORS + 1 for row in rows)
    assert all(row["sensor"] == f"s{row['n'] % SENSORS}" for row in rows)


def test_stream_log_can_be_read_as_a_dataframe(spark: SparkSession, deployment: Averages) -> None:
    assert history(spark, deployment).collect() == []
    for first in range(0, 100, 10):
        deployment.produce(some(first, 10))
    everything = history(spark, deployment, identity="true").collect()
    assert_each_once(everything, 100)
    names = [row._tiercel_id for row in everything]
    assert len(set(names)) == 100
    operator, _, epoch, _, _ = names[0].split("/")
    assert (operator, epoch) == (OPERATOR, "1")
    for sensor in range(SENSORS):
        of_sensor = [row.n for row in everything if row.sensor == f"s{sensor}"]
        assert of_sensor == sorted(of_sensor)
    last = deployment.last
    some_entries = history(
        spark, deployment, identity="true", startingOffset=2, endingOffset=last - 1
    ).collect()
    assert 0 < len(some_entries) < 100
    assert set(some_entries) < set(everything)


def test_rows_of_a_batch_have_the_same_identity_for_every_reader(
    spark: SparkSession, deployment: Averages
) -> None:
    with RowProducer(deployment.place, INPUT, name="many at once") as producer:
        producer.send_many(some(0, 200))
        producer.flush()
    deployment.wait_for(200)
    everything = history(spark, deployment, identity="true").collect()
    assert_each_once(everything, 200)
    names = {row._tiercel_id: row.n for row in everything}
    assert len(names) == 200
    assert {name.rpartition("/")[2] for name in names} == {
        f"0.{place}" for place in range(40)
    }  # one call each
    found: dict[str, int] = {}
    with RowSubscriber(deployment.place, OUTPUT, after=0) as subscriber:
        while len(found) < 200:
            found |= {received.id: received.row.n for received in subscriber.poll()}
    assert found == names


def test_query_resumes_from_its_checkpoint_after_a_router_restart(
    spark: SparkSession, deployment: Averages, tmp_path: Path
) -> None:
    into = {"path": str(tmp_path / "out")}
    frame = stream(spark, deployment).option("identity", "true").option("maxEntriesPerBatch", "8").load()
    for first in range(0, 100, 10):
        deployment.produce(some(first, 10))
    batches = run_all(frame, "parquet", tmp_path / "checkpoint", **into)
    assert sum(batch["numInputRows"] for batch in batches) == 100
    assert len([batch for batch in batches if batch["numInputRows"]]) == -(-deployment.last // 8) > 1
    deployment.restart_router()
    deployment.produce(some(100, 50), name="later sensors")
    run_all(frame, "parquet", tmp_path / "checkpoint", **into)
    found = pyarrow.parquet.read_table(into["path"]).to_pylist()
    assert_each_once(found, 150)
    commits = tmp_path / "checkpoint" / "commits"
    last = max(int(path.name) for path in commits.glob("[0-9]*"))
    for name in (f"{last}", f".{last}.crc"):
        (commits / name).unlink()  # as if it had died before: the last batch is read again
    run_all(frame, "parquet", tmp_path / "checkpoint", path=str(tmp_path / "again"))
    again = pyarrow.parquet.read_table(tmp_path / "again").to_pylist()
    assert 0 < len(again) <= 50
    known = {row["_tiercel_id"]: row for row in found}
    assert all(known[row["_tiercel_id"]] == row for row in again)


def test_streaming_query_waits_for_new_entries(
    spark: SparkSession, deployment: Averages, tmp_path: Path
) -> None:
    frame = stream(spark, deployment).option("startingOffset", "latest").load()
    deployment.produce(some(0, 10))
    query = frame.writeStream.format("memory").queryName("live").start()
    try:
        while query.lastProgress is None:  # it has looked where the log ends
            query.processAllAvailable()
        deployment.produce(some(10, 20))
        deployment.restart_router()
        deployment.produce(some(30, 20), name="later sensors")
        query.processAllAvailable()
        assert sorted(row.n for row in spark.table("live").collect()) == list(range(10, 50))
    finally:
        query.stop()


def test_each_key_is_in_one_partition_of_a_batch_and_in_order(
    spark: SparkSession, deployment: Averages, tmp_path: Path
) -> None:
    for first in range(0, 300, 10):
        deployment.produce(some(first, 10))
    frame = stream(spark, deployment).option("partitions", "3").load()
    into = {"path": str(tmp_path / "out")}
    run_all(frame.withColumn("part", f.spark_partition_id()), "parquet", tmp_path / "checkpoint", **into)
    files = [pyarrow.parquet.read_table(path).to_pylist() for path in (tmp_path / "out").glob("*.parquet")]
    assert_each_once([row for rows in files for row in rows], 300)
    assert len({row["part"] for rows in files for row in rows}) > 1
    for sensor in range(SENSORS):
        [of_sensor] = [found for rows in files if (found := [r for r in rows if r["sensor"] == f"s{sensor}"])]
        assert [row["n"] for row in of_sensor] == list(range(sensor, 300, SENSORS))
    parted = history(spark, deployment, partitions=4)
    assert parted.rdd.getNumPartitions() == 4
    assert_each_once(parted.collect(), 300)
    assert [row.n for row in parted.collect() if row.sensor == "s1"] == list(range(1, 300, SENSORS))


def test_trimmed_entries_are_refused_with_the_retained_range(spark: SparkSession, tmp_path: Path) -> None:
    with averages(tmp_path / "storage", checkpoint_ms=50.0, stream_entries_max=5) as deployment:
        for first in range(0, 100, 10):
            deployment.produce(some(first, 10))
        last = deployment.last
        with pytest.raises(
            PySparkException, match=f"a range within the retained entries: {last - 4} to {last}"
        ):
            history(spark, deployment, startingOffset=1).collect()
        kept = history(spark, deployment).collect()
        assert 5 <= len(kept) < 100


def test_feed_with_failing_tasks_writes_each_row_and_each_dead_letter_once(
    spark: SparkSession, deployment: Averages, tmp_path: Path
) -> None:
    def fails_at_first(batches: Iterator[Any]) -> Iterator[Any]:
        """Every task of the first attempt breaks when it has written half of its rows."""
        context = TaskContext.get()
        assert context is not None
        for batch in batches:
            yield batch.slice(0, batch.num_rows // 2)
            if context.attemptNumber() == 0:
                raise OSError("planted")
            yield batch.slice(batch.num_rows // 2)

    rows = tmp_path / "rows"
    rows.mkdir()
    frame = (
        spark.readStream.schema("sensor string, n bigint, due_ns bigint, value double")
        .json(str(rows))
        .repartition(2)
        .mapInArrow(fails_at_first, "sensor string, n bigint, due_ns bigint, value double")
        .withColumnRenamed("value", "VALUE")
    )
    options = {"storage": str(deployment.place.directory), "stream": INPUT}
    for batch in (0, 1):
        lines = [json.dumps(reading(f"s{n % SENSORS}", n)) for n in range(1000 * batch, 1000 * batch + 1000)]
        lines.append(json.dumps(reading("s0", 1 << 40)))  # the stream's n is an int
        lines.append(json.dumps(reading("", 7) | {"sensor": None}))  # and its key is never null
        (rows / f"{batch}.json").write_text("\n".join(lines))
        run_all(frame, "tiercel", tmp_path / "checkpoint", queryName="trips", **options)
    deployment.wait_for(2000)
    assert sorted(row["n"] for row in deployment.averages()) == list(range(2000))
    assert [path.suffix for path in deployment.place.feeds.iterdir()] == [".site"], "no row is in a file"
    where = spark.read.format("tiercel").options(storage=options["storage"], stream=f"{INPUT}/dead")
    letters = where.option("identity", "true").load().orderBy("batch", "key").collect()
    assert [json.loads(letter.row)["n"] for letter in letters] == [7, 1 << 40] * 2
    assert [json.loads(letter.row)["sensor"] for letter in letters] == [None, "s0"] * 2
    assert [letter.reason.partition(":")[0] for letter in letters] == ["column sensor", "column n"] * 2
    key = deployment.columns.key_of(("s0", 0, 0, 0.0))
    assert [letter.key and bytes(letter.key) for letter in letters] == [None, key] * 2
    assert [(letter.feed, letter.batch) for letter in letters] == [("trips", batch) for batch in (0, 0, 1, 1)]
    assert len({(letter.batch, letter.partition, letter.offset) for letter in letters}) == 4
    assert all(letter.partition in (0, 1) and 1 <= letter.offset <= 1002 for letter in letters)
    assert len({letter._tiercel_id for letter in letters}) == 4


def stage_at_router(deployment: Averages, feed: str, rows: list[dict[str, Any]]) -> StagedRows:
    """What a task does that writes these rows."""
    client = BatchTaskClient(deployment.place, SITE)
    task = BatchTask(feed, 0, 0, uuid.uuid4().hex)
    client.begin(task, INPUT)
    client.send(INPUT, [deployment.columns.pack(row) for row in rows])
    client.flush()
    client.close()
    return StagedRows(feed, 0, StagedPart(task.attempt, 1), -1, 0)


def test_repeated_commit_of_a_writer_adds_nothing(spark: SparkSession, deployment: Averages) -> None:
    columns = Columns.of(deployment.columns.schema, deployment.columns)
    writer = StreamWriter(Target(deployment.place, INPUT, SITE, deployment.columns), columns)
    for _ in range(2):
        writer.commit([stage_at_router(deployment, "a-query", some(0, 50))], 0)
    deployment.wait_for(50)
    assert_each_once(deployment.averages(), 50)


def test_batch_write_adds_rows_once_and_can_fail_on_invalid_rows(
    spark: SparkSession, deployment: Averages
) -> None:
    frame = spark.range(0, 200, 1, 3).select(
        f.format_string("s%s", f.col("id") % SENSORS).alias("sensor"),
        f.col("id").cast("int").alias("n"),
        f.lit(0).cast("bigint").alias("due_ns"),
        f.col("id").cast("double").alias("value"),
    )
    into = {"storage": str(deployment.place.directory), "stream": INPUT}
    frame.write.format("tiercel").mode("append").options(**into).save()
    deployment.wait_for(200)
    assert sorted(row["n"] for row in deployment.averages()) == list(range(200))
    assert list(deployment.place.feeds.iterdir()) == []
    large = frame.limit(1).withColumn("n", f.lit(1 << 40))
    with pytest.raises(PySparkException, match="column n"):
        large.write.format("tiercel").mode("append").options(badRows="fail", **into).save()
    assert deployment.dead_letters() == []
    for _ in range(2):  # a job that is run again adds no dead letter twice either
        large.write.format("tiercel").mode("append").options(batchId="monday", **into).save()
    [letter] = deployment.dead_letters()
    assert (letter["feed"], letter["offset"]) == (f"batch-{INPUT}|monday", 1)
    assert json.loads(letter["row"])["n"] == 1 << 40


def test_job_that_runs_again_under_its_batch_id_adds_nothing(
    spark: SparkSession, deployment: Averages
) -> None:
    def write(first: int, partitions: int, batch: str) -> None:
        frame = spark.range(first, first + 1_000, 1, partitions).selectExpr(
            f"concat('s', id % {SENSORS}) AS sensor", "int(id) AS n", "0L AS due_ns", "double(id) AS value"
        )
        into = {"storage": str(deployment.place.directory), "stream": INPUT, "batchId": batch}
        frame.write.format("tiercel").mode("append").options(**into).save()

    write(0, 2, "monday/1")
    write(0, 3, "monday/1")  # its driver did not hear that it was done
    stage_at_router(deployment, f"batch-{INPUT}|tuesday", some(1_000, 1_000))
    write(1_000, 3, "tuesday")  # its driver died before the commit, with all rows staged
    deployment.wait_for(2_000)
    write(2_000, 1, "wednesday")
    deployment.wait_for(3_000)
    assert sorted(row["n"] for row in deployment.averages()) == list(range(3_000))


def test_state_can_be_read_as_a_dataframe(spark: SparkSession, deployment: Averages) -> None:
    deployment.produce(some(0, 100))
    state = (
        spark.read.format("tiercel-state")
        .option("storage", str(deployment.place.directory))
        .option("operator", OPERATOR)
        .load()
    )
    rows = state.collect()
    assert {row.key.sensor: json.loads(row.value)[0] for row in rows} == {f"s{n}": 20 for n in range(SENSORS)}
    assert {(row.variable, row.map_key, tuple(row.timers), row.epoch) for row in rows} == {
        ("average", None, (), 1)
    }
    assert {row.instance for row in rows} <= {f"{OPERATOR}@{SITE}#1", f"{OPERATOR}@{SITE}#2"}
    [one] = state.where("key.sensor = 's3'").collect()
    assert one == next(row for row in rows if row.key.sensor == "s3")


def test_metrics_can_be_read_as_a_dataframe_and_as_a_stream(
    spark: SparkSession, deployment: Averages, tmp_path: Path
) -> None:
    deployment.produce(some(0, 100))
    where = str(deployment.place.directory)
    metrics = spark.read.format("tiercel-metrics").option("storage", where).load()
    processes = {f"{OPERATOR}@{SITE}#1", f"{OPERATOR}@{SITE}#2", SITE}
    while {row.process for row in metrics.select("process").distinct().collect()} != processes:
        pass  # each writes a line a second
    into = {"path": str(tmp_path / "out")}
    frame = spark.readStream.format("tiercel-metrics").option("storage", where).load()
    found: list[Any] = []
    while len(found) < 6:
        run_all(frame, "parquet", tmp_path / "checkpoint", **into)
        found = spark.read.parquet(into["path"]).collect()
    known = {(row.at, row.process, row.kind): row for row in metrics.collect()}
    assert len({(row.at, row.process, row.kind) for row in found}) == len(found)
    assert all(known[row.at, row.process, row.kind] == row for row in found)
    assert {row.kind for row in found} == {"router", "instance", "inbox"}


def test_checkpoint_ahead_of_its_log_is_refused(deployment: Averages) -> None:
    """It waited, and then skipped as many entries as had been lost."""
    place = deployment.place
    facts = place.manifest().streams[OUTPUT]
    reader = StreamReader(
        ReadRequest(place, OUTPUT, OPERATOR, RowCodec.of(facts), identity=False, starting=EARLIEST)
    )
    limit = reader.getDefaultReadLimit()
    begin = reader.initialOffset()
    assert reader.latestOffset(begin, limit) == begin
    with pytest.raises(UserError, match="ends at 0, and the query has read up to 1"):
        reader.latestOffset({**begin, "offset": begin["offset"] + 1}, limit)
