"""RIoTBench as an application: `dataflow` and `dataset` choose what runs on which messages.

Responsible for: the streams and operators of each dataflow, from messages to events.
Not responsible for: the tasks (tasks.py), the messages (generator.py), the batch jobs (oracle.py).

Plotting, compressing, storing and publishing, with which RIoTBench's dataflows end, are the subscriber's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal

from pyspark.sql import DataFrame, SparkSession

from tiercel import Live, LiveStream
from tiercel.apps.app import App, Built, Event, Options, Output, Values
from tiercel.apps.riot import chained, oracle, tasks
from tiercel.apps.riot.generator import (
    BASE,
    BASE_MS,
    DATASETS,
    FIRST_MSGID,
    MESSAGE,
    Dataset,
    Messages,
    known_sensors,
    model_row,
)
from tiercel.apps.times import to_ms

DELAY_MS = 100
LAST_MS = 600_000
MODEL_EVERY_S = 5
FIELD = ("sensor", "field")
NO_SENSOR = "none"

Instances = Mapping[str, int]


class RiotOptions(Options, frozen=True):
    """Which dataflow, on which messages; whether ETL and STATS are one operator for each task."""

    dataflow: Literal["etl", "stats", "pred"] = "etl"
    dataset: Literal["city", "taxi"] = "city"
    tasks: Literal["separate", "chained"] = "separate"


def _at(place: int) -> Any:
    def moment(values: Values) -> int:
        return to_ms(values[place]) - BASE_MS

    return moment


class RiotApp(App[RiotOptions]):
    """Messages of sensors that are cleaned, summed up, or classified."""

    name = "riot"
    about = "RIoTBench: ETL, STATS and PRED on messages like those of CITY and TAXI"
    options = RiotOptions
    outputs = {  # noqa: RUF012
        "etl": Output(("msgid",), _at(5)),
        "averages": Output(("sensor", "field", "n"), _at(4), order="n"),
        "predictions": Output(("sensor", "field", "n"), _at(4), order="n"),
        "statistics": Output(("sensor", "n"), _at(4), order="n", key="sensor"),
        "sensors": Output(("field", "windowEnd"), lambda row: _at(1)(row) + DELAY_MS),
        "pred": Output(
            ("msgid",),
            _at(5),
            key="sensor",
            finding=lambda row: f"{row[1]}: bad" if row[2] == tasks.CLASSES[-1] else "",
        ),
    }

    def generate(self, options: RiotOptions, seed: int, rate: int) -> Iterator[Event]:
        dataset = DATASETS[options.dataset]
        sensors = known_sensors(dataset)
        step = max(1, rate * MODEL_EVERY_S // len(sensors))  # one sensor after the other gets a new model
        for n, (ms, row) in enumerate(Messages(dataset, seed).rows(rate)):
            if options.dataflow == "pred" and n % step == 0:
                version, sensor = divmod(n // step, len(sensors))
                yield ms, "messages", model_row(sensors[sensor], version + 1, FIRST_MSGID + n, ms)
            yield ms, "messages", row

    def last_events(self, options: RiotOptions, moment: int) -> list[Event]:
        if options.dataflow != "stats":
            return []
        ms = moment + LAST_MS
        return [(ms, "messages", (0, NO_SENSOR, '{"e":[]}', None, BASE + timedelta(milliseconds=ms)))]

    def build(self, live: Live, options: RiotOptions, instances: Instances) -> Built:
        dataset = DATASETS[options.dataset]
        timed = options.dataflow == "stats"
        messages = live.stream(
            "messages",
            MESSAGE,
            key="sensor",
            event_time="at" if timed else "",
            delay=f"{DELAY_MS} milliseconds" if timed else "",
        )
        if options.dataflow == "pred":
            found = messages.fold(
                tasks.Predict(dataset),
                (0, 0, 0.0, None, None),
                tasks.PREDICTION,
                state_schema="model int, count int, total double, average double, before double",
                name="predict",
                instances=instances,
            )
            return Built({"messages": messages}, {"pred": found}, "predict")
        if options.tasks == "chained":
            return Built({"messages": messages}, *self._chained(messages, dataset, timed, instances))
        parse = tasks.Parse(dataset, checked=not timed)
        fields = messages.flat_map(parse, tasks.OBSERVATION).key_by(*FIELD, name="fields")
        if timed:
            return Built({"messages": messages}, *self._stats(fields, dataset.block, instances))
        complete = fields.fold(
            tasks.Interpolate(dataset.interpolate),
            ([],),
            tasks.OBSERVATION,
            state_schema="last array<double>",
            name="interpolation",
            output_key="msgid",
            instances=instances,
        )
        joined = complete.fold(
            tasks.Join(dataset),
            ([], []),
            tasks.JOINED,
            state_schema="places array<int>, values array<double>",
            name="join",
        )
        return Built({"messages": messages}, {"etl": joined}, "interpolation")

    def _chained(
        self, messages: LiveStream, dataset: Dataset, timed: bool, instances: Instances
    ) -> tuple[dict[str, LiveStream], str]:
        if not timed:
            joined = messages.fold(
                chained.Etl(dataset),
                ([],),
                tasks.JOINED,
                state_schema="last array<array<double>>",
                name="etl",
                instances=instances,
            )
            return {"etl": joined}, "etl"
        statistics = messages.fold(
            chained.Statistics(dataset),
            chained.NO_STATISTICS,
            chained.STATISTICS,
            state_schema=chained.STATISTICS_STATE,
            name="statistics",
            instances=instances,
        )
        active = messages.fold(
            chained.Active(dataset),
            (0, 0),
            chained.ACTIVE,
            state_schema="end bigint, seen int",
            name="active",
            output_key="field",
            output_event_time="at",
        )
        sensors = active.transform_with_state(
            tasks.DistinctSensors(), tasks.DISTINCT, name="distinct-sensors", time_mode="eventTime"
        )
        return {"statistics": statistics, "sensors": sensors}, "statistics"

    def _stats(
        self, fields: LiveStream, block: int, instances: Instances
    ) -> tuple[dict[str, LiveStream], str]:
        averages = fields.fold(
            tasks.BlockAverage(block),
            (0, 0, 0.0),
            tasks.AVERAGE,
            state_schema="block bigint, count int, total double",
            name="average",
        )
        filtered = fields.fold(
            tasks.kalman,
            (0, 0.0, tasks.FIRST_ERROR),
            tasks.FILTERED,
            state_schema="n bigint, estimate double, error double",
            name="kalman",
            instances=instances,
        )
        predictions = filtered.fold(
            tasks.regress, ([],), tasks.PREDICTED, state_schema="last array<double>", name="regression"
        )
        sensors = fields.key_by("field", name="by-field").transform_with_state(
            tasks.DistinctSensors(), tasks.DISTINCT, name="distinct-sensors", time_mode="eventTime"
        )
        return {"averages": averages, "predictions": predictions, "sensors": sensors}, "kalman"

    def oracle(
        self, spark: SparkSession, inputs: Mapping[str, DataFrame], options: RiotOptions
    ) -> Mapping[str, DataFrame]:
        dataset = DATASETS[options.dataset]
        messages = inputs["messages"].filter(f"sensor <> '{NO_SENSOR}'")
        match options.dataflow:
            case "etl":
                return oracle.expected_etl(spark, messages, dataset)
            case "stats":
                found = oracle.expected_stats(spark, messages, dataset)
                return oracle.by_message(found, dataset) if options.tasks == "chained" else found
            case "pred":
                return oracle.expected_pred(spark, messages, dataset)
