"""Feeds: streaming DataFrames that write into a stream, each as a named query of Spark.

Responsible for: the handle of a feed, its name, starting its query.
Not responsible for: how its rows get into the stream (sources/stream_writer.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.job_errors import reason_of


class Feed:
    """A streaming DataFrame that writes into a stream. Its query starts with the deployment."""

    def __init__(
        self, frame: DataFrame, stream: str, name: str, site: str, options: Mapping[str, str]
    ) -> None:
        self.frame, self.stream, self.name, self.site = frame, stream, name, site
        self.options = dict(options)
        self.query: StreamingQuery | None = None

    def stop(self) -> None:
        if self.query is not None:
            self.query.stop()

    def wait(self, timeout_s: int | None = None) -> bool:
        """Wait until the query ends by itself, because its source ends or its trigger runs once."""
        if self.query is None:
            raise UserError(f"feed {self.name!r} has not started", hint="live.deploy() starts it")
        self.query.awaitTermination(timeout_s)
        return not self.query.isActive


def check_feed_name(feed: Feed, others: Iterable[Feed]) -> None:
    """Refuse the name of another feed: a running query has a name of its own, which names its checkpoint."""
    if any(o.name == feed.name and (o.query is None or o.query.isActive) for o in others):
        raise UserError(
            f"there is a feed {feed.name!r} already", expected="a name of its own", hint="feed(…, name=…)"
        )


def start_feed(deployment: DeploymentDir, feed: Feed) -> None:
    checkpoint = feed.options.pop("checkpoint", str(deployment.feeds / f"checkpoint-{feed.name}"))
    trigger = feed.options.pop("trigger", "")
    writer = (
        feed.frame.writeStream.format("tiercel")
        .queryName(feed.name)
        .option("checkpointLocation", checkpoint)
        .option("storage", str(deployment.directory))
        .option("stream", feed.stream)
        .option("site", feed.site)
        .options(**feed.options)
    )
    if trigger == "availableNow":
        writer = writer.trigger(availableNow=True)
    elif trigger:
        writer = writer.trigger(processingTime=trigger)
    try:
        feed.query = writer.start()
    except PySparkException as error:
        raise UserError(
            f"feed {feed.name!r} cannot start: {reason_of(error)}",
            expected="a query that Spark can run, under a name that no other query of the session has",
            hint="another name: feed(…, name=…), or transform_with_state(…, name=…)",
        ) from error
