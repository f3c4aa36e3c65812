"""The format "tiercel-metrics": figures of every process, second by second, as a DataFrame.

Responsible for: columns, and offsets that name the same lines whenever they are read.
Not responsible for: the lines and their files (runtime/process/metrics.py).

An offset is {"until": second}. A batch holds only seconds for which every process has written its lines.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.process.metrics import MetricsLine, first_second, read_lines, settled_until_s
from tiercel.spark.sources.options import Options

FOREVER = 1 << 62  # a DataFrame that is read again shows later lines too
WAIT_S = 0.3  # one wait for new lines; Spark asks again at once, and may stop the query in between
SCHEMA = """
    at timestamp, site string, process string, kind string, operator string, rate double, outputs double,
    latency_ms double, lag bigint, state_keys bigint, state_bytes bigint, busy double, moves int,
    hot_keys bigint, read_back double, replica string, replica_behind bigint, unexpected bigint,
    cpu double, stolen double, cores int, arrivals double, oldest_ms double,
    heavy_slots map<int, double>, heavy_keys map<binary, double>,
    links map<string, struct<rtt_ms: double, sent: double, received: double>>, gauges double,
    executor string
"""


class Metrics(DataSource):
    """Option: storage."""

    @classmethod
    def name(cls) -> str:
        return "tiercel-metrics"

    def _deployment(self) -> DeploymentDir:
        deployment = Options(self.options, ("storage",)).deployment()
        deployment.manifest()  # a clear error if this is no deployment's directory
        return deployment

    def schema(self) -> str:
        self._deployment()
        return SCHEMA

    def reader(self, schema: Any) -> DataSourceReader:
        return MetricsReader(self._deployment())

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return MetricsStreamReader(self._deployment())


class MetricsReader(DataSourceReader):
    """Reads all lines that are retained."""

    def __init__(self, deployment: DeploymentDir) -> None:
        self._deployment = deployment

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition((0, FOREVER))]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        return map(_row, read_lines(self._deployment.metrics, *partition.value))


class MetricsStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads whole seconds, as they become complete."""

    def __init__(self, deployment: DeploymentDir) -> None:
        self._deployment = deployment
        self._last: int | None = None  # available now: no second after this one

    def initialOffset(self) -> dict[str, int]:
        return {"until": first_second(self._deployment.metrics) - 1}

    def prepareForTriggerAvailableNow(self) -> None:
        self._last = settled_until_s()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        if self._last is None and settled_until_s() <= start["until"]:
            time.sleep(WAIT_S)
        until = settled_until_s() if self._last is None else min(self._last, settled_until_s())
        return {"until": max(until, start["until"])}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [InputPartition((start["until"], end["until"]))] if start != end else []

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        return map(_row, read_lines(self._deployment.metrics, *partition.value))


def _row(line: MetricsLine) -> tuple[Any, ...]:
    at = datetime.datetime.fromtimestamp(line.at_ms / 1e3, datetime.UTC)
    return (
        at,
        line.site,
        line.process,
        line.kind,
        line.operator,
        line.rate,
        line.outputs,
        line.latency_ms,
        line.lag,
        line.state_keys,
        line.state_bytes,
        line.busy,
        line.moves,
        line.hot_keys,
        line.read_back,
        line.replica,
        line.replica_behind,
        line.unexpected,
        line.cpu,
        line.stolen,
        line.cores,
        line.arrivals,
        line.oldest_ms,
        line.heavy_slots,
        None if line.heavy_keys is None else dict(line.heavy_keys),
        line.links,
        line.gauges,
        line.executor,
    )
