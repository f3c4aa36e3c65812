"""Keyed state as user code sees it: PySpark's handle, values, lists, maps, timers, time to live.

Responsible for: the state of the key that is being called, undo when a call raises, images of keys.
Not responsible for: when calls happen (engine.py), where images go (checkpoints, moves).

Names of methods are PySpark's (`StatefulProcessorHandle`): unmodified processors run on this.
Maps and timers iterate in encoded order, so that a replay and a shadow see the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import xxhash

from tiercel.core.records import Key, KeyImage

Undo = list[tuple[Any, Any, Any]]
_MISSING = object()
_encode = msgspec.msgpack.Encoder().encode


class KeyState:
    """The state of one key. `values` holds tuples (value), lists of tuples (list), dicts (map)."""

    __slots__ = ("epoch", "timers", "user_key", "values")

    def __init__(self, epoch: int, user_key: Any) -> None:
        self.values: dict[str, Any] = {}
        self.timers: set[int] = set()
        self.epoch = epoch
        self.user_key = user_key

    @property
    def empty(self) -> bool:
        return not self.values and not self.timers

    def image(self, key: Key, at: int, time_ms: int, watermark_ms: int) -> KeyImage:
        values = None if self.empty else {n: _frozen(v) for n, v in self.values.items()}
        return KeyImage(key, self.epoch, at, values, tuple(sorted(self.timers)), time_ms, watermark_ms)

    def restore(self, image: KeyImage) -> None:
        self.values = {n: _thawed(v) for n, v in (image.values or {}).items()}
        self.timers = set(image.timers)

    def digest(self) -> int:
        """The same for equal state, however it came about."""
        frozen = sorted((n, _frozen(v)) for n, v in self.values.items())
        return xxhash.xxh3_64_intdigest(_encode((frozen, sorted(self.timers))))


def _frozen(value: Any) -> Any:
    """A copy that later changes do not reach, in a canonical order."""
    if type(value) is dict:
        return ("map", tuple(sorted(value.items(), key=lambda kv: _encode(kv[0]))))
    if type(value) is list:
        return ("list", tuple(value))
    return ("value", value)


def _thawed(value: Any) -> Any:
    kind, content = value
    if kind == "map":
        return {_tupled(k): _tupled(v) for k, v in content}
    if kind == "list":
        return [_tupled(v) for v in content]
    return _tupled(content)


def _tupled(value: Any) -> Any:
    """Tuples again, at every depth: on the way they may have become lists."""
    return tuple(_tupled(v) for v in value) if type(value) in (list, tuple) else value


class Handle:
    """What `init(handle)` gets. Bound to one key at a time."""

    def __init__(self, time_mode: str) -> None:
        self.time_mode = time_mode
        self.state: KeyState = KeyState(0, None)
        self.undo: Undo = []
        self.time_ms = 0
        self.new_timers: list[int] = []
        self.opening = True  # state variables are made in init only

    def _declared(self, name: str) -> str:
        if not self.opening:
            msg = f"state variable {name!r}: getXState is allowed in init only"
            raise ValueError(msg)
        return name

    def getValueState(
        self, stateName: str, schema: Any = None, ttlDurationMs: int | None = None
    ) -> ValueState:
        return ValueState(self, self._declared(stateName), ttlDurationMs)

    def getListState(self, stateName: str, schema: Any = None, ttlDurationMs: int | None = None) -> ListState:
        return ListState(self, self._declared(stateName), ttlDurationMs)

    def getMapState(
        self,
        stateName: str,
        userKeySchema: Any = None,
        valueSchema: Any = None,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        return MapState(self, self._declared(stateName), ttlDurationMs)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        if self.time_mode == "none":
            msg = "timers need a time mode: processingTime or eventTime"
            raise ValueError(msg)
        timers = self.state.timers
        if expiryTimestampMs not in timers:
            timers.add(expiryTimestampMs)
            self.undo.append((timers, expiryTimestampMs, None))
            self.new_timers.append(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        timers = self.state.timers
        if expiryTimestampMs in timers:
            timers.discard(expiryTimestampMs)
            self.undo.append((timers, None, expiryTimestampMs))

    def listTimers(self) -> Iterator[int]:
        return iter(sorted(self.state.timers))

    def deleteIfExists(self, stateName: str) -> None:
        self._declared(stateName)
        self.state.values.pop(stateName, None)

    def roll_back(self) -> None:
        """Undo what the call that raised has changed."""
        for container, key, old in reversed(self.undo):
            if type(container) is set:
                if key is not None:
                    container.discard(key)
                    self.new_timers.remove(key)
                else:
                    container.add(old)
            elif type(container) is list:
                container[:] = old
            elif old is _MISSING:
                container.pop(key, None)
            else:
                container[key] = old
        self.undo.clear()


class _State:
    """Common to the three kinds of state variable."""

    __slots__ = ("_handle", "_name", "_ttl")

    def __init__(self, handle: Handle, name: str, ttl_ms: int | None) -> None:
        self._handle = handle
        self._name = name
        self._ttl = ttl_ms

    def _expiry(self) -> int:
        assert self._ttl is not None
        return self._handle.time_ms + self._ttl

    def clear(self) -> None:
        values = self._handle.state.values
        if self._name in values:
            self._handle.undo.append((values, self._name, values.pop(self._name)))


class ValueState(_State):
    """One value per key. With a time to live it is stored as (value, expiry)."""

    __slots__ = ()

    def exists(self) -> bool:
        return self.get() is not None

    def get(self) -> tuple[Any, ...] | None:
        value: Any = self._handle.state.values.get(self._name)
        if value is None or self._ttl is None:
            return value  # type: ignore[no-any-return]
        return None if value[1] <= self._handle.time_ms else value[0]

    def update(self, newValue: Any) -> None:
        if type(newValue) is not tuple:
            newValue = tuple(newValue)
        handle = self._handle
        values = handle.state.values
        handle.undo.append((values, self._name, values.get(self._name, _MISSING)))
        values[self._name] = newValue if self._ttl is None else (newValue, self._expiry())


class ListState(_State):
    """A list per key; with a time to live each element has its own."""

    __slots__ = ()

    def exists(self) -> bool:
        return any(True for _ in self.get())

    def get(self) -> Iterator[tuple[Any, ...]]:
        elements: list[Any] = self._handle.state.values.get(self._name, [])
        if self._ttl is None:
            return iter(list(elements))
        now = self._handle.time_ms
        return iter([value for value, expiry in elements if expiry > now])

    def _writable(self) -> list[Any]:
        handle = self._handle
        values = handle.state.values
        elements: list[Any] | None = values.get(self._name)
        if elements is None:
            handle.undo.append((values, self._name, _MISSING))
            elements = values[self._name] = []
        else:
            handle.undo.append((elements, None, list(elements)))
        return elements

    def _element(self, value: Any) -> Any:
        value = tuple(value)
        return value if self._ttl is None else (value, self._expiry())

    def put(self, newState: Iterable[Any]) -> None:
        elements = [self._element(v) for v in newState]
        if not elements:
            msg = f"list state {self._name!r}: put of an empty list; use clear()"
            raise ValueError(msg)
        self._writable()[:] = elements

    def appendValue(self, newState: Any) -> None:
        self._writable().append(self._element(newState))

    def appendList(self, newState: Iterable[Any]) -> None:
        elements = [self._element(v) for v in newState]
        if not elements:
            msg = f"list state {self._name!r}: appendList of an empty list"
            raise ValueError(msg)
        self._writable().extend(elements)


class MapState(_State):
    """A map per key, iterated in encoded order; with a time to live each entry has its own."""

    __slots__ = ()

    def _live(self) -> dict[Any, Any]:
        entries: dict[Any, Any] = self._handle.state.values.get(self._name, {})
        if self._ttl is None:
            return entries
        now = self._handle.time_ms
        return {k: v[0] for k, v in entries.items() if v[1] > now}

    def exists(self) -> bool:
        return bool(self._live())

    def getValue(self, key: Any) -> Any:
        return self._live().get(tuple(key))

    def containsKey(self, key: Any) -> bool:
        return tuple(key) in self._live()

    def updateValue(self, key: Any, value: Any) -> None:
        handle = self._handle
        values = handle.state.values
        entries = values.get(self._name)
        if entries is None:
            handle.undo.append((values, self._name, _MISSING))
            entries = values[self._name] = {}
        key, value = tuple(key), tuple(value)
        handle.undo.append((entries, key, entries.get(key, _MISSING)))
        entries[key] = value if self._ttl is None else (value, self._expiry())

    def iterator(self) -> Iterator[tuple[Any, Any]]:
        return iter(sorted(self._live().items(), key=lambda kv: _encode(kv[0])))

    def keys(self) -> Iterator[Any]:
        return iter([k for k, _ in self.iterator()])

    def values(self) -> Iterator[Any]:
        return iter([v for _, v in self.iterator()])

    def removeKey(self, key: Any) -> None:
        values = self._handle.state.values
        entries = values.get(self._name)
        key = tuple(key)
        if entries is not None and key in entries:
            self._handle.undo.append((entries, key, entries.pop(key)))
            if not entries:
                self._handle.undo.append((values, self._name, values.pop(self._name)))
