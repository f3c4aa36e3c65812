"""The format "tiercel-anchor": ties a query to the deployment that its live operator runs in.

Responsible for: an offset that names the deployment, in the offset log of the user's own query; a task in the
    query's first batch, so that the router knows the query from then on; batches for outputs of timers.
Not responsible for: rows and their outputs (batch_step.py).

Without it, a query that continues from its checkpoint with an empty deployment would go on with lost state:
the first batch of some sources has no tasks, so the router could not tell the two apart.

Timers fire when they are due, not when a batch runs. The router numbers the places of the output log that
hold such outputs. The offset counts these places: Spark starts a batch when there are some, and its offset
log says which places belong to which batch, also after a restart.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from tiercel.errors import UserError
from tiercel.runtime.client.batch_task import TimerClient, client_for, drop
from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.sources.batch_step import arrow_outputs, this_task
from tiercel.spark.sources.options import Options, facts_of
from tiercel.spark.sources.stream_reader import LONG_POLL_S, RETRY_S, ROUTER_S_MAX

if TYPE_CHECKING:
    import pyarrow

Offset = dict[str, Any]
ANCHOR_PARTITION = -1  # no task of the query has it
BEGUN = 1  # the offset of a query that has begun; each place with outputs of timers adds one
SETTLED_S_MAX = 10.0  # to wait until everything that has entered is processed


class Anchor(DataSource):
    """Options: storage, and the stream whose columns it has."""

    @classmethod
    def name(cls) -> str:
        return "tiercel-anchor"

    def schema(self) -> StructType:
        options = Options(self.options, ("storage", "stream"))
        return RowCodec.of(facts_of(options.deployment(), options.needed("stream", "a stream"))).schema

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        options = Options(self.options, ("storage", "stream"))
        return AnchorReader(options.deployment(), options.text("stream"))


class AnchorReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Has the outputs of timers, if the operator has a time mode, and otherwise no rows."""

    def __init__(self, deployment: DeploymentDir, outputs: str) -> None:
        self._deployment, self._outputs = deployment, outputs
        self._directory, manifest = deployment.directory, deployment.manifest()
        self._id = manifest.id
        operator = manifest.topology.producer_of(outputs)
        assert operator is not None
        self._operator = manifest.topology.operators[operator]
        self._site = manifest.topology.streams[outputs].home
        self._codec = RowCodec.of(facts_of(deployment, outputs))
        self._timers: TimerClient | None = None
        self._available: int | None = None  # available now: no place after this one

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_timers": None}  # another process opens its own connection

    @property
    def _stream(self) -> str:
        return self._operator.inputs[0]

    def initialOffset(self) -> Offset:
        return {"offset": 0, "deployment": self._id}

    def prepareForTriggerAvailableNow(self) -> None:
        if self._operator.time_mode == "processingTime":  # these may go on for ever
            self._available = self._places(0, wait=False)
        elif self._operator.time_mode == "eventTime":
            self._available = -1  # what the rows of this run have caused, however many batches that takes

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        check_deployment(start, self._id, self._directory)
        if self._operator.time_mode == "none":
            return {"offset": BEGUN, "deployment": self._id}
        known = max(int(start["offset"]) - BEGUN, 0)
        if self._available is not None and self._available >= 0:
            last = max(known, self._available)
        else:
            begun = int(start["offset"]) >= BEGUN
            last = max(known, self._places(known, wait=begun and self._available is None))
        return {"offset": BEGUN + last, "deployment": self._id}

    def _places(self, known: int, *, wait: bool) -> int:
        """The last place with outputs of timers; with `wait`, a little later if there is none yet."""
        give_up = time.monotonic() + ROUTER_S_MAX
        while True:
            try:
                if self._timers is None:
                    self._timers = TimerClient(self._deployment, self._site, self._stream)
                last = self._timers.last(known, SETTLED_S_MAX, settled=True)
                if wait and (last is None or last <= known):
                    last = self._timers.last(known, LONG_POLL_S)
                return known if last is None else last
            except UserError:
                if time.monotonic() > give_up:
                    raise
                if self._timers is not None:
                    self._timers.close()
                    self._timers = None
                time.sleep(RETRY_S)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        check_deployment(start, self._id, self._directory)
        places = max(int(start["offset"]) - BEGUN, 0), int(end["offset"]) - BEGUN
        return [InputPartition(places)] if start != end else []

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Introduce the query to the router, and yield the outputs of the planned places."""
        task = msgspec.structs.replace(this_task(), partition=ANCHOR_PARTITION)
        client = client_for(self._deployment, self._site, self._outputs)
        try:
            client.begin(task, self._stream, partition.value)
            client.end()
            yield from arrow_outputs(client, self._codec)
        except BaseException:
            drop(client)
            raise


def check_deployment(offset: Offset, deployment: str, directory: Any) -> None:
    """Refuse an offset of another deployment: it comes from a checkpoint that belongs to that one."""
    if offset.get("deployment", deployment) != deployment:
        raise UserError(
            f"{directory} holds another deployment than the query's checkpoint",
            expected="the storage that the query has read before, with its state and log",
            hint="storage= belongs to checkpointLocation: give the same ones again, or two new ones",
        )
