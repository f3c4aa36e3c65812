"""NEXMark as an application: `query` chooses one of its queries.

Responsible for: from a query to streams, events and expected rows.
Not responsible for: the queries (queries.py), the events (generator.py), the batch jobs (oracle.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Literal

import msgspec
from pyspark.sql import DataFrame, SparkSession

from tiercel import Live, UserError
from tiercel.apps.app import POSITION, App, Built, Event, Options
from tiercel.apps.nexmark.generator import BASE, Nexmark
from tiercel.apps.nexmark.oracle import expected
from tiercel.apps.nexmark.queries import DELAY_MS, QUERIES, SCHEMAS, Query

LAST_MS = 3_600_000  # how far behind the last event the rows lie that close every window
KINDS = tuple(SCHEMAS)
SLOWEST = 10  # events in a second of event time


class NexmarkOptions(Options, frozen=True):
    """Which query, and how many seconds of event time pass in one second."""

    query: Literal["q1", "q2", "q3", "q4", "q5", "q6", "q7", "q8", "q7-drrs", "q8-drrs"] = "q5"
    speed: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 1


class NexmarkApp(App[NexmarkOptions]):
    """Auctions, bids and persons; one of ten queries."""

    name = "nexmark"
    about = "NEXMark: Q1 to Q8 as Beam has them, and the variants of DRRS"
    options = NexmarkOptions
    outputs = {name: query.output for name, query in QUERIES.items()}  # noqa: RUF012

    def generate(self, options: NexmarkOptions, seed: int, rate: int) -> Iterator[Event]:
        query = QUERIES[options.query]
        mix = query.mix
        share = sum(getattr(mix, kind) for kind in query.sources) / mix.cycle
        if query.timed and rate < SLOWEST * options.speed:
            raise UserError(
                f"nexmark: speed = {options.speed} at {rate} events a second",
                expected=f"a speed of at most {rate // SLOWEST}",
                hint=f"bids run ahead of auctions by events: a second of event time needs {SLOWEST} of them",
            )
        # `rate` counts what the query reads
        generator = Nexmark(seed=seed, rate=rate / share / options.speed, mix=mix)
        number = 0
        while True:
            block = generator.block(number)
            number += 1
            events: list[tuple[int, str, tuple[object, ...]]] = []
            for kind in query.sources:
                rows = zip(*getattr(block, kind).values(), strict=True)
                events += [(n, kind, row) for n, row in zip(block.numbers[kind].tolist(), rows, strict=True)]
            events.sort(key=lambda event: event[0])
            for n, kind, row in events:
                yield generator.moment(n), kind, row

    def last_events(self, options: NexmarkOptions, moment: int) -> list[Event]:
        query = QUERIES[options.query]
        return [last_event(query, kind, moment + LAST_MS) for kind in query.sources] if query.timed else []

    def build(self, live: Live, options: NexmarkOptions, instances: Mapping[str, int]) -> Built:
        query = QUERIES[options.query]
        streams = {
            kind: live.stream(
                kind,
                source.schema(kind),
                key=source.key,
                event_time="dateTime",
                delay=f"{DELAY_MS} milliseconds",
            )
            for kind, source in query.sources.items()
        }
        output, operator = query.build(streams, instances)
        return Built(streams, {options.query: output}, operator)

    def oracle(
        self, spark: SparkSession, inputs: Mapping[str, DataFrame], options: NexmarkOptions
    ) -> Mapping[str, DataFrame]:
        query = QUERIES[options.query]
        frames = {}
        for kind, source in query.sources.items():
            frame = inputs[kind].filter(f"{source.key} >= 0").drop(POSITION)
            frames[kind] = frame.withColumnRenamed(source.id, "id") if source.id != "id" else frame
        return {options.query: expected(spark, options.query, frames)}


def last_event(query: Query, kind: str, moment: int) -> Event:
    """A row far behind all others, under a key that no other row has."""
    key = -1 - KINDS.index(kind)  # of its own for each kind: nothing joins with it
    at = BASE + timedelta(milliseconds=moment)
    values: list[object] = []
    for column in query.sources[kind].schema(kind).split(", "):
        kind_of = column.split(" ")[1]
        values.append(at if kind_of == "timestamp" else "" if kind_of == "string" else key)
    return moment, kind, tuple(values)
