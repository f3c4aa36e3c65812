"""A program that reaches Spark through Spark Connect, and runs a deployment there: for test_connect.py.

python connected.py WHAT URL STORAGE
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

import tiercel
from tiercel.bench.operators import INPUT_SCHEMA, OUTPUT_SCHEMA, NumberedAverage
from tiercel.chaos.steady_traffic import OPERATOR, Traffic, declare
from tiercel.spark.api.deployment import Live
from tiercel.spark.api.status import ProcessStatus

FIRST = f"{OPERATOR}@cloud#1"


def process(live: Live, name: str) -> ProcessStatus:
    return next(found for found in live.status().processes if found.name == name)


def until_reborn(live: Live, before: ProcessStatus) -> None:
    while (
        found := live.deployment.registry.find(before.name)
    ) is None or found.incarnation == before.incarnation:
        assert not live.failures, live.failures
        time.sleep(0.05)


def everything(spark: SparkSession, storage: Path) -> None:
    with tiercel.start(spark, ["cloud"], storage / "a") as live:
        readings, averages = declare(live)
        query = averages.dataframe().writeStream.format("memory").queryName("seen").start()
        traffic = Traffic(readings, averages)
        traffic.go_on()
        before = process(live, FIRST)
        assert before.stage >= 0
        os.kill(before.pid, signal.SIGKILL)
        until_reborn(live, before)
        assert process(live, FIRST).attempt == 1  # Spark itself has started it again
        traffic.go_on()
        before = process(live, "cloud")
        live.cancel("cloud")
        until_reborn(live, before)
        assert process(live, "cloud").submissions == 2
        traffic.go_on()
        live.scale(OPERATOR, {"cloud": 2}).wait()
        live.drain(FIRST).wait()
        assert process(live, FIRST).slots == 0
        rows = traffic.finish() * 20
        while spark.table("seen").count() < rows:
            assert query.exception() is None
            time.sleep(0.1)
        assert spark.table("seen").distinct().count() == spark.table("seen").count() == rows
        query.stop()
    files = storage / "files"
    rows_of_four = spark.range(40).selectExpr("id % 4 sensor", "id n", "0L due_ns", "1.0D value")
    rows_of_four.write.parquet(str(files))
    fed = spark.readStream.schema(INPUT_SCHEMA).parquet(str(files))
    outputs = tiercel.transform_with_state(
        fed.groupBy("sensor"), NumberedAverage(), OUTPUT_SCHEMA, "update", "none", storage=storage / "b"
    )
    query = outputs.writeStream.format("memory").queryName("dropped").start()
    while spark.table("dropped").count() < 40:
        assert query.exception() is None
        time.sleep(0.1)
    query.stop()
    tiercel.stop_all()


def begin_and_wait_to_be_killed(spark: SparkSession, storage: Path) -> None:
    live = tiercel.start(spark, ["cloud"], storage)
    traffic = Traffic(*declare(live))
    traffic.go_on()
    print(traffic.finish(), flush=True)
    time.sleep(600)


def take_over(spark: SparkSession, storage: Path) -> None:
    rounds = int(sys.argv[4])
    with tiercel.start(spark, ["cloud"], storage) as live:
        traffic = Traffic(*declare(live), begin=rounds)
        traffic.go_on()
        assert {found.incarnation for found in live.status().processes} == {2}
        print(traffic.finish())


if __name__ == "__main__":
    faulthandler.dump_traceback_later(240, exit=True)  # who hangs says where
    session = SparkSession.builder.remote(sys.argv[2]).getOrCreate()
    globals()[sys.argv[1]](session, Path(sys.argv[3]))
    session.stop()
    try:
        tiercel.start(session)
    except tiercel.UserError as error:
        print(error.what)
