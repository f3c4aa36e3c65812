"""Rows that devices number, at the real machines: order, repeats, gaps, numbers that go backwards."""

from __future__ import annotations

from typing import Any

import pytest

from machines_in_memory import SLOTS, SmallDeployment, key_in, topology
from tiercel.core import messages as m
from tiercel.core.errors import ProtocolViolation
from tiercel.core.model.keys import Key, KeySet
from tiercel.core.model.topology import Stream, Topology

A, B = "op@a#0", "op@b#0"
GAP_MS = 500


class Devices(SmallDeployment):
    """Two sites, and a stream whose rows are numbered from 1 on."""

    def __init__(self) -> None:
        facts = topology()
        streams = {
            **facts.streams,
            "in": Stream("in", "a", logged=False, gap_ms=GAP_MS, dead_letters="in/dead"),
            "in/dead": Stream("in/dead", "a", holds_dead_letters=True),
        }
        super().__init__(Topology(facts.sites, streams, facts.operators))
        self.appended: dict[tuple[str, int], list[int]] = {}
        self.start()
        self.key: Key = next(k for k in (key_in(slot) for slot in range(SLOTS)) if self.owner_of(k, "a") == A)

    def bring(self, site: str, *numbers: int, payload: Any = None) -> None:
        """A gateway of a site brings rows with these numbers."""
        rows = [(self.key, 0, (("row", n) if payload is None else payload)) for n in numbers]
        self.produce(site, *rows, producer=f"gateway {site}", numbers=numbers)
        self.advance_ms(50)
        self.processed()

    def counts(self) -> list[int]:
        """What the operator has counted, in the order of its outputs."""
        return [output.row[2][2] for output in self.outputs()]

    def processed(self) -> list[int]:
        """The numbers of the rows that were appended, in their order; logs are trimmed meanwhile."""
        for site in ("a", "b"):
            for entry in self.log(site):
                rows = [row[2][1] for row in entry.all_rows() if row[0] == self.key]
                self.appended.setdefault((site, entry.offset), rows)
        return [n for place in sorted(self.appended) for n in self.appended[place]]

    def named(self) -> list[tuple[Any, ...]]:
        """The columns of the dead letters."""
        return [output.row[2] for output in self.outputs("in/dead")]


def test_rows_of_two_gateways_are_appended_once_in_the_order_of_their_numbers() -> None:
    driver = Devices()
    driver.bring("b", 2, 3)
    driver.bring("a", 1, 2)
    driver.bring("b", 4)
    assert driver.processed() == [1, 2, 3, 4]
    assert driver.counts() == [1, 2, 3, 4]
    assert driver.named() == []


@pytest.mark.parametrize("site", ["a", "b"])
def test_a_row_that_waits_for_an_earlier_one_survives_a_restart_of_its_router(site: str) -> None:
    driver = Devices()
    driver.bring(site, 2)
    driver.restart("a")
    driver.restart("b")
    driver.advance_ms(50)
    driver.bring("a", 1)
    assert driver.processed() == [1, 2]


def test_a_gap_that_stays_open_is_closed_and_named_with_both_numbers() -> None:
    driver = Devices()
    driver.bring("b", 1, 4)
    assert driver.processed() == [1]
    driver.advance_ms(GAP_MS)
    assert driver.processed() == [1, 4]
    ((reason, key, number, row, *_),) = driver.named()
    assert "numbers 2 to 3 did not come within 0.5 s: went on with 4" in reason
    assert (key, number, row) == (driver.key, 4, None)


def test_a_row_that_comes_after_its_gap_was_closed_is_named_with_its_columns() -> None:
    driver = Devices()
    driver.bring("b", 1, 3)
    driver.advance_ms(GAP_MS)
    driver.bring("a", 2)
    assert driver.processed() == [1, 3]
    assert driver.named()[-1][2:4] == (2, '["row",2]')


def test_another_row_under_a_used_number_is_named_and_the_same_row_is_not() -> None:
    driver = Devices()
    driver.bring("a", 1, 2)
    driver.bring("b", 2)
    assert driver.named() == []
    driver.bring("b", 1, payload=("row", 99))
    ((reason, *_),) = driver.named()
    assert "number 1 came where 3 was next" in reason
    driver.bring("a", 3)
    assert driver.processed() == [1, 2, 3]


def test_a_number_that_is_not_above_zero_is_named() -> None:
    driver = Devices()
    driver.bring("a", -5)
    ((reason, _, number, *_),) = driver.named()
    assert number == -5
    assert "where 1 was next" in reason


def test_a_payload_that_is_no_row_is_named_and_stops_nobody() -> None:
    driver = Devices()
    driver.bring("a", 1)
    driver.bring("a", 1, payload=b"\xc1\xff garbage")
    ((_, _, _, shown, *_),) = driver.named()
    assert "garbage" in shown
    driver.bring("a", 2)
    assert driver.processed() == [1, 2]


def test_behind_a_move_to_another_site_repeats_are_still_known() -> None:
    driver = Devices()
    driver.bring("a", 1, 2)
    driver.move(KeySet(keys=frozenset({driver.key})), A, B, "pause")
    driver.finish_moves()
    driver.bring("a", 2, 3)
    driver.bring("b", 1)
    assert driver.counts() == [1, 2, 3]
    assert driver.named() == []


@pytest.mark.parametrize("numbers", [(), (1, 2)])
def test_a_frame_whose_numbers_do_not_fit_its_rows_is_refused_before_it_counts(
    numbers: tuple[int, ...],
) -> None:
    driver = Devices()
    rows = [(driver.key, 0, ("row", 1))]
    with pytest.raises(ProtocolViolation, match="1 rows of 'in' with"):
        driver.send("a", m.Produce("p", 1, "in", rows, numbers=numbers), "p")
    driver.bring("a", 1)
    assert driver.processed() == [1]
