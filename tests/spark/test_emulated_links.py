"""Emulated links on real Spark: rows and state between sites take their time; a bad link starts nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import tiercel
from tiercel.bench.operators import COUNTED, READING, KeyCount

LATENCY_MS = 60.0
AT_EDGE = "counts@edge#1"


def test_rows_and_state_between_two_sites_take_the_latency_of_their_link(
    spark: SparkSession, tmp_path: Path
) -> None:
    links = {"edge cloud": tiercel.Link(latency_ms=LATENCY_MS, jitter_ms=1, mbit=100)}
    with tiercel.start(spark, ["cloud", "edge"], tmp_path, links=links) as live:
        readings = live.stream("readings", READING, key="sensor")
        counts = readings.transform_with_state(
            KeyCount(), COUNTED, name="counts", instances={"cloud": 1, "edge": 1}
        )
        with readings.producer("gateway", site="edge") as producer, counts.subscribe() as subscriber:
            producer.send(*({"sensor": n, "value": 1.0} for n in range(8)))
            got = 0
            while got < 8:
                got += len(subscriber.poll(60.0))
            reports = live.move("counts", keys=list(range(8)), to=AT_EDGE).wait()
            sent_s = time.monotonic()
            producer.send({"sensor": 1, "value": 1.0})
            (received,) = subscriber.poll(60.0)
            took_ms = (time.monotonic() - sent_s) * 1e3
        assert received.row == (1, 2)
        assert took_ms >= LATENCY_MS - 1, "from the edge to the log of the stream, in the cloud"
        assert min(report.duration_ms for report in reports) >= 4 * (LATENCY_MS - 1), (
            "several messages each way"
        )


def test_a_link_of_a_site_that_does_not_exist_starts_nothing(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(tiercel.UserError, match="unknown site 'nowhere'"):
        tiercel.start(spark, ["cloud"], tmp_path / "s", links={"cloud nowhere": tiercel.Link(latency_ms=1)})
    assert not (tmp_path / "s").exists()
