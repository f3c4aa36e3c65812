"""`keycount`: a count per key, as Megaphone and Meces measure it; keys uniform or by Zipf's law.

Responsible for: its generator, its operator (a fold) and its oracle.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from tiercel import Live
from tiercel.apps.app import POSITION, App, Built, Event, Options, Output, Values

KEYS_MAX = 10_000_000


class KeyCountOptions(Options, frozen=True, kw_only=True):
    """Options of `keycount`."""

    keys: Annotated[int, msgspec.Meta(ge=1, le=KEYS_MAX)] = 1_000
    skew: Literal["uniform", "zipf"] = "uniform"
    exponent: Annotated[float, msgspec.Meta(ge=0.1, le=3.0)] = 1.0  # of Zipf's law


def count_key(state: tuple[int], row: Any) -> tuple[tuple[int], tuple[int, int, int]]:
    """The next count of a key."""
    count = state[0] + 1
    return (count,), (row.key, count, row.n)


def _cause(values: Values) -> int:
    return int(values[2])


class KeyCount(App[KeyCountOptions]):
    """Records (key, number); after each the count of its key."""

    name = "keycount"
    about = "count per key, uniform or zipf (Megaphone, Meces)"
    options = KeyCountOptions
    outputs: ClassVar[Mapping[str, Output]] = {
        "counts": Output(("key", "count"), _cause, order="count", key="key")
    }

    def generate(self, options: KeyCountOptions, seed: int, rate: int) -> Iterator[Event]:
        draw = random.Random(seed)
        keys = options.keys
        if options.skew == "uniform":
            n = 0
            while True:
                yield n, "records", (draw.randrange(keys), n)
                n += 1
        shares = list(accumulate(1.0 / rank**options.exponent for rank in range(1, keys + 1)))
        n = 0
        while True:
            yield n, "records", (bisect_left(shares, draw.random() * shares[-1]), n)
            n += 1

    def build(self, live: Live, options: KeyCountOptions, instances: Mapping[str, int]) -> Built:
        records = live.stream("records", "key long, n long", key="key")
        counts = records.fold(
            count_key,
            (0,),
            "key long, count long, n long",
            state_schema="count long",
            name="counter",
            instances=instances,
        )
        return Built({"records": records}, {"counts": counts}, "counter")

    def oracle(
        self, spark: SparkSession, inputs: Mapping[str, DataFrame], options: KeyCountOptions
    ) -> Mapping[str, DataFrame]:
        so_far = Window.partitionBy("key").orderBy(POSITION)
        return {"counts": inputs["records"].select("key", f.row_number().over(so_far), "n")}
