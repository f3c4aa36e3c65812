"""The format "tiercel": a stream as a DataFrame, and a DataFrame into a stream; registration of all formats.

Responsible for: the options of reading and writing a stream; which reader or writer they select.
Not responsible for: reading (stream_reader.py), writing (stream_writer.py), the other formats
    (state_source.py, metrics_source.py).

    spark.readStream.format("tiercel").option("storage", DIR).option("stream", "averages").load()
    spark.read.format("tiercel")...          the entries of the stream's log
    df.writeStream.format("tiercel")...      a feed: each row exactly once
    df.write.format("tiercel").mode("append").option("batchId", "2026-11-16")...

    option              meaning
    storage, stream     the deployment's directory, and the name of the stream
    startingOffset      earliest (default), latest, or the first entry to read
    endingOffset        latest (default), or the last entry to read; batch only
    identity            true: adds _tiercel_id, "operator/key/epoch/offset/n", the same whenever it is read
    maxEntriesPerBatch  entries of the stream's log in one batch; default: all
    partitions          tasks that read a batch, each a share of the keys; or history, each a share of the
                        entries; default: up to 4, by the number of entries
    site                the site of a feed; default: the first that the stream allows
    batchId             for a DataFrame that is written without a query: a name that no other batch of the
                        stream has; a job that runs again under it adds nothing twice
    feed, batch         the same for batches with numbers, as foreachBatch has them: a number that is not
                        larger than the last one of the feed adds nothing
    badRows             dead-letter (default): rows that do not fit go to the stream's dead letters,
                        the stream STREAM/dead; fail: they fail the query
"""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from tiercel.errors import UserError
from tiercel.runtime.client.validation import writable_hint
from tiercel.runtime.deployment import dead_letter_stream
from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.sources.anchor_source import Anchor
from tiercel.spark.sources.metrics_source import Metrics
from tiercel.spark.sources.options import EARLIEST, LATEST, Options, facts_of
from tiercel.spark.sources.state_source import State
from tiercel.spark.sources.stream_reader import HistoryReader, ReadRequest, StreamReader
from tiercel.spark.sources.stream_writer import (
    DEAD_LETTER,
    FAIL,
    BatchStreamWriter,
    Columns,
    NamedBatch,
    StreamWriter,
    Target,
)

KNOWN = (
    "storage",
    "stream",
    "startingOffset",
    "endingOffset",
    "identity",
    "maxEntriesPerBatch",
    "partitions",
    "site",
    "badRows",
    "batchId",
    "feed",
    "batch",
)


class Streams(DataSource):
    """The module's docstring lists the options."""

    @classmethod
    def name(cls) -> str:
        return "tiercel"

    def schema(self) -> StructType:
        return self._read_request().schema

    def reader(self, schema: StructType) -> DataSourceReader:
        return HistoryReader(self._readable())

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(self._readable())

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        target = self._target(overwrite=overwrite)
        options = Options(self.options, KNOWN)
        number = options.text("batch")
        if number and not number.isdecimal():
            raise UserError(f"option batch = {number!r}", expected="a number, 0 or more")
        batch = NamedBatch.of(
            target.stream, options.text("batchId"), options.text("feed"), int(number) if number else None
        )
        return BatchStreamWriter(target, Columns.of(schema, target.codec), batch)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        target = self._target(overwrite=overwrite)
        if Options(self.options, KNOWN).text("batchId"):
            what = "option batchId is given to a query"
            raise UserError(what, expected="checkpointLocation: a query's batches have numbers of their own")
        return StreamWriter(target, Columns.of(schema, target.codec))

    def _readable(self) -> ReadRequest:
        request = self._read_request()
        logs = {s.name for s in request.deployment.manifest().topology.streams.values() if s.logged}
        if request.stream not in logs:
            what = f"the stream {request.stream!r} has no log"
            raise UserError(what, expected=f"one of: {', '.join(sorted(logs)) or '(there are none)'}")
        return request

    def _read_request(self) -> ReadRequest:
        options = Options(self.options, KNOWN)
        deployment = options.deployment()
        stream = options.needed("stream", "the name of a stream")
        facts = facts_of(deployment, stream)
        ending = options.offset("endingOffset", LATEST)
        if ending == EARLIEST:
            raise UserError("option endingOffset = 'earliest'", expected="latest or an offset")
        return ReadRequest(
            deployment,
            stream,
            facts.written_by or stream,
            RowCodec.of(facts),
            options.flag("identity"),
            options.offset("startingOffset", EARLIEST),
            ending,
            options.number("maxEntriesPerBatch", "a number of entries"),
            options.number("partitions", "a number of tasks"),
        )

    def _target(self, *, overwrite: bool) -> Target:
        options = Options(self.options, KNOWN)
        deployment = options.deployment()
        stream = options.needed("stream", "the name of a stream")
        facts = facts_of(deployment, stream)
        if facts.writer:
            what = f"the stream {stream!r} is written by {facts.writer}"
            hint = writable_hint(deployment.manifest())
            raise UserError(what, expected="a stream that producers and feeds write", hint=hint)
        if overwrite:
            what = "a stream cannot be overwritten"
            raise UserError(what, expected='mode("append"), or outputMode("append") or ("update")')
        site = options.text("site") or (facts.sites[0] if facts.sites else "")
        dead_letters = (
            dead_letter_stream(stream)
            if options.choice("badRows", (DEAD_LETTER, FAIL)) == DEAD_LETTER
            else ""
        )
        if dead_letters not in deployment.manifest().streams:
            dead_letters = ""  # a stream that was not declared by `live.stream` has none
        return Target(deployment, stream, site, RowCodec.of(facts), dead_letters, options.text("queryName"))


def register(spark: SparkSession) -> None:
    """Register all formats with a session.

    Spark refuses a source that accepts filters, as `tiercel-state` does, unless filter pushdown is enabled.
    """
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    for source in (Streams, State, Metrics, Anchor):
        spark.dataSource.register(source)
