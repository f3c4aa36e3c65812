"""`tiercel bench throughput`: events a second through the public API, next to Spark's transformWithState.

Responsible for: sustained load from one producer to one subscriber, Spark's best in the same run, ratios.
Not responsible for: Spark's batches (spark.py), checking outputs (subscriber.py).

The producer sends as fast as its window allows, so the figure is that of the whole path.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, product
from time import monotonic_ns
from typing import Any

import numpy as np

from tiercel.bench.baselines import spark as spark_batches
from tiercel.bench.baselines.operator_alone import own_code_us
from tiercel.bench.deployments import PROCESSES, BenchDeployment, deployed
from tiercel.bench.loadgen.subscriber import SubscriberProcess
from tiercel.bench.operators import (
    AVERAGED,
    COUNTED,
    READING,
    KeyCount,
    RunningAverage,
    key_count,
    running_average,
)
from tiercel.bench.report import Line, process_cpu_s
from tiercel.core.settings import Settings
from tiercel.runtime.deployment import Durability
from tiercel.spark.cluster.session import open_session

ShowProgress = Callable[[str], None]

PROCESSORS: dict[str, tuple[dict[str, Callable[[], Any]], str]] = {
    "key-count": ({"processor": KeyCount, "fold": key_count}, COUNTED),
    "running-average": ({"processor": RunningAverage, "fold": running_average}, AVERAGED),
}
SPARK_ROWS = (20_000, 100_000, 500_000)
BATCH = 1_000  # tuples in one call of send_columns
WARM_S = 3.0
DRAIN_S_MAX = 60.0
BACKLOG_ROWS_MAX = 100_000  # beyond it the producer waits: a rate that only fills a queue is none


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    processors: Sequence[str]
    forms: Sequence[str]  # "processor": as it is for Spark; "fold": the same as a step function
    durability: Durability
    seconds: float
    keys: Sequence[int]
    spark_rows: Sequence[int]  # none: Spark is left out
    spark_batches: int
    seed: int


def measure(options: Options, show_progress: ShowProgress) -> tuple[list[Line], Line]:
    """One row for each number of keys, processor and form; beside it Spark by batch size, and our CPU."""
    orders = {keys: shuffled(keys, options.seed) for keys in options.keys}
    ours: dict[tuple[int, str, str], Line] = {}
    spark = open_session("tiercel-bench", slots=PROCESSES + 2)
    try:
        for keys, name, form in product(options.keys, options.processors, options.forms):
            forms, schema = PROCESSORS[name]
            show_progress(f"{name} as a {form}, {keys:,} keys: Tiercel, {options.seconds:g} s")
            limits = Settings(backlog_rows_max=BACKLOG_ROWS_MAX)
            with deployed(
                spark, forms[form](), READING, schema, durability=options.durability, settings=limits
            ) as running:
                line = ours[keys, name, form] = _sustained(running, orders[keys], options.seconds)
            line["own_code_us"] = own_code_us(forms[form]())
    finally:
        spark.stop()
    sparks = _sparks(options, orders, show_progress) if options.spark_rows else []
    rows = []
    for (keys, name, form), line in ours.items():
        mine = [each for each in sparks if (each["keys"], each["processor"]) == (keys, name)]
        best = spark_batches.best(mine) if mine else {}
        rows.append({"keys": keys, **_row(name, form, options.durability, line, best)})
    used = [
        {
            "keys": keys,
            "processor": name,
            "form": form,
            **line["cpu_us"],
            "own_code": round(line["own_code_us"], 2),
        }
        for (keys, name, form), line in ours.items()
    ]
    return rows, {"spark": sparks, "cpu_us_per_tuple": used}


def shuffled(keys: int, seed: int) -> list[int]:
    """The keys in the order in which the load takes turns, the same for each seed."""
    order = list(range(keys))
    random.Random(seed).shuffle(order)
    return order


def _row(name: str, form: str, durability: str, ours: Line, sparks: Line) -> Line:
    rate = ours["tiercel_events_per_s"]
    best, low = sparks.get("spark_events_per_s"), sparks.get("spark_events_per_s_below_2s")
    return {
        "processor": name,
        "form": form,
        "durability": durability,
        "tiercel_events_per_s": rate,
        "spark_events_per_s": best,
        "ratio": round(rate / best, 2) if best else None,
        "spark_events_per_s_below_2s": low,
        "ratio_below_2s": round(rate / low, 2) if low else None,
        **{name: ours[name] for name in ("backlog_s", "tuples", "faults")},
    }


def readings(order: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Every key in turn, `BATCH` rows at a time; the values of a key are 1.0, 2.0, 3.0, ...

    As columns, as Spark reads them from its files.
    """
    keys = len(order)
    sensors = np.resize(np.asarray(order, dtype=np.int64), keys + BATCH)  # from any key on, BATCH of them
    for first in count(0, BATCH):
        begin = first % keys
        values = np.arange(first, first + BATCH) // keys + 1
        yield {"sensor": sensors[begin : begin + BATCH], "value": values.astype(float)}


def _sustained(running: BenchDeployment, order: Sequence[int], seconds: float) -> Line:
    reader = SubscriberProcess(running.live.deployment, running.output.name, len(order))
    pids = {p.name: p.pid for p in running.live.status().processes}
    pids |= {"producer": os.getpid(), "subscriber": reader.pid}
    used: dict[str, float] = {}
    began_ns = 0
    source, sent = readings(order), 0
    with running.input.producer("bench") as producer:
        begins_s = time.monotonic() + WARM_S
        ends_s = begins_s + seconds
        while time.monotonic() < ends_s:
            producer.send_columns(next(source))
            sent += BATCH
            if not used and time.monotonic() >= begins_s:
                used, began_ns = process_cpu_s(pids), monotonic_ns()
        ended_ns = monotonic_ns()  # the last call may have waited: what counts is the time that went by
        spent = {name: cpu_s - used[name] for name, cpu_s in process_cpu_s(pids).items()}
        producer.flush(DRAIN_S_MAX)
    give_up_s = time.monotonic() + DRAIN_S_MAX
    while reader.received < sent and time.monotonic() < give_up_s:
        time.sleep(0.01)
    drained_ns = next((at for at, got in reader.reports if got >= sent), monotonic_ns())
    counts = reader.end()
    expected = [sent // len(order) + (place < sent % len(order)) for place in range(len(order))]
    missing = sum(abs(counts[sensor] - expected[place]) for place, sensor in enumerate(order))
    got = reader.received_at(ended_ns) - reader.received_at(began_ns)
    return {
        "tiercel_events_per_s": round(got / ((ended_ns - began_ns) / 1e9)),
        "backlog_s": round(max(0.0, (drained_ns - ended_ns) / 1e9), 3),
        "cpu_us": {name: round(cpu_s / max(1, got) * 1e6, 2) for name, cpu_s in spent.items()},
        "tuples": sent,
        "faults": reader.faults + missing,
    }


def _sparks(options: Options, orders: dict[int, list[int]], show_progress: ShowProgress) -> list[Line]:
    spark = open_session("tiercel-bench-spark", slots=os.cpu_count() or 1)
    lines = []
    try:
        for keys, name in product(options.keys, options.processors):
            forms, schema = PROCESSORS[name]
            for rows in options.spark_rows:
                show_progress(f"{name}, {keys:,} keys: Spark, {rows:,} rows a batch")
                line = spark_batches.measure(
                    spark, forms["processor"](), schema, orders[keys], rows, options.spark_batches
                )
                lines.append({"keys": keys, "processor": name, **line})
    finally:
        spark.stop()
    return lines
