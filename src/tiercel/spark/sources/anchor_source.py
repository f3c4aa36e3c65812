"""The format "tiercel-anchor": ties a query's checkpoint to the deployment that its live operator runs in.

Responsible for: an offset that names the deployment, in the offset log of the user's own query; a task in the
    query's first batch, so that the router knows the query from then on. It has no rows.
Not responsible for: rows and outputs (batch_step.py).

Without it, a query that continues from its checkpoint with an empty deployment would go on with lost state:
the first batch of some sources has no tasks, so the router could not tell the two apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from tiercel.errors import UserError
from tiercel.runtime.client.batch_task import client_for
from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.sources.batch_step import this_task
from tiercel.spark.sources.options import Options, facts_of

Offset = dict[str, Any]
ANCHOR_PARTITION = -1  # no task of the query has it
BEGUN = 1  # the only offset behind the first one


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
    """Has one offset, and no rows."""

    def __init__(self, deployment: DeploymentDir, outputs: str) -> None:
        self._deployment, self._outputs = deployment, outputs
        self._directory, self._id = deployment.directory, deployment.manifest().id

    def initialOffset(self) -> Offset:
        return {"offset": 0, "deployment": self._id}

    def prepareForTriggerAvailableNow(self) -> None:
        pass

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        check_deployment(start, self._id, self._directory)
        return {"offset": BEGUN, "deployment": self._id}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        check_deployment(start, self._id, self._directory)
        return [InputPartition(None)] if start != end else []

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Introduce the query to the router, in a task of its first batch."""
        topology = self._deployment.manifest().topology
        operator = topology.producer_of(self._outputs)
        assert operator is not None
        task = msgspec.structs.replace(this_task(), partition=ANCHOR_PARTITION)
        site = topology.streams[self._outputs].home
        client = client_for(self._deployment, site, self._outputs)
        client.begin(task, topology.operators[operator].inputs[0])
        client.forget()
        return iter(())


def check_deployment(offset: Offset, deployment: str, directory: Any) -> None:
    """Refuse an offset of another deployment: it comes from a checkpoint that belongs to that one."""
    if offset.get("deployment", deployment) != deployment:
        raise UserError(
            f"{directory} holds another deployment than the query's checkpoint",
            expected="the storage that the query has read before, with its state and log",
            hint="storage= belongs to checkpointLocation: give the same ones again, or two new ones",
        )
