"""The state API for user code: PySpark's handle with values, lists, maps, timers and time to live.

Responsible for: the state of the key of the current call, undo when a call raises, images of keys.
Not responsible for: the time of calls (user_code.py), the use of images (checkpoints, moves).

Methods have the names of PySpark's `StatefulProcessorHandle`, so unmodified processors run on it. Maps and
timers iterate in encoded order, so a replay and a destination see the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, NamedTuple, cast

import msgspec
import xxhash

from tiercel.core.model.keys import Key, StateImage

Undo = list[tuple[Any, Any, Any]]
_MISSING = object()
_encode = msgspec.msgpack.Encoder().encode

Convert = Callable[[Any], Any]


class Codec(NamedTuple):
    """The conversions of a state variable: stored values are nested tuples of MessagePack types."""

    keep: Convert = tuple  # from a value of user code to the stored form; raises if it does not fit
    show: Convert | None = None  # from the stored form to user code; None: unchanged
    show_named: Convert | None = None  # the same, with field names


def kept_as_given(name: str, schema: Any) -> Codec:
    """The codec for user code that only uses values in the stored form."""
    return Codec()


NO_TIMERS = cast("set[int]", frozenset())  # of every key that never had a timer: a set takes 200 bytes


class KeyState:
    """The state of one key. `values` holds tuples (value), lists of tuples (list), dicts (map)."""

    __slots__ = ("epoch", "slot", "timers", "user_key", "values")

    def __init__(self, epoch: int, user_key: Any, slot: int = 0) -> None:
        self.values: dict[str, Any] = {}
        self.timers: set[int] = NO_TIMERS
        self.epoch = epoch
        self.user_key = user_key
        self.slot = slot

    @property
    def empty(self) -> bool:
        return not self.values and not self.timers

    def image(self, key: Key, at: int, time_ms: int, watermark_ms: int) -> StateImage:
        values = None if self.empty else {n: _frozen(v) for n, v in self.values.items()}
        return StateImage(key, self.epoch, at, values, tuple(sorted(self.timers)), time_ms, watermark_ms)

    def restore(self, image: StateImage, deleted: Set[str] = frozenset()) -> None:
        self.values = {n: _thawed(v) for n, v in (image.values or {}).items() if n not in deleted}
        self.timers = set(image.timers) if image.timers else NO_TIMERS

    def digest(self) -> int:
        """A digest that depends only on the state, not on the order of its changes."""
        frozen = sorted((n, _frozen(v)) for n, v in self.values.items())
        return xxhash.xxh3_64_intdigest(_encode((frozen, sorted(self.timers))))


def _frozen(value: Any) -> Any:
    """An immutable copy in a canonical order."""
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


def _same(value: Any) -> Any:
    return value


def _tupled(value: Any) -> Any:
    """Convert nested lists back to tuples, after decoding."""
    return tuple(_tupled(v) for v in value) if type(value) in (list, tuple) else value


class Handle:
    """The argument of `init(handle)`. It is bound to one key at a time."""

    def __init__(self, time_mode: str, codec: Callable[[str, Any], Codec] = kept_as_given) -> None:
        self.time_mode = time_mode
        self.deleted: set[str] = set()  # variables of earlier versions of the user's code
        self._codec = codec
        self._names: set[str] = set()
        self.state: KeyState = KeyState(0, None)
        self.undo: Undo = []
        self.time_ms = 0
        self.new_timers: list[int] = []
        self.opening = True  # state variables are created in init only

    def _declared(self, name: str, ttl_ms: int | None = None) -> str:
        if not self.opening:
            msg = f"state variable {name!r}: getXState and deleteIfExists are allowed in init only"
            raise ValueError(msg)
        if name in self._names or name in self.deleted:
            msg = f"state variable {name!r}: it is named twice in init"
            raise ValueError(msg)
        if ttl_ms is not None and self.time_mode != "processingTime":
            msg = f"state variable {name!r}: a time to live needs time mode processingTime"
            raise ValueError(msg)
        return name

    def getValueState(
        self, stateName: str, schema: Any = None, ttlDurationMs: int | None = None
    ) -> ValueState:
        name = self._declared(stateName, ttlDurationMs)
        self._names.add(name)
        return ValueState(self, name, ttlDurationMs, self._codec(name, schema))

    def getListState(self, stateName: str, schema: Any = None, ttlDurationMs: int | None = None) -> ListState:
        name = self._declared(stateName, ttlDurationMs)
        self._names.add(name)
        return ListState(self, name, ttlDurationMs, self._codec(name, schema))

    def getMapState(
        self,
        stateName: str,
        userKeySchema: Any = None,
        valueSchema: Any = None,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        name = self._declared(stateName, ttlDurationMs)
        self._names.add(name)
        keys = self._codec(name, userKeySchema)
        return MapState(self, name, ttlDurationMs, self._codec(name, valueSchema), keys)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        if self.time_mode == "none":
            msg = "timers need a time mode: processingTime or eventTime"
            raise ValueError(msg)
        timers = self.state.timers
        if expiryTimestampMs not in timers:
            if timers is NO_TIMERS:
                timers = self.state.timers = set()
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
        """Keys that still have a variable of this name lose it when they are loaded."""
        self.deleted.add(self._declared(stateName))

    def install(self, values: dict[str, Any], timers: Iterable[int]) -> None:
        """Install state of this key from an image; `roll_back` undoes it like any other change."""
        withheld = self.state.values
        for name, value in values.items():
            self.undo.append((withheld, name, withheld.get(name, _MISSING)))
            withheld[name] = _thawed(value)
        for expiry in timers:
            self.registerTimer(expiry)

    def roll_back(self) -> None:
        """Undo the changes of a call that raised."""
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

    __slots__ = ("_handle", "_keep", "_name", "_show", "_show_named", "_ttl")

    def __init__(self, handle: Handle, name: str, ttl_ms: int | None, codec: Codec) -> None:
        self._handle = handle
        self._name = name
        self._ttl = ttl_ms
        self._keep, self._show, self._show_named = codec

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
        if value is not None and self._ttl is not None:
            value = None if value[1] <= self._handle.time_ms else value[0]
        return value if self._show is None or value is None else self._show(value)  # type: ignore[no-any-return]

    def update(self, newValue: Any) -> None:
        newValue = self._keep(newValue)
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
        if self._ttl is not None:
            now = self._handle.time_ms
            elements = [value for value, expiry in elements if expiry > now]
        return iter(list(elements) if self._show is None else [self._show(value) for value in elements])

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
        value = self._keep(value)
        return value if self._ttl is None else (value, self._expiry())

    def put(self, newState: Iterable[Any]) -> None:
        elements = [self._element(v) for v in newState]
        if not elements:
            msg = f"list state {self._name!r}: put of an empty list; use clear()"
            raise ValueError(msg)
        self._writable()[:] = elements

    def appendValue(self, newState: Any) -> None:
        element = self._element(newState)  # first: a value that does not fit must not leave an empty list
        self._writable().append(element)

    def appendList(self, newState: Iterable[Any]) -> None:
        elements = [self._element(v) for v in newState]
        if not elements:
            msg = f"list state {self._name!r}: appendList of an empty list"
            raise ValueError(msg)
        self._writable().extend(elements)


class MapState(_State):
    """A map per key, iterated in encoded order; with a time to live each entry has its own."""

    __slots__ = ("_keep_key", "_show_key")

    def __init__(self, handle: Handle, name: str, ttl_ms: int | None, codec: Codec, keys: Codec) -> None:
        super().__init__(handle, name, ttl_ms, codec)
        self._keep_key, self._show_key, _ = keys

    def _live(self) -> dict[Any, Any]:
        entries: dict[Any, Any] = self._handle.state.values.get(self._name, {})
        if self._ttl is None:
            return entries
        now = self._handle.time_ms
        return {k: v[0] for k, v in entries.items() if v[1] > now}

    def exists(self) -> bool:
        return bool(self._live())

    def getValue(self, key: Any) -> Any:
        value = self._live().get(self._keep_key(key))
        return value if self._show_named is None or value is None else self._show_named(value)

    def containsKey(self, key: Any) -> bool:
        return self._keep_key(key) in self._live()

    def updateValue(self, key: Any, value: Any) -> None:
        key, value = self._keep_key(key), self._keep(value)
        handle = self._handle
        values = handle.state.values
        entries = values.get(self._name)
        if entries is None:
            handle.undo.append((values, self._name, _MISSING))
            entries = values[self._name] = {}
        handle.undo.append((entries, key, entries.get(key, _MISSING)))
        entries[key] = value if self._ttl is None else (value, self._expiry())

    def iterator(self) -> Iterator[tuple[Any, Any]]:
        key, value = self._show_key or _same, self._show or _same
        return iter([(key(k), value(v)) for k, v in self._in_order()])

    def _in_order(self) -> list[tuple[Any, Any]]:
        return sorted(self._live().items(), key=lambda kv: _encode(kv[0]))

    def keys(self) -> Iterator[Any]:
        return iter([k for k, _ in self.iterator()])

    def values(self) -> Iterator[Any]:
        return iter([v for _, v in self.iterator()])

    def removeKey(self, key: Any) -> None:
        values = self._handle.state.values
        entries = values.get(self._name)
        key = self._keep_key(key)
        if entries is not None and key in entries:
            self._handle.undo.append((entries, key, entries.pop(key)))
            if not entries:
                self._handle.undo.append((values, self._name, values.pop(self._name)))
