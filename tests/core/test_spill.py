"""Keys that leave memory: only what is stored as it is, and it comes back whoever asks for it."""

from __future__ import annotations

from typing import Any

import pytest

from playing import DictShelf, Stage, topology
from tiercel.core.effects import LoadCheckpoint
from tiercel.core.events import TimerFired
from tiercel.core.faults import CoreBug
from tiercel.core.keyspace import KeySpace
from tiercel.core.records import KeyImage
from tiercel.core.settings import Settings
from tiercel.core.snapshots import Digests

ME = "op@a#0"
KEYS = [b"k%d" % n for n in range(7)]


class Play:
    """One instance with no room for any of its keys; a checkpoint takes slices of two keys."""

    def __init__(self, kind: str = "chained", **settings: Any) -> None:
        limits = Settings(slice_keys=2, **{"memory_bytes_max": 1, "checkpoint_ms": 1e6} | settings)
        self.stage = Stage(topology(["a"], kind), limits, kind).start()

    def say(self, *keys: bytes) -> None:
        self.stage.produce("a", *[(key, 0, ("x", 1)) for key in keys])

    def fire(self, timer: str) -> None:
        self.stage.timers.pop((ME, timer), None)
        self.stage.give(ME, TimerFired(timer))

    def checkpoint(self) -> None:
        self.fire("checkpoint")
        self.write_all()

    def write_all(self) -> None:
        while (ME, "slice") in self.stage.timers:
            self.fire("slice")

    @property
    def space(self) -> KeySpace:
        found: KeySpace = self.stage.machines[ME].space
        return found


def test_without_a_limit_nothing_leaves() -> None:
    play = Play(memory_bytes_max=0)
    play.say(*KEYS)
    play.checkpoint()
    assert set(play.space.keys) == set(KEYS)
    assert not play.space.cold


def test_what_a_stored_checkpoint_holds_leaves_and_what_has_changed_since_stays() -> None:
    play = Play(memory_bytes_max=4_000)  # no checkpoint comes early
    play.say(*KEYS)
    play.fire("checkpoint")
    play.say(KEYS[0])
    play.write_all()
    assert KEYS[0] in play.space.keys
    assert not set(play.space.dirty) & set(play.space.cold)
    assert play.space.cold
    assert play.space.count == len(KEYS)


def test_a_row_brings_its_key_back_as_it_was() -> None:
    play, reference = Play(), Play(memory_bytes_max=0)
    for each in (play, reference):
        each.say(*KEYS)
        each.checkpoint()
        each.say(*KEYS)
        each.say(*KEYS)
    assert play.space.spill.reads >= len(KEYS)
    assert [output.row for output in play.stage.outputs()] == [o.row for o in reference.stage.outputs()]


def test_entries_that_bring_more_than_fits_are_followed_by_an_early_checkpoint() -> None:
    play = Play()
    play.say(*KEYS)
    assert (ME, "slice") in play.stage.timers, "nobody asked for a checkpoint, and it has begun"
    play.write_all()
    assert not play.space.keys


def test_a_new_life_knows_its_keys_and_has_read_none() -> None:
    play = Play()
    play.say(*KEYS)
    play.checkpoint()
    play.stage.restart(ME)
    assert set(play.space.cold) == set(KEYS)
    assert play.space.spill.reads == 0
    assert play.space.members(range(4), ()) == sorted(KEYS)


def test_a_timer_of_a_key_that_is_not_in_memory_fires() -> None:
    play = Play("sessions", retry_ms=1e6)
    play.say(KEYS[0])
    play.checkpoint()
    play.stage.restart(ME)
    assert not play.space.keys
    play.stage.pass_ms(500)
    assert "session" in [output.row[2][2] for output in play.stage.outputs()]
    assert not play.space.has(KEYS[0])


def test_after_a_fall_back_while_a_cursor_is_under_way_all_values_are_loaded() -> None:
    """That cursor may delete yet what the values that are read back would rest on."""
    play = Play()
    play.say(*KEYS)
    play.checkpoint()
    machine = play.stage.machines[ME]
    play.stage.unsynced.add(ME)
    play.say(*KEYS)
    play.fire("checkpoint")
    play.write_all()
    machine.checkpointer.forget()
    assert machine.checkpointer.in_flight
    machine.loaded = False
    machine.session += 1
    asked: list[LoadCheckpoint] = []
    original = play.stage.loaded
    play.stage.loaded = lambda name, values: (asked.append(LoadCheckpoint(values)), original(name, values))[1]  # type: ignore[method-assign]
    play.stage.restart("a")
    assert asked
    assert all(effect.values for effect in asked)


# -- the key space alone -------------------------------------------------------------------------


def cold_space(**options: Any) -> KeySpace:
    """One key in storage."""
    space = KeySpace(4, lambda key: 1, lambda key: (key,), memory_bytes_max=1, **options)
    values = {"v": ("value", (5,)), "old": ("value", (6,))}
    stored = {("state", 0, b"k", 3): KeyImage(b"k", 2, 9, values, (70,))}
    shelf = DictShelf(stored)
    space.spill.shelf = type("Any slot", (), {"read": lambda self, at: shelf.read(("state", 0, *at[2:]))})()
    space.install_cold(b"k", 3, [70])
    return space


def test_a_look_leaves_a_key_where_it_is_and_finding_it_does_not() -> None:
    space = cold_space()
    seen = space.peek(b"k")
    assert seen is not None
    assert (seen.epoch, seen.values["v"]) == (2, (5,))
    assert (space.cold, space.keys) == ({b"k": 3}, {})
    found = space.find(b"k")
    assert found is not None
    assert found.digest() == seen.digest()
    assert (space.cold, list(space.keys)) == ({}, [b"k"])
    assert not space.dirty


def test_a_digest_of_a_key_that_is_not_in_memory_is_that_of_its_state() -> None:
    space = cold_space()
    seen = space.peek(b"k")
    assert seen is not None
    digests = Digests(space, [b"k", b"nobody"])
    digests.look_at(10)
    assert digests.found == {b"k": seen.digest(), b"nobody": 0}


def test_a_timer_that_is_due_brings_its_key_back() -> None:
    space = cold_space()
    assert space.due(69) == []
    assert space.cold
    assert space.due(70) == [b"k"]
    assert space.keys[b"k"].timers == {70}


def test_a_key_that_leaves_with_a_move_is_taken_as_it_is_stored() -> None:
    space = cold_space()
    assert space.detach([b"k", b"nobody"]) == {b"k": None}
    assert not space.has(b"k")
    assert space.by_slot == {}
    assert not space.dirty


def test_variables_that_were_deleted_are_gone_when_a_key_comes_back() -> None:
    space = cold_space(deleted=frozenset({"old"}))
    found = space.find(b"k")
    assert found is not None
    assert found.values == {"v": (5,)}


def test_state_that_comes_from_elsewhere_replaces_what_is_stored() -> None:
    space = cold_space()
    space.install(KeyImage(b"k", 4, 9, {"v": ("value", (8,))}), 4)
    assert not space.cold
    assert space.keys[b"k"].values == {"v": (8,)}


def test_a_key_that_nobody_can_read_is_a_bug_that_names_it() -> None:
    space = cold_space()
    space.spill.shelf = None
    with pytest.raises(CoreBug, match="b'k' is not in memory"):
        space.find(b"k")
