"""`traffic`: Falcon's Traffic Monitoring: the running average of each car's speed, and alerts of speeding.

Responsible for: its generator, its operator (a fold) and its oracle.

Cars drive on a ring road of segments, one mile each. They report in turn, each with a speed of U[20, 80) mph
as in Falcon's producer; fast cars drive U[50, 110). Falcon's repository names no limit: it is an option, as
are the number of cars and the bytes of state of each one. Every car reports once before the load begins.

Probes are cars in a jam on segment 0 that send every second report: they show what happens to keys that move.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from tiercel import Live, UserError
from tiercel.apps.app import POSITION, App, Built, Event, Options, Output, Values

CARS_MAX = 5_000_000
STATE_BYTES_MAX = 4_000_000_000  # of all cars together
JAM_MPH = 3  # probes drive slower than this
REPORTS = "car long, n long, segment int, speed double"
MEANS = "car long, n long, segment int, reports long, mean double, alert boolean"

State = tuple[int, float, bytes]


class TrafficOptions(Options, frozen=True, kw_only=True):
    """Options of `traffic`."""

    cars: Annotated[int, msgspec.Meta(ge=1, le=CARS_MAX)] = 1_000
    segments: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 101
    limit_mph: Annotated[float, msgspec.Meta(ge=1, le=200)] = 60.0
    state_bytes: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 0  # of each car, besides its average
    fast_percent: Annotated[int, msgspec.Meta(ge=0, le=100)] = 5
    probes: Annotated[int, msgspec.Meta(ge=0, le=1_000)] = 0

    def __post_init__(self) -> None:
        if self.cars * self.state_bytes > STATE_BYTES_MAX:
            raise UserError(
                f"traffic: {self.cars:,} cars with {self.state_bytes:,} bytes each",
                expected=f"at most {STATE_BYTES_MAX:,} bytes together",
            )
        if self.probes > self.cars:
            raise UserError(f"traffic: {self.probes:,} probes", expected=f"at most {self.cars:,}: the cars")


class RunningMean:
    """The step of the fold: the average speed of a car, and whether it is above the limit."""

    __name__ = "running_mean"

    def __init__(self, limit_mph: float, state_bytes: int) -> None:
        self._limit, self._load = limit_mph, bytes(state_bytes)

    def __call__(self, state: State, row: Any) -> tuple[State, tuple[Any, ...]]:
        reports, total = state[0] + 1, state[1] + row.speed
        mean = total / reports
        load = state[2] or self._load
        return (reports, total, load), (row.car, row.n, row.segment, reports, mean, mean > self._limit)


class Road:
    """Where each car is, as the generator moves it."""

    def __init__(self, options: TrafficOptions, seed: int) -> None:
        self._options, self._draw = options, random.Random(seed)
        draw, cars = self._draw, options.cars
        self._at = [draw.random() * options.segments for _ in range(cars)]  # miles
        self._is_fast = [draw.randrange(100) < options.fast_percent for _ in range(cars)]
        for probe in range(options.probes):
            self._at[probe] = 0.5

    def report(self, car: int, n: int, hours: float) -> tuple[int, int, int, float]:
        """The next report of a car; `hours` have passed since its last one."""
        draw = self._draw
        if car < self._options.probes:
            return car, n, 0, draw.randrange(JAM_MPH * 10) / 10
        low, high = (500, 1_100) if self._is_fast[car] else (200, 800)
        speed = draw.randrange(low, high) / 10
        at = self._at[car] = (self._at[car] + speed * hours) % self._options.segments
        return car, n, int(at), speed


def cars_of_first_segment(options: TrafficOptions, sent: Sequence[Event]) -> list[int]:
    """The cars whose last report came from segment 0."""
    last = {row[0]: row[2] for _, _, row in sent}
    return sorted(car for car, segment in last.items() if segment == 0)


def _cause(values: Values) -> int:
    return int(values[1])


def _finding(values: Values) -> str:
    car, _, segment, reports, mean, alert = values
    return f"car {car} on segment {segment}: {mean:.1f} mph on average of {reports}" if alert else ""


class Traffic(App[TrafficOptions]):
    """Reports of cars in, the average and an alert out."""

    name = "traffic"
    about = "running average speed of cars, alerts (Falcon's Traffic Monitoring)"
    options = TrafficOptions
    outputs: ClassVar[Mapping[str, Output]] = {
        "means": Output(("car", "n"), _cause, order="n", finding=_finding, key="car")
    }
    key_sets: ClassVar[Mapping[str, Any]] = {"segment": cars_of_first_segment}

    def first_events(self, options: TrafficOptions, seed: int) -> Iterator[Event]:
        road = Road(options, seed)
        for car in range(options.cars):
            n = car - options.cars
            yield n, "reports", road.report(car, n, 0.0)

    def generate(self, options: TrafficOptions, seed: int, rate: int) -> Iterator[Event]:
        road, draw = Road(options, seed), random.Random(seed + 1)
        turn = list(range(options.probes, options.cars)) or [0]
        draw.shuffle(turn)
        share = 2 if options.probes and options.probes < options.cars else 1
        hours = len(turn) * share / rate / 3_600
        n = 0
        while True:
            by_probe = options.probes and n % 2
            car = n // 2 % options.probes if by_probe else turn[n // share % len(turn)]
            yield n, "reports", road.report(car, n, hours)
            n += 1

    def build(self, live: Live, options: TrafficOptions, instances: Mapping[str, int]) -> Built:
        reports = live.stream("reports", REPORTS, key="car")
        means = reports.fold(
            RunningMean(options.limit_mph, options.state_bytes),
            (0, 0.0, b""),
            MEANS,
            state_schema="reports long, total double, load binary",
            name="vehicle-stats",
            instances=instances,
        )
        return Built({"reports": reports}, {"means": means}, "vehicle-stats")

    def oracle(
        self, spark: SparkSession, inputs: Mapping[str, DataFrame], options: TrafficOptions
    ) -> Mapping[str, DataFrame]:
        so_far = Window.partitionBy("car").orderBy(POSITION)
        mean = f.avg("speed").over(so_far.rowsBetween(Window.unboundedPreceding, Window.currentRow))
        averaged = inputs["reports"].select(
            "car", "n", "segment", f.row_number().over(so_far).alias("reports"), mean.alias("mean")
        )
        return {"means": averaged.withColumn("alert", f.col("mean") > options.limit_mph)}
