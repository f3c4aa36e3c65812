"""State of a key as user code sees it: values, lists, maps, timers, time to live, undo, images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.core.model.keys import StateImage
from tiercel.core.state.handle import Codec, Handle, KeyState


class Play:
    """One key, and a variable of each kind; a time to live is 10 ms."""

    def __init__(self) -> None:
        handle = self.handle = Handle("processingTime")
        self.value, self.values = handle.getValueState("v"), handle.getListState("l")
        self.map = handle.getMapState("m")
        self.short = handle.getValueState("tv", ttlDurationMs=10)
        self.short_list = handle.getListState("tl", ttlDurationMs=10)
        self.short_map = handle.getMapState("tm", ttlDurationMs=10)
        handle.opening = False
        self.state = handle.state = KeyState(1, ("k",))

    def seen(self) -> tuple[Any, ...]:
        return (
            self.value.get(),
            list(self.values.get()),
            list(self.map.iterator()),
            list(self.handle.listTimers()),
        )


def filled() -> Play:
    play = Play()
    play.value.update((1, "a"))
    play.values.put([(1,), (2,)])
    play.map.updateValue(("x",), (1,))
    play.handle.registerTimer(50)
    play.handle.undo.clear()
    return play


# -- the three kinds ---------------------------------------------------------------------------


def test_a_value_is_there_from_update_to_clear() -> None:
    play = Play()
    assert (play.value.exists(), play.value.get()) == (False, None)
    play.value.update([1, 2])
    assert (play.value.exists(), play.value.get()) == (True, (1, 2))
    play.value.clear()
    assert not play.value.exists()
    assert play.state.empty


def test_a_list_keeps_its_order_and_refuses_an_empty_list() -> None:
    play = Play()
    play.values.put([(1,)])
    play.values.appendValue((2,))
    play.values.appendList([(3,), (4,)])
    assert list(play.values.get()) == [(1,), (2,), (3,), (4,)]
    for empty in (play.values.put, play.values.appendList):
        with pytest.raises(ValueError, match="empty list"):
            empty([])
    assert list(play.values.get()) == [(1,), (2,), (3,), (4,)]


def test_a_value_that_cannot_be_stored_leaves_no_state() -> None:
    play = Play()
    for store in (
        play.value.update,
        play.values.appendValue,
        lambda value: play.map.updateValue(("x",), value),
    ):
        with pytest.raises(TypeError):
            store(5)
    assert play.state.empty


def test_values_are_encoded_when_stored_and_decoded_when_read() -> None:
    handle = Handle("none", lambda name, schema: Codec(lambda v: (str(v[0]),), lambda v: (int(v[0]),), list))
    value, values = handle.getValueState("v"), handle.getListState("l")
    mapped = handle.getMapState("m")
    value.update((1,))
    values.put([(1,), (2,)])
    mapped.updateValue((3,), (4,))
    assert handle.state.values == {"v": ("1",), "l": [("1",), ("2",)], "m": {("3",): ("4",)}}
    assert (value.get(), list(values.get())) == ((1,), [(1,), (2,)])
    assert (list(mapped.iterator()), mapped.containsKey((3,))) == ([((3,), (4,))], True)
    assert (mapped.getValue((3,)), mapped.getValue((5,))) == (["4"], None)
    mapped.removeKey((3,))
    assert not mapped.exists()


@pytest.mark.parametrize("mode", ["none", "eventTime"])
def test_a_time_to_live_needs_processing_time(mode: str) -> None:
    with pytest.raises(ValueError, match="needs time mode processingTime"):
        Handle(mode).getListState("l", ttlDurationMs=5)


def test_a_name_is_declared_or_deleted_once() -> None:
    handle = Handle("none")
    handle.getValueState("v")
    handle.deleteIfExists("d")
    for again in (handle.getMapState, handle.deleteIfExists):
        for name in ("v", "d"):
            with pytest.raises(ValueError, match="named twice"):
                again(name)


def test_a_map_iterates_in_encoded_order_regardless_of_insertion_order() -> None:
    one, other = Play(), Play()
    keys = [("b",), ("aa",), ("a",), ("c",)]
    for key in keys:
        one.map.updateValue(key, (1,))
    for key in reversed(keys):
        other.map.updateValue(key, (1,))
    assert list(one.map.iterator()) == list(other.map.iterator())
    assert list(one.map.keys()) == [("a",), ("b",), ("c",), ("aa",)]  # shorter ones first: their bytes
    assert one.state.digest() == other.state.digest()


def test_an_emptied_map_counts_as_no_state() -> None:
    play = Play()
    play.map.updateValue(("x",), (1,))
    assert play.map.containsKey(("x",))
    play.map.removeKey(("x",))
    assert not play.map.exists()
    assert play.state.empty


def test_variables_are_declared_in_init_only() -> None:
    handle = Play().handle
    for declare in (handle.getValueState, handle.getListState, handle.getMapState, handle.deleteIfExists):
        with pytest.raises(ValueError, match="init only"):
            declare("late")


def test_timers_are_listed_in_order_and_need_a_time_mode() -> None:
    play = Play()
    for expiry in (30, 10, 20, 10):
        play.handle.registerTimer(expiry)
    play.handle.deleteTimer(20)
    assert list(play.handle.listTimers()) == [10, 30]
    with pytest.raises(ValueError, match="time mode"):
        Handle("none").registerTimer(1)


# -- time to live ------------------------------------------------------------------------------


def test_values_disappear_when_their_time_to_live_is_over() -> None:
    play = Play()
    play.short.update((1,))
    play.short_list.appendValue((1,))
    play.short_map.updateValue(("x",), (1,))
    play.handle.time_ms = 5
    play.short_list.appendValue((2,))
    play.short_map.updateValue(("y",), (2,))
    play.handle.time_ms = 9
    assert play.short.get() == (1,)
    assert list(play.short_list.get()) == [(1,), (2,)]
    play.handle.time_ms = 10
    assert play.short.get() is None
    assert list(play.short_list.get()) == [(2,)]
    assert list(play.short_map.iterator()) == [(("y",), (2,))]
    assert play.short_map.getValue(("x",)) is None
    play.handle.time_ms = 15
    assert (play.short_list.exists(), play.short_map.exists()) == (False, False)


def test_an_update_renews_the_time_to_live() -> None:
    play = Play()
    play.short.update((1,))
    play.handle.time_ms = 9
    play.short.update((2,))
    play.handle.time_ms = 18
    assert play.short.get() == (2,)


# -- undo --------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Play], object]] = {
    "value": lambda p: p.value.update((9,)),
    "value cleared": lambda p: p.value.clear(),
    "value cleared and set": lambda p: (p.value.clear(), p.value.update((9,))),
    "list put": lambda p: p.values.put([(9,)]),
    "list appended twice": lambda p: (p.values.appendValue((8,)), p.values.appendList([(9,)])),
    "list cleared and appended": lambda p: (p.values.clear(), p.values.appendValue((9,))),
    "map entry": lambda p: p.map.updateValue(("x",), (9,)),
    "map emptied": lambda p: p.map.removeKey(("x",)),
    "map emptied and filled": lambda p: (p.map.removeKey(("x",)), p.map.updateValue(("y",), (9,))),
    "map cleared": lambda p: p.map.clear(),
    "timer added": lambda p: p.handle.registerTimer(60),
    "timer deleted": lambda p: p.handle.deleteTimer(50),
    "timer replaced": lambda p: (p.handle.deleteTimer(50), p.handle.registerTimer(50)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("play", [filled, Play], ids=["filled", "empty"])
def test_rollback_undoes_each_kind_of_change(play: Callable[[], Play], change: str) -> None:
    stage = play()
    before, digest = stage.seen(), stage.state.digest()
    CHANGES[change](stage)
    stage.handle.roll_back()
    assert stage.seen() == before
    assert stage.state.digest() == digest


@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=8))
def test_rollback_undoes_any_sequence_of_changes(changes: list[str]) -> None:
    play = filled()
    before = play.seen()
    for change in changes:
        CHANGES[change](play)
    play.handle.roll_back()
    assert play.seen() == before


# -- images ------------------------------------------------------------------------------------

FIELDS = (
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=3) | st.binary(max_size=3)
)
ROWS = st.lists(FIELDS, min_size=1, max_size=3).map(tuple)
STATES = st.fixed_dictionaries(
    {},
    optional={
        "v": ROWS,
        "l": st.lists(ROWS, min_size=1, max_size=3),
        "m": st.dictionaries(ROWS, ROWS, min_size=1, max_size=3),
    },
)


def restored(image: StateImage) -> KeyState:
    state = KeyState(image.epoch, ("k",))
    state.restore(image)
    return state


@given(STATES, st.sets(st.integers(0, 99), max_size=3), st.booleans())
def test_a_key_is_unchanged_after_a_move_or_a_checkpoint(
    values: dict[str, Any], timers: set[int], over_the_wire: bool
) -> None:
    state = KeyState(3, ("k",))
    state.values, state.timers = values, timers
    image = state.image(b"k", 7, 100, 50)
    if over_the_wire:
        image = msgspec.msgpack.decode(msgspec.msgpack.encode(image), type=StateImage)
    again = restored(image)
    assert (again.values, again.timers) == (values, timers)
    assert again.digest() == state.digest()


def test_an_image_does_not_change_when_the_key_does() -> None:
    play = filled()
    image = play.state.image(b"k", 7, 0, -1)
    for change in CHANGES.values():
        change(play)
    assert restored(image).digest() == filled().state.digest()


def test_the_image_of_a_key_without_state_is_marked_absent() -> None:
    assert KeyState(1, None).image(b"k", 7, 0, -1).values is None


def test_a_value_with_a_time_to_live_is_a_tuple_after_a_restart_too() -> None:
    play = Play()
    play.short.update((1, 2))
    image = play.state.image(b"k", 7, 0, -1)
    image = msgspec.msgpack.decode(msgspec.msgpack.encode(image), type=StateImage)
    play.state.restore(image)
    assert play.short.get() == (1, 2)
