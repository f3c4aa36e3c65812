"""Calls of user code: one atomic call per log entry and key, with identified outputs.

Responsible for: the arguments of a call, its outputs, its errors.
Not responsible for: the keys of an instance and the time of calls (processing.py, destination_instance.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from tiercel.core.errors import OperatorFailed
from tiercel.core.migration.instance_port import CallResult
from tiercel.core.model.keys import Key
from tiercel.core.model.log import INITIAL, Output, Row
from tiercel.core.model.row_batch import count_rows, singles
from tiercel.core.model.topology import Operator
from tiercel.core.state.handle import Codec, Handle, KeyState

_encode = msgspec.msgpack.Encoder().encode


class Fold(NamedTuple):
    """An operator whose whole state is one value, which each row advances.

    `advance(kept, row)` returns the new value and the output: a row, a list of rows, or None. The value is
    None before a key's first row, and after a step that deletes the key. `advance` has no side effects, so a
    row that raises changes nothing. Each row of a row batch is one step.
    """

    variable: str  # the name of the state variable
    advance: Callable[[Any, Row], tuple[Any, Row | list[Row] | None]]


class BundleCode(Protocol):
    """How user code reads bundles, and what its outputs look like in one.

    What it makes of an output is its internal form: `rows` makes rows of the core from some of one call, as
    `OperatorCode.output_rows` does, and `payload` makes one bundle of outputs of many keys.
    """

    joins: bool  # the outputs of a call have the operator's key and no event time: they leave as row batches

    def width(self, rows: int, slots: int, /) -> int: ...  # how many slots a bundle of outputs spans
    def internal(self, output: Any, /) -> Any: ...
    def advance(self, kept: Any, given: Any, /) -> tuple[Any, Any]: ...  # a fold: outputs are tuples, or None
    def unpack(self, payload: Any) -> tuple[list[Key], list[Any]]: ...  # keys and rows for user code
    def rows(self, key: Key, made: list[Any]) -> Iterable[Row]: ...
    def payload(self, keys: list[Key], made: list[Any]) -> bytes: ...  # if it `joins`


class OperatorCode(Protocol):
    """A user's operator, with the conversions that calls need."""

    processor: Any
    fold: Fold | None  # replaces handleInputRows: no call per key, nothing to undo

    @property
    def bundles(self) -> BundleCode | None: ...  # None: bundles are taken apart
    def state_codec(self, name: str, schema: Any) -> Codec: ...
    def user_key(self, key: Key) -> Any: ...
    def timer_key(self, user_key: Any) -> Any: ...
    def user_rows(self, rows: list[Row]) -> Iterator[Any]: ...
    def output_row(self, key: Key, output: Any) -> Row: ...
    def output_rows(self, key: Key, outputs: Iterator[Any]) -> Iterable[Row]: ...  # in row batches
    def timer_values(self, time_ms: int, watermark_ms: int) -> Any: ...
    def expired_timer(self, expiry_ms: int) -> Any: ...


class ProcessorRunner:
    """Calls one processor."""

    def __init__(self, code: OperatorCode, operator: Operator) -> None:
        self.code = code
        self.operator = operator
        self.handle = Handle(operator.time_mode, code.state_codec)
        self.event_time = operator.time_mode == "eventTime"
        self.has_timers = operator.time_mode != "none"
        self.attempts = 1 + (operator.retries if operator.on_error == "retry" else 0)
        code.processor.init(self.handle)
        self.handle.opening = False
        self.handle_rows = code.processor.handleInputRows
        self._user_rows, self._output_rows = code.user_rows, code.output_rows
        self.folds = code.fold is not None
        self.bundles = code.bundles
        self.variable, self._advance = code.fold or Fold("", _no_fold)
        self.attributes = vars(code.processor)
        self.initial = dict(self.attributes)
        self._time_ms = self._watermark_ms = -1  # the times in `_times`
        self._times = code.timer_values(-1, -1)
        self.dead_letters: list[Output] = []
        self.rows_apart = 0  # of moving keys, that were given to user code
        self.about_keys = (code.user_key, frozenset(self.handle.deleted))  # for a StateTable

    def reset_attributes(self) -> None:
        """Reset the attributes of the processor: a replay or a destination would not have them."""
        attributes, initial = self.attributes, self.initial
        attributes.update(initial)
        if len(attributes) != len(initial):
            attributes.clear()
            attributes.update(initial)

    def call(
        self,
        state: KeyState,
        key: Key,
        rows: list[Row],
        time_ms: int,
        watermark_ms: int,
        offset: int,
        out: list[Output],
    ) -> None:
        """Call handleInputRows, or handleInitialState per initial row; then fire due timers."""
        if self.folds:
            self.fold({key: state}, lambda _: state, rows, offset, out)
            return
        if rows[0][1] == INITIAL:  # precedes the key's first tuple, at most once
            first = next((i for i, row in enumerate(rows) if row[1] != INITIAL), len(rows))
            times = self.bind(state, time_ms, watermark_ms)
            for row in rows[:first]:
                self.call_alone(state, key, row, times, offset, out, len(out))
            rows = rows[first:]
            if not rows:
                return
        handle = self.handle
        times = self.bind(state, time_ms, watermark_ms)
        before = n = len(out)
        self.reset_attributes()
        try:
            epoch, add = state.epoch, out.append
            made = self.handle_rows(state.user_key, self._user_rows(rows), times)
            for row in self._output_rows(key, made):
                add(Output(offset, key, epoch, n - before, row))
                n += 1
            handle.undo.clear()
        except Exception as error:
            self.undo_call(out, before)
            self.call_each(state, key, rows, times, offset, out, before, error)
        if state.timers:
            self.fire(
                state,
                key,
                watermark_ms if self.event_time else time_ms,
                time_ms,
                watermark_ms,
                offset,
                out,
                before,
            )

    def call_each(
        self,
        state: KeyState,
        key: Key,
        rows: list[Row],
        times: Any,
        offset: int,
        out: list[Output],
        before: int,
        error: Exception,
    ) -> None:
        """Call user code row by row, after a call with these rows has raised this error."""
        alone = self.rows_to_retry(rows)
        if len(alone) > 1:
            for row in alone:
                self.call_alone(state, key, row, times, offset, out, before)
        else:
            self.call_alone(state, key, alone[0], times, offset, out, before, error)

    def call_apart(
        self, state: KeyState, key: Key, rows: list[Row], time_ms: int, watermark_ms: int, offset: int
    ) -> CallResult:
        """Call user code, and return outputs, dead letters and timers separately from those of other keys."""
        out: list[Output] = []
        before, self.dead_letters = self.dead_letters, []
        self.rows_apart += count_rows(rows)
        self.call(state, key, rows, time_ms, watermark_ms, offset, out)
        return self._apart(out, before)

    def fire_apart(
        self, state: KeyState, key: Key, due_ms: int, time_ms: int, watermark_ms: int, offset: int
    ) -> CallResult:
        """Fire timers, and return outputs, dead letters and timers separately from those of other keys."""
        out: list[Output] = []
        before, self.dead_letters = self.dead_letters, []
        self.fire(state, key, due_ms, time_ms, watermark_ms, offset, out)
        return self._apart(out, before)

    def _apart(self, out: list[Output], before: list[Output]) -> CallResult:
        dead, self.dead_letters = self.dead_letters, before
        timers = list(self.handle.new_timers)
        self.handle.new_timers.clear()
        return CallResult(out, dead, timers)

    def undo_call(self, out: list[Output], before: int) -> None:
        """Remove the outputs and state changes of a call that raised."""
        del out[before:]
        self.handle.roll_back()

    def rows_to_retry(self, rows: list[Row]) -> list[Row]:
        """The rows of a call that raised, as single rows, including those of a row batch."""
        return [single for row in rows for single in singles(row)]

    def fold(
        self,
        states: Mapping[Key, KeyState],
        new_state: Callable[[Key], KeyState],
        rows: list[Row],
        offset: int,
        out: list[Output],
    ) -> tuple[dict[Key, int], list[Key]]:
        """Advance the state with rows of any keys, in their order.

        Returns the keys of the rows, and the keys that may have no state now. As in a call, the number of an
        output counts the outputs of its key for this entry.
        """
        variable, advance, add = self.variable, self._advance, out.append
        made_of: dict[Key, int] = {}
        emptied: list[Key] = []
        for row in rows:
            key = row[0]
            state = states.get(key) or new_state(key)
            values = state.values
            try:
                kept, made = advance(values.get(variable), row)
            except Exception as error:
                kept, made = self._advance_alone(state, row, offset, error)
            if kept is not None:
                values[variable] = kept
            else:
                values.pop(variable, None)
                emptied.append(key)
            n = made_of.get(key, 0)
            if made is None:
                made_of[key] = n
            elif type(made) is list:
                for one in made:
                    add(Output(offset, key, state.epoch, n, one))
                    n += 1
                made_of[key] = n
            else:
                add(Output(offset, key, state.epoch, n, made))  # type: ignore[arg-type]
                made_of[key] = n + 1
        return made_of, emptied

    def _advance_alone(self, state: KeyState, row: Row, offset: int, error: Exception) -> tuple[Any, Any]:
        """Retry a row that raised, or each row of a batch alone, so that only failing rows are refused."""
        kept = state.values.get(self.variable)
        alone = singles(row)
        if len(alone) == 1:
            return self._advance_again(state, kept, row, offset, error)
        every: list[Row] = []
        for single in alone:
            try:
                kept, made = self._advance(kept, single)
            except Exception as raised:
                kept, made = self._advance_again(state, kept, single, offset, raised)
            if made is not None:
                every += made if type(made) is list else [made]  # type: ignore[list-item]
        return kept, every

    def _advance_again(
        self, state: KeyState, kept: Any, row: Row, offset: int, error: Exception
    ) -> tuple[Any, Any]:
        """Retry a step that raised up to the limit; then refuse the row and leave the state unchanged."""
        for _ in range(self.attempts - 1):
            try:
                return self._advance(kept, row)
            except Exception as raised:
                error = raised
        self.refuse(state, row[0], row, offset, error)
        return kept, None

    def bind(self, state: KeyState, time_ms: int, watermark_ms: int) -> Any:
        self.handle.state = state
        self.handle.time_ms = time_ms
        if self._time_ms != time_ms or self._watermark_ms != watermark_ms:  # one entry has one time
            self._time_ms, self._watermark_ms = time_ms, watermark_ms
            self._times = self.code.timer_values(time_ms, watermark_ms)
        return self._times

    def call_alone(
        self,
        state: KeyState,
        key: Key,
        row: Row,
        times: Any,
        offset: int,
        out: list[Output],
        before: int,
        error: Exception | None = None,
    ) -> None:
        """Call user code with one row of a call that raised, so that only failing rows are refused.

        `error` is the error of an earlier attempt with this row alone.
        """
        mark = len(out)
        for _ in range(self.attempts if error is None else self.attempts - 1):
            self.reset_attributes()
            try:
                if row[1] == INITIAL:
                    for initial in self.code.user_rows([row]):
                        self.code.processor.handleInitialState(state.user_key, initial, times)
                else:
                    for output in self.code.processor.handleInputRows(
                        state.user_key, self.code.user_rows([row]), times
                    ):
                        n = len(out) - before
                        out.append(Output(offset, key, state.epoch, n, self.code.output_row(key, output)))
                self.handle.undo.clear()
                return
            except Exception as raised:
                error = raised
                del out[mark:]
                self.handle.roll_back()
        assert error is not None
        self.refuse(state, key, row, offset, error)

    def refuse(self, state: KeyState, key: Key, row: Row, offset: int, error: Exception) -> None:
        """Make a dead letter (reason, key, offset, payload in MessagePack), or raise `OperatorFailed`."""
        reason = f"{type(error).__name__}: {error}"
        if self.operator.on_error == "fail":
            raise OperatorFailed(self.operator.name, key, offset, reason) from error
        n = sum(1 for dead in self.dead_letters if dead.key == key and dead.offset == offset)
        payload = (reason, key, offset, _encode(row[2]))
        self.dead_letters.append(Output(offset, key, state.epoch, n, (key, row[1], payload)))

    def fire(
        self,
        state: KeyState,
        key: Key,
        due_ms: int,
        time_ms: int,
        watermark_ms: int,
        offset: int,
        out: list[Output],
        before: int | None = None,
    ) -> None:
        """Fire the timers of this key up to `due_ms`, in order; a firing timer is listed until its call ends.

        A timer that such a call registers, and that is already due, fires with the key's next rows, tick or
        watermark. In Spark it fires with the next batch.
        """
        handle, code = self.handle, self.code
        handle.state = state
        handle.time_ms = time_ms
        first = len(out) if before is None else before
        for expiry in sorted(timer for timer in state.timers if timer <= due_ms):
            if expiry in state.timers:  # unless an earlier timer has deleted it
                times = code.timer_values(time_ms, watermark_ms)
                self._fire_one(state, key, expiry, times, offset, out, first)
                state.timers.discard(expiry)

    def _fire_one(
        self, state: KeyState, key: Key, expiry: int, times: Any, offset: int, out: list[Output], first: int
    ) -> None:
        mark = len(out)
        code = self.code
        failure: Exception | None = None
        for _ in range(self.attempts):
            self.reset_attributes()
            try:
                for output in code.processor.handleExpiredTimer(
                    key=code.timer_key(state.user_key),
                    timerValues=times,
                    expiredTimerInfo=code.expired_timer(expiry),
                ):
                    n = len(out) - first
                    out.append(Output(offset, key, state.epoch, n, code.output_row(key, output)))
                self.handle.undo.clear()
                return
            except Exception as raised:
                failure = raised
                del out[mark:]
                self.handle.roll_back()
        assert failure is not None
        self.refuse(state, key, (key, expiry, "timer"), offset, failure)


def _no_fold(kept: Any, row: Row) -> tuple[Any, None]:
    raise AssertionError(row)
