"""Adapters between a processor and its stored state: initial state in stored form, versioned names.

Responsible for: setting a key's initial state without calling user code; variables under the names that their
    schema's version gives them.
Not responsible for: where such state comes from (external_state.py), which version is current
    (schema_evolution.py).
"""

from __future__ import annotations

from typing import Any

import msgspec
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from tiercel.core.state.handle import Handle
from tiercel.spark.state.schema import Facts, stored_name

IMAGE = "state"  # the column with a key's whole state, next to the key columns

_Image = tuple[dict[str, tuple[str, Any]], list[int]]  # values and timers, frozen by core/state/handle.py
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Image).decode


def encode_image(values: dict[str, tuple[str, Any]], timers: list[int]) -> bytes:
    return _encode((values, timers))


def decode_image(data: bytes) -> _Image:
    return _decode(data)  # type: ignore[no-any-return]


def with_stored_state(processor: StatefulProcessor) -> type[StatefulProcessor]:
    """A subclass of the processor's class that sets initial state without calling user code."""
    kind: Any = type(processor)

    class WithStoredState(kind):  # type: ignore[misc]
        """Its keys may begin with state that was stored elsewhere."""

        def init(self, handle: Handle) -> None:
            self.__handle = handle
            super().init(handle)

        def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
            self.__handle.install(*decode_image(initialState[IMAGE]))

    return WithStoredState


def with_versioned_names(facts: Facts, processor: StatefulProcessor) -> type[StatefulProcessor]:
    """A subclass of the processor's class that stores its variables under versioned names."""
    kind: Any = type(processor)

    class WithVersionedNames(kind):  # type: ignore[misc]
        """Declares its variables under their own names."""

        def init(self, handle: Handle) -> None:
            super().init(RenamedState(handle, facts))

    return WithVersionedNames


class RenamedState:
    """PySpark's handle, with versioned names."""

    def __init__(self, handle: Handle, facts: Facts) -> None:
        self._handle, self._facts = handle, facts

    def _version(self, name: str) -> int:
        return self._facts[name].version if name in self._facts else 1

    def getValueState(self, stateName: str, *arguments: Any, **more: Any) -> Any:
        return self._handle.getValueState(self._name(stateName), *arguments, **more)

    def getListState(self, stateName: str, *arguments: Any, **more: Any) -> Any:
        return self._handle.getListState(self._name(stateName), *arguments, **more)

    def getMapState(self, stateName: str, *arguments: Any, **more: Any) -> Any:
        return self._handle.getMapState(self._name(stateName), *arguments, **more)

    def _name(self, variable: str) -> str:
        return stored_name(variable, self._version(variable))

    def deleteIfExists(self, stateName: str) -> None:
        """Deletes the values of every version of a variable."""
        for version in range(1, self._version(stateName) + 1):
            self._handle.deleteIfExists(stored_name(stateName, version))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)
