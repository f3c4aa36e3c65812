"""One processor on the real core, under a test's control.

Responsible for: what a test says (rows, keys, times) in the core's terms, and back.
Not responsible for: running the core (stage.py), comparing runs (determinism.py).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tiercel.core.keyed import KeyState
from tiercel.core.records import Key, Output
from tiercel.core.runs import join, split
from tiercel.core.settings import Settings
from tiercel.core.strategies import STRATEGIES
from tiercel.core.topology import Operator
from tiercel.errors import UserError
from tiercel.spark.border import Border, InputPlan, OperatorPlan
from tiercel.spark.processors import Variable, check_processor, pickled, state_columns
from tiercel.spark.rows import row_maker
from tiercel.spark.schema import Columns, Schema
from tiercel.testing.stage import DEAD, INPUT, INSTANCES, OPERATOR, OUTPUT, Stage

SLOTS = 16  # few: a trial starts its processes often
START_MS = 1_767_225_600_000  # 2026-01-01 in UTC: where a trial's clock stands at first


class Trial:
    """Two instances of an operator; time passes only when the test says so.

    `time_mode` is Spark's. `key` and `event_time` name columns of `schema`. `on_error` and `retries` are
    those of an operator. Rows go in with `send`; `move`, `crash`, `advance_time` and `watermark` happen
    between them, and must not be seen in what comes out.
    """

    def __init__(
        self,
        processor: Any,
        *,
        schema: Schema,
        key: str | Sequence[str],
        output: Schema,
        time_mode: str = "none",
        event_time: str = "",
        pandas: bool = False,
        on_error: str = "dead-letter",
        retries: int = 0,
        mutant: str = "",
    ) -> None:
        self.columns = Columns(schema, key, event_time)
        if not self.columns.key:
            raise UserError("no key column", expected=f"some of: {', '.join(self.columns.names)}")
        if time_mode == "eventTime" and not event_time:
            raise UserError("time mode eventTime without an event time", hint="name the column: event_time=…")
        self.output = Columns(output)
        self.variables: dict[str, Variable] = {v.name: v for v in check_processor(processor, time_mode)}
        self._row = row_maker(self.output.names)
        self._key_alone = self.columns.key_alone()
        plan = pickled(
            OperatorPlan(
                processor,
                (InputPlan(self.columns),),
                self.columns.schema,
                self.output,
                time_mode,
                pandas,
            )
        )
        operator = Operator(
            OPERATOR,
            (INPUT,),
            OUTPUT,
            INSTANCES,
            slots=SLOTS,
            dead_letters=DEAD,
            time_mode=time_mode,
            on_error=on_error,
            retries=retries,
        )
        # Each process unpickles the processor for itself, as on Spark: nothing is shared by accident.
        self.stage = Stage(lambda: Border(pickle.loads(plan)), operator, Settings(mutant=mutant), START_MS)

    # -- what happens ------------------------------------------------------------------------

    def send(self, *rows: Mapping[str, Any] | Sequence[Any]) -> None:
        """Rows that arrive together: one call of handleInputRows per key."""
        packed = [self.columns.pack(row) for row in rows]
        self.stage.produce(packed if self.columns.event_time else join(packed))

    def move(self, key: Any, strategy: str = "live") -> None:
        """The key goes to the other instance."""
        source = self.owner(key)
        self.begin_move(key, strategy)
        self.finish_moves()
        if self.owner(key) == source:
            reasons = [status.reason for status in self.stage.statuses.values() if status.reason]
            what = f"the move of key {key!r} was undone: {reasons[-1] if reasons else 'no reason given'}"
            raise UserError(what, hint="does check_deterministic say why?")

    def begin_move(self, key: Any, strategy: str = "live") -> None:
        """As `move`, but what is sent before `finish_moves` meets the key on its way."""
        if strategy not in STRATEGIES:
            raise UserError(f"strategy {strategy!r}", expected=f"one of: {', '.join(STRATEGIES)}")
        self.stage.begin_move(self._key(key), strategy)

    def finish_moves(self) -> None:
        self.stage.finish_moves()

    def crash(self, *, after_checkpoint: bool = False) -> None:
        """Every process dies and begins again: from its last checkpoint, and the log behind it."""
        if after_checkpoint:
            self.stage.checkpoint()
        self.stage.crash()

    def advance_time(self, ms: int) -> None:
        """Processing time jumps ahead; timers that have become due fire once, at the new time."""
        if ms < 0:
            raise UserError(f"{ms} ms", expected="0 or more: time does not go back")
        self.stage.jump(self.stage.now_ms + ms)

    def watermark(self, ms: int) -> None:
        """No row at or before this event time will come any more."""
        if self.stage.topology.operators[OPERATOR].time_mode != "eventTime":
            raise UserError("a watermark without event time", hint='give time_mode="eventTime"')
        self.stage.produce([], watermark_ms=ms)

    # -- what can be seen --------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        return self.stage.now_ms

    def owner(self, key: Any) -> str:
        """The instance that emits for this key."""
        return self.stage.owner(self._key(key))

    def outputs(self, key: Any = None) -> list[Any]:
        """The rows of the output stream; with a key only those that this key's calls made."""
        return [row for _, row in self.keyed_outputs(key)]

    def keyed_outputs(self, key: Any = None) -> list[tuple[tuple[Any, ...], Any]]:
        """As `outputs`, each with the key whose call made it."""
        return [
            (self.columns.key_values(output.key), self._row(self.output.unpack(payload)))
            for output in self._logged(OUTPUT, key)
            for payload in split(output.row[2])
        ]

    def dead_letters(self, key: Any = None) -> list[tuple[str, tuple[Any, ...] | str]]:
        """(reason, row) of what was refused; instead of a row `timer` for a timer."""
        letters = [output.row[2] for output in self._logged(DEAD, key)]
        return [(letter[0], self._refused(letter[3])) for letter in letters]

    def state(self, key: Any) -> dict[str, Any]:
        """The key's state variables as user code sees them; those without a value are left out."""
        state = self._state(key)
        return {} if state is None else {name: self._shown(name, v) for name, v in state.values.items()}

    def timers(self, key: Any) -> list[int]:
        state = self._state(key)
        return [] if state is None else sorted(state.timers)

    def known_keys(self) -> list[tuple[Any, ...]]:
        """Every key that has state or timers."""
        spaces = [self.stage.instance(name).space for name in INSTANCES]
        found = {key for space in spaces for key in (*space.keys, *space.cold)}
        return [self.columns.key_values(key) for key in sorted(found)]

    # -- in the core's terms -----------------------------------------------------------------

    def _key(self, key: Any) -> Key:
        return self._key_alone.key_of(tuple(key) if isinstance(key, tuple | list) else (key,))

    def _state(self, key: Any) -> KeyState | None:
        wanted = self._key(key)
        return self.stage.instance(self.stage.owner(wanted)).space.peek(wanted)

    def _logged(self, stream: str, key: Any) -> list[Output]:
        found = self.stage.logged(stream)
        return found if key is None else [output for output in found if output.key == self._key(key)]

    def _refused(self, row: bytes) -> tuple[Any, ...] | str:
        payload = msgspec.msgpack.decode(row)
        return "timer" if payload == "timer" else tuple(self.columns.unpack(payload))

    def _shown(self, name: str, kept: Any) -> Any:
        variable = self.variables[name]
        columns = state_columns(name, variable.schema)
        make = row_maker(columns.names)

        def show(value: Any) -> Any:
            return make(columns.values(value if variable.ttl_ms is None else value[0]))

        match variable.kind:
            case "value":
                return show(kept)
            case "list":
                return [show(value) for value in kept]
            case "map":
                assert variable.key_schema is not None
                keys = state_columns(name, variable.key_schema)
                return {keys.values(k): show(v) for k, v in kept.items()}
