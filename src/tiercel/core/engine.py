"""Calls of user code: one call per log entry and key, atomic, with outputs that have an identity.

Responsible for: what user code is called with, what becomes of its outputs, and of its errors.
Not responsible for: which keys are here, and when (instance.py, destination.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from tiercel.core.faults import OperatorFailed
from tiercel.core.keyed import Codec, Handle, KeyState
from tiercel.core.records import INITIAL, Key, Output, Row
from tiercel.core.runs import singles
from tiercel.core.topology import Operator

_encode = msgspec.msgpack.Encoder().encode


class Fold(NamedTuple):
    """An operator whose whole state is one value, which each row takes a step further.

    `advance(kept, row)` gives what to keep and what to emit: a row, several in a list, or None. What is kept
    is None before a key's first row, and again after a step that forgets the key. It changes nothing itself,
    so a row that raises leaves no trace. A run is as many steps.
    """

    variable: str  # under which name the value is kept
    advance: Callable[[Any, Row], tuple[Any, Row | list[Row] | None]]


class Code(Protocol):
    """A user's operator behind the few conversions that the border needs."""

    processor: Any
    fold: Fold | None  # in place of the processor's handleInputRows: no call per key, nothing to undo

    def state_codec(self, name: str, schema: Any) -> Codec: ...
    def user_key(self, key: Key) -> Any: ...
    def timer_key(self, user_key: Any) -> Any: ...
    def user_rows(self, rows: list[Row]) -> Iterator[Any]: ...
    def output_row(self, key: Key, output: Any) -> Row: ...
    def output_rows(self, key: Key, outputs: Iterator[Any]) -> Iterable[Row]: ...  # of one call, in runs
    def timer_values(self, time_ms: int, watermark_ms: int) -> Any: ...
    def expired_timer(self, expiry_ms: int) -> Any: ...


class Engine:
    """Calls one processor."""

    def __init__(self, code: Code, operator: Operator, mutant: str = "") -> None:
        self.mutant = mutant
        self.code = code
        self.operator = operator
        self.handle = Handle(operator.time_mode, code.state_codec)
        self.event_time = operator.time_mode == "eventTime"
        self.has_timers = operator.time_mode != "none"
        self.attempts = 1 + (operator.retries if operator.on_error == "retry" else 0)
        code.processor.init(self.handle)
        self.handle.opening = False
        self._handle_rows = code.processor.handleInputRows
        self._user_rows, self._output_rows = code.user_rows, code.output_rows
        self.folds = code.fold is not None
        self._variable, self._advance = code.fold or Fold("", _no_fold)
        self._attributes = vars(code.processor)
        self._initial = dict(self._attributes) if mutant != "attributes-survive" else {}
        self._time_ms = self._watermark_ms = -1  # what `_times` says
        self._times = code.timer_values(-1, -1)
        self.dead_letters: list[Output] = []
        self.about_keys = (code.user_key, frozenset(self.handle.deleted))  # for a KeySpace

    def _reset(self) -> None:
        """Attributes of a processor do not survive a call: a replay, or a shadow, would not have them."""
        attributes, initial = self._attributes, self._initial
        attributes.update(initial)
        if len(attributes) != len(initial) and self.mutant != "attributes-survive":
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
        """One call of handleInputRows, or of handleInitialState per initial row; then timers that are due."""
        if self.folds:
            self.fold({key: state}, lambda _: state, rows, offset, out)
            return
        if rows[0][1] == INITIAL:  # comes before the key's first tuple, at most once in its life
            first = next((i for i, row in enumerate(rows) if row[1] != INITIAL), len(rows))
            times = self._bind(state, time_ms, watermark_ms)
            for row in rows[:first]:
                self.call_alone(state, key, row, times, offset, out, len(out))
            rows = rows[first:]
            if not rows:
                return
        handle = self.handle
        times = self._bind(state, time_ms, watermark_ms)
        before = n = len(out)
        self._reset()
        try:
            epoch, add = state.epoch, out.append
            made = self._handle_rows(state.user_key, self._user_rows(rows), times)
            for row in self._output_rows(key, made):
                add(Output(offset, key, epoch, n - before, row))
                n += 1
            handle.undo.clear()
        except Exception as error:
            if self.mutant != "call-not-atomic":
                del out[before:]
                handle.roll_back()
            alone = [single for row in rows for single in singles(row)]
            if self.mutant == "runs-refused-whole":
                alone = rows
            if len(alone) > 1:
                for row in alone:
                    self.call_alone(state, key, row, times, offset, out, before)
            else:
                self.call_alone(state, key, alone[0], times, offset, out, before, error)
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

    def fold(
        self,
        states: Mapping[Key, KeyState],
        new_state: Callable[[Key], KeyState],
        rows: list[Row],
        offset: int,
        out: list[Output],
    ) -> tuple[dict[Key, int], list[Key]]:
        """Rows of any keys, one step each, in their order. Which keys they had; which may have no state now.

        An output's number counts those that its key has made of this entry, as in a call.
        """
        variable, advance, add = self._variable, self._advance, out.append
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
        """A row that raised, again; of a run each by itself: only those at fault are refused."""
        kept = state.values.get(self._variable)
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
        """A step that raised, as often as it may be tried; then the row is refused, and the state stays."""
        for _ in range(self.attempts - 1):
            try:
                return self._advance(kept, row)
            except Exception as raised:
                error = raised
        self._refuse(state, row[0], row, offset, error)
        return kept, None

    def _bind(self, state: KeyState, time_ms: int, watermark_ms: int) -> Any:
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
        """A row of a call that raised, by itself: only the rows that are at fault are refused.

        `error` is what a first attempt at this row alone has raised already.
        """
        mark = len(out)
        for _ in range(self.attempts if error is None else self.attempts - 1):
            self._reset()
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
        self._refuse(state, key, row, offset, error)

    def _refuse(self, state: KeyState, key: Key, row: Row, offset: int, error: Exception) -> None:
        """A dead letter: (reason, key, offset, payload in MessagePack); or the end of the process."""
        reason = f"{type(error).__name__}: {error}"
        if self.operator.on_error == "fail":
            raise OperatorFailed(self.operator.name, key, offset, reason) from error
        n = sum(1 for letter in self.dead_letters if letter.key == key and letter.offset == offset)
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
        """Timers of this key up to `due_ms`, ascending; the firing one is listed until it is done.

        One that is registered meanwhile and due already fires with the key's next rows, tick or watermark:
        in Spark with the next batch.
        """
        handle, code = self.handle, self.code
        handle.state = state
        handle.time_ms = time_ms
        first = len(out) if before is None else before
        for expiry in sorted(timer for timer in state.timers if timer <= due_ms):
            if expiry in state.timers:  # unless one before it has deleted it
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
            self._reset()
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
        self._refuse(state, key, (key, expiry, "timer"), offset, failure)


def _no_fold(kept: Any, row: Row) -> tuple[Any, None]:
    raise AssertionError(row)
