"""A deployment of running averages that really runs: a router and two instances, each in a thread.

What the data sources' tests read from and write to. Not in Spark tasks: Spark is at its ends here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from small import WAIT_S_MAX, Running, until
from tiercel.bench.averages import INPUT, OUTPUT, SITE, RunningAverage, topology
from tiercel.core.instance import Instance
from tiercel.core.router import Router
from tiercel.core.runs import split
from tiercel.core.settings import Settings
from tiercel.core.topology import Stream
from tiercel.runtime.client import Producer, Subscriber, stream_range
from tiercel.runtime.host import Host
from tiercel.runtime.place import Manifest, Place, StreamFacts, letters_of
from tiercel.runtime.store import Store
from tiercel.runtime.stored_state import stored_keys
from tiercel.spark.border import Border, InputPlan, OperatorPlan
from tiercel.spark.ddl import parse_ddl
from tiercel.spark.schema import FEED_LETTER_SCHEMA, Columns

OPERATOR = "average"
LETTERS = letters_of(INPUT)
READING = "sensor string not null, n int, due_ns bigint, value double"
AVERAGE = "sensor string, n int, count bigint, average double, due_ns bigint"


def reading(sensor: str, n: int) -> dict[str, Any]:
    return {"sensor": sensor, "n": n, "due_ns": 0, "value": float(n)}


class Averages:
    """One deployment; its router can be started again."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.place = Place(directory)
        streams = {
            INPUT: StreamFacts(parse_ddl(READING).json(), ("sensor",), sites=(SITE,)),
            LETTERS: StreamFacts(parse_ddl(FEED_LETTER_SCHEMA).json(), (), letters_of=INPUT),
            OUTPUT: StreamFacts(parse_ddl(AVERAGE).json(), (), written_by=OPERATOR),
        }
        known = topology(2)
        known = msgspec.structs.replace(
            known, streams=known.streams | {LETTERS: Stream(LETTERS, SITE, letters=True)}
        )
        self.place.write(Manifest("averages", known, streams, Settings(**settings)))
        self.columns, self.results = Columns.of(streams[INPUT]), Columns.of(streams[OUTPUT])
        self._hosts = [Running(self._host(SITE))]
        operator = self.place.manifest().topology.operators[OPERATOR]
        self._hosts += [Running(self._host(name)) for name in operator.instances]

    def _host(self, name: str) -> Host:
        place, manifest = self.place, self.place.manifest()
        store = Store(place.process(name), manifest.durability)
        operator = manifest.topology.operators[OPERATOR]
        if name == SITE:
            router = Router(SITE, manifest.topology, manifest.settings, store.life, store.items())
            return Host(SITE, router, place.registry, place.secret, store=store, metrics=place.metrics)
        plan = OperatorPlan(RunningAverage(), (InputPlan(self.columns),), self.columns.schema, self.results)
        instance = Instance(name, operator, Border(plan), manifest.settings, store.life)
        dials = [SITE, *(other for other in operator.instances if other > name)]
        return Host(
            name, instance, place.registry, place.secret, dials=dials, store=store, metrics=place.metrics
        )

    def restart_router(self) -> None:
        self._hosts[0].end()
        self._hosts[0] = Running(self._host(SITE))

    def produce(self, rows: list[dict[str, Any]], name: str = "sensors") -> None:
        """Returns when every row has come out of the operator."""
        before = self.outputs()
        with Producer(self.place, INPUT, name=name) as producer:
            for begin in range(0, len(rows), 10):  # several frames, and so several entries
                producer.send_frame(
                    producer.submitted + 1, [self.columns.pack(r) for r in rows[begin : begin + 10]]
                )
        self.wait_for(before + len(rows))

    def outputs(self) -> int:
        """Rows that the operator has emitted, by the counters in its state."""
        return sum(
            s.image.values["average"][1][0] for s in stored_keys(self.place, OPERATOR) if s.image.values
        )

    def wait_for(self, rows: int) -> None:
        """Until checkpoints hold this many rows: then their outputs are in the log."""
        until(lambda: self.outputs() >= rows, f"not all of {rows} rows came out")

    def averages(self) -> list[dict[str, Any]]:
        """Everything in the output log, in its order."""
        return self._log(OUTPUT, self.results)

    def letters(self) -> list[dict[str, Any]]:
        """Every row that a feed refused, in the order of the log."""
        return self._log(LETTERS, Columns(FEED_LETTER_SCHEMA))

    def _log(self, stream: str, columns: Columns) -> list[dict[str, Any]]:
        last, found = stream_range(self.place, stream)[1], list[Any]()
        with Subscriber(self.place, stream, after=0) as subscriber:
            while subscriber.offset < last:
                outputs = [o for entry in subscriber.poll(WAIT_S_MAX) for o in entry.outputs]
                found += [
                    dict(zip(columns.names, columns.unpack(payload), strict=True))
                    for output in outputs
                    for payload in split(output.row[2])
                ]
        return found

    @property
    def last(self) -> int:
        return stream_range(self.place, OUTPUT)[1]

    def end(self) -> None:
        for host in reversed(self._hosts):
            host.end()


@contextlib.contextmanager
def averages(directory: Path, **settings: Any) -> Iterator[Averages]:
    deployment = Averages(directory, **settings)
    try:
        yield deployment
    finally:
        deployment.end()
