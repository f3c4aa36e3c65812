"""The table of an instance's keys: due timers, empty keys, detached keys."""

from __future__ import annotations

from tiercel.core.model.keys import StateImage
from tiercel.core.state.table import StateTable


def space() -> StateTable:
    return StateTable(4, lambda key: 1, lambda key: (key,))


def test_due_timers_are_found_in_order_and_once() -> None:
    keys = space()
    for key, timers in ((b"a", [30, 10]), (b"b", [5]), (b"c", [99])):
        state = keys.state(key)
        state.timers = set(timers)
        keys.touched(key, state, timers)
    assert keys.due(30) == [b"b", b"a"]
    assert keys.due(30) == []
    assert keys.has_timers


def test_an_emptied_key_is_removed_and_its_deletion_is_dirty() -> None:
    keys = space()
    keys.touched(b"a", keys.state(b"a"), [])
    assert keys.keys == {}
    assert keys.by_slot == {}
    assert keys.dirty == {b"a": None}


def test_a_detached_key_has_no_due_timers() -> None:
    keys = space()
    keys.install(StateImage(b"a", 1, 0, {"v": ("value", (1,))}, (10,)), 1)
    taken = keys.detach([b"a", b"unknown"])
    assert list(taken) == [b"a"]
    assert keys.due(99) == []
