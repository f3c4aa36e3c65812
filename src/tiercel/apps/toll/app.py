"""Linear Road as an application: notifications, balances and expenditures.

Responsible for: the streams and operators, the options, from traffic to events.
Not responsible for: the operators (processors.py), the traffic (generator.py), the batch job (oracle.py).

Eight operators, three of which have state:

    forwarder | cars | tolls | notifier, assessment | accounts | balances, expenditures

The forwarder drops questions that nobody answers (type 4). It and the assessment run in front of the next
operator, the notifier and the last two in front of the reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Any

import msgspec
from pyspark.sql import DataFrame, SparkSession

from tiercel import Live, UserError
from tiercel.apps.app import POSITION, App, Built, Event, Options, Output, Values
from tiercel.apps.service import Service
from tiercel.apps.times import to_ms
from tiercel.apps.toll.generator import BASE, DAYS, INPUT, PERIOD, REPORT, TRAVEL_TIME, Road, Traffic
from tiercel.apps.toll.oracle import expected
from tiercel.apps.toll.processors import (
    ALERT,
    ANSWER,
    BALANCES,
    BASE_MS,
    CAR,
    EVENT,
    NO_CAR,
    NOTICE,
    PAST,
    QUERY,
    SPENT,
    TOLL,
    Accounts,
    Tolls,
    follow,
)
from tiercel.apps.toll.rules import ENTRANCE, past_toll

DELAY_MS = 100
LAST_MIN = 60  # minutes behind the last event
CARS_MIN = 60
SEGMENT = ("xway", "dir", "seg")
HISTORY_CARS = 2_000
ASKED = 0.9  # questions for each one that is drawn: few cars have a history
EXPRESSWAY_RATE = 1_700  # reports a second of one expressway at the end of the benchmark's three hours


class TollOptions(Options, frozen=True):
    """The size of the road; seconds of event time that pass in one second."""

    expressways: Annotated[int, msgspec.Meta(ge=0, le=1_000)] = 1  # 0: as many as the rate fills
    segments: Annotated[int, msgspec.Meta(ge=4, le=100)] = 100
    speed: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 1
    queries_percent: Annotated[int, msgspec.Meta(ge=0, le=100)] = 1
    accident_every_s: Annotated[int, msgspec.Meta(ge=60, le=10_800)] = 300
    service_us: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0  # that a report waits in its segment


def is_answered(row: Any) -> bool:
    """The forwarder's rule."""
    return bool(row.type != TRAVEL_TIME)


def is_for_driver(notice: Any) -> bool:
    return notice.kind in (TOLL, ALERT)


def is_for_account(notice: Any) -> bool:
    return bool(notice.kind != ALERT)


def is_balance(answer: Any) -> bool:
    return bool(answer.kind == QUERY)


def is_expenditure(answer: Any) -> bool:
    return bool(answer.kind != QUERY)


def to_balance(answer: Any) -> tuple[Any, ...]:
    return (answer.vid, answer.time, answer.at, answer.qid, answer.resultTime, answer.amount)


def to_expenditure(answer: Any) -> tuple[Any, ...]:
    return (answer.vid, answer.time, answer.at, answer.qid, answer.day, answer.amount)


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
    return round(PERIOD * rate / options.speed / (1 + ASKED * options.queries_percent / 100))


class TollApp(App[TollOptions]):
    """Cars that pay tolls, and accidents."""

    name = "toll"
    about = "Linear Road: segment statistics, accidents, tolls, balances, daily expenditure"
    options = TollOptions
    outputs = {  # noqa: RUF012
        "notices": Output(("kind", "vid", "time"), lambda row: _moment(row, 3), finding=_found),
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
                yield ms, "reports", row

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
        cars = rows.filter(is_answered).fold(
            follow,
            NO_CAR,
            EVENT,
            state_schema=CAR,
            name="cars",
            output_key=SEGMENT,
            output_event_time="at",
        )
        if options.service_us:
            cars = cars.filter(Service(options.service_us))
        notices = cars.transform_with_state(
            Tolls(),
            NOTICE,
            name="tolls",
            time_mode="eventTime",
            instances=instances,
            output_key="vid",
            output_event_time="at",
        )
        past = [(vid, [past_toll(vid, day) for day in range(1, DAYS + 1)]) for vid in range(1, HISTORY_CARS)]
        answers = notices.filter(is_for_account).transform_with_state(
            Accounts(),
            ANSWER,
            name="accounts",
            time_mode="eventTime",
            initial_state=live.spark.createDataFrame(past, PAST),
        )
        outputs = {
            "notices": notices.filter(is_for_driver),
            "balances": answers.filter(is_balance).map(to_balance, BALANCES),
            "expenditures": answers.filter(is_expenditure).map(to_expenditure, SPENT),
        }
        return Built({"reports": rows}, outputs, "tolls")

    def oracle(
        self, spark: SparkSession, inputs: Mapping[str, DataFrame], options: TollOptions
    ) -> Mapping[str, DataFrame]:
        return expected(spark, inputs["reports"].filter("vid > 0").drop(POSITION))
