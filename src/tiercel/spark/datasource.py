"""format("tiercel"): a stream as a DataFrame, and any DataFrame into a stream; and all formats registered.

Responsible for: the options of reading and writing a stream, which reader or writer they mean.
Not responsible for: reading (stream_reader.py), writing (feed.py), the formats beside this one
    (state_source.py, metrics_source.py).

    spark.readStream.format("tiercel").option("storage", DIR).option("stream", "averages").load()
    spark.read.format("tiercel")...          what the stream's log holds
    df.writeStream.format("tiercel")...      a feed: each row exactly once
    df.write.format("tiercel").mode("append").option("batchId", "2026-11-16")...

    option              meaning
    storage, stream     the deployment's directory, and the name of the stream
    startingOffset      earliest (default), latest, or the first entry to read
    endingOffset        latest (default), or the last entry to read; batch only
    identity            true: adds _tiercel_id, "operator/key/epoch/offset/n", unique for good
    maxEntriesPerBatch  of the stream's log; default: all there are
    site                where a feed enters; default: the first that the stream allows
    batchId             of a DataFrame that is written without a query: a name that no other batch of the
                        stream has; a job that is run again under it adds nothing twice
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
from tiercel.runtime.arguments import writable_hint
from tiercel.runtime.place import letters_of
from tiercel.spark.feed import DEAD_LETTER, FAIL, FeedOnceWriter, FeedWriter, Target, column_names
from tiercel.spark.metrics_source import Metrics
from tiercel.spark.options import EARLIEST, LATEST, Options, facts_of
from tiercel.spark.schema import Columns
from tiercel.spark.state_source import State
from tiercel.spark.stream_reader import HistoryReader, StreamReader, Wanted

KNOWN = (
    "storage",
    "stream",
    "startingOffset",
    "endingOffset",
    "identity",
    "maxEntriesPerBatch",
    "site",
    "badRows",
    "batchId",
)


class Streams(DataSource):
    """The module's docstring lists the options."""

    @classmethod
    def name(cls) -> str:
        return "tiercel"

    def schema(self) -> StructType:
        return self._wanted().schema

    def reader(self, schema: StructType) -> DataSourceReader:
        return HistoryReader(self._readable())

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(self._readable())

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        target = self._target(overwrite=overwrite)
        batch = Options(self.options, KNOWN).text("batchId")
        return FeedOnceWriter(target, column_names(schema, target.columns), batch)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        target = self._target(overwrite=overwrite)
        if Options(self.options, KNOWN).text("batchId"):
            what = "option batchId is given to a query"
            raise UserError(what, expected="checkpointLocation: a query's batches have numbers of their own")
        return FeedWriter(target, column_names(schema, target.columns))

    def _readable(self) -> Wanted:
        wanted = self._wanted()
        logs = {s.name for s in wanted.place.manifest().topology.streams.values() if s.logged}
        if wanted.stream not in logs:
            what = f"nobody keeps a log of the stream {wanted.stream!r}"
            raise UserError(what, expected=f"one of: {', '.join(sorted(logs)) or '(there are none)'}")
        return wanted

    def _wanted(self) -> Wanted:
        options = Options(self.options, KNOWN)
        place = options.place()
        stream = options.needed("stream", "the name of a stream")
        facts = facts_of(place, stream)
        ending = options.offset("endingOffset", LATEST)
        if ending == EARLIEST:
            raise UserError("option endingOffset = 'earliest'", expected="latest or an offset")
        return Wanted(
            place,
            stream,
            facts.written_by or stream,
            Columns.of(facts),
            options.flag("identity"),
            options.offset("startingOffset", EARLIEST),
            ending,
            options.number("maxEntriesPerBatch", "a number of entries"),
        )

    def _target(self, *, overwrite: bool) -> Target:
        options = Options(self.options, KNOWN)
        place = options.place()
        stream = options.needed("stream", "the name of a stream")
        facts = facts_of(place, stream)
        if facts.writer:
            what = f"the stream {stream!r} is written by {facts.writer}"
            hint = writable_hint(place.manifest())
            raise UserError(what, expected="a stream that producers and feeds write", hint=hint)
        if overwrite:
            what = "a stream cannot be overwritten"
            raise UserError(what, expected='mode("append"), or outputMode("append") or ("update")')
        site = options.text("site") or (facts.sites[0] if facts.sites else "")
        letters = letters_of(stream) if options.choice("badRows", (DEAD_LETTER, FAIL)) == DEAD_LETTER else ""
        if letters not in place.manifest().streams:
            letters = ""  # a stream that was not declared by `live.stream` has none
        return Target(place, stream, site, Columns.of(facts), letters, options.text("queryName"))


def register(spark: SparkSession) -> None:
    """Make all formats known to a session.

    Spark refuses sources that can take filters, as `tiercel-state` does, unless it may hand filters over.
    """
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    for source in (Streams, State, Metrics):
        spark.dataSource.register(source)
