"""An operator with keyed state, from the arguments of `transform_with_state` to declarations in the graph.

Responsible for: checking the options; the operator's output, initial state and dead letters as streams.
Not responsible for: the call that users write (streams.py), the topology (graph.py), running it (cluster/).

    OperatorOptions --validate--> declare: processor, inputs, output, initial state --> Graph
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.resource import ResourceProfile
from pyspark.sql import DataFrame, GroupedData
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from tiercel.core.model.topology import ON_ERROR, OUTPUTS_AT, Operator, site_of
from tiercel.errors import UserError
from tiercel.spark.api.graph import (
    Graph,
    OperatorDeclaration,
    StreamDeclaration,
    check_choice,
    check_whole,
    codec_of,
    parse_schema,
)
from tiercel.spark.operators.folds import Fold
from tiercel.spark.operators.plans import InputPlan, OperatorPlan
from tiercel.spark.pyspark_internals import grouped_frame
from tiercel.spark.rows.row_codec import DEAD_LETTER_SCHEMA, RowCodec, Schema
from tiercel.spark.state.declared_state import TIME_MODES, DeclaredState, declared_state
from tiercel.spark.state.external_state import ExternalState, PackedState, stored_state_codec
from tiercel.spark.state.schema_evolution import StatePlan, Upgrades

Inputs = Sequence[tuple[str, InputPlan]]  # (stream, how its rows are read); several: a union
OUTPUT_MODES = ("append", "update")


@dataclass(frozen=True)
class OperatorOptions:
    """The options of `transform_with_state`, as users give them."""

    name: str
    output_mode: str
    time_mode: str
    instances: Mapping[str, int] | None
    initial_state: DataFrame | GroupedData | ExternalState | None
    output_key: Sequence[str] | str | None
    output_event_time: str
    on_error: str
    retries: int
    deterministic: bool
    slots: int
    pandas: bool
    memory_bytes_max: int
    upgrade: Upgrades
    late_rows: bool = False
    outputs_at: str = "home"
    home: str = ""  # empty: the site of the first instance
    resources: ResourceProfile | None = None

    def validate(self, processor: StatefulProcessor, inputs: Inputs, graph: Graph) -> None:
        check_choice("time mode", self.time_mode, TIME_MODES)
        check_choice("output mode", self.output_mode.lower(), OUTPUT_MODES)
        check_choice("on_error", self.on_error, ON_ERROR)
        check_choice("outputs_at", self.outputs_at, OUTPUTS_AT)
        if self.home:
            graph.check_site(self.home)
        check_whole("slots", self.slots, 1)
        check_whole("retries", self.retries, 0)
        check_whole("memory_bytes_max", self.memory_bytes_max, 0)
        if self.resources is not None and not isinstance(self.resources, ResourceProfile):
            raise UserError(
                f"resources of operator {self.name!r}: {self.resources!r}",
                expected="a pyspark.resource.ResourceProfile",
                hint="ResourceProfileBuilder().require(TaskResourceRequests().cpus(0.5)).build",
            )
        for stream, plan in inputs if self.time_mode == "eventTime" else ():
            if not plan.codec.event_time:
                raise UserError(
                    f"operator {self.name!r} works in event time, but stream {stream!r} declares none",
                    expected="event_time='column' where the stream is declared",
                )
        for stream, _ in inputs:
            graph.refuse_dead_letters(stream, self.name)

    def validate_fold(self) -> None:
        """A fold has no timers, no handleInitialState and no DataFrames."""
        has_rows = self.initial_state is not None and not isinstance(self.initial_state, ExternalState)
        if self.pandas or self.time_mode != "none" or has_rows:
            what = f"operator {self.name!r} is a fold"
            expected = "no time mode, no rows as initial state, no DataFrames"
            raise UserError(what, expected=expected, hint="write a StatefulProcessor")


@dataclass(frozen=True)
class InitialState:
    """The initial state of one operator: its rows, their columns, and whether they are stored state."""

    rows: DataFrame | PackedState
    codec: RowCodec
    images: bool


def declare_operator(
    graph: Graph,
    inputs: Inputs,
    codec: RowCodec,
    processor: StatefulProcessor,
    output_schema: Schema,
    options: OperatorOptions,
) -> StreamDeclaration:
    """Add an operator with its streams to the graph; returns its output, which is still to be added."""
    options.validate(processor, inputs, graph)
    name = options.name
    state = declared_state(processor, options.time_mode)
    if isinstance(processor, Fold):
        options.validate_fold()
    output = _output_codec(options, output_schema, codec)
    initial = _initial_state(options, state, codec)
    names = graph.instances(name, options.instances)
    home = options.home or site_of(names[0])
    if initial is not None:
        plan = InputPlan(initial.codec, (), initial=True, images=initial.images)
        inputs = [*inputs, (f"{name}.initial", plan)]
    operator = Operator(
        name,
        tuple(stream for stream, _ in inputs),
        f"{name}.out",
        names,
        options.slots,
        options.deterministic,
        f"{name}.dead",
        options.time_mode,
        options.on_error,
        options.retries,
        options.memory_bytes_max,
        options.late_rows,
        _broadcast_stream(name, inputs),
    )
    plan_ = OperatorPlan(
        processor,
        tuple(plan for _, plan in inputs),
        codec.schema,
        output,
        options.time_mode,
        options.pandas,
        StatePlan({}, options.upgrade),
    )
    rows = None if initial is None else initial.rows
    graph.add_operator(OperatorDeclaration(operator, plan_, rows, state, options.resources))
    if initial is not None:
        graph.add_stream(StreamDeclaration(f"{name}.initial", initial.codec, home, images=initial.images))
    dead_letters = RowCodec(DEAD_LETTER_SCHEMA)
    graph.add_stream(StreamDeclaration(f"{name}.dead", dead_letters, home, None, name, logged=True))
    return StreamDeclaration(
        f"{name}.out", output, home, None, name, logged=True, outputs_at=options.outputs_at
    )


def _broadcast_stream(operator: str, inputs: Inputs) -> str:
    """The one broadcast stream of an operator; empty: none."""
    found = sorted({plan.broadcast for _, plan in inputs} - {""})
    if len(found) > 1:
        raise UserError(
            f"operator {operator!r} has the broadcast streams {', '.join(found)}",
            expected="one",
            hint="write their columns to one stream",
        )
    return found[0] if found else ""


def _output_codec(options: OperatorOptions, schema: Schema, codec: RowCodec) -> RowCodec:
    """The columns of the output. Unless the user names a key, rows keep the input's key columns."""
    parsed = parse_schema(schema, f"output schema of {options.name!r}")
    if options.output_key is None:
        key = codec.key if set(codec.key) <= set(parsed.names) else ()
    else:
        key = (options.output_key,) if isinstance(options.output_key, str) else tuple(options.output_key)
    return codec_of(f"output of {options.name!r}", parsed, key, options.output_event_time)


def _initial_state(options: OperatorOptions, declared: DeclaredState, codec: RowCodec) -> InitialState | None:
    given = options.initial_state
    if given is None:
        return None
    if isinstance(given, ExternalState):
        initial = stored_state_codec(codec)
        packed = given.packed(options.name, declared, options.time_mode, initial, options.upgrade)
        return InitialState(packed, initial, images=True)
    frame = _frame_keyed_alike(options.name, given, codec) if isinstance(given, GroupedData) else given
    return InitialState(frame, RowCodec(frame.schema, codec.key), images=False)


def _frame_keyed_alike(operator: str, grouped: GroupedData, codec: RowCodec) -> DataFrame:
    """The rows of grouped initial state, which must be grouped by the key of the stream."""
    frame, key = grouped_frame(grouped)
    if tuple(key) != codec.key:
        raise UserError(
            f"the initial state of {operator!r} is grouped by {', '.join(key)}",
            expected=f"the key of its input: {', '.join(codec.key)}",
        )
    return frame
