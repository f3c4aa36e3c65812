"""Deployments to measure: one router and two instances as Spark tasks, started by the public API.

Responsible for: starting and stopping them with a benchmark's processor.
Not responsible for: the load (loadgen/).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tiercel.bench.loadgen.process import LoadProcess
from tiercel.bench.operators import INPUT, INPUT_SCHEMA, OUTPUT_SCHEMA, SITE, NumberedAverage
from tiercel.core.settings import Settings
from tiercel.runtime.deployment import Durability
from tiercel.runtime.net.emulated_link import Link
from tiercel.spark.api.deployment import Live, start
from tiercel.spark.api.streams import LiveStream
from tiercel.spark.cluster.task import Build

OPERATOR = "average"
INSTANCES = 2
PROCESSES = 1 + INSTANCES
SLOTS = 2 * PROCESSES + 2  # two deployments side by side, and Spark's own work


@dataclass
class BenchDeployment:
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
    links: Mapping[str, Link] | None = None,
    instances: Mapping[str, int] | None = None,
) -> Iterator[BenchDeployment]:
    """In a temporary directory that is gone afterwards. `instances` names the sites and their instances."""
    instances = dict(instances or {SITE: INSTANCES})
    with start(spark, list(instances), durability=durability, settings=settings, links=links) as live:
        if build is not None:
            live.build = build
        stream = live.stream(INPUT, input_schema, key="sensor")
        output = stream.transform_with_state(processor, output_schema, name=OPERATOR, instances=instances)
        live.deploy()
        yield BenchDeployment(live, stream, output)


@contextlib.contextmanager
def loaded(
    spark: Any,
    keys: int,
    *,
    processor: Any = None,
    durability: Durability = "os",
    build: Build | None = None,
    settings: Settings | None = None,
    **placed: Any,
) -> Iterator[tuple[Live, LoadProcess]]:
    """A deployment of averages with a load process that is connected and waits."""
    processor = processor or NumberedAverage()
    options: dict[str, Any] = {"durability": durability, "build": build, "settings": settings, **placed}
    with (
        deployed(spark, processor, INPUT_SCHEMA, OUTPUT_SCHEMA, **options) as made,
        LoadProcess(made.live.deployment, keys, made.output.name) as loader,
    ):
        yield made.live, loader
