"""Checkpoints in slices: a few keys at a time, all as of one entry, valid with the last slice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines_in_memory import REQUESTER, SLOTS, SmallDeployment, key_in, topology
from tiercel.core import messages as m
from tiercel.core.instance.checkpoint_loader import load
from tiercel.core.machine.events import TimerFired
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.machine.step import Step
from tiercel.core.machine.stored import CheckpointHeader
from tiercel.core.model.keys import KeySet
from tiercel.core.settings import Settings

ME = "op@a#0"
KEYS = [b"k%d" % n for n in range(7)]


class Play:
    """One instance with seven keys; a checkpoint takes four slices of two keys."""

    def __init__(self, **settings: Any) -> None:
        self.driver = SmallDeployment(topology(["a"]), Settings(slice_keys=2, **settings)).start()
        self.produce(*KEYS)

    def produce(self, *keys: bytes) -> None:
        self.driver.produce("a", *[(key, 0, ("x", 1)) for key in keys])

    def fire(self, kind: TimerKind) -> None:
        self.driver.timers.pop((ME, Timer(kind)), None)
        self.driver.handle(ME, TimerFired(Timer(kind)))

    @property
    def writing(self) -> bool:
        return (ME, Timer(TimerKind.SLICE)) in self.driver.timers

    def write_all(self) -> None:
        while self.writing:
            self.fire(TimerKind.SLICE)

    def stored(self, generation: int) -> set[bytes]:
        disk = self.driver.disks[ME]
        return {place[2] for place in disk if place[0] == "state" and place[3] == generation}

    @property
    def cursor(self) -> CheckpointHeader | None:
        found: CheckpointHeader | None = self.driver.disks[ME].get(("checkpoint",))
        return found

    def states(self) -> dict[bytes, Any]:
        space = self.driver.machines[ME].space
        read = self.driver.versions(ME, [space.stored_at(key) for key in space.evicted])
        evicted = {place[2]: space.restored(image, place[3]) for place, (image, _) in read.items()}
        return {key: state.image(key, 0, 0, 0).values for key, state in (space.keys | evicted).items()}


def test_a_checkpoint_is_valid_only_with_its_last_slice() -> None:
    play = Play()
    play.fire(TimerKind.CHECKPOINT)
    assert len(play.stored(1)) == 2
    assert play.cursor is None
    play.fire(TimerKind.SLICE)
    assert len(play.stored(1)) == 4
    play.write_all()
    assert play.stored(1) == set(KEYS)
    assert play.cursor is not None
    assert play.cursor.generation == 1


def test_a_checkpoint_holds_keys_as_they_were_when_it_began() -> None:
    play = Play()
    before = play.states()
    play.fire(TimerKind.CHECKPOINT)
    applied = play.driver.machines[ME].applied
    play.produce(*KEYS)
    play.write_all()
    images = {p[2]: image.values for p, image in play.driver.disks[ME].items() if p[0] == "state"}
    assert images == before
    assert play.cursor is not None
    assert play.cursor.applied == applied


def test_slices_of_an_unfinished_checkpoint_are_never_loaded() -> None:
    play = Play()
    play.fire(TimerKind.CHECKPOINT)
    play.write_all()
    play.produce(*KEYS)
    play.fire(TimerKind.CHECKPOINT)
    assert len(play.stored(2)) == 2
    expected = play.states()
    play.driver.restart(ME)
    assert play.states() == expected, "replayed from the whole checkpoint"
    play.produce(KEYS[0])
    expected = play.states()
    play.fire(TimerKind.CHECKPOINT)
    play.write_all()
    play.driver.restart(ME)
    assert play.states() == expected
    assert play.stored(2) == set()


def test_a_checkpoint_without_dirty_keys_uses_up_its_generation() -> None:
    """Found by seed 583: slices of an unfinished checkpoint had the generation of the stored header."""
    play = Play()
    play.fire(TimerKind.CHECKPOINT)
    play.write_all()
    play.fire(TimerKind.CHECKPOINT)
    play.write_all()
    assert play.stored(2) == set()
    play.driver.restart(ME)
    play.produce(*KEYS)
    play.fire(TimerKind.CHECKPOINT)
    expected = play.states()
    assert len(play.stored(3)) == 2
    play.driver.restart(ME)
    assert play.states() == expected


def test_generations_of_discarded_versions_are_not_reused() -> None:
    play = Play()
    checkpointer = play.driver.machines[ME].checkpointer
    checkpointer.discard(
        {("checkpoint",): CheckpointHeader(9, 1, 1, 0, 0, []), ("state", 0, KEYS[0], 4): None}
    )
    assert checkpointer.generation == 9


def test_a_checkpoint_deletes_the_versions_that_it_replaces() -> None:
    play = Play()
    for generation in (1, 2, 3):
        play.produce(*KEYS)
        play.fire(TimerKind.CHECKPOINT)
        play.write_all()
        places = [place for place in play.driver.disks[ME] if place[0] == "state"]
        assert sorted(places) == sorted((*place[:3], generation) for place in places)
        assert len(places) == len(KEYS)


@pytest.mark.parametrize("swept", [0, 1, 2])
def test_a_deleted_key_is_not_restored_from_a_version_not_yet_swept(swept: int) -> None:
    play = Play()
    play.fire(TimerKind.CHECKPOINT)
    play.write_all()
    play.produce(*KEYS)
    play.fire(TimerKind.CHECKPOINT)
    while len(play.stored(2)) < len(KEYS):
        play.fire(TimerKind.SLICE)
    for _ in range(swept):
        play.fire(TimerKind.SLICE)
    instance = play.driver.machines[ME]
    instance.space.discard(KEYS[3])
    play.fire(TimerKind.CHECKPOINT)
    play.write_all()
    play.driver.restart(ME)
    assert set(play.states()) == set(KEYS) - {KEYS[3]}


def test_slices_of_an_abandoned_checkpoint_are_deleted_even_if_the_load_missed_them() -> None:
    """Found by seed 419: the instance was reset in the same incarnation before the slices were on disk."""
    play = Play()
    play.fire(TimerKind.CHECKPOINT)
    play.write_all()
    whole = dict(play.driver.disks[ME])
    play.produce(*KEYS)
    play.fire(TimerKind.CHECKPOINT)
    assert len(play.stored(2)) == 2
    instance = play.driver.machines[ME]
    applied = instance.applied
    instance.reset()
    load(Step(0.0), instance, whole, 0, -1)
    instance.loaded, instance.applied, instance.durable = True, applied, applied
    play.fire(TimerKind.CHECKPOINT)
    play.write_all()
    assert play.cursor is not None
    assert play.cursor.generation > 2
    assert play.stored(2) == set()


@given(
    st.lists(
        st.one_of(st.sampled_from(KEYS), st.just("look"), st.just("crash"), st.just("checkpoint")),
        max_size=40,
    )
)
def test_a_crash_at_any_slice_restores_the_same_state(script: list[bytes | str]) -> None:
    play = Play()
    for act in script:
        if isinstance(act, bytes):
            play.produce(act)
        elif act == "look" and play.writing:
            play.fire(TimerKind.SLICE)
        elif act == "checkpoint":
            play.fire(TimerKind.CHECKPOINT)
        elif act == "crash":
            expected = play.states()
            play.driver.restart(ME)
            assert play.states() == expected
    expected = play.states()
    play.driver.restart(ME)
    assert play.states() == expected


def test_a_move_checkpoints_only_its_incoming_keys_and_is_forgotten_soon_after() -> None:
    """Each part of a large move used to write all dirty keys, and rows waited for it."""
    driver = SmallDeployment(topology(["a", "b"])).start()
    source, destination = ME, "op@b#0"
    moved, own = (
        next(key_in(slot) for slot in range(SLOTS) if driver.owner_of(key_in(slot), at="a") == owner)
        for owner in (source, destination)
    )
    driver.advance_ms(1_100)  # the first checkpoint of an incarnation holds every key
    driver.produce("a", (moved, 0, 0), (own, 0, 0))
    before = len(driver.writes[destination])
    driver.move(KeySet(keys=frozenset({moved})), source, destination)
    driver.advance_ms(50)
    assert driver.messages("a", REQUESTER, m.MoveStatus)[-1].phase == "done"
    written = [place for write in driver.writes[destination][before:] for place in write.puts]
    assert {place[0] for place in written} == {"move", "checkpoint"}
    driver.advance_ms(driver.settings.tidy_ms + 50)
    assert driver.phase_of("m1", "source router") == ""
    assert driver.phase_of("m1", "destination router") == ""
    stored = {(place[0], place[2]) for place in driver.disks[destination] if place[0] in ("state", "move")}
    assert stored == {("state", moved), ("state", own)}
