"""Streams as users hold them: declare operators on them, feed them, read them.

Responsible for: the words of the public API, and what each of them declares.
Not responsible for: running anything (live.py), what user code sees (border.py).

A stream that was mapped or filtered is a view: its steps run in front of the operator that reads it.
Only when a view gets a new key, or is itself read, it becomes an operator of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, GroupedData
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from tiercel.core.topology import Operator
from tiercel.errors import UserError
from tiercel.runtime.place import letters_of
from tiercel.spark.border import InputPlan, OperatorPlan
from tiercel.spark.ends import RowProducer, RowSubscriber
from tiercel.spark.feed import column_names
from tiercel.spark.folds import Fold, StepFunction
from tiercel.spark.graph import (
    ON_ERROR,
    TIME_MODES,
    OperatorDeclaration,
    StreamDeclaration,
    check_choice,
    check_whole,
    columns_of,
    parse_schema,
    watermark_delay_ms,
)
from tiercel.spark.kept_state import KeptState, PackedState, image_columns
from tiercel.spark.processors import declared_state
from tiercel.spark.schema import DEAD_LETTER_SCHEMA, Columns, Schema
from tiercel.spark.seam import grouped_frame
from tiercel.spark.stateless import PassOn
from tiercel.spark.steps import Step
from tiercel.spark.steps import union as union_schema
from tiercel.spark.upgrading import StatePlan, Upgrades

if TYPE_CHECKING:
    from tiercel.spark.live import Live


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
    )
)


class LiveStream:
    """One stream, or a view of one, or the union of several."""

    def __init__(self, live: Live, inputs: Sequence[tuple[str, InputPlan]], columns: Columns) -> None:
        self._live = live
        self._inputs = tuple(inputs)  # (stream, how its rows are read); several: a union
        self.columns = columns  # what whoever reads this sees

    def __repr__(self) -> str:
        return f"<stream {self.name}: {self.columns.schema.simpleString()}>"

    @property
    def name(self) -> str:
        return "+".join(name for name, _ in self._inputs)

    @property
    def schema(self) -> StructType:
        return self.columns.schema

    @property
    def _plain(self) -> bool:
        """Whether this is a declared stream itself, not a view or a union."""
        return len(self._inputs) == 1 and not self._inputs[0][1].steps

    # -- stateless ------------------------------------------------------------------------------

    def filter(self, function: Callable[[Any], bool]) -> LiveStream:
        """The rows for which the function is true."""
        return self._with(Step("filter", function, None), self.columns)

    def map(self, function: Callable[[Any], Any], schema: Schema) -> LiveStream:
        """Each row through the function: a Row, a dict or a tuple of this schema. The key stays."""
        return self._with_schema("map", function, schema)

    def flat_map(self, function: Callable[[Any], Any], schema: Schema) -> LiveStream:
        """Each row through the function: any number of rows of this schema. The key stays."""
        return self._with_schema("flat_map", function, schema)

    def _with_schema(self, kind: Any, function: Callable[[Any], Any], schema: Schema) -> LiveStream:
        parsed = parse_schema(schema, kind)
        key = tuple(name for name in self.columns.key if name in parsed.names)
        event_time = self.columns.event_time if self.columns.event_time in parsed.names else ""
        return self._with(Step(kind, function, parsed), Columns(parsed, key, event_time))

    def _with(self, step: Step, columns: Columns) -> LiveStream:
        if not callable(step.function):
            raise UserError(f"{step.kind}({step.function!r})", expected="a function of a row")
        if len(self._inputs) > 1:
            raise UserError(
                f"{step.kind} of the union {self.name!r}", hint=f"{step.kind} each stream before the union"
            )
        inputs = [
            (name, InputPlan(plan.columns, (*plan.steps, step), plan.initial)) for name, plan in self._inputs
        ]
        return LiveStream(self._live, inputs, columns)

    def union(self, *others: LiveStream) -> LiveStream:
        """Rows of all of them: columns by name, those that a stream lacks are null. Keys must agree."""
        return union_of(self._live, (self, *others))

    def key_by(
        self,
        *key: str,
        name: str = "",
        event_time: str | None = None,
        instances: Mapping[str, int] | None = None,
    ) -> LiveStream:
        """The same rows under another key: they travel to where that key lives."""
        return self._passed_on(name or f"{self.name}-by-{'-'.join(key)}", key, event_time, instances)

    def _passed_on(
        self,
        name: str,
        key: Sequence[str],
        event_time: str | None = None,
        instances: Mapping[str, int] | None = None,
    ) -> LiveStream:
        return self.transform_with_state(
            PassOn(),
            self.columns.schema,
            name=name,
            instances=instances,
            output_key=tuple(key),
            output_event_time=self.columns.event_time if event_time is None else event_time,
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
        initial_state: DataFrame | GroupedData | KeptState | None = None,
        output_key: Sequence[str] | str | None = None,
        output_event_time: str = "",
        on_error: str = "dead-letter",
        retries: int = 3,
        deterministic: bool = True,
        slots: int = 4096,
        pandas: bool = False,
        memory_bytes_max: int = 0,
        upgrade: Upgrades | None = None,
    ) -> LiveStream:
        """An operator with keyed state: an unmodified PySpark StatefulProcessor. Returns its output.

        `output_mode` is accepted as PySpark has it: every output row is passed on as it is made. With
        `memory_bytes_max` each instance keeps about so much state decoded, and reads the rest when needed.
        `initial_state` is rows for handleInitialState, or state from elsewhere as it is: `tiercel.adopt(…)`,
        `tiercel.exported(…)`. `upgrade` says what becomes of stored values where a variable has
        another schema than before: {variable: {new field: default}}, or {variable: function of the old row}.
        """
        live, graph = self._live, self._live.graph
        live.check_declaring()
        name = name or _name_of(processor)
        check_choice("time mode", time_mode, TIME_MODES)
        check_choice("output mode", output_mode.lower(), ("append", "update"))
        check_choice("on_error", on_error, ON_ERROR)
        check_whole("slots", slots, 1)
        check_whole("retries", retries, 0)
        check_whole("memory_bytes_max", memory_bytes_max, 0)
        if time_mode == "eventTime":
            for stream, plan in self._inputs:
                if not plan.columns.event_time:
                    raise UserError(
                        f"operator {name!r} works in event time, but stream {stream!r} declares none",
                        expected="event_time='column' where the stream is declared",
                    )
        for stream, _ in self._inputs:
            graph.refuse_letters(stream, name)
        state = declared_state(processor, time_mode)
        kept = initial_state if isinstance(initial_state, KeptState) else None
        rows = None if isinstance(initial_state, KeptState) else initial_state
        if isinstance(processor, Fold) and (pandas or time_mode != "none" or rows is not None):
            what = f"operator {name!r} is a fold"
            expected = "no time mode, no rows as initial state, no DataFrames"
            raise UserError(what, expected=expected, hint="write a StatefulProcessor")
        output = parse_schema(output_schema, f"output schema of {name!r}")
        if output_key is None:
            key = self.columns.key if set(self.columns.key) <= set(output.names) else ()
        else:
            key = (output_key,) if isinstance(output_key, str) else tuple(output_key)
        columns = columns_of(f"output of {name!r}", output, key, output_event_time)
        inputs = list(self._inputs)
        upgrades = dict(upgrade or {})
        initial: DataFrame | PackedState | None = None
        if kept is not None:
            initial_columns = image_columns(self.columns)
            initial = kept.packed(name, state, time_mode, initial_columns, upgrades)
        elif rows is not None:
            initial = frame = (
                _keyed_alike(name, rows, self.columns) if isinstance(rows, GroupedData) else rows
            )
            initial_columns = Columns(frame.schema, self.columns.key)
        if initial is not None:
            plan = InputPlan(initial_columns, (), initial=True, images=kept is not None)
            inputs.append((f"{name}.initial", plan))
        names = graph.instances(name, instances)
        operator = Operator(
            name,
            tuple(stream for stream, _ in inputs),
            f"{name}.out",
            names,
            slots,
            deterministic,
            f"{name}.dead",
            time_mode,
            on_error,
            retries,
            memory_bytes_max,
        )
        schema, reads = self.columns.schema, tuple(p for _, p in inputs)
        stored = StatePlan({}, upgrades)
        plan_ = OperatorPlan(processor, reads, schema, columns, time_mode, pandas, stored)
        graph.add_operator(OperatorDeclaration(operator, plan_, initial, state))
        home = names[0].rpartition("@")[2].partition("#")[0]
        if initial is not None:
            images = kept is not None
            graph.add_stream(StreamDeclaration(f"{name}.initial", initial_columns, home, images=images))
        letters = Columns(DEAD_LETTER_SCHEMA)
        graph.add_stream(StreamDeclaration(f"{name}.dead", letters, home, None, name, logged=True))
        return live.declare(StreamDeclaration(f"{name}.out", columns, home, None, name, logged=True))

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
        """An operator that is one function: `step(state, row)` gives the next state and what to emit.

        `initial` is the state of a key that has none, a tuple with the columns of `state_schema`. Emitted is
        a tuple with the columns of `output_schema`, a list of them, or None. Several times lighter than a
        processor, and without timers, time to live and state of several variables. Further options:
        `instances`, `output_key`, `output_event_time`, `on_error`, `retries`, `deterministic`, `slots`,
        `memory_bytes_max`, `upgrade`, and `initial_state` from elsewhere.
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
        """The same for a processor that takes and gives pandas DataFrames. Much slower per row."""
        return self.transform_with_state(processor, output_schema, pandas=True, **options)

    # -- both ends ------------------------------------------------------------------------------

    def feed(
        self, frame: DataFrame, *, name: str = "", site: str = "", partitions: int = 1, **options: str
    ) -> Feed:
        """Let a streaming DataFrame write to this stream, from the deployment on until it ends.

        `partitions`: each costs a Python worker per micro-batch, and only one keeps the order of a source.
        Further options: `trigger` ("1 second"), `checkpoint` (a directory), `badRows`: rows that do not fit
        become `dead_letters` ("dead-letter"), or fail the feed ("fail").
        """
        stream = self._written("feed")
        missing = [n for n in self.columns.names if n not in frame.columns]
        if missing:
            raise UserError(
                f"the DataFrame fed to {stream!r} has no column {', '.join(missing)}",
                expected=f"the columns {', '.join(self.columns.names)}; it has {', '.join(frame.columns)}",
                hint="select, rename and cast its columns before it is fed",
            )
        if not frame.isStreaming:
            raise UserError(
                f"the DataFrame fed to {stream!r} is not a streaming one",
                expected="a query that goes on",
                hint="use spark.readStream, or write it once: df.write.format('tiercel')",
            )
        delay = watermark_delay_ms(frame, self.columns.event_time) if self.columns.event_time else None
        if delay is not None:
            self._live.note_delay(stream, delay)
        check_whole("partitions", partitions, 1)
        rows = frame.select(*self.columns.names)
        column_names(
            rows.schema, self.columns
        )  # types that do not fit are told here, not by a query that ends
        rows = rows.coalesce(partitions)
        feed = Feed(rows, stream, name or f"tiercel-feed-{stream}", site, options)
        self._live.add_feed(feed)
        return feed

    def producer(self, name: str, *, site: str = "") -> RowProducer:
        """A client that writes rows to this stream: batches, retries, exactly once by sequence."""
        stream = self._written("producer")
        self._live.deploy()
        if site:
            self._live.graph.check_site(site)
        producer = RowProducer(self._live.place, stream, name=name, site=site)
        self._live.look_after(producer.client)
        return producer

    def _written(self, what: str) -> str:
        stream, _ = self._inputs[0]
        declared = self._live.graph.streams[stream]
        if not self._plain or declared.written_by or declared.letters_of:
            raise UserError(
                f"{what} of {self.name!r}, which {'a feed' if declared.letters_of else 'an operator'} writes",
                expected="a stream that was declared with live.stream(...)",
            )
        return stream

    def read(self) -> str:
        """The name of a stream with a log that holds just these rows; declares it if there is none."""
        stream, _ = self._inputs[0]
        if self._plain and self._live.graph.streams[stream].logged:
            return stream
        copy = self._passed_on(f"{self.name}-copy", self.columns.key)
        self._inputs = copy._inputs
        return copy._inputs[0][0]

    def subscribe(self, *, after: int | None = None) -> RowSubscriber:
        """A low-latency reader: from now on, or behind an offset (0: from the beginning)."""
        stream = self.read()
        self._live.deploy()
        subscriber = RowSubscriber(self._live.place, stream, after=after)
        self._live.look_after(subscriber.client)
        return subscriber

    def dataframe(self, **options: Any) -> DataFrame:
        """This stream as a streaming DataFrame; options are those of the data source `tiercel`."""
        stream = self.read()
        self._live.deploy()
        return self._live.read_stream(stream, options)

    @property
    def dead_letters(self) -> LiveStream:
        """Rows that were refused, with the reason, the key and the offset.

        Of an operator's output: rows on which its code raised. Of a declared stream: rows of its feeds that
        do not fit its schema.
        """
        streams, (stream, _) = self._live.graph.streams, self._inputs[0]
        writer = streams[stream].written_by
        declared = streams.get(f"{writer}.dead" if writer else letters_of(stream)) if self._plain else None
        if declared is None or declared.name == stream:
            raise UserError(
                f"{self.name!r} has no dead letters",
                expected="a stream that was declared with live.stream(...), or the output of an operator",
                hint="ask for those of what is mapped, filtered or united, one by one",
            )
        return LiveStream(self._live, [(declared.name, InputPlan(declared.columns))], declared.columns)


def union_of(live: Live, streams: Sequence[LiveStream]) -> LiveStream:
    """Several streams as the input of one operator."""
    first = streams[0]
    for stream in streams:
        if stream.columns.key != first.columns.key:
            raise UserError(
                f"union of {first.name!r}, keyed by {first.columns.key}, and {stream.name!r}, "
                f"keyed by {stream.columns.key}",
                expected="the same key columns",
                hint="key_by(...) gives a stream another key",
            )
    inputs = [pair for stream in streams for pair in stream._inputs]
    names = [name for name, _ in inputs]
    if len(set(names)) < len(names):
        raise UserError(f"a union with one stream twice: {', '.join(names)}", expected="different streams")
    schema = union_schema(plan for _, plan in inputs)
    return LiveStream(live, inputs, Columns(schema, first.columns.key, first.columns.event_time))


class Feed:
    """A streaming DataFrame that writes to a stream: a named query, once the deployment runs."""

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
        """Until the query ends by itself (a source that ends, `trigger="once"`)."""
        if self.query is None:
            raise UserError(f"feed {self.name!r} has not started", hint="live.deploy() starts it")
        self.query.awaitTermination(timeout_s)
        return not self.query.isActive


def _keyed_alike(operator: str, grouped: GroupedData, columns: Columns) -> DataFrame:
    """The rows of grouped initial state, which must be grouped as the stream is keyed."""
    frame, key = grouped_frame(grouped)
    if tuple(key) != columns.key:
        raise UserError(
            f"the initial state of {operator!r} is grouped by {', '.join(key)}",
            expected=f"the key of its input: {', '.join(columns.key)}",
        )
    return frame


def _name_of(processor: Any) -> str:
    """CamelCase -> camel-case."""
    name = type(processor).__name__
    return "".join(f"-{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def _name_of_step(step: Any) -> str:
    """snake_case -> snake-case; a lambda has no name."""
    name = str(getattr(step, "__name__", "")).strip("_").replace("_", "-")
    return name if name.replace("-", "").isalnum() else "fold"
