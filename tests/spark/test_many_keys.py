"""Thousands of keys on Spark: rows travel as bundles, in a chain, with event time, and while keys move."""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import tiercel
from tiercel.spark.api.deployment import Live
from tiercel.spark.api.streams import LiveStream

KEYS, ROUNDS, GROUPS = 3_000, 4, 700
BOTH = {"local": 2}


class Running(StatefulProcessor):
    """The running total of a sensor."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._total = handle.getValueState("total", "n long, total double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n, total = self._total.get() or (0, 0.0)
        for row in rows:
            n, total = n + 1, total + row.value
            yield Row(sensor=key[0], group=key[0] % GROUPS, n=n, total=total)
        self._total.update((n, total))

    def close(self) -> None:
        """Holds no resources."""


def largest(state: tuple[int, float], row: Any) -> Any:
    rows, total = state[0] + 1, max(state[1], row.total)
    return (rows, total), (row.group, rows, total)


class Deployment:
    """Sensors with event time -> totals by sensor -> the largest total of each group."""

    def __init__(self, live: Live, sensors: LiveStream, totals: LiveStream, groups: LiveStream) -> None:
        self.live, self.sensors, self.totals, self.groups = live, sensors, totals, groups


@pytest.fixture(scope="module")
def deployment(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with tiercel.start(spark, storage=tmp_path_factory.mktemp("many") / "storage") as live:
        sensors = live.stream(
            "sensors",
            "sensor bigint, at timestamp, value double",
            key="sensor",
            event_time="at",
            delay="1 hour",
        )
        totals = sensors.transform_with_state(
            Running(),
            "sensor bigint, group bigint, n bigint, total double",
            name="totals",
            instances=BOTH,
            output_key="group",
        )
        groups = totals.fold(
            largest,
            (0, 0.0),
            "group bigint, rows bigint, total double",
            state_schema="rows long, total double",
            name="groups",
            instances=BOTH,
        )
        yield Deployment(live, sensors, totals, groups)


def send(deployment: Deployment, name: str, *, moves: bool = False) -> None:
    """Each sensor in each round once, with its number as value; in the second half keys may move."""
    now_s = time.time()
    live = deployment.live
    with deployment.sensors.producer(name) as producer:
        for n in range(ROUNDS):
            at = datetime.datetime.fromtimestamp(now_s + n, datetime.UTC)
            sensors = list(range(KEYS))
            producer.send_columns({"sensor": sensors, "at": [at] * KEYS, "value": list(map(float, sensors))})
            if moves and n == ROUNDS // 2:
                producer.flush()
                under_way = [
                    live.move("totals", slots=range(100), to="totals@local#2"),
                    live.move("totals", keys=[7, 8, 2_999], to="totals@local#1", strategy="pause"),
                    live.move("groups", slots=range(4_000, 4_096), to="groups@local#1"),
                ]
                for move in under_way:
                    move.wait()


def test_thousands_of_keys_travel_as_bundles_and_every_row_counts_once(deployment: Deployment) -> None:
    with deployment.totals.subscribe(after=0) as totals, deployment.groups.subscribe(after=0) as groups:
        send(deployment, "first")
        send(deployment, "second", moves=True)
        expected = 2 * ROUNDS * KEYS
        seen: dict[int, list[tuple[int, float]]] = {}
        names: Counter[str] = Counter()
        give_up_s = time.monotonic() + 90
        while sum(map(len, seen.values())) < expected and time.monotonic() < give_up_s:
            for received in totals.poll(5.0):
                seen.setdefault(received.row.sensor, []).append((received.row.n, received.row.total))
                names[received.id] += 1
        rows: Counter[int] = Counter()
        highest: dict[int, float] = {}
        while sum(rows.values()) < expected and time.monotonic() < give_up_s:
            for group, count, total in groups.poll_values(5.0):
                rows[group] += 1
                assert count == rows[group]
                highest[group] = total
    for sensor in range(KEYS):
        assert seen[sensor] == [(n, n * float(sensor)) for n in range(1, 2 * ROUNDS + 1)], sensor
    assert max(names.values()) == 1
    assert len(names) == expected
    assert highest == {
        group: max(s for s in range(KEYS) if s % GROUPS == group) * 2.0 * ROUNDS for group in range(GROUPS)
    }
