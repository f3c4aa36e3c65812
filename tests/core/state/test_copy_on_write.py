"""Snapshots of a table: each key is captured once, before it changes."""

from __future__ import annotations

from tiercel.core.state.copy_on_write import Snapshot
from tiercel.core.state.digests import DigestJob
from tiercel.core.state.handle import KeyState
from tiercel.core.state.table import StateTable

KEYS = [b"k%d" % n for n in range(7)]


def space_of(*keys: bytes) -> StateTable:
    space = StateTable(4, lambda key: 1, lambda key: (key,))
    for key in keys:
        space.state(key).values["v"] = (0,)
    return space


def test_a_snapshot_visits_each_key_once_before_it_changes() -> None:
    space = space_of(*KEYS)
    seen: list[tuple[bytes, int]] = []

    def look(key: bytes, state: KeyState) -> None:
        seen.append((key, state.values["v"][0]))

    snapshot = Snapshot(dict(space.keys), look)
    space.watch(snapshot)
    snapshot.look_at(2)
    for key in KEYS:
        space.before_change([key])
        space.keys[key].values["v"] = (1,)
    assert snapshot.look_at(10) == 0
    assert sorted(seen) == [(key, 0) for key in KEYS]


def test_a_snapshot_stays_valid_when_another_table_absorbs_its_keys() -> None:
    arriving, own = space_of(KEYS[0]), space_of(KEYS[1])
    digests = DigestJob(arriving, [KEYS[0], KEYS[2]])
    expected = arriving.keys[KEYS[0]].digest()
    own.absorb(arriving)
    own.before_change([KEYS[0]])
    own.keys[KEYS[0]].values["v"] = (1,)
    assert digests.complete
    assert digests.found == {KEYS[0]: expected, KEYS[2]: 0}
