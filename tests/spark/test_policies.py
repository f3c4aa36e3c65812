"""Policies on Spark: an operator under load gets instances, loses them again, and loses no row."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import tiercel
from tiercel.cli import main as cli
from tiercel.control.proposals import Nothing, Outcome, Resize
from tiercel.control.view import View
from tiercel.errors import UserError
from tiercel.spark.api.deployment import Live
from tiercel.spark.api.streams import LiveStream
from waiting import until

CARS = 40
SERVICE_S = 0.002  # of a row, as if user code called a service


class Slow(StatefulProcessor):
    """Numbers the rows of each car, and takes its time."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("state", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        (n,) = self.state.get() or (0,)
        for row in rows:
            time.sleep(SERVICE_S)
            n += 1
            yield Row(car=key[0], n=n, sent=row.sent)
        self.state.update((n,))


class Running:
    """A deployment, and the ends of its one operator."""

    def __init__(self, live: Live, cars: LiveStream, numbers: LiveStream) -> None:
        self.live, self.cars, self.numbers = live, cars, numbers

    def instances(self) -> list[str]:
        return [name for name, slots in self.live.status().operators["numbers"].items() if slots]


@pytest.fixture(scope="module")
def running(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with tiercel.start(spark, storage=tmp_path_factory.mktemp("policies") / "storage") as live:
        cars = live.stream("cars", "car string, sent long", key="car")
        numbers = cars.transform_with_state(Slow(), "car string, n long, sent long", name="numbers")
        live.deploy()
        yield Running(live, cars, numbers)


class Traffic:
    """Sends rows at a rate until it is told to stop."""

    def __init__(self, cars: LiveStream, per_s: int) -> None:
        self._cars, self._per_s = cars, per_s
        self.sent = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        with self._cars.producer("gateway") as producer:
            begun = time.monotonic()
            while not self._stop.wait(0.02):
                due = int((time.monotonic() - begun) * self._per_s)
                producer.send_many([{"car": f"car-{n % CARS}", "sent": n} for n in range(self.sent, due)])
                self.sent = due

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.sent


def test_an_operator_grows_under_load_and_shrinks_afterwards_and_loses_nothing(running: Running) -> None:
    live = running.live
    with running.numbers.subscribe(after=0) as subscriber:
        live.autoscale(
            "numbers", policy="rate", min=1, max=3, cool_down_s=2, scale_in_after_s=4, judge_after_s=2
        )
        traffic = Traffic(running.cars, per_s=700)  # one instance can do 500
        try:
            until(lambda: len(running.instances()) >= 2, "no instance was added")
        finally:
            sent = traffic.stop()
        found: list[Any] = []
        while len(found) < sent:
            found += [received.row for received in subscriber.poll(60.0)]
        until(lambda: len(running.instances()) == 1, "no instance was removed")
    assert len(found) == sent
    for car in range(CARS):
        mine = [row for row in found if row.car == f"car-{car}"]
        assert [row.n for row in mine] == list(range(1, len(mine) + 1))
        assert [row.sent for row in mine] == list(range(car, sent, CARS))
    changes = live.policies().changes
    counts = [c.proposal.instances for c in changes if isinstance(c.proposal, Resize)]
    assert max(counts) >= 2
    assert counts[-1] == 1
    assert "rows/s arrive" in changes[0].reason
    outcomes = {decision.outcome for decision in live.policies().history}
    assert outcomes & {Outcome.NOTHING, Outcome.REFUSED}, "decisions not to change are in the history too"
    live.remove_policy("numbers: rate")


def test_the_record_of_a_deployment_is_shown_and_replayed_from_outside(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[View] = []

    def mine(view: View, memory: Any) -> Any:
        seen.append(view)
        return [Nothing("numbers", f"{len(seen)} views")], memory

    running.live.policy(mine, name="mine")
    until(lambda: len(seen) >= 2, "the policy was not asked")
    storage = str(running.live.status().storage)
    for command, shown in (("show", "mine"), ("history", "numbers"), ("dry-run", "numbers")):
        assert cli.run_app(["policy", command, storage]) == 0
        assert shown in capsys.readouterr().out
    running.live.remove_policy("mine")


def test_a_policy_that_raises_is_in_the_history_and_the_deployment_goes_on(running: Running) -> None:
    def broken(view: View, memory: Any) -> Any:
        return 1 / 0

    running.live.policy(broken)
    until(
        lambda: any(
            d.policy == "broken" and d.outcome is Outcome.FAILED for d in running.live.policies().history
        )
    )
    running.live.remove_policy("broken")
    assert {p.state for p in running.live.status().processes} == {"running"}


def test_a_spare_instance_is_attached_and_owns_nothing(running: Running) -> None:
    running.live.autoscale("numbers", spares=1, dry_run=True)
    until(lambda: len(running.live.status().operators["numbers"]) == 2, "no spare was started")
    until(lambda: {p.state for p in running.live.status().processes} == {"running"}, "it is not attached")
    assert len(running.instances()) == 1
    running.live.remove_policy("numbers: rate")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"min": 4, "max": 2}, "min = 4 is above max = 2"),
        ({"target": 0}, "target = 0"),
        ({"target": 1.5}, "target = 1.5"),
        ({"policy": "clever"}, "unknown policy 'clever'"),
        ({"max": {"mars": 2}}, "mars"),
        ({"spares": {"mars": 1}}, "mars"),
        ({"spares": -1}, "spares"),
        ({"quiet": ["at night"]}, "quiet window 'at night'"),
        ({"speed": 3}, "'speed'"),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_is_changed(
    running: Running, options: dict[str, Any], named: str
) -> None:
    before = running.live.policies().policies
    with pytest.raises(UserError, match=named):
        running.live.autoscale("numbers", **options)
    with pytest.raises(UserError, match="unknown operator 'toll'"):
        running.live.autoscale("toll")
    assert running.live.policies().policies == before


# -- sites ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def at_edges(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    sites = {"cloud": None, "edge-1": "cloud", "edge-2": "cloud"}
    with tiercel.start(spark, sites, storage=tmp_path_factory.mktemp("edges") / "storage") as live:
        cars = live.stream("cars", "car string, sent long", key="car")
        numbers = cars.transform_with_state(Slow(), "car string, n long, sent long", name="numbers")
        live.deploy()
        yield Running(live, cars, numbers)


def test_keys_follow_a_source_that_travels_and_no_row_is_lost_or_reordered(at_edges: Running) -> None:
    live = at_edges.live
    live.mobility("numbers", mobility=tiercel.Threshold(tuples=3), wait=tiercel.Threshold(seconds=2))

    def owner() -> str:
        return live.owners("numbers", ["traveller"])["traveller"]

    sent = 0
    found: list[Any] = []
    with at_edges.numbers.subscribe(after=0) as subscriber:
        for site in ("edge-1", "edge-2"):
            with at_edges.cars.producer(f"gateway of {site}", site=site) as producer:
                give_up = time.monotonic() + 60
                while f"@{site}#" not in owner():
                    assert time.monotonic() < give_up, f"{owner()} at {site}: {live.policies()}"
                    producer.send({"car": "traveller", "sent": sent})
                    sent += 1
                    time.sleep(0.1)
                producer.flush()
            while (
                len(found) < sent
            ):  # the next gateway begins behind this one: producers have no common order
                found += [received.row for received in subscriber.poll(60.0)]
    assert [row.sent for row in found] == list(range(sent))
    assert [row.n for row in found] == list(range(1, sent + 1))
    ways = [str(c.proposal) for c in live.policies().changes if c.policy == "mobility"]
    assert ways == [f"numbers: 1 keys to {site}" for site in ("edge-1", "cloud", "edge-2")]
    live.remove_policy("numbers: mobility")


def test_heavy_keys_go_to_the_edge_while_demand_there_is_high(at_edges: Running) -> None:
    live = at_edges.live
    live.offload("numbers", cost=100, reports=2, cool_down_s=1)
    owner = live.owners("numbers", ["heavy"])["heavy"]
    assert "@cloud#" in owner
    with at_edges.cars.producer("heavy gateway", site="edge-1") as producer:
        give_up = time.monotonic() + 60
        while "@edge-1#" not in live.owners("numbers", ["heavy"])["heavy"]:
            assert time.monotonic() < give_up, str(live.policies())
            producer.send_many([{"car": "heavy", "sent": n} for n in range(40)])
            time.sleep(0.15)
    until(lambda: "@cloud#" in live.owners("numbers", ["heavy"])["heavy"], "it does not return")
    changes = [c for c in live.policies().changes if c.policy == "numbers: offload" and "edge-1" in c.reason]
    assert [str(c.proposal) for c in changes] == ["numbers: 1 keys to edge-1", "numbers: 1 keys to cloud"]
    assert "rows/s enter at edge-1, which costs 100" in changes[0].reason
    assert changes[1].reason.endswith("they return")
