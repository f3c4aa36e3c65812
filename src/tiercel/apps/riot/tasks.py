"""RIoTBench's tasks: parse, range filter, interpolation, join, block average, Kalman filter, regression, ...

Responsible for: what each task does with a row, as transforms and folds.
Not responsible for: how tasks are connected (app.py).

These are the intended dataflows. The public code has faults that are not repeated here: its interpolation and
its decision tree ignore their input in most configurations, its error estimate mixes all sensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from tiercel.apps.riot.generator import Dataset, known_sensors
from tiercel.apps.times import from_ms, to_ms

OBSERVATION = "msgid bigint, sensor string, field string, value double, at timestamp"
JOINED = "msgid bigint, sensor string, annotation string, values array<double>, senml string, at timestamp"
AVERAGE = "sensor string, field string, n bigint, mean double, at timestamp"
FILTERED = "sensor string, field string, n bigint, value double, at timestamp"
PREDICTED = "sensor string, field string, n bigint, mean double, at timestamp"
DISTINCT = "field string, windowEnd timestamp, sensors bigint"
PREDICTION = "msgid bigint, sensor string, class string, predicted int, error double, at timestamp"

PROCESS_NOISE, SENSOR_NOISE, FIRST_ERROR = 0.125, 0.32, 30.0
TRAINED, PREDICTED_STEPS = 10, 10  # points of the regression, and steps ahead
REGISTERS, ALPHA = 1024, 0.79402
DISTINCT_MS = 10_000


class _Entry(msgspec.Struct):
    n: str
    v: str | None = None


class _SenML(msgspec.Struct):
    e: list[_Entry]


_decode = msgspec.json.Decoder(_SenML).decode


# -- ETL -----------------------------------------------------------------------------------------


class Parse:
    """A message becomes one row for each observation. Values out of range, or of unknown sensors, are null.

    The set of known sensors stands for RIoTBench's Bloom filter.
    """

    def __init__(self, dataset: Dataset, *, checked: bool) -> None:
        self._ranges = {name: (field.low, field.high) for name, field in dataset.fields.items()}
        self._known, self._checked = frozenset(known_sensors(dataset)), checked

    def __call__(self, message: Any) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        unknown = self._checked and message.sensor not in self._known
        for entry in _decode(message.senml).e:
            if entry.v is None or entry.n not in self._ranges:
                continue
            value: float | None = float(entry.v)
            low, high = self._ranges[entry.n]
            if self._checked and (unknown or value is None or not low <= value <= high):
                value = None
            found.append((message.msgid, message.sensor, entry.n, value, message.at))
        return found


class Interpolate:
    """A missing value is the mean of the last ones of its sensor and field; 0.0 if there is none."""

    def __init__(self, window: int) -> None:
        self._window = window

    def __call__(self, state: Sequence[Any], row: Any) -> tuple[Any, Any]:
        (last,) = state
        value = row.value
        if value is not None:
            if self._window:
                state = ([*last, value][-self._window :],)
        elif self._window:
            value = sum(last) / len(last) if last else 0.0
        return state, (row.msgid, row.sensor, row.field, value, row.at)


class Join:
    """The observations of a message come together again, with what is known about the sensor."""

    def __init__(self, dataset: Dataset) -> None:
        self._fields = list(dataset.fields)
        self._places = {name: n for n, name in enumerate(self._fields)}

    def __call__(self, state: Sequence[Any], row: Any) -> tuple[Any, Any]:
        places, values = [*state[0], self._places[row.field]], [*state[1], row.value]
        if len(places) < len(self._fields):
            return (places, values), None
        ordered = [value for _, value in sorted(zip(places, values, strict=True), key=lambda pair: pair[0])]
        note = annotation(row.sensor)
        senml = to_senml(self._fields, row.sensor, note, ordered)
        return None, (row.msgid, row.sensor, note, ordered, senml, row.at)


def annotation(sensor: str) -> str:
    """Metadata by id: RIoTBench reads them from a table."""
    return f"region-{int(sensor[1:]) % 7}" if sensor.startswith("s") else "unknown"


def to_senml(fields: Sequence[str], sensor: str, note: str, values: Sequence[float | None]) -> str:
    entries = [{"n": "source", "sv": sensor}, {"n": "annotation", "sv": note}]
    entries += [{"n": name, "v": repr(value)} for name, value in zip(fields, values, strict=True)]
    return msgspec.json.encode({"e": entries}).decode()


# -- STATS ---------------------------------------------------------------------------------------


class BlockAverage:
    """The mean of every `size` values of a sensor and field."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, state: Sequence[Any], row: Any) -> tuple[Any, Any]:
        block, count, total = state
        count, total = count + 1, total + row.value
        if count < self._size:
            return (block, count, total), None
        return (block + 1, 0, 0.0), (row.sensor, row.field, block, total / count, row.at)


def kalman(state: Sequence[Any], row: Any) -> tuple[Any, Any]:
    """The filtered value of a sensor and field, for each value."""
    n, estimate, error = state
    error += PROCESS_NOISE
    gain = error / (error + SENSOR_NOISE)
    estimate += gain * (row.value - estimate)
    error *= 1 - gain
    return (n + 1, estimate, error), (row.sensor, row.field, n + 1, estimate, row.at)


def regress(state: Sequence[Any], row: Any) -> tuple[Any, Any]:
    """The mean of the next ten values, by a line through the last ten; from the eleventh value on."""
    values = [*state[0], row.value][-TRAINED:]
    if row.n <= TRAINED:
        return (values,), None
    middle = (TRAINED - 1) / 2
    mean = sum(values) / TRAINED
    slope = sum((x - middle) * (y - mean) for x, y in enumerate(values)) / sum(
        (x - middle) ** 2 for x in range(TRAINED)
    )
    ahead = TRAINED - 1 + (1 + PREDICTED_STEPS) / 2 - middle
    return (values,), (row.sensor, row.field, row.n, mean + slope * ahead, row.at)


class DistinctSensors(StatefulProcessor):
    """How many sensors report a field in each 10 s, by Durand and Flajolet's LogLog. Key: field.

    RIoTBench emits an estimate for each row, which depends on the order in which sensors come together.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._windows = handle.getMapState("windows", "end bigint", "registers binary")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        changed: dict[int, bytearray] = {}
        for row in rows:
            at = to_ms(row.at)
            end = at - at % DISTINCT_MS + DISTINCT_MS
            if end not in changed:
                found = self._windows.getValue((end,))
                if found is None:
                    self._handle.registerTimer(end)
                changed[end] = bytearray(REGISTERS) if found is None else bytearray(found[0])
            bucket, rank = bucket_and_rank(row.sensor)
            changed[end][bucket] = max(changed[end][bucket], rank)
        for end, registers in changed.items():
            self._windows.updateValue((end,), (bytes(registers),))
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        end = expiredTimerInfo.getExpiryTimeInMs()
        found = self._windows.getValue((end,))
        if found is not None:
            self._windows.removeKey((end,))
            yield Row(field=key[0], windowEnd=from_ms(end), sensors=estimate(bytes(found[0])))

    def close(self) -> None:
        """Nothing to release."""


def bucket_and_rank(sensor: str) -> tuple[int, int]:
    """Of the first four bytes of its SHA-1: the last ten bits, and the zeros at the end of the others."""
    number = int.from_bytes(hashlib.sha1(sensor.encode(), usedforsecurity=False).digest()[:4], "big")
    rest = number >> 10
    return number & (REGISTERS - 1), (rest & -rest).bit_length() - 1 if rest else 31


def estimate(registers: bytes) -> int:
    return int(ALPHA * REGISTERS * 2 ** (sum(registers) / REGISTERS))


# -- PRED ----------------------------------------------------------------------------------------

MODELS = (  # coefficients of the regression by position, limits of the classes
    ((0.9, 0.05), (18.0, 22.0, 26.0, 34.0)),
    ((0.7, 0.1), (19.0, 23.0, 28.0, 36.0)),
    ((1.1, 0.0), (17.0, 21.0, 25.0, 33.0)),
)
CLASSES = ("Excellent", "VeryGood", "Good", "Average", "Bad")


class Predict:
    """Class and expected value of each message by the latest model, and the relative error of the latter.

    Decision tree, regression, block average and error estimate are steps of one fold: the error needs the
    average and the prediction of the same message.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._fields, self._size = list(dataset.fields), dataset.block
        self._observed = self._fields.index(dataset.observed)

    def __call__(self, state: Sequence[Any], row: Any) -> tuple[Any, Any]:
        version, count, total, average, before = state
        if row.model is not None:
            return (row.model, count, total, average, before), None
        entries = {entry.n: entry.v for entry in _decode(row.senml).e}
        values = [float(entries[name] or "nan") for name in self._fields]
        observed = values[self._observed]
        (own, first), limits = MODELS[version % len(MODELS)]
        predicted = int(own * (observed if before is None else before) + first * values[0])
        kind = CLASSES[sum(observed > limit for limit in limits)]
        error = None if average is None else (observed - predicted) / average
        count, total = count + 1, total + observed
        if count == self._size:
            count, total, average = 0, 0.0, total / count
        state = (version, count, total, average, observed)
        return state, (row.msgid, row.sensor, kind, predicted, error, row.at)
