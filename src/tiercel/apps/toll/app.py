"""Linear Road as an application: notifications, balances and expenditures.

Responsible for: the streams and operators, the options, from traffic to events.
Not responsible for: the operators (processors.py), the traffic (generator.py), the batch job (oracle.py).

Rows of type 0 and 2 are one stream by car, those of type 3 another. The official files have them in one; the
forwarder of other implementations splits them by type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Annotated

import msgspec
from pyspark.sql import DataFrame, SparkSession

from tiercel import Live, UserError
from tiercel.apps.app import POSITION, App, Built, Event, Options, Output, Values
from tiercel.apps.service import Service
from tiercel.apps.times import to_ms
from tiercel.apps.toll.generator import BASE, DAYS, EXPENDITURE, INPUT, PERIOD, REPORT, Road, Traffic
from tiercel.apps.toll.oracle import expected
from tiercel.apps.toll.processors import (
    ALERT,
    BALANCES,
    BASE_MS,
    CAR,
    EVENT,
    MOVES,
    NO_CAR,
    NOTICE,
    PAST,
    SPENT,
    STOPS,
    TOLL,
    Accidents,
    Accounts,
    Expenditure,
    Tolls,
    follow,
)
from tiercel.apps.toll.rules import ENTRANCE, past_toll

DELAY_MS = 100
LAST_MIN = 60  # minutes behind the last event
CARS_MIN = 60
SEGMENT = ("xway", "dir", "seg")
HISTORY_CARS = 2_000
EXPRESSWAY_RATE = 1_700  # reports a second of one expressway at the end of the benchmark's three hours


class TollOptions(Options, frozen=True):
    """The size of the road; seconds of event time that pass in one second."""

    expressways: Annotated[int, msgspec.Meta(ge=0, le=1_000)] = 1  # 0: as many as the rate fills
    segments: Annotated[int, msgspec.Meta(ge=4, le=100)] = 100
    speed: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 1
    queries_percent: Annotated[int, msgspec.Meta(ge=0, le=100)] = 1
    accident_every_s: Annotated[int, msgspec.Meta(ge=60, le=10_800)] = 300
    service_us: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0  # that a report waits in its segment


def is_report(event: object) -> bool:
    kind: int = event.kind  # type: ignore[attr-defined]
    return kind not in (STOPS, MOVES)


def is_standing(event: object) -> bool:
    kind: int = event.kind  # type: ignore[attr-defined]
    return kind in (STOPS, MOVES)


def is_for_account(notice: object) -> bool:
    kind: int = notice.kind  # type: ignore[attr-defined]
    return kind != ALERT


def _moment(values: Values, place: int) -> int:
    return to_ms(values[place]) - BASE_MS


def _found(values: Values) -> str:
    if values[0] == ALERT:
        return f"car {values[1]}: accident ahead in segment {values[6]}"
    if values[0] == TOLL and values[8]:
        return f"car {values[1]}: {values[8] / 100:.2f} for segment {values[6]}, {values[7]} mph"
    return ""


def _cars(options: TollOptions, rate: int) -> int:
    """Cars on the road that make so many reports and questions a second."""
    return round(PERIOD * rate / options.speed / (1 + 0.6 * options.queries_percent / 100))


class TollApp(App[TollOptions]):
    """Cars that pay tolls, and accidents."""

    name = "toll"
    about = "Linear Road: segment statistics, accidents, tolls, balances, daily expenditure"
    options = TollOptions
    outputs = {  # noqa: RUF012
        "notices": Output(("kind", "vid", "time", "qid"), lambda row: _moment(row, 3), finding=_found),
        "balances": Output(("qid",), lambda row: _moment(row, 2)),
        "expenditures": Output(("qid",), lambda row: _moment(row, 2)),
    }

    def generate(self, options: TollOptions, seed: int, rate: int) -> Iterator[Event]:
        asked = options.queries_percent / 100
        cars = _cars(options, rate)
        if cars < CARS_MIN:
            raise UserError(
                f"toll: speed = {options.speed} at {rate} events a second leaves {cars} cars",
                expected=f"at least {CARS_MIN} cars: each reports every {PERIOD} s of event time",
                hint=f"a speed of at most {max(1, rate * PERIOD // CARS_MIN)}, or a higher rate",
            )
        expressways = options.expressways or math.ceil(rate / EXPRESSWAY_RATE)
        road = Road(cars, expressways, options.segments, asked, options.accident_every_s, HISTORY_CARS)
        for second in Traffic(road, seed).seconds():
            for ms, row in second:
                yield ms, "expenditures" if row[0] == EXPENDITURE else "reports", row

    def load_facts(self, options: TollOptions, rate: int) -> dict[str, float]:
        """The load factor is the number of expressways, each at the end of its three hours."""
        return {"load_factor": round(rate / EXPRESSWAY_RATE, 2), "cars": _cars(options, rate)}

    def last_events(self, options: TollOptions, moment: int) -> list[Event]:
        """A report at the very begin of a minute, far ahead: every minute before it is complete."""
        ms = (moment // 60_000 + LAST_MIN) * 60_000
        row = (
            REPORT,
            ms // 1000,
            -1,
            0,
            -1,
            ENTRANCE,
            0,
            -1,
            -1,
            *(-1,) * 6,
            BASE + timedelta(milliseconds=ms),
        )
        return [(ms, "reports", row)]

    def build(self, live: Live, options: TollOptions, instances: Mapping[str, int]) -> Built:
        rows = live.stream("reports", INPUT, key="vid", event_time="at", delay=f"{DELAY_MS} milliseconds")
        asked = live.stream("expenditures", INPUT, key="vid")
        cars = rows.fold(
            follow,
            NO_CAR,
            EVENT,
            state_schema=CAR,
            name="cars",
            output_key=SEGMENT,
            output_event_time="at",
        )
        accidents = cars.filter(is_standing).transform_with_state(
            Accidents(),
            EVENT,
            name="accidents",
            time_mode="eventTime",
            output_key=SEGMENT,
            output_event_time="at",
        )
        reports = cars.filter(is_report)
        if options.service_us:
            reports = reports.filter(Service(options.service_us))
        notices = reports.union(accidents).transform_with_state(
            Tolls(),
            NOTICE,
            name="tolls",
            time_mode="eventTime",
            instances=instances,
            output_key="vid",
            output_event_time="at",
        )
        balances = notices.filter(is_for_account).transform_with_state(
            Accounts(), BALANCES, name="accounts", time_mode="eventTime"
        )
        past = [(vid, [past_toll(vid, day) for day in range(1, DAYS + 1)]) for vid in range(1, HISTORY_CARS)]
        spent = asked.transform_with_state(
            Expenditure(), SPENT, name="expenditure", initial_state=live.spark.createDataFrame(past, PAST)
        )
        return Built(
            {"reports": rows, "expenditures": asked},
            {"notices": notices, "balances": balances, "expenditures": spent},
            "tolls",
        )

    def oracle(
        self, spark: SparkSession, inputs: Mapping[str, DataFrame], options: TollOptions
    ) -> Mapping[str, DataFrame]:
        rows = {name: frame.filter("vid > 0").drop(POSITION) for name, frame in inputs.items()}
        return expected(spark, rows)
