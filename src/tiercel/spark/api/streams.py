"""Streams as users hold them: declare operators on them, feed them, read them.

Responsible for: the methods of a stream in the public API, and what each of them declares.
Not responsible for: operators with state (operator_declaration.py), running anything (deployment.py), what
    user code sees (operators/processor_adapter.py).

A stream that was mapped or filtered is a view: its transforms run in front of the operator that reads it. A
view becomes an operator only when it gets a new key, or when a DataFrame reads it. A subscriber runs them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pyspark.resource import ResourceProfile
from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql import functions as f
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from tiercel.errors import UserError
from tiercel.runtime.client.event_loop_thread import Client
from tiercel.runtime.deployment import DeploymentDir, dead_letter_stream
from tiercel.spark.api.clients import BroadcastProducer, RowProducer, RowSubscriber
from tiercel.spark.api.feeds import Feed
from tiercel.spark.api.graph import (
    Graph,
    StreamDeclaration,
    check_whole,
    parse_schema,
    watermark_delay_ms,
)
from tiercel.spark.api.operator_declaration import Inputs, OperatorOptions, declare_operator
from tiercel.spark.api.operator_methods import OperatorMethods
from tiercel.spark.operators.folds import Fold, StepFunction
from tiercel.spark.operators.plans import InputPlan, Transform
from tiercel.spark.operators.transforms import Identity, union_schema, with_broadcast
from tiercel.spark.rows.row_codec import RowCodec, Schema
from tiercel.spark.sources.stream_writer import column_names
from tiercel.spark.sources.table_refresh import TableRefresh, change_schema
from tiercel.spark.state.external_state import ExternalState
from tiercel.spark.state.schema_evolution import Upgrades


class Deployment(Protocol):
    """The deployment of a stream, as far as a stream uses it. `Live` is one."""

    graph: Graph
    deployment: DeploymentDir

    def check_declaring(self) -> None: ...
    def declare(self, declared: StreamDeclaration) -> LiveStream: ...
    def note_delay(self, stream: str, delay_ms: int) -> None: ...
    def add_feed(self, feed: Feed) -> None: ...
    def add_refresh(self, refresh: TableRefresh, schema: StructType, key: Sequence[str]) -> LiveStream: ...
    def deploy(self) -> object: ...
    def close_at_stop(self, client: Client) -> None: ...
    def read_stream(self, stream: str, options: Mapping[str, Any]) -> DataFrame: ...


_FOLD_OPTIONS = frozenset(
    (
        "instances",
        "output_key",
        "output_event_time",
        "on_error",
        "memory_bytes_max",
        "retries",
        "deterministic",
        "slots",
        "upgrade",
        "initial_state",
        "outputs_at",
        "home",
        "resources",
    )
)


class LiveStream(OperatorMethods):
    """One stream, or a view of one, or the union of several."""

    def __init__(self, live: Deployment, inputs: Inputs, codec: RowCodec) -> None:
        self._live = live
        self._inputs = tuple(inputs)
        self.codec = codec  # the columns that readers of this stream see

    def __repr__(self) -> str:
        return f"<stream {self.name}: {self.codec.schema.simpleString()}>"

    @property
    def name(self) -> str:
        return "+".join(name for name, _ in self._inputs)

    @property
    def schema(self) -> StructType:
        return self.codec.schema

    @property
    def _is_declared(self) -> bool:
        """Whether this is a declared stream itself, not a view or a union."""
        plan = self._inputs[0][1]
        return len(self._inputs) == 1 and not plan.transforms and not plan.broadcast

    # -- stateless ------------------------------------------------------------------------------

    def filter(self, function: Callable[[Any], bool]) -> LiveStream:
        """The rows for which the function returns true."""
        return self._with_transform(Transform("filter", function, None), self.codec)

    def map(self, function: Callable[[Any], Any], schema: Schema) -> LiveStream:
        """One row for each row.

        The function returns a Row, a dict or a tuple of this schema. The key stays.
        """
        return self._with_schema("map", function, schema)

    def flat_map(self, function: Callable[[Any], Any], schema: Schema) -> LiveStream:
        """Any number of rows for each row. The function returns rows of this schema. The key stays."""
        return self._with_schema("flat_map", function, schema)

    def _with_schema(self, kind: Any, function: Callable[[Any], Any], schema: Schema) -> LiveStream:
        parsed = parse_schema(schema, kind)
        key = tuple(name for name in self.codec.key if name in parsed.names)
        event_time = self.codec.event_time if self.codec.event_time in parsed.names else ""
        return self._with_transform(Transform(kind, function, parsed), RowCodec(parsed, key, event_time))

    def _with_transform(self, transform: Transform, codec: RowCodec) -> LiveStream:
        if not callable(transform.function):
            raise UserError(f"{transform.kind}({transform.function!r})", expected="a function of a row")
        if len(self._inputs) > 1:
            raise UserError(
                f"{transform.kind} of the union {self.name!r}",
                hint=f"{transform.kind} each stream before the union",
            )
        inputs = [
            (name, dataclasses.replace(plan, transforms=(*plan.transforms, transform)))
            for name, plan in self._inputs
        ]
        return LiveStream(self._live, inputs, codec)

    def broadcast(self, control: LiveStream, *, suffix: str = "_broadcast") -> LiveStream:
        """Each row with the columns of the last row of a small stream; null before its first one.

        A row of `control` counts from its place in the log of its site on, for every key and instance: write
        it with `control.broadcast_producer(...)`. Every row carries it through the log, so it must be small.
        A column whose name is taken gets the suffix.
        """
        stream, (name, plan) = control._input_stream("broadcast"), self._inputs[0]
        if control.codec.sequence:
            raise UserError(
                f"broadcast of {stream!r}, whose rows devices number",
                expected="a stream without sequence=: every row of a broadcast stream counts at once",
            )
        if not self._is_declared or name == stream:
            raise UserError(
                f"broadcast of {stream!r} to {self.name!r}",
                expected="another stream, as it was declared",
                hint="map, filter and union the rows behind it: positions.broadcast(models).filter(...)",
            )
        codec = with_broadcast(self.codec, control.codec, suffix)
        columns = len(control.codec.names)
        plan = dataclasses.replace(plan, codec=codec, broadcast=stream, broadcast_columns=columns)
        return LiveStream(self._live, [(name, plan)], codec)

    def broadcast_producer(self, name: str) -> BroadcastProducer:
        """A client that writes each row of this stream to every site. Starts the deployment."""
        stream = self._input_stream("broadcast_producer")
        self._live.deploy()
        producers = [
            RowProducer(self._live.deployment, stream, name=f"{name}-{site}", site=site)
            for site in self._live.graph.sites
        ]
        for producer in producers:
            self._live.close_at_stop(producer.client)
        return BroadcastProducer(producers)

    def union(self, *others: LiveStream) -> LiveStream:
        """The rows of all streams: columns by name, a column that a stream lacks is null. Keys must agree."""
        return union_of(self._live, (self, *others))

    def key_by(
        self,
        *key: str,
        name: str = "",
        event_time: str | None = None,
        instances: Mapping[str, int] | None = None,
    ) -> LiveStream:
        """The same rows under another key. They are routed to the owner of that key."""
        return self._identity(name or f"{self.name}-by-{'-'.join(key)}", key, event_time, instances)

    def _identity(
        self,
        name: str,
        key: Sequence[str],
        event_time: str | None = None,
        instances: Mapping[str, int] | None = None,
    ) -> LiveStream:
        return self.transform_with_state(
            Identity(),
            self.codec.schema,
            name=name,
            instances=instances,
            output_key=tuple(key),
            output_event_time=self.codec.event_time if event_time is None else event_time,
        )

    # -- stateful -------------------------------------------------------------------------------

    def transform_with_state(
        self,
        processor: StatefulProcessor,
        output_schema: Schema,
        *,
        name: str = "",
        output_mode: str = "update",
        time_mode: str = "none",
        instances: Mapping[str, int] | None = None,
        initial_state: DataFrame | GroupedData | ExternalState | None = None,
        output_key: Sequence[str] | str | None = None,
        output_event_time: str = "",
        on_error: str = "dead-letter",
        retries: int = 3,
        deterministic: bool = True,
        slots: int = 4096,
        pandas: bool = False,
        memory_bytes_max: int = 0,
        upgrade: Upgrades | None = None,
        late_rows: bool = False,
        outputs_at: str = "home",
        home: str = "",
        resources: ResourceProfile | None = None,
    ) -> LiveStream:
        """An operator with keyed state: an unmodified PySpark StatefulProcessor. Returns its output.

        `output_mode` is accepted as in PySpark; every output row is emitted when it is made. With
        `memory_bytes_max` each instance keeps about that much state in memory, and evicts the rest to disk.
        `initial_state` is rows for handleInitialState, or stored state: `tiercel.read_spark_state(…)` or
        `tiercel.read_exported_state(…)`. `upgrade` converts stored values of a variable whose schema has
        changed: {variable: {new field: default}}, or {variable: function of the old row}. With `late_rows`
        the processor is given rows behind the watermark too; otherwise they are dropped, as in Spark.

        `outputs_at` says where the log of the output is: at its `home`, one site (by default that of the
        first instance); at each `site` that makes rows, where `subscribe(site=...)` reads them without a
        detour; or `both`.
        `resources` is the ResourceProfile of the tasks of its instances: fractions of a CPU, memory, GPUs.
        Spark takes one on a cluster; a local master ignores it.
        """
        self._live.check_declaring()
        options = OperatorOptions(
            name or _name_of(processor),
            output_mode,
            time_mode,
            instances,
            initial_state,
            output_key,
            output_event_time,
            on_error,
            retries,
            deterministic,
            slots,
            pandas,
            memory_bytes_max,
            dict(upgrade or {}),
            late_rows,
            outputs_at,
            home,
            resources,
        )
        output = declare_operator(
            self._live.graph, self._inputs, self.codec, processor, output_schema, options
        )
        return self._live.declare(output)

    def fold(
        self,
        step: StepFunction,
        initial: Any,
        output_schema: Schema,
        *,
        state_schema: Schema,
        name: str = "",
        **options: Any,
    ) -> LiveStream:
        """An operator that is one function: `step(state, row)` returns the next state and what to emit.

        `initial` is the state of a new key, a tuple with the columns of `state_schema`. A step emits a tuple
        with the columns of `output_schema`, a list of tuples, or None. A fold is several times faster than a
        processor. It has no timers, no time to live and only one state variable. Further options:
        `instances`, `output_key`, `output_event_time`, `on_error`, `retries`, `deterministic`, `slots`,
        `memory_bytes_max`, `upgrade`, `outputs_at`, `home`, and `initial_state` as stored state.
        """
        unknown = sorted(set(options) - _FOLD_OPTIONS)
        if unknown:
            raise UserError(f"fold: unknown option {unknown[0]!r}", expected=", ".join(sorted(_FOLD_OPTIONS)))
        output = parse_schema(output_schema, "output schema")
        fold = Fold(step, initial, parse_schema(state_schema, "state schema"), output)
        return self.transform_with_state(fold, output, name=name or _name_of_step(step), **options)

    def transform_with_state_in_pandas(
        self, processor: StatefulProcessor, output_schema: Schema, **options: Any
    ) -> LiveStream:
        """The same for a processor that takes and yields pandas DataFrames. Much slower per row."""
        return self.transform_with_state(processor, output_schema, pandas=True, **options)

    # -- writing and reading ------------------------------------------------------------------------------

    def feed(
        self,
        frame: DataFrame,
        *,
        name: str = "",
        site: str = "",
        partitions: int | None = None,
        **options: str,
    ) -> Feed:
        """Let a streaming DataFrame write into this stream, from the start of the deployment to its end.

        Its tasks send their rows from their executors to the router. It has the partitions of the DataFrame,
        or at most `partitions`; rows of a batch enter in the order of partitions. Rows of one key that are in
        several partitions of the source keep the order of the source with `partitions=1` only. Further
        options: `trigger` ("1 second"), `checkpoint` (a directory), `badRows`: rows that do not fit become
        `dead_letters` ("dead-letter"), or fail the feed ("fail").
        """
        stream = self._input_stream("feed")
        if not frame.isStreaming:
            raise UserError(
                f"the DataFrame fed to {stream!r} is not a streaming one",
                expected="a query that goes on",
                hint="use spark.readStream, or from_dataframe(df) for one of spark.read",
            )
        rows = self._fitting(frame, stream)
        if partitions is not None:
            check_whole("partitions", partitions, 1)
            rows = rows.coalesce(partitions)
        feed = Feed(rows, stream, name or f"tiercel-feed-{stream}", site, options)
        self._live.add_feed(feed)
        return feed

    def from_dataframe(
        self,
        history: DataFrame,
        *,
        then: DataFrame | None = None,
        boundary: Column | None = None,
        name: str = "",
        site: str = "",
        **options: str,
    ) -> Feed:
        """Write a batch DataFrame into this stream once, and then feed a streaming DataFrame.

        All rows of the history enter before the first row of `then`. `boundary` is a condition that says
        which rows are history, such as `col("time") < "2026-11-01"`: the others come from `then`, and its
        rows that are history are left out. So both may overlap, and no row is missing or doubled. A start on
        the same storage goes on where the last one stopped. Options and `name` as in `feed`.
        """
        stream = self._input_stream("from_dataframe")
        for frame, streams in ((history, False), (then, True)):
            if frame is not None and frame.isStreaming is not streams:
                raise UserError(
                    f"from_dataframe({'then=' if streams else ''}…): the DataFrame for {stream!r} is "
                    f"{'not ' if streams else ''}a streaming one",
                    expected="history of spark.read, and then= of spark.readStream",
                )
        if boundary is not None:
            history = history.where(boundary)
            then = None if then is None else then.where(~f.coalesce(boundary, f.lit(False)))
        past = self._fitting(history, stream)
        rows = None if then is None else self._fitting(then, stream)
        feed = Feed(rows, stream, name or f"tiercel-feed-{stream}", site, options, past)
        self._live.add_feed(feed)
        return feed

    def foreach_batch(self, name: str) -> Callable[[DataFrame, int], None]:
        """A function for `foreachBatch` that writes each batch into this stream, once.

        `name` is permanent, and no other query has it: with the number of a batch it tells repeats apart.
        """
        stream = self._input_stream("foreach_batch")
        self._live.deploy()
        storage = str(self._live.deployment.directory)
        names = self.codec.names

        def write(frame: DataFrame, batch: int) -> None:
            writer = frame.select(*names).write.format("tiercel").mode("append")
            writer.options(storage=storage, stream=stream, feed=name, batch=str(batch)).save()

        return write

    def _fitting(self, frame: DataFrame, stream: str) -> DataFrame:
        """The columns of the stream; UserError if they are not there or do not fit."""
        missing = [n for n in self.codec.names if n not in frame.columns]
        if missing:
            raise UserError(
                f"the DataFrame fed to {stream!r} has no column {', '.join(missing)}",
                expected=f"the columns {', '.join(self.codec.names)}; it has {', '.join(frame.columns)}",
                hint="select, rename and cast its columns before it is fed",
            )
        delay = watermark_delay_ms(frame, self.codec.event_time) if self.codec.event_time else None
        if delay is not None:
            self._live.note_delay(stream, delay)
        rows = frame.select(*self.codec.names)
        column_names(rows.schema, self.codec)  # refuses types that do not fit before anything starts
        return rows

    def _table_changes(
        self, operator: str, table: DataFrame, read: Callable[[], DataFrame], every_s: float
    ) -> LiveStream:
        refresh = TableRefresh(operator, f"{operator}-changes", table, read, every_s)
        return self._live.add_refresh(refresh, change_schema(table.schema, self.codec.key), self.codec.key)

    def producer(self, name: str, *, site: str = "") -> RowProducer:
        """A client that writes rows to this stream: batches, retries, exactly once by sequence number.

        The first producer, subscriber or DataFrame of a deployment starts it: routers and instances as Spark
        tasks, which takes seconds.
        """
        stream = self._input_stream("producer")
        self._live.deploy()
        if site:
            self._live.graph.check_site(site)
        producer = RowProducer(self._live.deployment, stream, name=name, site=site)
        self._live.close_at_stop(producer.client)
        return producer

    def _input_stream(self, what: str) -> str:
        stream, _ = self._inputs[0]
        declared = self._live.graph.streams[stream]
        if not self._is_declared or declared.written_by or declared.dead_letters_of:
            writer = "a feed" if declared.dead_letters_of else "an operator"
            raise UserError(
                f"{what} of {self.name!r}, which {writer} writes",
                expected="a stream that was declared with live.stream(...)",
            )
        return stream

    def read(self) -> str:
        """The name of a stream whose log holds these rows; declares one if there is none."""
        stream, _ = self._inputs[0]
        if self._is_declared and self._live.graph.streams[stream].logged:
            return stream
        copy = self._identity(self._live.graph.new_name(f"{self.name}-copy"), self.codec.key)
        self._inputs = copy._inputs
        return copy._inputs[0][0]

    def _read_as_view(self) -> tuple[str, InputPlan | None]:
        """The stream that a subscriber reads, and what it does with each row: filter and map need no process.

        All views of a stream that has no log share one copy, so they can be read one after the other.
        """
        stream, plan = self._inputs[0]
        kinds = {transform.kind for transform in plan.transforms}
        if len(self._inputs) > 1 or plan.broadcast or "flat_map" in kinds:
            return self.read(), None  # rows of a flat_map need an identity each
        declared = self._live.graph.streams[stream]
        if not declared.logged:
            copy = f"{stream}-copy"
            if f"{copy}.out" not in self._live.graph.streams:
                whole = LiveStream(self._live, [(stream, InputPlan(declared.codec))], declared.codec)
                whole._identity(copy, declared.codec.key)
            stream = f"{copy}.out"
        return stream, plan if plan.transforms else None

    def subscribe(
        self, *, after: int | None = None, at: str = "", site: str = "", subscription: str = ""
    ) -> RowSubscriber:
        """A low-latency reader, from now on or after an offset (0: from the beginning).

        `at` is the site where the reader is, if an emulated link lies between it and the stream's home. With
        a `site` it reads the rows that this site makes, there (`outputs_at` of the operator).

        With the name of a `subscription` the stream keeps the rows that this reader has not processed, also
        while no program reads, and slows producers down when these are too many. A reader of the same name
        continues there.

        The functions of `filter`, `map` and `split` run in the reader. Starts the deployment.
        """
        stream, view = self._read_as_view()
        self._live.deploy()
        subscriber = RowSubscriber(
            self._live.deployment,
            stream,
            after=after,
            at=at or site,
            site=site,
            subscription=subscription,
            view=view,
        )
        self._live.close_at_stop(subscriber.client)
        return subscriber

    def dataframe(self, **options: Any) -> DataFrame:
        """This stream as a streaming DataFrame, with the options of the format `tiercel`.

        Starts the deployment.
        """
        stream = self.read()
        self._live.deploy()
        return self._live.read_stream(stream, options)

    @property
    def dead_letters(self) -> LiveStream:
        """The refused rows, with the reason, the key and the offset.

        For an operator's output, rows on which its code raised. For a declared stream, rows of its feeds that
        do not fit its schema.
        """
        streams, (stream, _) = self._live.graph.streams, self._inputs[0]
        writer = streams[stream].written_by
        declared = (
            streams.get(f"{writer}.dead" if writer else dead_letter_stream(stream))
            if self._is_declared
            else None
        )
        if declared is None or declared.name == stream:
            raise UserError(
                f"{self.name!r} has no dead letters",
                expected="a stream that was declared with live.stream(...), or the output of an operator",
                hint="ask for the dead letters of each stream that is mapped, filtered or united",
            )
        return LiveStream(self._live, [(declared.name, InputPlan(declared.codec))], declared.codec)


def union_of(live: Deployment, streams: Sequence[LiveStream]) -> LiveStream:
    """Several streams as the input of one operator."""
    first = streams[0]
    for stream in streams:
        if stream.codec.key != first.codec.key:
            raise UserError(
                f"union of {first.name!r}, keyed by {first.codec.key}, and {stream.name!r}, "
                f"keyed by {stream.codec.key}",
                expected="the same key columns",
                hint="key_by(...) gives a stream another key",
            )
    inputs = [pair for stream in streams for pair in stream._inputs]
    names = [name for name, _ in inputs]
    if len(set(names)) < len(names):
        raise UserError(f"a union with one stream twice: {', '.join(names)}", expected="different streams")
    schema = union_schema(plan for _, plan in inputs)
    return LiveStream(live, inputs, RowCodec(schema, first.codec.key, first.codec.event_time))


def _name_of(processor: Any) -> str:
    """CamelCase -> camel-case."""
    name = type(processor).__name__
    return "".join(f"-{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def _name_of_step(step: Any) -> str:
    """snake_case -> snake-case; a lambda has no name."""
    name = str(getattr(step, "__name__", "")).strip("_").replace("_", "-")
    return name if name.replace("-", "").isalnum() else "fold"
