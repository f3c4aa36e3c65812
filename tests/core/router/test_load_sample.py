"""The sample of rows that enter: all are counted, few are looked at, memory is bounded."""

from __future__ import annotations

import pytest

from machines_in_memory import SmallDeployment, key_in
from tiercel.core.model.bundle import bundled, is_bundle
from tiercel.core.model.log import Row
from tiercel.core.model.routing import slot_of
from tiercel.core.model.row_batch import in_runs
from tiercel.core.router.load_sample import (
    KEYS_MAX,
    KEYS_REPORTED_MAX,
    SENT_ON_MAX,
    SENT_ON_REPORTED_MAX,
    LoadSample,
)

SLOTS = 64


def row(key: bytes, payload: bytes = b"\x01") -> Row:
    return (key, 0, payload)


def steady(sample: LoadSample, rows: list[Row], seconds: int = 30, batch: int = 500) -> None:
    """The same rows in each second, in frames of `batch` rows; the report of the last second is left."""
    for second in range(seconds):
        for start in range(0, len(rows), batch):
            some = rows[start : start + batch]
            sample.count(some, len(some))
        if second < seconds - 1:
            sample.each_second()


@pytest.mark.parametrize("batch", [1, 7, 500, 5_000])
def test_a_heavy_key_and_its_slot_are_found_with_their_rate(batch: int) -> None:
    sample = LoadSample(SLOTS)
    rows = [row(b"hot" if n % 4 == 0 else b"k%d" % (n % 900)) for n in range(6_100)]
    steady(sample, rows, batch=batch)
    slots, keys = sample.each_second()
    assert keys[0][0] == b"hot"
    assert keys[0][1] == pytest.approx(6_100 / 4, rel=0.25)
    assert max(slots, key=lambda slot: slots[slot]) == slot_of(b"hot", SLOTS)
    assert slots[slot_of(b"hot", SLOTS)] == pytest.approx(6_100 / 4, rel=0.25)
    assert sum(slots.values()) <= 6_100 * 1.15
    assert sample.entered == 30 * 6_100


def test_memory_is_bounded_and_no_light_key_is_called_heavy() -> None:
    sample = LoadSample(SLOTS)
    rows = [row(b"k%d" % n) for n in range(50_000)]
    steady(sample, rows, seconds=3)
    slots, keys = sample.each_second()
    assert len(sample._keys) <= KEYS_MAX
    assert len(slots) <= SLOTS
    assert len(keys) <= KEYS_REPORTED_MAX
    assert all(rate <= 3 * 509 for _, rate in keys)


def test_slots_that_happen_to_be_in_the_sample_are_not_called_heavy() -> None:
    """They were, and a planner moved half of them and believed that this was half of the load."""
    sample = LoadSample(4_096)
    steady(sample, [row(b"k%d" % n) for n in range(1_000)])
    assert sample.each_second() == ({}, [])


def test_a_load_that_has_gone_is_forgotten() -> None:
    sample = LoadSample(SLOTS)
    steady(sample, [row(b"hot")] * 1_000)
    for _ in range(60):
        slots, keys = sample.each_second()
    assert (slots, keys) == ({}, [])


def test_rows_of_a_batch_count_as_many() -> None:
    sample = LoadSample(SLOTS)
    (batch,) = in_runs([b"\x01"] * 50)
    steady(sample, [row(b"hot", batch)] * 100 + [row(b"k%d" % n) for n in range(100)])
    _, keys = sample.each_second()
    assert keys[0] == (b"hot", pytest.approx(5_000, rel=0.3))


def test_rows_that_are_sent_on_are_all_counted_by_key_and_reported_once() -> None:
    sample = LoadSample(SLOTS)
    keys = [b"car %d" % n for n in range(600)]
    for _ in range(3):
        sample.count_sent_on([(key, 0, b"", "edge", 1, 1) for key in keys])
    reports = [sample.take_sent_on() for _ in range(3)]
    assert [len(report) for report in reports] == [SENT_ON_REPORTED_MAX, 600 - SENT_ON_REPORTED_MAX, 0]
    assert dict(reports[0] + reports[1]) == dict.fromkeys(keys, 3)


def test_keys_that_are_sent_on_take_bounded_memory() -> None:
    sample = LoadSample(SLOTS)
    sample.count_sent_on([(b"car %d" % n, 0, b"", "edge", 1, 1) for n in range(SENT_ON_MAX + 100)])
    assert len(sample._sent_on) == SENT_ON_MAX


def test_a_router_reports_the_keys_that_it_sends_on_and_what_waits_for_its_instances() -> None:
    driver = SmallDeployment().start("a", "b", "op@a#0", "op@b#0")
    here, elsewhere = key_in(0), key_in(3)
    assert [driver.machines["a"].inboxes["op"].table.route(key).site for key in (here, elsewhere)] == [
        "a",
        "b",
    ]
    driver.produce("a", (here, 0, "x"), (elsewhere, 0, "x"), (elsewhere, 1, "y"))
    at_a, at_b = (driver.machines[site].loads()["op"] for site in ("a", "b"))
    assert at_a.sent_on == [(elsewhere, 2)]
    assert (at_a.entered, at_b.entered) == (3, 0), "rows count where they enter"
    assert (at_a.readers["op@a#0"].arrived, at_b.readers["op@b#0"].arrived) == (1, 2)
    assert at_b.readers["op@b#0"].lag_rows == 0
    assert at_b.readers["op@b#0"].oldest_at_ms == 0
    assert driver.machines["a"].loads()["op"].sent_on == [], "each report once"


def test_a_heavy_key_is_found_within_bundles() -> None:
    sample = LoadSample(SLOTS)
    singles = [row(b"hot" if n % 4 == 0 else b"k%d" % (n % 900)) for n in range(6_000)]
    rows = [
        each for n in range(0, 6_000, 500) for each in bundled(singles[n : n + 500], SLOTS, 16, timed=True)
    ]
    for _ in range(30):
        sample.count(rows, 6_000)
        slots, keys = sample.each_second()
    assert keys[0][0] == b"hot"
    assert keys[0][1] == pytest.approx(6_000 / 4, rel=0.3)
    assert max(slots, key=lambda slot: slots[slot]) == slot_of(b"hot", SLOTS)
    sample.count([row(b"one"), *rows, row(b"two")], 6_002)
    assert all(not is_bundle(key) for key, _ in sample.each_second()[1])
