"""Folds: operators whose state is one value that each row takes a step further.

Responsible for: a step function as a `StatefulProcessor`, and the same as one short function for the core.
Not responsible for: when it is called, and what becomes of a step that raises (core/engine.py).

A processor pays for what it could do with each call: a handle, iterators, an undo log, rows made by name. A
fold is decoded, stepped, checked and encoded in one function, which is made for its schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from tiercel.core.engine import Fold as CoreFold
from tiercel.core.records import INITIAL
from tiercel.core.records import Row as CoreRow
from tiercel.core.runs import RUN
from tiercel.errors import UserError
from tiercel.spark.conversion import View
from tiercel.spark.processors import state_columns
from tiercel.spark.rows import BadRow, in_order, light_row_type, row_maker
from tiercel.spark.schema import Columns, Schema, compiled, decode_payload, encode_payload, encode_rows
from tiercel.spark.stateful import decode_image
from tiercel.spark.steps import InputPlan

if TYPE_CHECKING:
    from tiercel.spark.border import OperatorPlan

VARIABLE = "state"  # the name of a fold's one state variable
StepFunction = Callable[[Any, Any], tuple[Any, Any]]


class Fold(StatefulProcessor):
    """`step(state, row)` gives the next state and what to emit: a row, a list of rows, or None.

    The state is a tuple with the columns of `state_schema`; a key without one begins with `initial`. A step
    that returns None for it forgets the key. An output is a tuple with the columns of `output_schema`, a dict
    or a Row. It is a `StatefulProcessor` too, so it runs in Spark itself; in Tiercel it takes the short way.
    """

    def __init__(self, step: StepFunction, initial: Any, state_schema: Schema, output_schema: Schema) -> None:
        if not callable(step):
            raise UserError(f"fold({step!r:.80})", expected="a function of a state and a row")
        self.step = step
        self.initial = initial
        self.state_schema = state_columns(VARIABLE, state_schema).schema
        self.output_schema = Columns(output_schema).schema
        state_columns("initial", self.state_schema).payload(initial)  # else BadRow: it says what does not fit

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
        """Nothing to let go."""


def pair(result: Any) -> tuple[Any, Any]:
    """What a step gave, if it is a state and an output."""
    if type(result) is not tuple or len(result) != 2:
        no_pair(result)
    return result


def no_pair(result: Any) -> NoReturn:
    expected = "(state, output), where either may be None"
    raise BadRow(f"step gave {result!r:.80} ({type(result).__name__})", expected=expected)


def several(made: Any) -> Iterable[Any]:
    if made is None:
        return ()
    return made if type(made) is list else (made,)


def core_fold(plan: OperatorPlan, user_rows: Callable[[list[CoreRow]], Iterator[Any]]) -> CoreFold | None:
    """The core's form of an operator that is a fold; None if it is none."""
    fold = plan.processor
    if not isinstance(fold, Fold) or plan.pandas:
        return None
    variable = plan.state.stored_name(VARIABLE)
    read = [each for each in plan.inputs if not each.initial]
    if len(read) == 1 and not read[0].steps:
        advance = _short(fold, read[0], plan.output)
        untagged = advance if len(plan.inputs) == 1 else _untagged(advance)
    else:
        untagged = _long(fold, plan.output, user_rows)
    if len(read) == len(plan.inputs):
        return CoreFold(variable, untagged)
    return CoreFold(variable, _with_stored_state(untagged))


def _untagged(advance: Callable[[Any, CoreRow], Any]) -> Callable[[Any, CoreRow], Any]:
    """Beside initial state, a payload comes with the number of its input."""
    return lambda kept, row: advance(kept, (row[0], row[1], row[2][1]))


def _with_stored_state(advance: Callable[[Any, CoreRow], Any]) -> Callable[[Any, CoreRow], Any]:
    """A key may begin with state that was stored elsewhere."""

    def begin(kept: Any, row: CoreRow) -> Any:
        if row[1] != INITIAL:
            return advance(kept, row)
        values, _ = decode_image(decode_payload(row[2][1])[-1])
        return (tuple(values[VARIABLE][1]) if VARIABLE in values else None), None

    return begin


def _short(fold: Fold, given: InputPlan, output: Columns) -> Callable[[Any, CoreRow], Any]:
    """One function from a row, or a run, to state and output; a value as it should be costs a comparison."""
    state = state_columns(VARIABLE, fold.state_schema)
    states, state_fits = state.test_of("s")
    outputs, output_fits = output.test_of("o")
    shown = "kept" if state.plain else "show(kept)"
    key = "key_of(made)" if output.key else "row[0]"
    time = "time_of(made)" if output.event_time else "0"
    stepping = [
        f"result = step(initial if kept is None else {shown}, given)",
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
        f"if payload[0] == {RUN}: return run(kept, row[0], payload)",
        "given = read(payload)",
        *stepping,
        "if made is None: return new, None",
        f"if type(made) is tuple and len(made) == {len(output.names)}:",
        f"  {outputs} = made",
        f"  if {output_fits}: return new, ({key}, {time}, encode(made))",
        "return new, together(row[0], [fit(one) for one in several(made)])",
    ]
    in_run = [
        "every = []",
        "for given in read_run(payload[1:]):",
        *["  " + line for line in (*stepping, "kept = new")],
        "  if made is None: continue",
        f"  if type(made) is tuple and len(made) == {len(output.names)}:",
        f"    {outputs} = made",
        f"    if {output_fits}: every.append(made); continue",
        "  for one in several(made): every.append(fit(one))",
        "if not every: return kept, None",
        "return kept, together(key, every)",
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
        "encode": msgspec.msgpack.Encoder().encode,  # what encode_payload does, without a call in between
        "read_run": _run_reader(given),
        "several": several,
        "together": _together(output),
    }
    functions = {"advance(kept, row)": lines, "run(kept, key, payload)": in_run}
    source = [
        line for head, body in functions.items() for line in (f"def {head}:", *["  " + b for b in body])
    ]
    exec(compiled("\n".join(source)), scope)
    return scope["advance"]  # type: ignore[no-any-return]


def _long(
    fold: Fold, output: Columns, user_rows: Callable[[list[CoreRow]], Iterator[Any]]
) -> Callable[[Any, CoreRow], Any]:
    """The same with stateless steps in front, or several inputs: a row may become none, or many."""
    state = state_columns(VARIABLE, fold.state_schema)
    step, initial, show, keep = fold.step, fold.initial, state.values, state.payload
    fit, together = _fitter(output), _together(output)

    def advance(kept: Any, row: CoreRow) -> tuple[Any, list[CoreRow]]:
        every: list[Any] = []
        for one in user_rows([row]):
            new, made = pair(step(initial if kept is None else show(kept), one))
            kept = None if new is None else keep(new)
            every += [fit(each) for each in several(made)]
        return kept, together(row[0], every)

    return advance


def _fitter(output: Columns) -> Callable[[Any], tuple[Any, ...]]:
    """From an output of a step to its internal form."""
    return lambda made: output.payload(tuple(output.in_order(made)))


def _reader(given: InputPlan) -> Callable[[Any], Any]:
    """From a payload to the row that a step gets."""
    columns, kind = _light_rows(given)
    if columns.plain:
        return msgspec.msgpack.Decoder(kind).decode
    values = columns.values
    return lambda payload: kind(*values(decode_payload(payload)))


def _run_reader(given: InputPlan) -> Callable[[Any], Iterable[Any]]:
    """From the rows of a run to those that a step gets."""
    columns, kind = _light_rows(given)
    if columns.plain:
        return msgspec.msgpack.Decoder(list[kind]).decode  # type: ignore[valid-type]
    values, decode = columns.values, msgspec.msgpack.Decoder(list[tuple[Any, ...]]).decode
    return lambda run: [kind(*values(row)) for row in decode(run)]


def _light_rows(given: InputPlan) -> tuple[Columns, Any]:
    columns = Columns(given.columns.schema, view=View.INPUT)
    return columns, light_row_type(columns.names)


def _together(output: Columns) -> Callable[[bytes, list[Any]], list[CoreRow]]:
    """From outputs in internal form to rows of the core: in runs, if they have the same key and no time."""
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
