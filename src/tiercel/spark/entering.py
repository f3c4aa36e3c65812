"""What enters a deployment when it begins: initial state, then the DataFrames that feed its streams.

Responsible for: initial state once in the life of a deployment; feeds as named queries of Spark.
Not responsible for: how rows become tuples (ends.py, feed.py).
"""

from __future__ import annotations

from pyspark.sql import DataFrame

from tiercel.runtime.place import Place
from tiercel.spark.ends import RowProducer
from tiercel.spark.schema import Columns
from tiercel.spark.streams import Feed

INITIAL_ROWS = 500  # of initial state in one frame


def give_initial_state(place: Place, operator: str, columns: Columns, frame: DataFrame) -> None:
    """Before the first tuple, once in the life of a deployment; sorted, so that a second try resumes."""
    done = place.directory / f"initial-{operator}.done"
    if done.exists():
        return
    with RowProducer(place, f"{operator}.initial", name=f"initial-{operator}") as producer:
        rows = frame.sort(*columns.key, *[c for c in frame.columns if c not in columns.key])
        producer.send_initial(rows.toLocalIterator(prefetchPartitions=True), INITIAL_ROWS)
        producer.flush()
    done.touch()


def start_feed(place: Place, feed: Feed) -> None:
    checkpoint = feed.options.pop("checkpoint", str(place.feeds / f"checkpoint-{feed.name}"))
    trigger = feed.options.pop("trigger", "")
    writer = (
        feed.frame.writeStream.format("tiercel")
        .queryName(feed.name)
        .option("checkpointLocation", checkpoint)
        .option("storage", str(place.directory))
        .option("stream", feed.stream)
        .option("site", feed.site)
        .options(**feed.options)
    )
    if trigger == "availableNow":
        writer = writer.trigger(availableNow=True)
    elif trigger:
        writer = writer.trigger(processingTime=trigger)
    feed.query = writer.start()
