"""Eviction: only keys that a checkpoint holds unchanged leave memory, and every use restores them."""

from __future__ import annotations

from typing import Any

import pytest

from machines_in_memory import SmallDeployment, topology
from tiercel.core.errors import CoreBug
from tiercel.core.machine.effects import LoadCheckpoint
from tiercel.core.machine.events import TimerFired
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.model.keys import StateImage
from tiercel.core.settings import Settings
from tiercel.core.state.digests import DigestJob
from tiercel.core.state.table import StateTable

ME = "op@a#0"
KEYS = [b"k%d" % n for n in range(7)]


class Play:
    """One instance with no room for any of its keys; a checkpoint takes slices of two keys."""

    def __init__(self, kind: str = "chained", **settings: Any) -> None:
        limits = Settings(slice_keys=2, **{"memory_bytes_max": 1, "checkpoint_ms": 1e6} | settings)
        self.driver = SmallDeployment(topology(["a"], kind), limits, kind).start()

    def produce(self, *keys: bytes) -> None:
        self.driver.produce("a", *[(key, 0, ("x", 1)) for key in keys])

    def fire(self, kind: TimerKind) -> None:
        self.driver.timers.pop((ME, Timer(kind)), None)
        self.driver.handle(ME, TimerFired(Timer(kind)))

    def checkpoint(self) -> None:
        self.fire(TimerKind.CHECKPOINT)
        self.write_all()

    def write_all(self) -> None:
        while (ME, Timer(TimerKind.SLICE)) in self.driver.timers:
            self.fire(TimerKind.SLICE)

    @property
    def space(self) -> StateTable:
        found: StateTable = self.driver.machines[ME].space
        return found


def test_no_key_is_evicted_without_a_memory_limit() -> None:
    play = Play(memory_bytes_max=0)
    play.produce(*KEYS)
    play.checkpoint()
    assert set(play.space.keys) == set(KEYS)
    assert not play.space.evicted


def test_only_keys_unchanged_since_the_checkpoint_are_evicted() -> None:
    play = Play(memory_bytes_max=4_000)  # no checkpoint comes early
    play.produce(*KEYS)
    play.fire(TimerKind.CHECKPOINT)
    play.produce(KEYS[0])
    play.write_all()
    assert KEYS[0] in play.space.keys
    assert not set(play.space.dirty) & set(play.space.evicted)
    assert play.space.evicted
    assert play.space.count == len(KEYS)


def test_a_row_restores_its_evicted_key_unchanged() -> None:
    play, reference = Play(), Play(memory_bytes_max=0)
    for each in (play, reference):
        each.produce(*KEYS)
        each.checkpoint()
        each.produce(*KEYS)
        each.produce(*KEYS)
    assert play.space.memory_limit.reads >= len(KEYS)
    assert [output.row for output in play.driver.outputs()] == [o.row for o in reference.driver.outputs()]


def test_exceeding_the_memory_limit_starts_a_checkpoint_early() -> None:
    play = Play()
    play.produce(*KEYS)
    assert (ME, Timer(TimerKind.SLICE)) in play.driver.timers, "a checkpoint has begun before its time"
    play.write_all()
    assert not play.space.keys


def test_a_restarted_instance_starts_with_all_keys_evicted() -> None:
    play = Play()
    play.produce(*KEYS)
    play.checkpoint()
    play.driver.restart(ME)
    assert set(play.space.evicted) == set(KEYS)
    assert play.space.memory_limit.reads == 0
    assert play.space.members(range(4), ()) == sorted(KEYS)


def test_a_timer_of_an_evicted_key_fires() -> None:
    play = Play("sessions", retry_ms=1e6)
    play.produce(KEYS[0])
    play.checkpoint()
    play.driver.restart(ME)
    assert not play.space.keys
    play.driver.advance_ms(500)
    assert "session" in [output.row[2][2] for output in play.driver.outputs()]
    assert not play.space.has(KEYS[0])


def test_a_reset_during_a_checkpoint_loads_all_values_into_memory() -> None:
    """The checkpoint in progress may still delete the versions that a lazy load would read."""
    play = Play()
    play.produce(*KEYS)
    play.checkpoint()
    machine = play.driver.machines[ME]
    play.driver.unsynced.add(ME)
    play.produce(*KEYS)
    play.fire(TimerKind.CHECKPOINT)
    play.write_all()
    machine.checkpointer.forget()
    assert machine.checkpointer.in_flight
    machine.loaded = False
    machine.session += 1
    asked: list[LoadCheckpoint] = []
    original = play.driver.loaded
    play.driver.loaded = lambda name, values: (asked.append(LoadCheckpoint(values)), original(name, values))[
        1
    ]  # type: ignore[method-assign]
    play.driver.restart("a")
    assert asked
    assert all(effect.values for effect in asked)


# -- the state table alone -----------------------------------------------------------------------


def table_with_an_evicted_key(**options: Any) -> StateTable:
    """One evicted key, which the driver has read for the event."""
    space = StateTable(4, lambda key: 1, lambda key: (key,), memory_bytes_max=1, **options)
    values = {"v": ("value", (5,)), "old": ("value", (6,))}
    space.install_evicted(b"k", 3, [70])
    space.memory_limit.read_ahead = {space.stored_at(b"k"): (StateImage(b"k", 2, 9, values, (70,)), 100)}
    return space


def test_peek_leaves_a_key_evicted_and_find_restores_it() -> None:
    space = table_with_an_evicted_key()
    seen = space.peek(b"k")
    assert seen is not None
    assert (seen.epoch, seen.values["v"]) == (2, (5,))
    assert (space.evicted, space.keys) == ({b"k": 3}, {})
    found = space.find(b"k")
    assert found is not None
    assert found.digest() == seen.digest()
    assert (space.evicted, list(space.keys)) == ({}, [b"k"])
    assert not space.dirty


def test_the_digest_of_an_evicted_key_equals_that_of_its_state() -> None:
    space = table_with_an_evicted_key()
    seen = space.peek(b"k")
    assert seen is not None
    digests = DigestJob(space, [b"k", b"unknown"])
    digests.look_at(10)
    assert digests.found == {b"k": seen.digest(), b"unknown": 0}


def test_a_due_timer_restores_its_evicted_key() -> None:
    space = table_with_an_evicted_key()
    assert space.due(69) == []
    assert space.evicted
    assert space.due(70) == [b"k"]
    assert space.keys[b"k"].timers == {70}


def test_detaching_an_evicted_key_does_not_restore_it() -> None:
    space = table_with_an_evicted_key()
    assert space.detach([b"k", b"unknown"]) == {b"k": None}
    assert not space.has(b"k")
    assert space.by_slot == {}
    assert not space.dirty


def test_restoring_a_key_drops_its_deleted_variables() -> None:
    space = table_with_an_evicted_key(deleted=frozenset({"old"}))
    found = space.find(b"k")
    assert found is not None
    assert found.values == {"v": (5,)}


def test_installed_state_replaces_the_evicted_version() -> None:
    space = table_with_an_evicted_key()
    space.install(StateImage(b"k", 4, 9, {"v": ("value", (8,))}), 4)
    assert not space.evicted
    assert space.keys[b"k"].values == {"v": (8,)}


def test_finding_an_evicted_key_that_was_not_read_ahead_raises_with_its_name() -> None:
    space = table_with_an_evicted_key()
    space.memory_limit.read_ahead = {}
    with pytest.raises(CoreBug, match="b'k' is not in memory"):
        space.find(b"k")
