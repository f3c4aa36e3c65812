"""A checkpoint is written a few keys at a time, holds all of them as of one entry, and counts when whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from playing import BOSS, Stage, key_in, topology
from tiercel.core import messages as m
from tiercel.core.checkpoints import load
from tiercel.core.events import TimerFired
from tiercel.core.keyed import KeyState
from tiercel.core.keyspace import KeySpace
from tiercel.core.records import KeySet
from tiercel.core.settings import Settings
from tiercel.core.snapshots import Digests, Snapshot
from tiercel.core.taken import Cursor

ME = "op@a#0"
KEYS = [b"k%d" % n for n in range(7)]


class Play:
    """One instance with seven keys; a checkpoint takes four slices of two keys."""

    def __init__(self, **settings: Any) -> None:
        self.stage = Stage(topology(["a"]), Settings(slice_keys=2, **settings)).start()
        self.say(*KEYS)

    def say(self, *keys: bytes) -> None:
        self.stage.produce("a", *[(key, 0, ("x", 1)) for key in keys])

    def fire(self, timer: str) -> None:
        self.stage.timers.pop((ME, timer), None)
        self.stage.give(ME, TimerFired(timer))

    @property
    def writing(self) -> bool:
        return (ME, "slice") in self.stage.timers

    def write_all(self) -> None:
        while self.writing:
            self.fire("slice")

    def stored(self, generation: int) -> set[bytes]:
        disk = self.stage.disks[ME]
        return {place[2] for place in disk if place[0] == "state" and place[3] == generation}

    @property
    def cursor(self) -> Cursor | None:
        found: Cursor | None = self.stage.disks[ME].get(("cursor",))
        return found

    def states(self) -> dict[bytes, Any]:
        space = self.stage.machines[ME].space
        found = {key: space.peek(key) for key in (*space.keys, *space.cold)}
        return {key: state.image(key, 0, 0, 0).values for key, state in found.items() if state is not None}


def test_a_checkpoint_takes_several_steps_and_counts_with_the_last() -> None:
    play = Play()
    play.fire("checkpoint")
    assert len(play.stored(1)) == 2
    assert play.cursor is None
    play.fire("slice")
    assert len(play.stored(1)) == 4
    play.write_all()
    assert play.stored(1) == set(KEYS)
    assert play.cursor is not None
    assert play.cursor.generation == 1


def test_a_key_that_changes_meanwhile_is_in_it_as_it_was() -> None:
    play = Play()
    before = play.states()
    play.fire("checkpoint")
    applied = play.stage.machines[ME].applied
    play.say(*KEYS)
    play.write_all()
    images = {p[2]: image.values for p, image in play.stage.disks[ME].items() if p[0] == "state"}
    assert images == before
    assert play.cursor is not None
    assert play.cursor.applied == applied


def test_of_an_unfinished_checkpoint_nothing_counts_also_after_the_next_one() -> None:
    play = Play()
    play.fire("checkpoint")
    play.write_all()
    play.say(*KEYS)
    play.fire("checkpoint")
    assert len(play.stored(2)) == 2
    expected = play.states()
    play.stage.restart(ME)
    assert play.states() == expected, "replayed from the whole checkpoint"
    play.say(KEYS[0])
    expected = play.states()
    play.fire("checkpoint")
    play.write_all()
    play.stage.restart(ME)
    assert play.states() == expected
    assert play.stored(2) == set()


def test_a_checkpoint_without_dirty_keys_has_a_number_that_is_not_used_again() -> None:
    """Seed 583 of the simulator: slices of an unfinished checkpoint had the number of the stored cursor."""
    play = Play()
    play.fire("checkpoint")
    play.write_all()
    play.fire("checkpoint")
    play.write_all()
    assert play.stored(2) == set()
    play.stage.restart(ME)
    play.say(*KEYS)
    play.fire("checkpoint")
    expected = play.states()
    assert len(play.stored(3)) == 2
    play.stage.restart(ME)
    assert play.states() == expected


def test_no_number_of_what_is_discarded_is_used_again_while_it_is_still_there() -> None:
    play = Play()
    checkpointer = play.stage.machines[ME].checkpointer
    checkpointer.discard({("cursor",): Cursor(9, 1, 1, 0, 0, []), ("state", 0, KEYS[0], 4): None})
    assert checkpointer.generation == 9


def test_older_versions_go_when_newer_ones_count() -> None:
    play = Play()
    for generation in (1, 2, 3):
        play.say(*KEYS)
        play.fire("checkpoint")
        play.write_all()
        places = [place for place in play.stage.disks[ME] if place[0] == "state"]
        assert sorted(places) == sorted((*place[:3], generation) for place in places)
        assert len(places) == len(KEYS)


@pytest.mark.parametrize("swept", [0, 1, 2])
def test_a_key_that_is_gone_is_not_brought_back_by_a_version_that_was_still_to_be_swept(swept: int) -> None:
    play = Play()
    play.fire("checkpoint")
    play.write_all()
    play.say(*KEYS)
    play.fire("checkpoint")
    while len(play.stored(2)) < len(KEYS):
        play.fire("slice")
    for _ in range(swept):
        play.fire("slice")
    instance = play.stage.machines[ME]
    instance.space.discard(KEYS[3])
    play.fire("checkpoint")
    play.write_all()
    play.stage.restart(ME)
    assert set(play.states()) == set(KEYS) - {KEYS[3]}


def test_what_was_written_of_a_checkpoint_that_was_given_up_goes_also_if_the_disk_did_not_show_it() -> None:
    """Seed 419 of the simulator: begun anew in the same life, on a disk that had not yet taken the slices."""
    play = Play()
    play.fire("checkpoint")
    play.write_all()
    whole = dict(play.stage.disks[ME])
    play.say(*KEYS)
    play.fire("checkpoint")
    assert len(play.stored(2)) == 2
    instance = play.stage.machines[ME]
    applied = instance.applied
    instance.reset()
    load(instance, whole, 0, -1)
    instance.loaded, instance.applied, instance.durable = True, applied, applied
    play.fire("checkpoint")
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
def test_wherever_it_dies_it_comes_back_as_it_was(script: list[bytes | str]) -> None:
    play = Play()
    for act in script:
        if isinstance(act, bytes):
            play.say(act)
        elif act == "look" and play.writing:
            play.fire("slice")
        elif act == "checkpoint":
            play.fire("checkpoint")
        elif act == "crash":
            expected = play.states()
            play.stage.restart(ME)
            assert play.states() == expected
    expected = play.states()
    play.stage.restart(ME)
    assert play.states() == expected


# -- snapshots ---------------------------------------------------------------------------------


def space_of(*keys: bytes) -> KeySpace:
    space = KeySpace(4, lambda key: 1, lambda key: (key,))
    for key in keys:
        space.state(key).values["v"] = (0,)
    return space


def test_every_key_is_looked_at_once_before_it_changes() -> None:
    space = space_of(*KEYS)
    seen: list[tuple[bytes, int]] = []

    def look(key: bytes, state: KeyState) -> None:
        seen.append((key, state.values["v"][0]))

    snapshot = Snapshot(dict(space.keys), look)
    space.watch(snapshot)
    snapshot.look_at(2)
    for key in KEYS:
        space.about_to_change([key])
        space.keys[key].values["v"] = (1,)
    assert snapshot.look_at(10) == 0
    assert sorted(seen) == [(key, 0) for key in KEYS]


def test_a_snapshot_follows_its_keys_into_another_space() -> None:
    arriving, own = space_of(KEYS[0]), space_of(KEYS[1])
    digests = Digests(arriving, [KEYS[0], KEYS[2]])
    expected = arriving.keys[KEYS[0]].digest()
    own.absorb(arriving)
    own.about_to_change([KEYS[0]])
    own.keys[KEYS[0]].values["v"] = (1,)
    assert digests.complete
    assert digests.found == {KEYS[0]: expected, KEYS[2]: 0}


def test_a_move_writes_only_the_keys_that_arrive_and_is_let_go_soon_after() -> None:
    """It wrote all that had changed, for each piece of a large move, and every tuple queued behind that."""
    stage = Stage(topology(["a", "b"])).start()
    source, destination = ME, "op@b#0"
    routes = stage.machines["a"].inboxes["op"].table
    moved, own = (
        next(key_in(n) for n in range(routes.count) if routes.slots[n].instance == owner)
        for owner in (source, destination)
    )
    stage.pass_ms(1_100)  # the first checkpoint of a life is one of everything
    stage.produce("a", (moved, 0, 0), (own, 0, 0))
    before = len(stage.writes[destination])
    stage.move(KeySet(keys=frozenset({moved})), source, destination)
    stage.pass_ms(50)
    assert stage.said("a", BOSS, m.MoveStatus)[-1].phase == "done"
    written = [place for write in stage.writes[destination][before:] for place in write.puts]
    assert {place[0] for place in written} == {"move", "cursor"}
    stage.pass_ms(stage.settings.tidy_ms + 50)
    assert not stage.machines["a"].departures
    assert not stage.machines["b"].arrivals
    kept = {(place[0], place[2]) for place in stage.disks[destination] if place[0] in ("state", "move")}
    assert kept == {("state", moved), ("state", own)}
