"""State from elsewhere: read from a checkpoint of Spark, exported, imported, upgraded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from oracle import Collected, Files, differences, until
from oracle_cases import OUTPUT
from oracle_processors import START, Adopted, Lasting, Told
from plain_spark import settled
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import tiercel
from tiercel.admin import checkpoint
from tiercel.errors import UserError
from tiercel.spark.api.export_import import import_state

INPUT = "k string, seq long, op string, n long, text string, ts timestamp"
START_S = int(START.timestamp())
KEYS = [f"k{n}" for n in range(12)]
Rows = list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def spark(spark: SparkSession) -> SparkSession:
    tiercel.register(spark)
    return spark


def batches(ops: list[str], seed: int) -> list[Rows]:
    """Four batches: the first two are Spark's. A later batch is a minute later."""
    random = Random(seed)
    made = []
    for batch in range(4):
        rows: Rows = []
        for n, key in enumerate(KEYS if batch < 2 else KEYS[::2]):
            at = START + timedelta(seconds=60 * batch + n)
            for seq in range(3):
                op = random.choice(ops)
                number = START_S + 60 * batch + 90 if op == "register" else random.randint(0, 50)
                rows.append((key, 100 * batch + seq, op, number, f"t{random.randint(0, 3)}", at))
        made.append(rows)
    return made


def looks(rows: Rows) -> Rows:
    return [(key, seq, "look", 0, text, at) for key, seq, _, _, text, at in rows]


class UnderSpark:
    """A query that is stopped and goes on."""

    def __init__(self, spark: SparkSession, directory: Path, processor: Told, time_mode: str) -> None:
        self.files = Files(directory / "in", INPUT)
        frame = self.files.frame(spark)
        if time_mode == "eventTime":
            frame = frame.withWatermark("ts", "0 seconds")
        self.results = frame.groupBy("k").transformWithState(processor, OUTPUT, "update", time_mode)
        self.checkpoint = directory / "checkpoint"
        self.ends = time_mode == "eventTime"

    def run(self, some: list[Rows]) -> tuple[Collected, list[int]]:
        """What came out, and how much of it after each batch."""
        collected, counts = Collected(), list[int]()
        sizes: list[int] = []  # of the batches that have begun

        def take(batch: DataFrame, number: int) -> None:
            rows = batch.collect()
            collected.add(rows)
            sizes.append(len(rows))

        writer = (
            self.results.writeStream.outputMode("update")
            .option("checkpointLocation", str(self.checkpoint))
            .foreachBatch(take)
        )
        query = writer.start()
        try:
            for rows in some:
                wanted = collected.count + len(rows)
                self.files.write(rows)
                if self.ends:
                    query = settled(query, writer)
                else:  # with timers in processing time there is always one more batch, after a commit
                    until(
                        lambda wanted=wanted: collected.count >= wanted and sizes[-1] == 0,
                        lambda wanted=wanted: f"Spark: {collected.count} of {wanted}",
                    )
                counts.append(collected.count)
        finally:
            query.stop()
        return collected, counts


@pytest.mark.parametrize(
    ("processor", "time_mode", "ops"),
    [
        (Adopted(), "eventTime", ["set", "append", "update", "register", "look"]),
        pytest.param(Lasting(), "processingTime", ["begin", "look"], marks=pytest.mark.long),
    ],
)
def test_operator_continues_the_state_of_a_spark_query(
    spark: SparkSession, tmp_path: Path, processor: Told, time_mode: str, ops: list[str]
) -> None:
    query = UnderSpark(spark, tmp_path, processor, time_mode)
    *first, third, fourth = batches(ops, 7)
    query.run(first)
    shutil.copytree(query.checkpoint, tmp_path / "left")
    adopted = tiercel.read_spark_state(spark, tmp_path / "left")
    # what is registered in processing time later is not the same on both sides
    last = [third if time_mode == "eventTime" else looks(third), looks(fourth)]
    wanted, counts = query.run(last)
    collected = Collected()
    event_time = "ts" if time_mode == "eventTime" else ""
    with tiercel.start(spark, ["cloud"], tmp_path / "storage") as live:
        stream = live.stream("in", INPUT, key="k", event_time=event_time)
        operator = stream.transform_with_state(
            processor, OUTPUT, name="op", time_mode=time_mode, instances={"cloud": 2}, initial_state=adopted
        )
        with (
            operator.dead_letters.subscribe(after=0) as refused,
            operator.subscribe(after=0) as outputs,
            stream.producer("p") as producer,
        ):
            for rows, count in zip(last, counts, strict=True):
                producer.send_many(rows)
                producer.flush()

                def arrived(count: int = count) -> bool:
                    collected.add([received.row for received in outputs.poll(0.05)])
                    letters = [received.row.reason for received in refused.poll(0)]
                    assert not letters, letters[:3]
                    return collected.count >= count

                until(arrived, lambda count=count: f"Tiercel: {collected.count} of {count}\n{live.status()}")
    if time_mode == "eventTime":
        assert any("fired" in told for of_key in wanted.of_key.values() for _, told in of_key)
    found = differences(collected.of_key, wanted.of_key)
    assert not found, "\n".join(found[:3])


# -- out and in, and another schema --------------------------------------------------------------


class Totals(StatefulProcessor):
    """Counts and remembers; a later version has a unit, or another name."""

    def __init__(self, schema: str) -> None:
        self.schema = schema

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.total = handle.getValueState("total", self.schema)
        self.seen = handle.getListState("seen", "at timestamp, n decimal(8,2)")
        self.by_text = handle.getMapState("by_text", "text string", "n int", 3_600_000)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            total = self.total.get() or (0, *[None] * self.schema.count(","))
            self.total.update((total[0] + row.n, *total[1:]))
            self.seen.appendValue((START, row.n))
            self.by_text.updateValue((row.text,), (row.n,))
            self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 3_600_000)
            yield Row(k=key[0], seq=row.n, told=repr((*total, len(list(self.seen.get())))))

    def close(self) -> None:
        """Nothing to let go."""


def run(spark: SparkSession, storage: Path, rows: Rows, schema: str = "n long", **options: Any) -> list[str]:
    """Start, let rows through, take a checkpoint, stop; what was told, in order of keys."""
    with tiercel.start(spark, ["cloud"], storage) as live:
        stream = live.stream("in", "k string, n int, text string", key="k")
        operator = stream.transform_with_state(
            Totals(schema), OUTPUT, name="op", time_mode="processingTime", instances={"cloud": 2}, **options
        )
        with operator.subscribe() as outputs, stream.producer("p") as producer:
            producer.send_many(rows)
            producer.flush()
            told: list[Any] = []

            def arrived() -> bool:
                told.extend(received.row for received in outputs.poll(0.05))
                return len(told) >= len(rows)

            until(arrived, lambda: f"{len(told)} of {len(rows)}")
        checkpoint(storage)
    return [row.told for row in sorted(told, key=lambda row: row.k)]


def columns(spark: SparkSession, storage: Path) -> dict[str, Any]:
    frame = spark.read.format("tiercel-state").options(storage=str(storage), operator="op", layout="columns")
    return {row.key.k: (row.state, row.timers) for row in frame.load().collect()}


def test_exported_state_can_be_imported_and_upgraded(spark: SparkSession, tmp_path: Path) -> None:
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    keys = [f"k{n}" for n in range(10)]
    assert run(spark, first, [(k, n, f"t{n % 3}") for n, k in enumerate(keys)]) == ["(0, 1)"] * 10
    before = columns(spark, first)
    assert (before["k3"][0].total.n, len(before["k3"][1])) == (3, 1)
    out = str(tmp_path / "export")
    about = tiercel.export_state(first, "op", out, spark=spark)
    assert (about.keys, sorted(about.state)) == (10, ["by_text", "seen", "total"])
    with pytest.raises(UserError, match="holds an export already"):
        tiercel.export_state(first, "op", out, spark=spark)

    # as initial state of a new deployment: a new schema on the way, or none
    kept = tiercel.read_exported_state(spark, out)
    told = run(
        spark,
        second,
        [("k3", 5, "t9")],
        "n long, u string",
        initial_state=kept,
        upgrade={"total": {"u": "km"}},
    )
    assert told == ["(3, 'km', 2)"]
    after = columns(spark, second)
    assert {k: state[1] for k, state in after.items() if k != "k3"} == {
        k: state[1] for k, state in before.items() if k != "k3"
    }
    assert all(after[k][0].seen == before[k][0].seen for k in keys if k != "k3")
    assert all(after[k][0].by_text == before[k][0].by_text for k in keys if k != "k3")  # expiries too
    assert [tuple(after[k][0].total) for k in ("k2", "k3")] == [(2, "km"), (8, "km")]
    assert run(spark, second, [("k3", 1, "t9")], "n long, u string") == [
        "(8, 'km', 3)"
    ]  # it need not be said again
    with pytest.raises(UserError, match="'total' of operator 'op' has another schema"):
        run(spark, tmp_path / "never", [], "n string", initial_state=kept)

    # into a stopped one, of the same schema and without keys
    with pytest.raises(UserError, match="'op' has keys already"):
        import_state(out, first, "op", spark=spark)
    run(spark, third, [])
    assert import_state(out, third, "op", spark=spark) == 10
    assert columns(spark, third) == before
    assert run(spark, third, [("k3", 5, "t9")]) == ["(3, 2)"]

    # another schema of the same deployment
    for upgrade, reason in (
        (None, "has another schema than what is stored: n:bigint,u:string"),
        ({"total": {}}, "no default for u"),
    ):
        with pytest.raises(UserError, match=reason):
            run(spark, first, [], "n long, u string", upgrade=upgrade)
    with pytest.raises(UserError, match=r"failed at key \['k7'\]: ZeroDivisionError"):
        run(spark, first, [], "m long", upgrade={"total": lambda old: {"m": 1 // (old["n"] - 7)}})
    assert columns(spark, first) == before  # nothing was touched
    renamed = run(
        spark, first, [("k3", 5, "t9")], "m long", upgrade={"total": lambda old: {"m": 10 * old["n"]}}
    )
    assert renamed == ["(30, 2)"]
    assert {k: state.total.m for k, (state, _) in columns(spark, first).items()} == {
        k: 35 if k == "k3" else 10 * n for n, k in enumerate(keys)
    }
    assert run(spark, first, [("k4", 1, "t9")], "m long") == ["(40, 2)"]  # it is done: no upgrade is needed
