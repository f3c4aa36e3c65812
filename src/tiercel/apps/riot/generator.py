"""Messages of sensors in SenML, like those of RIoTBench's data sets CITY and TAXI.

Responsible for: the text of message n, as a function of the seed and n; ranges and names of the fields.
Not responsible for: when a message is sent.

    {"e":[{"n":"source","sv":"s17"},{"n":"temperature","u":"far","v":"23.91"},...],"bt":1780272000000}

Number of sensors, sizes and distributions are close to the public samples, which have no licence: nothing is
copied from them. One message of fifty comes from a sensor that nobody knows.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercel.apps.times import to_ms

BASE = datetime.datetime(2026, 6, 1, tzinfo=datetime.UTC)
BASE_MS = to_ms(BASE)
MESSAGE = "msgid bigint, sensor string, senml string, model int, at timestamp"
FIRST_MSGID = 10**12
BLOCK = 1_000
UNKNOWN = 50  # one message of so many

Values = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Values]


@dataclass(frozen=True)
class Field:
    """An observation: unit, the range outside which it counts as missing, and how it is drawn."""

    unit: str
    draw: Draw
    low: float = -np.inf
    high: float = np.inf


@dataclass(frozen=True)
class Dataset:
    """One data set: its sensors and fields, and the length of its windows."""

    sensors: int
    fields: dict[str, Field]
    observed: str  # the field that PRED predicts
    block: int  # values in a block average
    interpolate: int  # values that a missing one is the mean of; 0: none
    head: float = 0.0  # share of the busiest sensor


def _normal(mean: float, deviation: float) -> Draw:
    return lambda random, n: random.normal(mean, deviation, n)


def _lognormal(median: float, sigma: float) -> Draw:
    return lambda random, n: median * np.exp(random.normal(0, sigma, n))


def _often(value: float, share: float, draw: Draw) -> Draw:
    """Mostly one value."""
    return lambda random, n: np.where(random.random(n) < share, value, draw(random, n))


def _uniform(low: float, high: float) -> Draw:
    return lambda random, n: random.uniform(low, high, n)


DATASETS = {
    "city": Dataset(
        788,
        {
            "temperature": Field("far", _normal(23.9, 4), -12.5, 43.1),
            "humidity": Field("per", _normal(48, 14), 10.7, 95.2),
            "light": Field("per", _often(0, 0.92, _uniform(1345, 26282)), 1345, 26282),
            "dust": Field("per", _lognormal(798, 0.9), 186.61, 5188.21),
            "airquality_raw": Field("per", _lognormal(24, 0.35), 17, 363),
        },
        observed="airquality_raw",
        block=5,
        interpolate=5,
    ),
    "taxi": Dataset(
        782,
        {
            "trip_time_in_secs": Field("s", _lognormal(600, 0.7), 140, 3155),
            "trip_distance": Field("mi", _lognormal(3, 0.8), 1.37, 29.86),
            "fare_amount": Field("USD", _lognormal(11, 0.6), 6, 201),
            "surcharge": Field("USD", _often(0, 0.5, _uniform(0.5, 1))),
            "mta_tax": Field("USD", _often(0.5, 0.99, _uniform(0, 0.5))),
            "tip_amount": Field("USD", _often(0, 0.4, _lognormal(2.5, 0.6)), 0.65, 38.55),
            "tolls_amount": Field("USD", _often(0, 0.94, _uniform(2.5, 18)), 2.5, 18),
            "total_amount": Field("USD", _lognormal(15, 0.6)),
        },
        observed="fare_amount",
        block=10,
        interpolate=0,
        head=0.06,
    ),
}


class Messages:
    """The messages of one data set and seed."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self._data, self._seed = dataset, seed

    def rows(self, rate: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Millisecond and row of each message, without an end; `rate` of them in a second."""
        number = 0
        while True:
            for n, sensor, senml in self._block(number):
                ms = n * 1000 // rate
                stamp = BASE_MS + ms
                text = f'{{"e":[{{"n":"timestamp","u":"s","v":"{stamp}"}},{senml}],"bt":{stamp}}}'
                at = BASE + datetime.timedelta(milliseconds=ms)
                yield ms, (FIRST_MSGID + n, sensor, text, None, at)
            number += 1

    def _block(self, number: int) -> Iterator[tuple[int, str, str]]:
        data, random = self._data, np.random.default_rng([self._seed, number])
        sensors = random.integers(0, data.sensors, BLOCK)
        if data.head:
            sensors = np.where(random.random(BLOCK) < data.head, 0, sensors)
        strange = random.integers(0, UNKNOWN, BLOCK) == 0
        names = [f"x{s}" if odd else f"s{s}" for s, odd in zip(sensors, strange, strict=True)]
        places = random.uniform(-180, 180, (BLOCK, 2)).tolist()
        columns = [
            [f'{{"n":"{name}","u":"{field.unit}","v":"{value:.2f}"}}' for value in field.draw(random, BLOCK)]
            for name, field in data.fields.items()
        ]
        for n, (sensor, (longitude, latitude), *values) in enumerate(
            zip(names, places, *columns, strict=True)
        ):
            meta = (
                f'{{"n":"source","sv":"{sensor}"}},{{"n":"longitude","u":"lon","v":"{longitude:.5f}"}},'
                f'{{"n":"latitude","u":"lat","v":"{latitude / 2:.5f}"}}'
            )
            yield number * BLOCK + n, sensor, ",".join([meta, *values])


def known_sensors(dataset: Dataset) -> list[str]:
    return [f"s{n}" for n in range(dataset.sensors)]


def model_row(sensor: str, version: int, msgid: int, ms: int) -> tuple[Any, ...]:
    """A new model for a sensor, in the stream of its messages: it counts from its place there on."""
    return (msgid, sensor, None, version, BASE + datetime.timedelta(milliseconds=ms))
