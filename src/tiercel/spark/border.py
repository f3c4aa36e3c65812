"""Between the core's rows and PySpark's: an unmodified `StatefulProcessor` behind the core's `Code`.

Responsible for: keys, rows, outputs, state values and times in the form PySpark gives them to user code.
Not responsible for: state and timers (core/keyed.py has PySpark's interface), when calls happen.

A payload is the MessagePack of a row's columns in internal form (schema.py), made once where the row
arises and read once where it is processed: whoever is in between passes bytes on. Rows of one key may come
as one payload, and what a call emits leaves as one (core/runs.py). A key is the MessagePack of its columns.
Of an operator with several inputs each payload comes with the number of its input. What does not fit raises
inside the call, so it goes the way of an error of user code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
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
from pyspark.sql.types import StructType

from tiercel.core.keyed import Codec
from tiercel.core.records import Key
from tiercel.core.records import Row as CoreRow
from tiercel.core.runs import RUN
from tiercel.spark.conversion import View
from tiercel.spark.folds import core_fold
from tiercel.spark.pandas_rows import PandasForm, in_pandas
from tiercel.spark.processors import state_codec
from tiercel.spark.rows import BadRow, row_maker
from tiercel.spark.schema import Columns, decode_payloads, decode_rows, encode_payload, encode_rows
from tiercel.spark.stateful import kept_under_other_names, with_stored_state
from tiercel.spark.steps import InputPlan, Step, plain_row, reader
from tiercel.spark.upgrading import StatePlan

_payload = itemgetter(2)
_decode = msgspec.msgpack.Decoder(tuple[Any, ...]).decode


@dataclass(frozen=True)
class OperatorPlan:
    """What an instance must know about its operator besides the core's facts."""

    processor: StatefulProcessor
    inputs: tuple[InputPlan, ...]  # in the order of the core's Operator.inputs
    schema: StructType  # what the processor sees: of the input after its steps, or of several the union
    output: Columns  # no key: rows keep the operator's key
    time_mode: str = "none"
    pandas: bool = False  # the processor takes and gives DataFrames
    state: StatePlan = field(default_factory=StatePlan)  # under which names its values are stored


def encode_key(*columns: Any) -> Key:
    return encode_payload(columns)


class Border:
    """One processor with the columns of its inputs and output."""

    def __init__(self, plan: OperatorPlan) -> None:
        self.plan = plan
        self.processor = _prepared(plan)
        self.fold = core_fold(plan, self.user_rows)
        self._readers = [reader(each, each.schema if each.initial else plan.schema) for each in plan.inputs]
        self._read = self._readers[0]
        self._row = plain_row(plan.inputs[0], plan.schema)
        self._several = len(plan.inputs) > 1
        keys = plan.inputs[0].columns
        self._keys = Columns(keys.schema, keys.key, view=View.INPUT)
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

    # -- in ----------------------------------------------------------------------------------

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
            return iter((self._row(_decode(payload)),))  # three iterators cost more than what they do
        return self._read(iter(decode_payloads(map(_payload, rows))))

    def _tagged_rows(self, rows: list[CoreRow]) -> Iterator[Row]:
        for row in rows:
            n, payload = row[2]
            yield from self._readers[n](iter(decode_rows(payload)))

    # -- out ---------------------------------------------------------------------------------

    def output_row(self, key: Key, output: Any) -> CoreRow:
        output = self._arranged(output)
        try:
            if self._unkeyed:
                return (key, 0, self._encoded(output))
            internal = self._check(tuple(output))
            return (
                key if self._key_of is None else self._key_of(internal),
                0 if self._time_of is None else self._time_of(internal),
                encode_payload(internal),
            )
        except BadRow as error:
            raise self._misfit(error) from None

    def output_rows(self, key: Key, outputs: Iterator[Any]) -> Iterable[CoreRow]:
        """What one call gave: in runs, where all of it has the same key and no time of its own."""
        if not self._unkeyed:
            return map(self.output_row, repeat(key), outputs)
        arranged, checked = self._arranged, self._checked
        try:
            made = [checked(arranged(output)) for output in outputs]
        except BadRow as error:
            raise self._misfit(error) from None
        return [(key, 0, payload) for payload in encode_rows(made)]

    def _misfit(self, error: BadRow) -> BadRow:
        hint = error.hint or "change what is yielded, or the output schema"
        return BadRow(error.what, expected=error.expected, hint=hint)

    def _arranged(self, output: Any) -> Any:
        """Columns by name, as Spark takes them: a missing one is null, one too many is left out."""
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
        """As Spark: neither without a time mode, no watermark in processing time, 0 while there is none."""
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
    """The processor, or a copy of it whose class does what must be done around its calls.

    A class and not a wrapper: the core looks after the attributes of the object that it calls.
    """
    around: list[Callable[[StatefulProcessor], type[StatefulProcessor]]] = []
    if plan.pandas:
        around.append(partial(in_pandas, PandasForm(Columns(plan.schema, view=View.INPUT), plan.output)))
    if any(each.drops_rows for each in plan.inputs):
        around.append(_spared_empty_calls)
    if any(each.images for each in plan.inputs):
        around.append(with_stored_state)
    if plan.state.renamed:
        around.append(partial(kept_under_other_names, plan.state.facts))
    processor = plan.processor
    for make in around:
        kind = make(processor)
        processor = copy.copy(processor)
        processor.__class__ = kind
    return processor


def _spared_empty_calls(processor: StatefulProcessor) -> type[StatefulProcessor]:
    """No call where a step has left no row: Spark, with a filter in front, makes none either."""
    kind: Any = type(processor)

    class Spared(kind):  # type: ignore[misc]
        """Is called with at least one row."""

        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
            for first in rows:
                return super().handleInputRows(key, chain((first,), rows), timerValues)  # type: ignore[no-any-return]
            return iter(())

    return Spared


__all__ = [
    "Border",
    "InputPlan",
    "OperatorPlan",
    "Row",
    "StatefulProcessor",
    "StatefulProcessorHandle",
    "Step",
    "encode_key",
    "row_maker",
]
