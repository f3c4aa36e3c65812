"""Rows that devices number, on real Spark: gateways at two sites bring them, and the key's owner moves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import tiercel
from tiercel.spark.api.deployment import Live

POSITION, SEEN = "car string, seq long, at double", "car string, seq long, before long"
WAIT_S = 60.0


def follow(state: tuple[int], row: Any) -> tuple[tuple[int], tuple[str, int, int]]:
    """Emits the number of each row, and the one before it."""
    return (row.seq,), (row.car, row.seq, state[0])


def there_and_back(car: str, visits: Any) -> str:
    """A car that has been seen at the edge drives to the cloud next."""
    return "cloud" if visits[-1].site == "edge" else "edge"


def position(car: str, seq: int, at: float = 0.0) -> dict[str, Any]:
    return {"car": car, "seq": seq, "at": at}


class Cars:
    """A deployment with a gateway at each of its two sites."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.positions = live.stream("positions", POSITION, key="car", sequence="seq", gap="2 seconds")
        instances = {"cloud": 1, "edge": 1}
        self.seen = self.positions.fold(
            follow, (0,), SEEN, state_schema="last long", name="follow", instances=instances
        )
        self.outputs = self.seen.subscribe(after=0)
        self.letters = self.positions.dead_letters.subscribe(after=0)
        self.cloud = self.positions.producer("gateway-cloud", site="cloud")
        self.edge = self.positions.producer("gateway-edge", site="edge")
        self.got: dict[str, list[tuple[int, int]]] = {}
        self.waiting: dict[bytes, list[Any]] = {}

    def until(self, car: str, count: int) -> list[tuple[int, int]]:
        """The outputs of a car, once there are so many."""
        deadline = time.monotonic() + WAIT_S
        while len(self.got.get(car, [])) < count and time.monotonic() < deadline:
            for received in self.outputs.poll(1.0):
                row = received.row
                self.got.setdefault(row["car"], []).append((row["seq"], row["before"]))
        return self.got.get(car, [])

    def dead_letter(self, car: str) -> Any:
        """The next dead letter of a car; others may have some on a slow machine."""
        key = self.live.graph.streams["positions"].codec.pack(position(car, 1))[0]
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for received in self.letters.poll(1.0):
                self.waiting.setdefault(bytes(received.row["key"]), []).append(received.row)
            if self.waiting.get(key):
                return self.waiting[key].pop(0)
        raise TimeoutError(car)


@pytest.fixture(scope="module")
def cars(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cars]:
    directory: Path = tmp_path_factory.mktemp("devices")
    with tiercel.start(spark, {"cloud": None, "edge": "cloud"}, directory) as live:
        yield Cars(live)


def in_order(count: int) -> list[tuple[int, int]]:
    return [(n, n - 1) for n in range(1, count + 1)]


def test_rows_that_two_gateways_bring_in_any_order_and_twice_are_processed_once_in_their_order(
    cars: Cars,
) -> None:
    cars.edge.send(position("a", 3), position("a", 2))
    cars.edge.flush()
    cars.cloud.send(position("a", 1), position("a", 2), position("a", 5))
    cars.cloud.flush()
    cars.edge.send(position("a", 4), position("a", 5), position("a", 6))
    assert cars.until("a", 6) == in_order(6)


def test_the_order_of_a_car_stays_while_its_key_moves_between_the_sites_of_its_gateways(cars: Cars) -> None:
    move = None
    for n in range(1, 201, 2):
        cars.edge.send(position("b", n + 1))
        cars.cloud.send(position("b", n), position("b", n + 1))
        if n == 61:
            move = cars.live.move("follow", keys=["b"], to="follow@edge#1")
        if n == 121:
            assert move is not None
            move.wait()
            move = cars.live.move("follow", keys=["b"], to="follow@cloud#1")
    assert cars.until("b", 200) == in_order(200)
    assert move is not None
    move.wait()


def test_a_gap_that_does_not_close_is_a_dead_letter_with_both_numbers(cars: Cars) -> None:
    cars.cloud.send(position("c", 1), position("c", 2), position("c", 5))
    assert cars.until("c", 3) == [(1, 0), (2, 1), (5, 2)]
    refused = cars.dead_letter("c")
    assert "numbers 3 to 4 did not come within 2 s: went on with 5" in refused["reason"]
    assert refused["offset"] == 5
    cars.edge.send(position("c", 4))
    late = cars.dead_letter("c")
    assert "number 4 came where 6 was next" in late["reason"]
    assert late["row"] == '["c",4,0.0]'


def test_a_sequence_that_goes_backwards_is_named_and_harms_nothing(cars: Cars) -> None:
    cars.cloud.send(*(position("d", n) for n in range(1, 6)))
    assert cars.until("d", 5) == in_order(5)
    cars.edge.send(position("d", 1, at=99.0))
    refused = cars.dead_letter("d")
    assert "number 1 came where 6 was next" in refused["reason"]
    assert "went backwards" in refused["reason"]
    assert refused["row"] == '["d",1,99.0]'
    cars.cloud.send(position("d", 6))
    assert cars.until("d", 6) == in_order(6)


def test_a_dataframe_brings_rows_of_devices_too(cars: Cars, spark: SparkSession) -> None:
    rows = spark.createDataFrame([("e", n, 0.0) for n in (4, 3, 2, 1)], POSITION).coalesce(1)
    where = {"storage": str(cars.live.deployment.directory), "stream": "positions"}
    rows.write.format("tiercel").options(**where).mode("append").save()
    cars.edge.send(position("e", 2), position("e", 5))
    assert cars.until("e", 5) == in_order(5)


def test_a_predicted_copy_becomes_the_owner_when_its_car_arrives(cars: Cars) -> None:
    live, wait = cars.live, tiercel.Threshold(seconds=1)
    live.mobility("follow", mobility=tiercel.Threshold(tuples=2), wait=wait, predict=there_and_back)
    n = 0

    def until_at(site: str, gateway: Any) -> None:
        nonlocal n
        deadline = time.monotonic() + WAIT_S
        while f"@{site}#" not in live.owners("follow", ["g"])["g"]:
            assert time.monotonic() < deadline, live.status()
            n += 1
            gateway.send(position("g", n))
            time.sleep(0.1)

    until_at("cloud", cars.edge if "@cloud#" not in live.owners("follow", ["g"])["g"] else cars.cloud)
    until_at("edge", cars.edge)
    asked = [d for d in live.policies().changes if "predicted at cloud" in d.reason]
    deadline = time.monotonic() + WAIT_S
    while not asked and time.monotonic() < deadline:
        n += 1
        cars.edge.send(position("g", n))
        time.sleep(0.2)
        asked = [d for d in live.policies().changes if "predicted at cloud" in d.reason]
    time.sleep(1.0)
    until_at("cloud", cars.cloud)
    assert cars.until("g", n) == in_order(n)
    deadline = time.monotonic() + WAIT_S
    while "predicted at cloud" not in str(live.status()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "handed over: follow: edge -> cloud, 1 keys" in str(live.status())
    live.remove_policy("follow: mobility")


def test_a_row_without_its_number_is_refused_where_it_is_sent(cars: Cars) -> None:
    with pytest.raises(tiercel.UserError, match="seq"):
        cars.cloud.send({"car": "f", "seq": None, "at": 0.0})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sequence": "number"}, "sequence column 'number' is not in the schema"),
        ({"sequence": "at"}, "sequence column 'at': double"),
        ({"sequence": "seq", "gap": 0}, "gap = 0"),
        ({"gap": "1 second"}, "without sequence="),
        ({"sequence": "seq", "first_number": "1"}, "first_number '1'"),
    ],
)
def test_a_sequence_that_cannot_work_is_refused_where_it_is_declared(
    spark: SparkSession, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    live = tiercel.start(spark, ["cloud"], tmp_path)
    try:
        with pytest.raises(tiercel.UserError, match=said):
            live.stream("positions", POSITION, key="car", **options)
    finally:
        live.stop()
