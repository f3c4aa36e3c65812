"""ETL and STATS with the tasks of a message chained in one step, by sensor: one row in, one row out.

Responsible for: the same results as the separate tasks (tasks.py), a row for each message.
Not responsible for: the oracle, which is that of the separate tasks.

As separate operators, a message of five fields is five rows on each of three hops. Chained, it is one row on
one hop. Only the count of distinct sensors needs a hop more, because it is by field; a sensor takes it once
in each of its windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiercel.apps.riot.generator import Dataset
from tiercel.apps.riot.tasks import (
    DISTINCT_MS,
    FIRST_ERROR,
    PREDICTED_STEPS,
    PROCESS_NOISE,
    SENSOR_NOISE,
    TRAINED,
    Parse,
    annotation,
    to_senml,
)
from tiercel.apps.times import to_ms

STATISTICS = "sensor string, n bigint, averages array<double>, predictions array<double>, at timestamp"
STATISTICS_STATE = (
    "n bigint, error double, totals array<double>, estimates array<double>, last array<array<double>>"
)
NO_STATISTICS: tuple[Any, ...] = (0, FIRST_ERROR, [], [], [])
ACTIVE = "field string, sensor string, at timestamp"

_MIDDLE = (TRAINED - 1) / 2
_AHEAD = TRAINED - 1 + (1 + PREDICTED_STEPS) / 2 - _MIDDLE
_SQUARES = sum((x - _MIDDLE) ** 2 for x in range(TRAINED))
WEIGHTS = [1 / TRAINED + (x - _MIDDLE) * _AHEAD / _SQUARES for x in range(TRAINED)]  # of the last values


class Etl:
    """Parse, filters, interpolation, join, annotation and SenML. State: the last values of each field."""

    def __init__(self, dataset: Dataset) -> None:
        self._parse, self._fields = Parse(dataset, checked=True), list(dataset.fields)
        self._window = dataset.interpolate

    def __call__(self, state: Sequence[Any], row: Any) -> tuple[Any, Any]:
        found = {field: value for _, _, field, value, _ in self._parse(row)}
        window = self._window
        kept = list(state[0]) or [[] for _ in self._fields]
        values: list[float | None] = []
        for n, field in enumerate(self._fields):
            value = found.get(field)
            if window:
                last = kept[n]
                if value is None:
                    value = sum(last) / len(last) if last else 0.0
                else:
                    kept[n] = [*last, value][-window:]
            values.append(value)
        note = annotation(row.sensor)
        text = to_senml(self._fields, row.sensor, note, values)
        return (kept if window else [],), (row.msgid, row.sensor, note, values, text, row.at)


class Statistics:
    """Block averages, Kalman filter and regression of all fields of a message."""

    def __init__(self, dataset: Dataset) -> None:
        self._parse, self._fields = Parse(dataset, checked=False), list(dataset.fields)
        self._block = dataset.block

    def __call__(self, state: Sequence[Any], row: Any) -> tuple[Any, Any]:
        n, error, totals, estimates, last = state
        found = {field: value for _, _, field, value, _ in self._parse(row)}
        if not found:  # the row behind the last message
            return state, None
        values = [found[field] for field in self._fields]
        if not n:
            totals, estimates, last = [0.0] * len(values), [0.0] * len(values), [[] for _ in values]
        n, error = n + 1, error + PROCESS_NOISE
        gain = error / (error + SENSOR_NOISE)
        totals = [total + value for total, value in zip(totals, values, strict=True)]
        estimates = [was + gain * (value - was) for was, value in zip(estimates, values, strict=True)]
        last = [[*few, one][-TRAINED:] for few, one in zip(last, estimates, strict=True)]
        averages = predictions = None
        if n % self._block == 0:
            averages, totals = [total / self._block for total in totals], [0.0] * len(values)
        if n > TRAINED:
            predictions = [sum(map(float.__mul__, WEIGHTS, few)) for few in last]
        state = (n, error * (1 - gain), totals, estimates, last)
        if averages is None and predictions is None:
            return state, None
        return state, (row.sensor, n, averages, predictions, row.at)


class Active:
    """A sensor has reported a field: once in each window. State: its end, and which fields it has seen."""

    def __init__(self, dataset: Dataset) -> None:
        self._parse, self._fields = Parse(dataset, checked=False), list(dataset.fields)
        self._all = (1 << len(self._fields)) - 1

    def __call__(self, state: Sequence[Any], row: Any) -> tuple[Any, Any]:
        end, seen = state
        at = to_ms(row.at)
        ends = at - at % DISTINCT_MS + DISTINCT_MS
        if ends != end:
            seen = 0
        if seen == self._all:
            return (ends, seen), None
        fields = [field for _, _, field, _, _ in self._parse(row)]
        new = [field for field in fields if not seen >> self._fields.index(field) & 1]
        for field in new:
            seen |= 1 << self._fields.index(field)
        return (ends, seen), [(field, row.sensor, row.at) for field in new]
