"""The two applications that `tiercel bench recover` kills: a deployment of Tiercel, and Spark's own query.

Responsible for: running one of them until it is killed, on storage or a checkpoint that outlives it.
Not responsible for: load and outputs (recover_systems.py), when it dies (recover.py).

    python -m tiercel.bench.scenarios.recover_apps tiercel|spark JSON

Both run the same processor, `HeavyAverage`, with equal state. Spark's query reads files, stores its state in
RocksDB with changelog checkpoints, and restarts from its checkpoint as soon as it fails.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tiercel.bench.baselines.spark import CHANGELOG
from tiercel.bench.loadgen.child import reply
from tiercel.bench.operators import INPUT, INPUT_SCHEMA, OUTPUT_SCHEMA, SITE, HeavyAverage
from tiercel.core.settings import Settings
from tiercel.spark.api.deployment import start
from tiercel.spark.cluster.session import open_session
from tiercel.spark.pyspark_internals import repartition_checkpoint

OPERATOR = "average"
SLOTS = 8  # room for a router, instances that take over, and those that go


class Setup(msgspec.Struct, frozen=True):
    """The parameters of an application."""

    directory: str  # all of its own
    state_bytes: int  # of each key
    cluster: bool = False  # executors in processes of their own
    checkpoint_ms: float = 1_000.0
    backup: bool = True
    read_mb_s: float = 0.0  # of each reader of the backup; 0: no limit
    warm_workers: int = 1
    partitions: int = 0  # of Spark's state; 0: one for each core

    @property
    def place(self) -> Path:
        return Path(self.directory)


def session(name: str, setup: Setup, slots: int, attempts: int = 4) -> Any:
    """On this machine's cores, or with two executors."""
    if not setup.cluster:
        return open_session(name, slots=slots, attempts=attempts)
    settings = {"spark.executor.memory": "512m"}
    return open_session(name, master=f"local-cluster[2,{slots},1024]", config=settings)


# -- Tiercel ------------------------------------------------------------------------------------------


def run_tiercel(setup: Setup) -> None:
    """One instance has all of the state. Asked on stdin to recover it over several, it does."""
    spark = session("tiercel-recover", setup, SLOTS)
    backup = {"location": (setup.place / "backup").as_uri(), "read_mb_s": setup.read_mb_s}
    settings = Settings(checkpoint_ms=setup.checkpoint_ms)
    with start(
        *(spark, [SITE], setup.place / "storage"),
        settings=settings,
        backup=backup if setup.backup else None,
        warm_workers=setup.warm_workers,
    ) as live:
        readings = live.stream(INPUT, INPUT_SCHEMA, key="sensor")
        readings.transform_with_state(
            HeavyAverage(setup.state_bytes), OUTPUT_SCHEMA, name=OPERATOR, instances={SITE: 1}
        )
        live.deploy()
        reply({"ready": True})
        for line in sys.stdin:
            asked = msgspec.json.decode(line, type=dict[str, Any])
            live.recover(asked["instance"], over=asked["over"])


# -- Spark --------------------------------------------------------------------------------------------


FAILURES = "failures"  # a file with a byte for each time that the query has failed


class Query:
    """Spark's query, started again whenever it fails."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._spark = spark = session("spark-recover", setup, os.cpu_count() or 1, attempts=1)
        spark.conf.set("spark.sql.shuffle.partitions", str(setup.partitions or os.cpu_count() or 1))
        spark.conf.set(CHANGELOG, "true")
        self._lock = threading.Lock()
        self._outputs = setup.place / "outputs"
        self._outputs.mkdir(exist_ok=True)

    def start(self, *, until_drained: bool = False) -> Any:
        trigger: dict[str, Any] = {"availableNow": True} if until_drained else {"processingTime": "0 seconds"}
        frame = self._spark.readStream.schema(INPUT_SCHEMA).csv(str(self._setup.place / "inputs"))
        return (
            frame.groupBy("sensor")
            .transformWithState(HeavyAverage(self._setup.state_bytes), OUTPUT_SCHEMA, "update", "none")
            .writeStream.outputMode("update")
            .foreachBatch(self._record)
            .option("checkpointLocation", str(self._setup.place / "checkpoint"))
            .trigger(**trigger)
            .start()
        )

    def _record(self, batch: Any, number: int) -> None:
        """The sink: when it has the rows, they have come out."""
        found = batch.select("sensor", "n", "due_ns").toArrow()
        emitted_ns = np.full(found.num_rows, time.monotonic_ns(), dtype=np.int64)
        columns = [found[name].to_numpy() for name in ("sensor", "n", "due_ns")]
        draft = self._outputs / f".{number}"
        with draft.open("wb") as file:
            np.save(file, np.stack([*columns, emitted_ns]))
        draft.rename(self._outputs / f"{time.monotonic_ns():020d}.npy")

    def keep_running(self) -> None:
        self._query = self.start()
        reply({"ready": True})
        while True:
            query = self._query
            try:
                query.awaitTermination()
            except Exception:  # whatever it is: it is what a user's supervision has to cope with
                with (self._setup.place / FAILURES).open("ab") as failures:
                    failures.write(b".")
                self._query = self.start()
            with self._lock:  # it was stopped: until it runs again
                pass

    def rescale(self, partitions: int) -> None:
        """Stop, repartition the state offline, start again; replies with what each step took."""
        with self._lock:
            begun = time.monotonic()
            self._query.stop()
            stopped = time.monotonic()
            self.start(until_drained=True).awaitTermination()  # the last batch must be committed
            drained = time.monotonic()
            self._spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
            repartition_checkpoint(self._spark, str(self._setup.place / "checkpoint"), partitions)
            repartitioned = time.monotonic()
            self._query = self.start()
            took = {"stopped": stopped - begun, "drained": drained - begun}
            took["repartitioned"] = repartitioned - begun
            reply({**took, "restarted": time.monotonic() - begun})


def main() -> None:
    kind, facts = sys.argv[1:]
    setup = msgspec.json.decode(facts, type=Setup)
    if kind == "tiercel":
        run_tiercel(setup)
    else:
        query = Query(setup)
        threading.Thread(target=query.keep_running, daemon=True).start()
        for line in sys.stdin:  # until our parent is gone
            query.rescale(msgspec.json.decode(line, type=dict[str, int])["partitions"])


if __name__ == "__main__":
    main()
