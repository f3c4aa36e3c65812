"""The routing table: look-ups, updates by epoch, overrides and slots, invalid key sets."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines_in_memory import SLOTS, key_in, topology
from tiercel.core.errors import InvalidRequest
from tiercel.core.model.keys import KeySet
from tiercel.core.model.routing import Route, RouteUpdate, RoutingTable, check_keys, overlap, slot_of

OPERATOR = topology().operators["op"]
A, B, C = "op@a#0", "op@b#0", "op@c#0"
KEY = key_in(0)
SLOT_0 = KeySet(slots=frozenset({0}))


def table() -> RoutingTable:
    return RoutingTable.initial(OPERATOR)


def slots(**routes: tuple[str, int]) -> RouteUpdate:
    return RouteUpdate({int(s[1:]): Route(*r) for s, r in routes.items()}, {})


def key(owner: str, epoch: int) -> RouteUpdate:
    return RouteUpdate({}, {KEY: Route(owner, epoch)})


# -- look-ups ----------------------------------------------------------------------------------


def test_slots_are_spread_in_ranges_over_the_first_instances() -> None:
    assert table().slots == [Route(A, 1), Route(A, 1), Route(B, 1), Route(B, 1)]


def test_the_slot_of_a_key_never_changes() -> None:
    assert [slot_of(k, 4096) for k in (b"", b"a", b"key-1")] == [1218, 3615, 2553]


def test_an_override_precedes_its_slot_and_concerns_no_other_key() -> None:
    t = table()
    assert t.route(KEY) == Route(A, 1)
    assert t.take(key(B, 2))
    assert t.route(KEY) == Route(B, 2)
    assert t.route(key_in(0, 1)) == Route(A, 1)
    assert t.owners() == {A, B}


# -- updates -----------------------------------------------------------------------------------


def test_an_update_changes_only_entries_with_an_older_epoch() -> None:
    t = table()
    assert t.take(slots(s0=(B, 3)))
    for stale in (slots(s0=(C, 2)), slots(s0=(C, 3)), slots(s0=(B, 3))):
        assert not t.take(stale)
    assert t.slots[0] == Route(B, 3)


def test_entries_have_epochs_of_their_own() -> None:
    t = table()
    assert t.take(slots(s0=(B, 9)))
    assert t.take(slots(s1=(B, 2))), "the epochs of two slots are independent"


def test_a_newer_slot_sweeps_older_overrides() -> None:
    t = table()
    t.take(key(B, 2))
    assert t.take(slots(s0=(C, 3)))
    assert t.overrides == {}
    assert t.route(KEY) == Route(C, 3)


def test_an_override_that_is_newer_than_the_slot_stays() -> None:
    t = table()
    t.take(key(B, 5))
    assert t.take(slots(s0=(C, 3)))
    assert t.route(KEY) == Route(B, 5)
    assert t.route(key_in(0, 1)) == Route(C, 3)


def test_an_override_that_the_slot_lists_stays_although_it_is_older() -> None:
    t = table()
    t.take(key(B, 2))
    assert t.take(RouteUpdate({0: Route(C, 3)}, {KEY: Route(B, 2)}))
    assert t.route(KEY) == Route(B, 2)


def test_an_older_override_is_accepted_with_the_slot_epoch_that_the_table_has() -> None:
    t = table()
    t.take(slots(s0=(C, 3)))
    assert not t.take(key(B, 2)), "alone it may have been swept"
    assert t.take(RouteUpdate({0: Route(C, 3)}, {KEY: Route(B, 2)}))
    assert t.route(KEY) == Route(B, 2)


# -- flips -------------------------------------------------------------------------------------


def test_a_flip_of_a_key_takes_the_next_epoch_of_its_entry() -> None:
    t = table()
    assert t.moved(KeySet(keys=frozenset({KEY})), A, B) == key(B, 2)
    t.take(key(B, 2))
    assert t.moved(KeySet(keys=frozenset({KEY})), B, A) == key(A, 3), "going home leaves an override"


def test_a_flip_of_a_slot_is_above_the_overrides_that_it_sweeps() -> None:
    t = table()
    t.take(key(A, 7))  # a key that came home
    update = t.moved(SLOT_0, A, B)
    assert update == slots(s0=(B, 8))
    t.take(update)
    assert t.overrides == {}


def test_a_flip_of_a_slot_carries_the_overrides_that_live_elsewhere() -> None:
    t = table()
    t.take(key(C, 7))
    update = t.moved(SLOT_0, A, B)
    assert update == RouteUpdate({0: Route(B, 2)}, {KEY: Route(C, 7)})
    t.take(update)
    assert t.route(KEY) == Route(C, 7)


def test_the_difference_of_two_tables_brings_the_older_one_up_to_date() -> None:
    ours, theirs = table(), table()
    assert ours.difference(theirs) == RouteUpdate({}, {})
    theirs.take(slots(s1=(B, 2)))
    theirs.take(key(C, 4))
    difference = ours.difference(theirs)
    assert difference == RouteUpdate({1: Route(B, 2)}, {KEY: Route(C, 4)})
    ours.take(difference)
    assert (ours.slots, ours.overrides) == (theirs.slots, theirs.overrides)


ROUTES = st.builds(Route, st.sampled_from([A, B, C]), st.integers(1, 6))
UPDATES = st.builds(
    RouteUpdate,
    st.dictionaries(st.integers(0, SLOTS - 1), ROUTES, max_size=3),
    st.dictionaries(st.sampled_from([key_in(s, n) for s in range(2) for n in range(2)]), ROUTES, max_size=3),
)


@given(st.lists(UPDATES, max_size=6))
def test_no_update_lowers_the_epoch_of_an_entry(updates: list[RouteUpdate]) -> None:
    t = table()
    for update in updates:
        before = copy.deepcopy(t)
        changed = bool(t.take(update))
        assert changed == ((before.slots, before.overrides) != (t.slots, t.overrides))
        for slot in range(SLOTS):
            assert t.slots[slot].epoch >= before.slots[slot].epoch
        for k, route in t.overrides.items():
            assert route.epoch >= before.overrides.get(k, route).epoch
        for k in before.overrides.keys() - t.overrides.keys():  # swept
            assert t.route(k).epoch > before.overrides[k].epoch
        assert not t.take(update), "the same update twice changes nothing"


# -- sets of keys ------------------------------------------------------------------------------


def test_a_key_overlaps_its_slot() -> None:
    one_key, other = KeySet(keys=frozenset({KEY})), KeySet(keys=frozenset({key_in(1)}))
    assert overlap(one_key, SLOT_0, SLOTS)
    assert overlap(SLOT_0, one_key, SLOTS)
    assert overlap(one_key, one_key, SLOTS)
    assert not overlap(other, SLOT_0, SLOTS)
    assert not overlap(one_key, other, SLOTS)
    assert not overlap(SLOT_0, KeySet(slots=frozenset({1})), SLOTS)


@pytest.mark.parametrize(
    ("keys", "what", "expected"),
    [
        (KeySet(), "the key set is empty", "at least one slot or one key"),
        (KeySet(frozenset({0}), frozenset({KEY})), "names slots and keys", "one kind"),
        (KeySet(slots=frozenset({SLOTS})), f"slot {SLOTS} is out of range for op", f"0 to {SLOTS - 1}"),
        (KeySet(slots=frozenset({1, -1})), "slot -1 is out of range", f"0 to {SLOTS - 1}"),
    ],
)
def test_an_invalid_key_set_is_refused(keys: KeySet, what: str, expected: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_keys(keys, OPERATOR)
    assert what in refusal.value.what
    assert expected in refusal.value.expected


def test_validating_a_table_names_its_invalid_entry() -> None:
    t = table()
    t.validate([A, B])
    with pytest.raises(InvalidRequest, match=r"unknown instance 'op@b#0'.*expected one of: op@a#0"):
        t.validate([A])
    t.slots[2] = Route(B, 0)
    with pytest.raises(InvalidRequest, match=r"op: entry 2 has epoch 0; expected 1 or more"):
        t.validate()
