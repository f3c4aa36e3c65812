"""Deployments to measure: one router, two instances, all of it Spark tasks, by the public API.

Responsible for: starting them and ending them, with the processor that a benchmark wants.
Not responsible for: the load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tiercel.bench.averages import INPUT, INPUT_SCHEMA, OUTPUT_SCHEMA, SITE
from tiercel.bench.averages import RunningAverage as NumberedAverage
from tiercel.bench.loader import Loader
from tiercel.core.settings import Settings
from tiercel.runtime.place import Durability
from tiercel.spark.hosting import Build
from tiercel.spark.live import Live, start
from tiercel.spark.streams import LiveStream

OPERATOR = "average"
INSTANCES = 2
PROCESSES = 1 + INSTANCES
SLOTS = 2 * PROCESSES + 2  # two deployments side by side, and Spark's own work


@dataclass
class Deployed:
    """A running deployment with both ends of its operator."""

    live: Live
    input: LiveStream
    output: LiveStream


@contextlib.contextmanager
def deployed(
    spark: Any,
    processor: Any,
    input_schema: str,
    output_schema: str,
    *,
    durability: Durability = "os",
    build: Build | None = None,
    settings: Settings | None = None,
) -> Iterator[Deployed]:
    """In a temporary directory that is gone afterwards."""
    with start(spark, [SITE], durability=durability, settings=settings) as live:
        if build is not None:
            live.build = build
        stream = live.stream(INPUT, input_schema, key="sensor")
        output = stream.transform_with_state(
            processor, output_schema, name=OPERATOR, instances={SITE: INSTANCES}
        )
        live.deploy()
        yield Deployed(live, stream, output)


@contextlib.contextmanager
def loaded(
    spark: Any,
    keys: int,
    *,
    processor: Any = None,
    durability: Durability = "os",
    build: Build | None = None,
    settings: Settings | None = None,
) -> Iterator[tuple[Live, Loader]]:
    """A deployment of averages with a load process that is connected and waits."""
    processor = processor or NumberedAverage()
    options: dict[str, Any] = {"durability": durability, "build": build, "settings": settings}
    with (
        deployed(spark, processor, INPUT_SCHEMA, OUTPUT_SCHEMA, **options) as made,
        Loader(made.live.place, keys, made.output.name) as loader,
    ):
        yield made.live, loader
