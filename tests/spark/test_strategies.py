"""Every strategy on real Spark: rows go on while keys move; reports, predictions, the history of moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import tiercel
from tiercel.core.migration.strategies import STRATEGIES
from tiercel.errors import UserError
from tiercel.spark.api.deployment import Live

ONE, TWO = "totals@local#1", "totals@local#2"
CARS = list(range(200))


class Totals(StatefulProcessor):
    """Numbers the rows of each car."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("state", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n = (self.state.get() or (0,))[0]
        for row in rows:
            n += 1
            yield Row(car=key[0], sent=row.n, n=n)
        self.state.update((n,))


class Running:
    """A deployment with both ends of its operator; `sent` counts the rows of each car."""

    def __init__(self, live: Live, producer: Any, subscriber: Any) -> None:
        self.live, self.producer, self.subscriber = live, producer, subscriber
        self.sent = 0

    def send_round(self) -> None:
        self.sent += 1
        self.producer.send_many([{"car": car, "n": self.sent} for car in CARS])

    def received(self, count: int) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        while len(found) < count:
            found += [tuple(received.row) for received in self.subscriber.poll(60.0)]
        return found


@pytest.fixture(scope="module")
def running(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    settings = tiercel.Settings(checkpoint_ms=300.0)
    directory = tmp_path_factory.mktemp("strategies") / "storage"
    with tiercel.start(spark, storage=directory, settings=settings) as live:
        cars = live.stream("cars", "car long, n long", key="car")
        totals = cars.transform_with_state(
            Totals(), "car long, sent long, n long", name="totals", instances={"local": 2}
        )
        live.deploy()
        with cars.producer("gateway") as producer, totals.subscribe(after=0) as subscriber:
            yield Running(live, producer, subscriber)


AT_ONCE = [name for name, strategy in STRATEGIES.items() if not strategy.awaits_rows]  # others wait for rows


@pytest.mark.parametrize("strategy", [*AT_ONCE, "auto"])
def test_rows_go_on_and_state_stays_while_keys_move(running: Running, strategy: str) -> None:
    live = running.live
    running.send_round()
    owner = next(iter(live.owners("totals", CARS[:1]).values()))
    to = TWO if owner == ONE else ONE
    live.move("totals", keys=CARS, to=owner).wait()
    if strategy == "standby":
        live.set_standby(owner, to)
    handle = live.move("totals", keys=CARS, to=to, strategy=strategy)
    running.send_round()
    (report,) = handle.wait()
    running.send_round()
    found = running.received(3 * len(CARS))
    assert sorted(found) == sorted(
        (car, n, n) for car in CARS for n in range(running.sent - 2, running.sent + 1)
    )
    assert report.keys == len(CARS)
    assert report.messages > 0
    assert 0 <= report.overlap <= 1
    assert report.state == "done"
    assert (report.prediction is not None) is (strategy == "auto")
    assert handle.remaining_s == 0.0
    if strategy == "standby":
        live.set_standby(owner, "")


def test_an_explained_move_shows_every_strategy_and_moves_nothing(running: Running) -> None:
    before = running.live.owners("totals", CARS)
    moves = len(running.live.moves())
    choice = running.live.move("totals", keys=CARS, to=TWO, strategy="auto", explain=True)
    assert {p.strategy for p in choice.predictions} >= {"live", "pause", "restart", "push", "standby"}
    assert choice.strategy in str(choice)
    assert running.live.owners("totals", CARS) == before
    assert len(running.live.moves()) == moves


def test_the_history_of_moves_is_on_disk(running: Running) -> None:
    from tiercel.spark.move_history import MoveHistory

    found = MoveHistory(running.live.deployment.directory).reports()
    assert {report.strategy for report in found} >= set(AT_ONCE)
    assert all(report.phases and report.requested_at > 0 for report in found)
    assert found == running.live.moves()


def test_a_standby_that_is_none_is_refused_and_nothing_moves(running: Running) -> None:
    before = running.live.owners("totals", CARS)
    to = TWO if before[0] == ONE else ONE
    with pytest.raises(UserError, match="is not the standby of"):
        running.live.move("totals", keys=CARS, to=to, strategy="standby")
    with pytest.raises(UserError, match="does not run"):
        running.live.set_standby(ONE, "totals@local#9")
    assert running.live.owners("totals", CARS) == before


@pytest.mark.parametrize(
    "what", [{"strategy": "teleport"}, {"strategy": "push", "order": "alphabetical"}, {"order": "pam"}]
)
def test_an_unknown_strategy_or_order_is_named_and_nothing_moves(
    running: Running, what: dict[str, str]
) -> None:
    before = running.live.owners("totals", CARS)
    with pytest.raises(UserError, match=r"strategy|order"):
        running.live.move("totals", keys=CARS, to=TWO, **what)
    assert running.live.owners("totals", CARS) == before
