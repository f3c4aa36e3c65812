"""Bundles are an encoding of single rows: taking one apart gives the rows that it was made of."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.core.model.bundle import (
    MalformedBundle,
    are_apart,
    bundle,
    bundled,
    check_bundles,
    entries_of,
    is_bundle,
    keys_of,
    may_hold,
    newest_ms,
    open_bundle,
    open_output,
    opened,
    opened_for,
    range_key,
    range_of,
    range_width,
)
from tiercel.core.model.keys import KeySet, slot_of
from tiercel.core.model.log import Output, Row
from tiercel.core.model.row_batch import count_rows, join, split

encode = msgspec.msgpack.encode
SLOTS = 64

KEYS = st.integers(0, 40).map(lambda n: encode((n,)))
ROWS = st.lists(st.tuples(KEYS, st.integers(0, 1000), st.integers().filter(lambda n: abs(n) < 1 << 60)))


def encoded(rows: list[tuple[bytes, int, Any]]) -> list[Row]:
    return [(key, at, encode((value,))) for key, at, value in rows]


def by_key(rows: list[Row]) -> dict[bytes, list[Row]]:
    found: dict[bytes, list[Row]] = {}
    for row in rows:
        found.setdefault(row[0], []).append(row)
    return found


@given(ROWS, st.integers(1, SLOTS))
def test_a_bundle_with_times_stands_for_its_rows_in_their_order(
    made: list[tuple[bytes, int, Any]], width: int
) -> None:
    rows = encoded(made)
    bundles = bundled(rows, SLOTS, width, timed=True)
    assert by_key(opened(bundles)) == by_key(rows)
    assert count_rows(bundles) == len(rows)
    if rows:
        assert newest_ms(bundles) == max(row[1] for row in rows)
        assert min(row[1] for row in bundles) == min(row[1] for row in rows)


@given(ROWS, st.integers(1, SLOTS))
def test_a_bundle_without_times_stands_for_row_batches(
    made: list[tuple[bytes, int, Any]], width: int
) -> None:
    rows = [(key, 0, payload) for key, _, payload in encoded(made)]
    assert by_key(opened(bundled(rows, SLOTS, width, timed=False))) == by_key(join(rows))


@given(ROWS, st.integers(1, SLOTS))
def test_the_keys_of_a_bundle_are_in_its_range_of_slots(
    made: list[tuple[bytes, int, Any]], width: int
) -> None:
    for row in bundled(encoded(made), SLOTS, width, timed=False):
        assert is_bundle(row[0])
        count, slots = range_of(row[0])
        assert count == SLOTS
        assert all(slot_of(key, SLOTS) in slots for key in keys_of(row))
        assert [len(split(row[2]))] == [len(keys_of(row))]


def test_the_number_of_an_input_stays_with_each_row_of_a_bundle() -> None:
    key, at, payload = bundled(encoded([(b"\x91\x01", 5, 7), (b"\x91\x02", 6, 8)]), SLOTS, SLOTS, timed=True)[
        0
    ]
    rows = open_bundle((key, at, (1, payload, b"last")))
    assert rows == [
        (b"\x91\x01", 5, (1, encode((7,)), b"last")),
        (b"\x91\x02", 6, (1, encode((8,)), b"last")),
    ]
    assert count_rows([(key, at, (1, payload))]) == 2


def test_an_output_that_is_a_bundle_stands_for_one_output_per_call() -> None:
    key = range_key(SLOTS, 0, SLOTS - 1)
    row = bundle(key, [b"a", b"a", b"b"], [], [(1,), (2,), (3,)])
    outputs = open_output(Output(9, key, 4, 0, row))
    assert outputs == [
        Output(9, b"a", 4, 0, join([(b"a", 0, encode((1,))), (b"a", 0, encode((2,)))])[0]),
        Output(9, b"b", 4, 0, (b"b", 0, encode((3,)))),
    ]


def test_outputs_for_other_keys_keep_the_key_of_their_call_and_their_number() -> None:
    key = range_key(SLOTS, 0, SLOTS - 1)
    row = bundle(key, [b"x", b"y"], [70, 80], [(1,), (2,)], [b"a", b"a"], [0, 1])
    assert open_output(Output(9, key, 4, 0, row)) == [
        Output(9, b"a", 4, 0, (b"x", 70, encode((1,)))),
        Output(9, b"a", 4, 1, (b"y", 80, encode((2,)))),
    ]


def test_bundles_are_apart_only_if_no_key_can_be_in_two_of_them() -> None:
    low, high, all_of_them = (
        bundled(encoded([(b"k", 0, 1)]), SLOTS, SLOTS, timed=False)[0][1:] for _ in range(3)
    )
    first, second = (range_key(SLOTS, 0, 31), *low), (range_key(SLOTS, 32, 63), *high)
    wide = (range_key(SLOTS, 0, 63), *all_of_them)
    here = (next(key for n in range(99) if slot_of(key := encode((n,)), SLOTS) < 32), 0, b"")
    assert are_apart([first, second], [], SLOTS)
    assert not are_apart([first, wide], [], SLOTS)
    assert not are_apart([first, first], [], SLOTS)
    assert not are_apart([first], [here], SLOTS)
    assert are_apart([second], [here], SLOTS)
    assert not are_apart([first, second], [], SLOTS // 2)


@given(st.lists(st.tuples(ROWS, st.integers(1, SLOTS)), max_size=4))
def test_rows_are_divided_into_entries_whose_bundles_have_ranges_of_their_own(
    flushes: list[tuple[list[tuple[bytes, int, Any]], int]],
) -> None:
    rows = [row for made, width in flushes for row in bundled(encoded(made), SLOTS, width, timed=True)]
    entries = entries_of(rows)
    assert [row for entry in entries for row in entry] == rows
    assert all(are_apart(entry, [], SLOTS) for entry in entries)
    assert len(entries) <= max(1, len(rows))


@given(ROWS, st.sets(st.integers(0, SLOTS - 1)), st.integers(1, SLOTS))
def test_only_bundles_that_may_hold_a_key_of_a_move_are_taken_apart(
    made: list[tuple[bytes, int, Any]], moving: set[int], width: int
) -> None:
    keys = KeySet(slots=frozenset(moving))
    bundles = bundled(encoded(made), SLOTS, width, timed=True)
    rows = opened_for(bundles, [keys])
    assert by_key(opened(rows)) == by_key(opened(bundles))
    assert not [row for row in rows if is_bundle(row[0]) and may_hold(row[0], keys)]
    assert [row for row in bundles if not may_hold(row[0], keys)] == [
        row for row in rows if is_bundle(row[0])
    ]


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1\xc1", b"\xc1\xc1" + bytes(20), b"\xc1\xc1" + bytes(20) + b"\x90"]
)
def test_bytes_that_are_no_bundle_are_refused_with_a_reason(payload: bytes) -> None:
    with pytest.raises(MalformedBundle, match="cannot be read"):
        open_bundle((range_key(SLOTS, 0, 1), 0, payload))


def test_a_bundle_with_fewer_rows_than_it_says_is_refused() -> None:
    key, at, payload = bundled(encoded([(b"a", 0, 1)]), SLOTS, SLOTS, timed=False)[0]
    with pytest.raises(MalformedBundle, match="2 rows"):
        open_bundle((key, at, payload[:5] + b"\x02" + payload[6:]))


@given(ROWS, st.integers(1, SLOTS), st.booleans())
def test_every_bundle_that_is_made_passes_the_check(
    made: list[tuple[bytes, int, Any]], width: int, timed: bool
) -> None:
    check_bundles(bundled(encoded(made), SLOTS, width, timed=timed))
    check_bundles(encoded(made))


@given(st.data())
def test_a_bundle_that_is_cut_or_has_another_count_does_not_pass(data: st.DataObject) -> None:
    rows = encoded([(encode((n,)), n, n) for n in range(20)])
    key, at, payload = bundled(rows, SLOTS, SLOTS, timed=True)[0]
    cut = data.draw(st.integers(0, len(payload) - 1))
    for broken in (payload[:cut], payload[:5] + b"\x13" + payload[6:], payload + b"\x90", (0, payload)):
        with pytest.raises(MalformedBundle):
            check_bundles([(key, at, broken)])


def test_frames_with_few_rows_make_no_bundles() -> None:
    assert range_width(100, 4096) == 0
    assert range_width(16_000, 0) == 0
    assert range_width(200, 4096) == 512
    assert range_width(16_000, 4096) == 64
    assert range_width(200, 5) == 1
