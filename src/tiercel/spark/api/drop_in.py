"""The drop-in `transform_with_state`: PySpark's signature, with another import.

Responsible for: one call from `df.groupBy(...)` and a processor to a streaming DataFrame.
Not responsible for: anything else; it only makes calls of the public API.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pyspark.sql import DataFrame, GroupedData
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from tiercel.runtime.deployment import dead_letter_stream
from tiercel.spark.api.deployment import Live, start
from tiercel.spark.api.graph import watermark_delay_ms
from tiercel.spark.api.streams import LiveStream
from tiercel.spark.pyspark_internals import grouped_frame
from tiercel.spark.rows.row_codec import Schema
from tiercel.spark.sources.batch_step import BatchStep

log = logging.getLogger(__name__)

_deployments: dict[str, Live] = {}  # by storage directory; they run until the application ends


def transform_with_state(
    grouped: GroupedData,
    statefulProcessor: StatefulProcessor,
    outputStructType: Schema,
    outputMode: str,
    timeMode: str,
    initialState: GroupedData | None = None,
    eventTimeColumnName: str = "",
    *,
    storage: str | Path | None = None,
    name: str = "",
    instances: int = 1,
) -> DataFrame:
    """As `grouped.transformWithState(...)`, with a live operator. Returns a streaming DataFrame.

    The deployment runs until `tiercel.stop_all()`, or the end of the application. With `storage` it resumes
    where it stopped. Without `storage` its state ends with it, and the query that reads the result cannot be
    restarted from its checkpoint: `storage` belongs to `checkpointLocation`. `tiercel.deployments()` returns
    the deployment, for moves and scaling.
    """
    if storage is None:
        log.warning("transform_with_state without storage=: its state ends with the application")
    frame, key = grouped_frame(grouped)
    event_time = next((c for c in frame.columns if watermark_delay_ms(frame, c) is not None), "")
    live = start(frame.sparkSession, ["local"], storage)
    try:
        source = live.stream(
            "input", frame.schema, key=key, event_time="" if timeMode == "none" else event_time
        )
        delay = watermark_delay_ms(frame, event_time) if event_time else None
        if delay is not None and timeMode != "none":
            live.note_delay(source.name, delay)
        outputs = source.transform_with_state(
            statefulProcessor,
            outputStructType,
            name=name,
            output_mode=outputMode,
            time_mode=timeMode,
            initial_state=initialState,
            output_event_time=eventTimeColumnName,
            instances={"local": instances},
        )
        if timeMode != "none":
            live.graph.put_in_query(outputs.name)
        result = inside(live, frame, source, outputs)
        live.watch_dead_letters()
    except BaseException:
        live.stop()
        raise
    _deployments[str(live.deployment.directory)] = live
    return result


def inside(live: Live, frame: DataFrame, source: LiveStream, outputs: LiveStream) -> DataFrame:
    """The outputs of an operator as a step of the query that the DataFrame becomes a part of.

    Starts the deployment.
    """
    live.deploy()
    step = BatchStep(
        live.deployment,
        live.graph.root,
        source.name,
        source.codec,
        dead_letter_stream(source.name),
        outputs.name,
        outputs.codec,
    )
    anchor = live.spark.readStream.format("tiercel-anchor").option("storage", str(live.deployment.directory))
    rows = frame.select(*source.codec.names).mapInArrow(step, outputs.codec.schema)
    return rows.union(anchor.option("stream", outputs.name).load())


def deployments() -> list[Live]:
    """The running deployments that `transform_with_state` has made."""
    return [live for live in _deployments.values() if not live.stopped]


def stop_all() -> None:
    """Stop every deployment that `transform_with_state` has made."""
    while _deployments:
        _deployments.popitem()[1].stop()
