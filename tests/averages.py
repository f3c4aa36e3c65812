"""A deployment of running averages that really runs: a router and two instances, each in a thread.

The tests of the data sources read from it and write to it. Spark is only at its ends: no Spark task runs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from deployment_in_process import WAIT_S_MAX, Running, until
from tiercel.bench.operators import INPUT, OUTPUT, SITE, NumberedAverage, topology
from tiercel.core.instance.instance import Instance
from tiercel.core.model.row_batch import split
from tiercel.core.model.topology import Stream
from tiercel.core.router.router import Router
from tiercel.core.settings import Settings
from tiercel.runtime.client.producer import Producer
from tiercel.runtime.client.subscriber import Subscriber, stream_range
from tiercel.runtime.deployment import DeploymentDir, Manifest, StreamFacts, dead_letter_stream
from tiercel.runtime.process.durability_gate import Storage
from tiercel.runtime.process.host import Host, HostConfig
from tiercel.runtime.recovery.read_only import stored_keys
from tiercel.runtime.storage.store import Store
from tiercel.spark.operators.plans import OperatorPlan
from tiercel.spark.operators.processor_adapter import InputPlan, ProcessorAdapter
from tiercel.spark.rows.ddl import parse_ddl
from tiercel.spark.rows.row_codec import FEED_DEAD_LETTER_SCHEMA, RowCodec

OPERATOR = "average"
DEAD_LETTERS = dead_letter_stream(INPUT)
READING = "sensor string not null, n int, due_ns bigint, value double"
AVERAGE = "sensor string, n int, count bigint, average double, due_ns bigint"


def reading(sensor: str, n: int) -> dict[str, Any]:
    return {"sensor": sensor, "n": n, "due_ns": 0, "value": float(n)}


class Averages:
    """One deployment; its router can be started again."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.place = DeploymentDir(directory)
        streams = {
            INPUT: StreamFacts(parse_ddl(READING).json(), ("sensor",), sites=(SITE,)),
            DEAD_LETTERS: StreamFacts(parse_ddl(FEED_DEAD_LETTER_SCHEMA).json(), (), dead_letters_of=INPUT),
            OUTPUT: StreamFacts(parse_ddl(AVERAGE).json(), (), written_by=OPERATOR),
        }
        known = topology(2)
        known = msgspec.structs.replace(
            known, streams=known.streams | {DEAD_LETTERS: Stream(DEAD_LETTERS, SITE, holds_dead_letters=True)}
        )
        self.place.write(Manifest("averages", known, streams, Settings(**settings)))
        self.columns, self.results = RowCodec.of(streams[INPUT]), RowCodec.of(streams[OUTPUT])
        self._hosts = [Running(self._host(SITE))]
        operator = self.place.manifest().topology.operators[OPERATOR]
        self._hosts += [Running(self._host(name)) for name in operator.instances]

    def _host(self, name: str) -> Host:
        place, manifest = self.place, self.place.manifest()
        store = Store(place.process(name), manifest.durability)
        operator = manifest.topology.operators[OPERATOR]
        if name == SITE:
            router = Router(SITE, manifest.topology, manifest.settings, store.incarnation, store.items())
            return Host(SITE, router, HostConfig.of(place, metrics=place.metrics, storage=Storage(store)))
        plan = OperatorPlan(NumberedAverage(), (InputPlan(self.columns),), self.columns.schema, self.results)
        instance = Instance(name, operator, ProcessorAdapter(plan), manifest.settings, store.incarnation)
        dials = [SITE, *(other for other in operator.instances if other > name)]
        return Host(
            name, instance, HostConfig.of(place, dials=dials, metrics=place.metrics, storage=Storage(store))
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

    def dead_letters(self) -> list[dict[str, Any]]:
        """Every row that a feed refused, in the order of the log."""
        return self._log(DEAD_LETTERS, RowCodec(FEED_DEAD_LETTER_SCHEMA))

    def _log(self, stream: str, columns: RowCodec) -> list[dict[str, Any]]:
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
