"""A trial: one processor on the real core, under the control of a test.

Responsible for: translating rows, keys and times between a test and the core.
Not responsible for: running the core (in_memory_driver.py), comparing runs (determinism.py).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tiercel.core.migration.strategies import STRATEGIES
from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.log import Output, Row
from tiercel.core.model.row_batch import join, split
from tiercel.core.model.topology import Operator, Stream, Topology, instance_name
from tiercel.core.settings import Settings
from tiercel.core.state.handle import KeyState
from tiercel.errors import UserError
from tiercel.spark.operators.plans import OperatorPlan
from tiercel.spark.operators.processor_adapter import InputPlan, ProcessorAdapter
from tiercel.spark.rows.row_codec import RowCodec, Schema
from tiercel.spark.rows.row_types import row_maker
from tiercel.spark.state.declared_state import Variable, check_processor, pickled, variable_codec
from tiercel.testing.in_memory_driver import InMemoryDriver

SLOTS = 16  # few: a trial starts its processes often
SITE, INPUT, OUTPUT, DEAD_LETTERS = "site", "input", "output", "dead-letters"
OPERATOR, PRODUCER = "operator", "producer"
INSTANCES = tuple(instance_name(OPERATOR, SITE, n) for n in range(2))
START_MS = 1_767_225_600_000  # 2026-01-01 in UTC: where a trial's clock stands at first


class Trial:
    """Two instances of an operator; time passes only when the test says so.

    `time_mode` is Spark's. `key` and `event_time` name columns of `schema`. `on_error` and `retries` are
    those of an operator. Rows go in with `send`; `move`, `crash`, `advance_time` and `watermark` happen
    between rows, and must not change the outputs.
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
    ) -> None:
        self.columns = RowCodec(schema, key, event_time)
        if not self.columns.key:
            raise UserError("no key column", expected=f"some of: {', '.join(self.columns.names)}")
        if time_mode == "eventTime" and not event_time:
            raise UserError("time mode eventTime without an event time", hint="name the column: event_time=…")
        self.output = RowCodec(output)
        self.variables: dict[str, Variable] = {v.name: v for v in check_processor(processor, time_mode)}
        self._row = row_maker(self.output.names)
        self._key_alone = self.columns.key_alone()
        self._plan = pickled(
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
            dead_letters=DEAD_LETTERS,
            time_mode=time_mode,
            on_error=on_error,
            retries=retries,
        )
        producers = {PRODUCER: SITE} if time_mode == "eventTime" else {}
        streams = {
            INPUT: Stream(INPUT, SITE, logged=False, producers=producers),
            OUTPUT: Stream(OUTPUT, SITE),
            DEAD_LETTERS: Stream(DEAD_LETTERS, SITE),
        }
        self._moves = 0
        self.driver = InMemoryDriver(
            Topology({SITE: None}, streams, {OPERATOR: operator}).validate(),
            lambda instance: self._make_code(),
            Settings(),
            now_ms=START_MS,
            transcript=False,
        )
        self.driver.start()

    def _make_code(self) -> ProcessorAdapter:
        """Each process unpickles the processor for itself, as on Spark: nothing is shared by accident."""
        return ProcessorAdapter(pickle.loads(self._plan))

    # -- what happens ------------------------------------------------------------------------

    def send(self, *rows: Mapping[str, Any] | Sequence[Any]) -> None:
        """Rows that arrive together: one call of handleInputRows per key."""
        packed = [self.columns.pack(row) for row in rows]
        self._produce(packed if self.columns.event_time else join(packed))

    def move(self, key: Any, strategy: str = "live") -> None:
        """Move the key to the other instance."""
        source = self.owner(key)
        self.begin_move(key, strategy)
        self.finish_moves()
        if self.owner(key) == source:
            reasons = [status.reason for status in self.driver.statuses.values() if status.reason]
            what = f"the move of key {key!r} was undone: {reasons[-1] if reasons else 'no reason given'}"
            raise UserError(what, hint="run check_deterministic: it names the difference")

    def begin_move(self, key: Any, strategy: str = "live") -> None:
        """As `move`, but rows sent before `finish_moves` arrive while the key moves."""
        if strategy not in STRATEGIES:
            raise UserError(f"strategy {strategy!r}", expected=f"one of: {', '.join(STRATEGIES)}")
        self._moves += 1
        source = self.owner(key)
        destination = next(other for other in INSTANCES if other != source)
        keys = KeySet(keys=frozenset([self._key(key)]))
        self.driver.move(keys, source, destination, strategy, f"move-{self._moves}")
        self.driver.restart_exited()

    def finish_moves(self) -> None:
        self.driver.finish_moves()

    def crash(self, *, after_checkpoint: bool = False) -> None:
        """Kill every process and restart it from its last checkpoint, with a replay of the log."""
        if after_checkpoint:
            self.driver.checkpoint()
        self.driver.crash()
        self.driver.finish_moves()

    def advance_time(self, ms: int) -> None:
        """Processing time jumps ahead; timers that have become due fire once, at the new time."""
        if ms < 0:
            raise UserError(f"{ms} ms", expected="0 or more: time does not go back")
        self.driver.jump_to_ms(self.driver.now_ms + ms)
        self.driver.restart_exited()

    def watermark(self, ms: int) -> None:
        """Promise that no row at or before this event time follows."""
        if self.driver.topology.operators[OPERATOR].time_mode != "eventTime":
            raise UserError("a watermark without event time", hint='give time_mode="eventTime"')
        self._produce([], watermark_ms=ms)

    def _produce(self, rows: list[Row], **options: Any) -> None:
        self.driver.produce(SITE, *rows, producer=PRODUCER, stream=INPUT, **options)
        self.driver.restart_exited()

    # -- what can be seen --------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        return int(self.driver.now_ms)

    def owner(self, key: Any) -> str:
        """The instance that emits for this key."""
        return self.driver.owner_of(self._key(key))

    def outputs(self, key: Any = None) -> list[Any]:
        """The rows of the output stream; with a key only those that this key's calls made."""
        return [row for _, row in self.keyed_outputs(key)]

    def keyed_outputs(self, key: Any = None) -> list[tuple[tuple[Any, ...], Any]]:
        """As `outputs`, each row with its key."""
        return [
            (self.columns.key_values(output.key), self._row(self.output.unpack(payload)))
            for output in self._logged(OUTPUT, key)
            for payload in split(output.row[2])
        ]

    def dead_letters(self, key: Any = None) -> list[tuple[str, tuple[Any, ...] | str]]:
        """(reason, row) of what was refused; instead of a row `timer` for a timer."""
        dead_letters = [output.row[2] for output in self._logged(DEAD_LETTERS, key)]
        return [(dead[0], self._refused(dead[3])) for dead in dead_letters]

    def state(self, key: Any) -> dict[str, Any]:
        """The key's state variables as user code sees them; those without a value are left out."""
        state = self._state(key)
        return {} if state is None else {name: self._shown(name, v) for name, v in state.values.items()}

    def timers(self, key: Any) -> list[int]:
        state = self._state(key)
        return [] if state is None else sorted(state.timers)

    def known_keys(self) -> list[tuple[Any, ...]]:
        """Every key that has state or timers."""
        return [self.columns.key_values(key) for key in self.driver.keys_with_state()]

    # -- in the core's terms -----------------------------------------------------------------

    def _key(self, key: Any) -> Key:
        return self._key_alone.key_of(tuple(key) if isinstance(key, tuple | list) else (key,))

    def _state(self, key: Any) -> KeyState | None:
        return self.driver.state_of(self._key(key))

    def _logged(self, stream: str, key: Any) -> list[Output]:
        found = self.driver.outputs(stream)
        return found if key is None else [output for output in found if output.key == self._key(key)]

    def _refused(self, row: bytes) -> tuple[Any, ...] | str:
        payload = msgspec.msgpack.decode(row)
        return "timer" if payload == "timer" else tuple(self.columns.unpack(payload))

    def _shown(self, name: str, kept: Any) -> Any:
        variable = self.variables[name]
        columns = variable_codec(name, variable.schema)
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
                keys = variable_codec(name, variable.key_schema)
                return {keys.values(k): show(v) for k, v in kept.items()}
