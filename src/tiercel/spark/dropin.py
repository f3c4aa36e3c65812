"""`transformWithState` as PySpark users write it, with another import.

Responsible for: from `df.groupBy(...)` and a processor to a streaming DataFrame, in one call.
Not responsible for: anything that the calls it makes do not do already.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pyspark.sql import DataFrame, GroupedData
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from tiercel.spark.graph import watermark_delay_ms
from tiercel.spark.live import Live, start
from tiercel.spark.schema import Schema
from tiercel.spark.seam import grouped_frame

log = logging.getLogger(__name__)

_deployments: dict[str, Live] = {}  # by storage directory: they live as long as the application


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
    """What `grouped.transformWithState(...)` does, as a live operator. Returns a streaming DataFrame.

    The deployment runs until `tiercel.stop_all()`, or the end of the application. With `storage` it
    continues where it was; without, its state ends with it, and the query that reads the result cannot be
    restarted from its checkpoint: `storage` belongs to `checkpointLocation`. `tiercel.deployments()` has
    it, for moves and scaling.
    """
    if storage is None:
        log.warning("transform_with_state without storage=: what it keeps ends with the application")
    frame, key = grouped_frame(grouped)
    event_time = next((c for c in frame.columns if watermark_delay_ms(frame, c) is not None), "")
    live = start(frame.sparkSession, ["local"], storage)
    try:
        source = live.stream("input", frame.schema, key=key, event_time=event_time)
        source.feed(frame, name=f"tiercel-feed-{name or type(statefulProcessor).__name__}")
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
        result = outputs.dataframe()
    except BaseException:
        live.stop()
        raise
    _deployments[str(live.place.directory)] = live
    return result


def deployments() -> list[Live]:
    """Those that `transform_with_state` has made and that run."""
    return [live for live in _deployments.values() if not live.stopped]


def stop_all() -> None:
    """End every deployment that `transform_with_state` has made."""
    while _deployments:
        _deployments.popitem()[1].stop()
