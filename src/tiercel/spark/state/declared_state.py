"""The state that a user's processor declares, found by a trial call of its `init` in the driver.

Responsible for: that call, which Spark makes too, and its errors; the codec of a state variable; pickling.
Not responsible for: running the processor (operators/processor_adapter.py), how state is stored (schema.py).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pyspark import cloudpickle
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from tiercel.core.state.handle import Codec, Handle, ListState, MapState, ValueState
from tiercel.errors import UserError
from tiercel.spark.rows.ddl import parse_ddl
from tiercel.spark.rows.row_codec import RowCodec
from tiercel.spark.rows.row_types import row_maker
from tiercel.spark.rows.values import View

TIME_MODES = ("none", "processingTime", "eventTime")
StateKind = Literal["value", "list", "map"]


@dataclass(frozen=True)
class Variable:
    """One state variable as `init` declared it."""

    name: str
    kind: StateKind
    schema: StructType
    key_schema: StructType | None = None  # of a map
    ttl_ms: int | None = None


class DeclaredState(NamedTuple):
    """The state that `init` declares: its variables, and the names of those that it deletes."""

    variables: tuple[Variable, ...] = ()
    deleted: frozenset[str] = frozenset()


def variable_codec(name: str, schema: StructType | str) -> RowCodec:
    """The codec of a state variable's values: user code sees columns, the store has their internal form."""
    if not isinstance(schema, StructType):
        if not isinstance(schema, str):
            raise UserError(f"state variable {name!r}: schema {schema!r}", expected="a StructType or text")
        schema = parse_ddl(schema)
    return RowCodec(schema, view=View.STATE, within=name)


def state_codec(name: str, schema: StructType | str) -> Codec:
    """The core's codec of this variable. Reading is free when no column needs a conversion."""
    columns = variable_codec(name, schema)
    make, show = row_maker(columns.names), columns.values
    if columns.plain:
        return Codec(columns.payload, None, make)
    return Codec(columns.payload, show, lambda stored: make(show(stored)))


class _Recorder(Handle):
    """Records the variables that `init` declares."""

    def __init__(self, time_mode: str) -> None:
        super().__init__(time_mode, state_codec)
        self.variables: list[Variable] = []

    def getValueState(
        self, stateName: str, schema: Any = None, ttlDurationMs: int | None = None
    ) -> ValueState:
        state = super().getValueState(stateName, schema, ttlDurationMs)
        self._record(stateName, "value", schema, None, ttlDurationMs)
        return state

    def getListState(self, stateName: str, schema: Any = None, ttlDurationMs: int | None = None) -> ListState:
        state = super().getListState(stateName, schema, ttlDurationMs)
        self._record(stateName, "list", schema, None, ttlDurationMs)
        return state

    def getMapState(
        self,
        stateName: str,
        userKeySchema: Any = None,
        valueSchema: Any = None,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        state = super().getMapState(stateName, userKeySchema, valueSchema, ttlDurationMs)
        self._record(stateName, "map", valueSchema, userKeySchema, ttlDurationMs)
        return state

    def _record(self, name: str, kind: StateKind, schema: Any, key_schema: Any, ttl_ms: int | None) -> None:
        keys = None if key_schema is None else variable_codec(name, key_schema).schema
        self.variables.append(Variable(name, kind, variable_codec(name, schema).schema, keys, ttl_ms))


def check_processor(processor: Any, time_mode: str = "none") -> tuple[Variable, ...]:
    """The state variables that a processor declares. UserError if it cannot run."""
    return declared_state(processor, time_mode).variables


def declared_state(processor: Any, time_mode: str = "none") -> DeclaredState:
    """Start and close a copy of a processor; returns what it declares. UserError if it cannot run."""
    if isinstance(processor, type):
        what = f"{processor.__name__} is a class"
        raise UserError(what, expected="a processor", hint=f"write {processor.__name__}()")
    name = type(processor).__name__
    if not isinstance(processor, StatefulProcessor):
        what = f"{processor!r:.80} ({name}) is no processor"
        hint = "derive its class from pyspark.sql.streaming.StatefulProcessor"
        raise UserError(what, expected="a StatefulProcessor", hint=hint)
    if time_mode not in TIME_MODES:
        raise UserError(f"time mode {time_mode!r}", expected=f"one of: {', '.join(TIME_MODES)}")
    copied = pickle.loads(pickled(processor))
    handle = _Recorder(time_mode)
    expected = "an init that only declares state variables and prepares the processor"
    hint = (
        "def init(self, handle): self.n = handle.getValueState('n', 'n long'); tiercel.testing.Trial runs it"
    )
    _or_user_error(f"init of {name} failed", expected, hint, lambda: copied.init(handle))
    hint = "it is called once after init, here too; tiercel.testing.Trial runs it"
    _or_user_error(f"close of {name} failed", "a close that releases what init made", hint, copied.close)
    return DeclaredState(tuple(handle.variables), frozenset(handle.deleted))


def pickled(code: Any) -> bytes:
    """Pickle user code, or a plan that holds it. UserError if that is impossible."""
    expected = "code that can be pickled: what cannot (connections, locks) is made in init"
    found = _or_user_error(
        f"{type(code).__name__} cannot be sent to the executors",
        expected,
        "keep what is needed to make them as attributes, and make them in init",
        lambda: cloudpickle.dumps(code),  # type: ignore[no-untyped-call]
    )
    assert isinstance(found, bytes)
    return found


def _or_user_error(what: str, expected: str, hint: str, attempt: Callable[[], Any]) -> Any:
    try:
        return attempt()
    except Exception as error:
        reason = f"{what}: {type(error).__name__}: {error}"
        raise UserError(reason, expected=expected, hint=hint) from error
