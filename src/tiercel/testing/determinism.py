"""The determinism check: runs the same rows several times, with moves and crashes, and compares the outputs.

Responsible for: the runs, and naming the first difference.
Not responsible for: running (trial.py). Equal runs are no proof; they show no difference for these rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from tiercel.spark.operators.processor_adapter import ProcessorAdapter
from tiercel.testing.trial import Trial

_CLOCK = (
    "the result must depend on the key's state, the row and timerValues only: no now(), no random numbers, "
    "no set order, no calls of services"
)
_ATTRIBUTES = "attributes of the processor do not survive a call: put what must be remembered into state"
_SHARED = (
    "something outlived a call or was lost between two: a list or dict in an attribute, a class or module "
    "variable; put what must be remembered into state"
)


class NotDeterministic(AssertionError):
    """Two runs differ. `key`, `tuple_number` (from 1; 0: at the end), `column`, `expected`, `found`."""

    def __init__(self, name: str, run: _Run, difference: _Difference) -> None:
        self.run = run.name
        self.key, self.tuple_number, self.column, self.expected, self.found = difference
        when = f"tuple {self.tuple_number}" if self.tuple_number else "at the end"
        super().__init__(
            f"{name} is not deterministic: it gave a different result when {run.name}\n"
            f"{when}, key {self.key}, {self.column}: {self.expected!r} when undisturbed, "
            f"{self.found!r} when {run.name}\n"
            f"hint: {run.hint}"
        )


class _Remembering:
    """A processor whose attributes survive a call: what Tiercel resets are the attributes of this object."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)


class _RememberingTrial(Trial):
    """A trial in which attributes of the processor survive a call."""

    def _make_code(self) -> ProcessorAdapter:
        code = super()._make_code()
        code.processor = _Remembering(code.processor)  # type: ignore[assignment]
        return code


class _Run(NamedTuple):
    """One way to treat the same rows."""

    name: str
    hint: str
    around: Callable[[Trial, int, Any, Callable[[], None]], None]  # trial, number, key, sends the row
    trial: type[Trial] = Trial


class _Difference(NamedTuple):
    key: Any
    tuple_number: int
    column: str
    expected: Any
    found: Any


def _undisturbed(trial: Trial, number: int, key: Any, send: Callable[[], None]) -> None:
    send()


def _moved(trial: Trial, number: int, key: Any, send: Callable[[], None]) -> None:
    """Send the row while its key moves: both instances process it, one emits."""
    trial.begin_move(key)
    send()
    trial.finish_moves()


def _crashed(trial: Trial, number: int, key: Any, send: Callable[[], None]) -> None:
    """Half of the crashes come right after a checkpoint, the others replay the last rows."""
    send()
    trial.crash(after_checkpoint=number % 2 == 0)


_RUNS = (
    _Run("run again", _CLOCK, _undisturbed),
    _Run("attributes of the processor survive", _ATTRIBUTES, _undisturbed, _RememberingTrial),
    _Run("moved at every tuple", _SHARED, _moved),
    _Run("crashed at every tuple", _SHARED, _crashed),
)


def check_deterministic(
    processor: Any,
    rows: Iterable[Mapping[str, Any] | Sequence[Any]],
    *,
    step_ms: int = 1_000,
    end_ms: int = 86_400_000,
    **trial: Any,
) -> None:
    """Runs the rows undisturbed, again, with a move and with a crash at every tuple, and compares.

    After each row the clock moves by `step_ms`, and in event time the watermark follows the newest row;
    at the end both move by `end_ms`, so that timers fire. The other arguments are those of `Trial`.
    Raises NotDeterministic for the first output, dead letter, state variable or timer that differs.
    """
    rows = list(rows)
    play = _Play(processor, rows, step_ms, end_ms, trial)
    expected = play.run(_Run("undisturbed", "", _undisturbed))
    for run in _RUNS:
        difference = _first_difference(expected, play.run(run))
        if difference is not None:
            raise NotDeterministic(type(processor).__name__, run, difference)


Made = tuple[int, Any, str, Any]  # (tuple number, key, what, value): one thing that came out


class _Play(NamedTuple):
    """The common part of all runs."""

    processor: Any
    rows: list[Any]
    step_ms: int
    end_ms: int
    arguments: dict[str, Any]

    def run(self, run: _Run) -> list[Made]:
        trial = run.trial(self.processor, **self.arguments)
        watch = _Watch(trial)
        timed = self.arguments.get("time_mode") == "eventTime"
        newest = 0
        for number, row in enumerate(self.rows, 1):
            key, time_ms, _ = trial.columns.pack(row)
            user_key = trial.columns.key_values(key)
            run.around(trial, number, user_key, partial(trial.send, row))
            newest = max(newest, time_ms)
            if timed:
                trial.watermark(newest)
            trial.advance_time(self.step_ms)
            watch.look(number)
        if timed:
            trial.watermark(newest + self.end_ms)
        trial.advance_time(self.end_ms)
        watch.look(0)
        watch.look_at_state()
        return watch.made


class _Watch:
    """Records the outputs of a trial since the last look."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.made: list[Made] = []
        self._outputs = 0
        self._dead_letters = 0

    def look(self, number: int) -> None:
        outputs = self.trial.keyed_outputs()
        for key, row in outputs[self._outputs :]:
            for name, value in zip(self.trial.output.names, row, strict=True):
                self.made.append((number, key, f"column {name}", value))
        self._outputs = len(outputs)
        dead_letters = self.trial.dead_letters()
        self.made += [
            (number, row, "dead letter", reason) for reason, row in dead_letters[self._dead_letters :]
        ]
        self._dead_letters = len(dead_letters)

    def look_at_state(self) -> None:
        for key in self.trial.known_keys():
            for name, value in sorted(self.trial.state(key).items()):
                self.made.append((0, key, f"state {name}", value))
            self.made.append((0, key, "timers", self.trial.timers(key)))


def _first_difference(expected: list[Made], found: list[Made]) -> _Difference | None:
    nothing: Made = (0, None, "", "nothing")
    for one, other in zip_longest(_by_key(expected), _by_key(found), fillvalue=nothing):
        if repr(one) != repr(other):  # repr: a NaN is the same as a NaN, 1 is not 1.0
            number, key, what, value = one if one is not nothing else other
            if one[:3] == other[:3]:
                return _Difference(key, number, what, value, other[3])
            return _Difference(key, number, what, _text_of(one), _text_of(other))
    return None


def _by_key(made: list[Made]) -> list[Made]:
    """Sorted per tuple, then per key, because only the outputs of one key have an order; the end is last."""
    return sorted(made, key=lambda one: (one[0] or math.inf, repr(one[1])))


def _text_of(made: Made) -> str:
    return "nothing" if made[1] is None else f"{made[2]} {made[3]!r} of key {made[1]}"
