"""The adapter between the core and a user's processor: runs an unmodified PySpark `StatefulProcessor`.

Responsible for: keys, rows, outputs, state values and times in the form in which PySpark gives them to user
    code.
Not responsible for: state and timers (core/state/handle.py has PySpark's interface), when calls happen.

A payload is the MessagePack of a row's columns in internal form (rows/row_codec.py). It is encoded once
where the row enters and decoded once where it is processed; everything in between passes bytes on. Rows of
one key may come as one payload, a row batch, and the outputs of one call leave as one
(core/model/row_batch.py). A key is the MessagePack of its columns. Each payload of an operator with several
inputs carries the number of its input, and with a broadcast stream the last row of that. A value that does
not fit raises inside the call, so it is handled like an error of user code.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

import msgspec
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

from tiercel.core.model.keys import Key
from tiercel.core.model.log import Row as CoreRow
from tiercel.core.model.row_batch import RUN
from tiercel.core.state.handle import Codec
from tiercel.spark.operators.bundle_code import OperatorBundles, processor_readers, reads_bundles
from tiercel.spark.operators.folds import core_fold, fold_bundles
from tiercel.spark.operators.pandas_adapter import PandasForm, in_pandas
from tiercel.spark.operators.plans import InputPlan, OperatorPlan
from tiercel.spark.operators.transforms import plain_row, reader
from tiercel.spark.rows.arrow_rows import ArrowRows
from tiercel.spark.rows.row_codec import RowCodec, decode_payloads, decode_rows, encode_payload, encode_rows
from tiercel.spark.rows.row_types import BadRow, row_maker
from tiercel.spark.rows.values import View
from tiercel.spark.state.declared_state import state_codec
from tiercel.spark.state.stored_state_adapter import with_stored_state, with_versioned_names

_payload = itemgetter(2)
_decode = msgspec.msgpack.Decoder(tuple[Any, ...]).decode


def encode_key(*columns: Any) -> Key:
    return encode_payload(columns)


class ProcessorAdapter:
    """One processor with the columns of its inputs and output."""

    def __init__(self, plan: OperatorPlan) -> None:
        self.plan = plan
        self.processor = _prepared(plan)
        self.fold = core_fold(plan, self.user_rows)
        self.bundles = self._bundles()
        self._readers = [reader(each, each.schema if each.initial else plan.schema) for each in plan.inputs]
        self._read = self._readers[0]
        self._row = plain_row(plan.inputs[0], plan.schema)
        self._several = len(plan.inputs) > 1 or any(each.broadcast for each in plan.inputs)
        self._broadcast_columns = [each.broadcast_columns for each in plan.inputs]
        codec = plan.inputs[0].codec
        self._keys = RowCodec(codec.schema, codec.key, view=View.INPUT)
        self._key_row = row_maker(self._keys.key)
        self._output_names = plan.output.names
        self._check, self._checked, self._encoded = (
            plan.output.payload,
            plan.output.checked,
            plan.output.encoded,
        )
        self._unkeyed = not plan.output.key and not plan.output.event_time
        self._key_of = plan.output.key_of_payload if plan.output.key else None
        self._time_of = plan.output.time_of_payload if plan.output.event_time else None

    # -- input ----------------------------------------------------------------------------------

    def state_codec(self, name: str, schema: Any) -> Codec:
        return state_codec(name, schema)

    def user_key(self, key: Key) -> tuple[Any, ...]:
        return self._keys.key_values(key)

    def timer_key(self, user_key: tuple[Any, ...]) -> Row:
        return self._key_row(user_key)

    def user_rows(self, rows: list[CoreRow]) -> Iterator[Row]:
        if self._several:
            return self._tagged_rows(rows)
        if len(rows) == 1:
            payload = rows[0][2]
            if self._row is None or payload[0] == RUN:
                return self._read(iter(decode_rows(payload)))
            return iter((self._row(_decode(payload)),))  # the general way costs three iterators
        return self._read(iter(decode_payloads(map(_payload, rows))))

    def _tagged_rows(self, rows: list[CoreRow]) -> Iterator[Row]:
        for row in rows:
            n, payload, *last = row[2]
            internal: Iterable[Any] = decode_rows(payload)
            if columns := self._broadcast_columns[n]:
                more = _decode(last[0]) if last[0] is not None else (None,) * columns
                internal = [(*values, *more) for values in internal]
            yield from self._readers[n](iter(internal))

    def _bundles(self) -> OperatorBundles | None:
        if self.fold is not None:
            return fold_bundles(self.plan)
        if not reads_bundles(self.plan):
            return None
        return OperatorBundles(processor_readers(self.plan), self.plan.output, self.internal)

    # -- output ---------------------------------------------------------------------------------

    def internal(self, output: Any) -> tuple[Any, ...]:
        """The internal form of one output."""
        try:
            if getattr(output, "__fields__", None) == self._output_names:
                return self._checked(output)
            return self._checked(self._arranged(output))
        except BadRow as error:
            return self._as_spark_takes_it(output, error)

    def output_row(self, key: Key, output: Any) -> CoreRow:
        arranged = self._arranged(output)
        try:
            if self._unkeyed:
                return (key, 0, self._encoded(arranged))
            internal = self._check(tuple(arranged))
        except BadRow as error:
            internal = self._as_spark_takes_it(output, error)
        try:
            return (
                key if self._key_of is None else self._key_of(internal),
                0 if self._time_of is None else self._time_of(internal),
                encode_payload(internal),
            )
        except BadRow as error:
            raise self._misfit(error) from None

    def output_rows(self, key: Key, outputs: Iterator[Any]) -> Iterable[CoreRow]:
        """The outputs of one call; as row batches, if all of them have the same key and no event time."""
        if not self._unkeyed:
            return map(self.output_row, repeat(key), outputs)
        return [(key, 0, payload) for payload in encode_rows(list(map(self.internal, outputs)))]

    def _as_spark_takes_it(self, output: Any, error: BadRow) -> tuple[Any, ...]:
        """The internal form of a row that our checks refuse, if Spark takes it.

        Spark lets Arrow convert what a processor yields: a naive datetime is in UTC, an int may be a date.
        """
        import pyarrow

        try:
            given = pyarrow.RecordBatch.from_pylist([output.asDict(True)], schema=self._spark_schema)
        except (AttributeError, ArithmeticError, TypeError, ValueError, pyarrow.ArrowException):
            raise self._misfit(error) from None
        rows, refused = self._spark_rows.rows(given)
        if refused:
            raise self._misfit(refused[0][2])
        return rows[0]

    @functools.cached_property
    def _spark_schema(self) -> Any:
        from pyspark.sql.pandas.types import to_arrow_schema

        return to_arrow_schema(self.plan.output.schema, timezone="UTC")

    @functools.cached_property
    def _spark_rows(self) -> ArrowRows:
        return ArrowRows(self.plan.output)

    def _misfit(self, error: BadRow) -> BadRow:
        hint = error.hint or "change the yielded rows, or the output schema"
        return BadRow(error.what, expected=error.expected, hint=hint)

    def _arranged(self, output: Any) -> Any:
        """Columns by name, as in Spark: a missing one is null, an extra one is left out."""
        try:
            fields = output.__fields__
        except AttributeError:
            what = f"output {output!r:.80} ({type(output).__name__})"
            names = ", ".join(self._output_names)
            hint = f"yield Row({', '.join(f'{name}=...' for name in self._output_names)})"
            raise BadRow(what, expected=f"a Row with the columns: {names}", hint=hint) from None
        if fields == self._output_names:
            return output
        values = dict(zip(fields, output, strict=False))
        return tuple([values.get(name) for name in self._output_names])

    # -- time --------------------------------------------------------------------------------

    def timer_values(self, time_ms: int, watermark_ms: int) -> TimerValues:
        """As in Spark: no time without a time mode, no watermark in processing time, at first 0."""
        match self.plan.time_mode:
            case "processingTime":
                return TimerValues(time_ms, 0)
            case "eventTime":
                return TimerValues(time_ms, max(watermark_ms, 0))
            case _:
                return TimerValues(-1, -1)

    def expired_timer(self, expiry_ms: int) -> ExpiredTimerInfo:
        return ExpiredTimerInfo(expiry_ms)


def _prepared(plan: OperatorPlan) -> StatefulProcessor:
    """The processor, or a copy of it with a subclass that wraps its calls.

    This makes subclasses instead of wrappers, because the core checks the attributes of the object that it
    calls.
    """
    wrappers: list[Callable[[StatefulProcessor], type[StatefulProcessor]]] = []
    if plan.pandas:
        wrappers.append(partial(in_pandas, PandasForm(RowCodec(plan.schema, view=View.INPUT), plan.output)))
    if any(each.drops_rows for each in plan.inputs):
        wrappers.append(_without_empty_calls)
    if any(each.images for each in plan.inputs):
        wrappers.append(with_stored_state)
    if plan.state.renamed:
        wrappers.append(partial(with_versioned_names, plan.state.facts))
    processor = plan.processor
    for make in wrappers:
        kind = make(processor)
        processor = copy.copy(processor)
        processor.__class__ = kind
    return processor


def _without_empty_calls(processor: StatefulProcessor) -> type[StatefulProcessor]:
    """No call where transforms leave no row: Spark, with a filter in front, makes none either."""
    kind: Any = type(processor)

    class SkipEmptyCalls(kind):  # type: ignore[misc]
        """Is called with at least one row."""

        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
            for first in rows:
                return super().handleInputRows(key, chain((first,), rows), timerValues)  # type: ignore[no-any-return]
            return iter(())

    return SkipEmptyCalls


__all__ = [
    "InputPlan",
    "OperatorPlan",
    "ProcessorAdapter",
    "Row",
    "StatefulProcessor",
    "StatefulProcessorHandle",
    "encode_key",
    "row_maker",
]
