"""The patches of the planted bugs in state and timers of user code, which only the model can notice.

Responsible for: one patch per planted bug, of a method that processors call or that calls them.
Not responsible for: planting it (planting.py), the promise that it breaks (mutants.py).

The first reference runs the same code: it has the same bug.
"""

from __future__ import annotations

from typing import Any

from tiercel.core.instance.user_code import ProcessorRunner
from tiercel.core.state.handle import Handle, ListState, MapState, ValueState, _State
from tiercel.sim.explore.planting import Patch, instead

LATE_MS = 30


def _expiry_ignored(original: Any) -> Any:
    def get(state: Any) -> Any:
        value = state._handle.state.values.get(state._name)
        return value if value is None or state._ttl is None else value[0]

    return get


def _fires_late(original: Any) -> Any:
    return lambda runner, state, key, due_ms, *rest: original(runner, state, key, due_ms - LATE_MS, *rest)


def _fires_last(original: Any) -> Any:
    """Of several timers that are due only the last one fires."""

    def fire(runner: Any, state: Any, key: Any, due_ms: int, *rest: Any) -> None:
        due = sorted(timer for timer in state.timers if timer <= due_ms)
        state.timers.difference_update(due[:-1])
        original(runner, state, key, due_ms, *rest)

    return fire


def _keeps_first(original: Any) -> Any:
    """A second timer of a key is not registered."""
    return lambda handle, at_ms: None if handle.state.timers else original(handle, at_ms)


def _unsorted(original: Any) -> Any:
    return lambda state: list(state._live().items())


def _prepends(original: Any) -> Any:
    def append(state: Any, value: Any) -> None:
        original(state, value)
        elements = state._writable()
        elements.insert(0, elements.pop())

    return append


PATCHES: dict[str, tuple[Patch, ...]] = {
    "time-to-live-ignored": (Patch(ValueState, "get", _expiry_ignored),),
    "values-not-cleared": (Patch(_State, "clear", instead(None)),),
    "lists-are-stacks": (Patch(ListState, "appendValue", _prepends),),
    "maps-in-any-order": (Patch(MapState, "_in_order", _unsorted),),
    "map-keys-not-removed": (Patch(MapState, "removeKey", instead(None)),),
    "timers-fire-late": (Patch(ProcessorRunner, "fire", _fires_late),),
    "only-last-timer-fires": (Patch(ProcessorRunner, "fire", _fires_last),),
    "only-first-timer-kept": (Patch(Handle, "registerTimer", _keeps_first),),
    "timers-not-deleted": (Patch(Handle, "deleteTimer", instead(None)),),
}
