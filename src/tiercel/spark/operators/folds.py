"""Folds: operators whose state is one value, which a step function updates with each row.

Responsible for: a step function as a `StatefulProcessor`, and the same as one generated function for the
    core.
Not responsible for: when it is called, and what happens to a step that raises (core/instance/user_code.py).

Each call of a processor costs a handle, iterators, an undo log and rows with names. A fold decodes the row,
calls the step, checks and encodes in one function, `advance`, which `_compiled_step` generates for its
schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import msgspec
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from tiercel.core.instance.user_code import Fold as CoreFold
from tiercel.core.model.log import INITIAL
from tiercel.core.model.log import Row as CoreRow
from tiercel.core.model.row_batch import RUN
from tiercel.errors import UserError
from tiercel.spark.operators.bundle_code import OperatorBundles, decoder, reads_bundles
from tiercel.spark.operators.plans import InputPlan, OperatorPlan
from tiercel.spark.rows.codegen import compile_source
from tiercel.spark.rows.row_codec import (
    RowCodec,
    Schema,
    decode_payload,
    encode_payload,
    encode_rows,
)
from tiercel.spark.rows.row_types import BadRow, fast_row_type, in_order, row_maker
from tiercel.spark.rows.values import View
from tiercel.spark.state.declared_state import variable_codec
from tiercel.spark.state.stored_state_adapter import decode_image

VARIABLE = "state"  # the name of a fold's one state variable
StepFunction = Callable[[Any, Any], tuple[Any, Any]]


class Fold(StatefulProcessor):
    """`step(state, row)` returns the next state and what to emit: a row, a list of rows, or None.

    The state is a tuple with the columns of `state_schema`; a new key begins with `initial`. A step that
    returns None as the state deletes the key. An output is a tuple with the columns of `output_schema`, a
    dict or a Row. A fold is also a `StatefulProcessor`, so it runs in Spark itself; Tiercel runs a
    generated function instead.
    """

    def __init__(self, step: StepFunction, initial: Any, state_schema: Schema, output_schema: Schema) -> None:
        if not callable(step):
            raise UserError(f"fold({step!r:.80})", expected="a function of a state and a row")
        self.step = step
        self.initial = initial
        self.state_schema = variable_codec(VARIABLE, state_schema).schema
        self.output_schema = RowCodec(output_schema).schema
        variable_codec("initial", self.state_schema).payload(initial)  # raises BadRow if it does not fit

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state = handle.getValueState(VARIABLE, self.state_schema)
        self._names = list(self.output_schema.names)
        self._row = row_maker(self._names)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        had = state = self._state.get()
        for row in rows:
            state, made = pair(self.step(self.initial if state is None else state, row))
            for one in several(made):
                yield self._row(in_order(one, self._names, "", ", ".join(self._names)))
        if state is not None:
            self._state.update(state)
        elif had is not None:
            self._state.clear()

    def close(self) -> None:
        """Nothing to release."""


def pair(result: Any) -> tuple[Any, Any]:
    """The result of a step, if it is a state and an output."""
    if type(result) is not tuple or len(result) != 2:
        no_pair(result)
    return result


def no_pair(result: Any) -> NoReturn:
    expected = "(state, output), where either may be None"
    raise BadRow(f"step returned {result!r:.80} ({type(result).__name__})", expected=expected)


def several(made: Any) -> Iterable[Any]:
    if made is None:
        return ()
    return made if type(made) is list else (made,)


def core_fold(plan: OperatorPlan, user_rows: Callable[[list[CoreRow]], Iterator[Any]]) -> CoreFold | None:
    """The core's form of an operator that is a fold; None for other operators."""
    fold = plan.processor
    if not isinstance(fold, Fold) or plan.pandas:
        return None
    variable = plan.state.stored_name(VARIABLE)
    read = [each for each in plan.inputs if not each.initial]
    if len(read) == 1 and not read[0].transforms and not read[0].broadcast:
        advance, _ = _compiled_step(fold, read[0], plan.output)
        untagged = advance if len(plan.inputs) == 1 else _untagged(advance)
    else:
        untagged = _general_step(fold, plan.output, user_rows)
    if len(read) == len(plan.inputs):
        return CoreFold(variable, untagged)
    return CoreFold(variable, _with_stored_state(untagged))


def _untagged(advance: Callable[[Any, CoreRow], Any]) -> Callable[[Any, CoreRow], Any]:
    """For an operator with initial state: each payload carries the number of its input."""
    return lambda stored, row: advance(stored, (row[0], row[1], row[2][1]))


def _with_stored_state(advance: Callable[[Any, CoreRow], Any]) -> Callable[[Any, CoreRow], Any]:
    """For keys that begin with state that was stored elsewhere."""

    def begin(stored: Any, row: CoreRow) -> Any:
        if row[1] != INITIAL:
            return advance(stored, row)
        values, _ = decode_image(decode_payload(row[2][1])[-1])
        return (tuple(values[VARIABLE][1]) if VARIABLE in values else None), None

    return begin


def fold_bundles(plan: OperatorPlan) -> OperatorBundles | None:
    """How a fold reads bundles; None if they are taken apart for it."""
    read = [each for each in plan.inputs if not each.initial]
    if len(read) != 1 or not reads_bundles(plan):
        return None
    assert isinstance(plan.processor, Fold)
    _, advance = _compiled_step(plan.processor, read[0], plan.output)
    columns, kind = _fast_rows(read[0])
    if columns.plain:
        rows = decoder(kind)
    else:
        values, decode = columns.values, decoder(tuple[Any, ...])

        def rows(payload: bytes) -> tuple[list[bytes], list[Any]]:
            keys, internal = decode(payload)
            return keys, [kind(*values(each)) for each in internal]

    return OperatorBundles([rows] * len(plan.inputs), plan.output, _fitter(plan.output), advance)


def _compiled_step(
    fold: Fold, given: InputPlan, output: RowCodec
) -> tuple[Callable[[Any, CoreRow], Any], Callable[[Any, Any], Any]]:
    """Generates `advance`: from a row, or a row batch, to state and output; and the same within a bundle.

    A valid value costs one comparison.
    """
    state = variable_codec(VARIABLE, fold.state_schema)
    states, state_fits = state.column_test("s")
    outputs, output_fits = output.column_test("o")
    shown = "stored" if state.plain else "show(stored)"
    key = "key_of(made)" if output.key else "row[0]"
    time = "time_of(made)" if output.event_time else "0"
    stepping = [
        f"result = step(initial if stored is None else {shown}, given)",
        "try: new, made = result",
        "except (TypeError, ValueError): no_pair(result)",
        "if new is not None:",
        f"  if type(new) is tuple and len(new) == {len(state.names)}:",
        f"    {states} = new",
        f"    if not ({state_fits}): new = keep(new)",
        "  else: new = keep(new)",
    ]
    lines = [
        "payload = row[2]",
        f"if payload[0] == {RUN}: return row_batch(stored, row[0], payload)",
        "given = read(payload)",
        *stepping,
        "if made is None: return new, None",
        f"if type(made) is tuple and len(made) == {len(output.names)}:",
        f"  {outputs} = made",
        f"  if {output_fits}: return new, ({key}, {time}, encode(made))",
        "return new, pack_outputs(row[0], [fit(one) for one in several(made)])",
    ]
    in_bundle = [
        *stepping,
        "if made is None: return new, None",
        f"if type(made) is tuple and len(made) == {len(output.names)}:",
        f"  {outputs} = made",
        f"  if {output_fits}: return new, made",
        "return new, [fit(one) for one in several(made)]",
    ]
    in_batch = [
        "every = []",
        "for given in read_batch(payload[1:]):",
        *["  " + line for line in (*stepping, "stored = new")],
        "  if made is None: continue",
        f"  if type(made) is tuple and len(made) == {len(output.names)}:",
        f"    {outputs} = made",
        f"    if {output_fits}: every.append(made); continue",
        "  for one in several(made): every.append(fit(one))",
        "if not every: return stored, None",
        "return stored, pack_outputs(key, every)",
    ]
    scope: dict[str, Any] = {
        "step": fold.step,
        "initial": fold.initial,
        "read": _reader(given),
        "show": state.values,
        "keep": state.payload,
        "no_pair": no_pair,
        "fit": _fitter(output),
        "key_of": output.key_of_payload,
        "time_of": output.time_of_payload,
        "encode": msgspec.msgpack.Encoder().encode,  # as encode_payload, without its call
        "read_batch": _batch_reader(given),
        "several": several,
        "pack_outputs": _output_packer(output),
    }
    functions = {
        "advance(stored, row)": lines,
        "row_batch(stored, key, payload)": in_batch,
        "advance_internal(stored, given)": in_bundle,
    }
    source = [
        line for head, body in functions.items() for line in (f"def {head}:", *["  " + b for b in body])
    ]
    exec(compile_source("\n".join(source)), scope)
    return scope["advance"], scope["advance_internal"]


def _general_step(
    fold: Fold, output: RowCodec, user_rows: Callable[[list[CoreRow]], Iterator[Any]]
) -> Callable[[Any, CoreRow], Any]:
    """The same with transforms in front, or several inputs: a row may become none, or many."""
    state = variable_codec(VARIABLE, fold.state_schema)
    step, initial, show, keep = fold.step, fold.initial, state.values, state.payload
    fit, pack_outputs = _fitter(output), _output_packer(output)

    def advance(stored: Any, row: CoreRow) -> tuple[Any, list[CoreRow]]:
        every: list[Any] = []
        for one in user_rows([row]):
            new, made = pair(step(initial if stored is None else show(stored), one))
            stored = None if new is None else keep(new)
            every += [fit(each) for each in several(made)]
        return stored, pack_outputs(row[0], every)

    return advance


def _fitter(output: RowCodec) -> Callable[[Any], tuple[Any, ...]]:
    """Makes the internal form of a step's output."""
    return lambda made: output.payload(tuple(output.in_order(made)))


def _reader(given: InputPlan) -> Callable[[Any], Any]:
    """Makes the row that a step gets from a payload."""
    columns, kind = _fast_rows(given)
    if columns.plain:
        return msgspec.msgpack.Decoder(kind).decode
    values = columns.values
    return lambda payload: kind(*values(decode_payload(payload)))


def _batch_reader(given: InputPlan) -> Callable[[Any], Iterable[Any]]:
    """Makes the rows that a step gets from a row batch."""
    columns, kind = _fast_rows(given)
    if columns.plain:
        return msgspec.msgpack.Decoder(list[kind]).decode  # type: ignore[valid-type]
    values, decode = columns.values, msgspec.msgpack.Decoder(list[tuple[Any, ...]]).decode
    return lambda batch: [kind(*values(row)) for row in decode(batch)]


def _fast_rows(given: InputPlan) -> tuple[RowCodec, Any]:
    columns = RowCodec(given.codec.schema, view=View.INPUT)
    return columns, fast_row_type(columns.names)


def _output_packer(output: RowCodec) -> Callable[[bytes, list[Any]], list[CoreRow]]:
    """Makes rows of the core from outputs in internal form: row batches, if they have no key and no time."""
    if not output.key and not output.event_time:
        return lambda key, made: [(key, 0, payload) for payload in encode_rows(made)]

    def apart(key: bytes, made: list[Any]) -> list[CoreRow]:
        return [
            (
                output.key_of_payload(internal) if output.key else key,
                output.time_of_payload(internal) if output.event_time else 0,
                encode_payload(internal),
            )
            for internal in made
        ]

    return apart
