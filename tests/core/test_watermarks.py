"""Streams that make their own watermark: when there is one, at which sites, and which rows are late."""

from __future__ import annotations

from typing import Any

import msgspec

from playing import Stage, key_in, topology
from tiercel.core import messages as m
from tiercel.core.records import Row, Watermark
from tiercel.core.topology import Stream, Topology

DELAY_MS = 10


def timed(*inputs: str, sites: tuple[str, ...] = ("a", "b")) -> Topology:
    """Operator `op` in event time, over these streams."""
    facts = topology(sites, kind="windows")
    streams = {name: Stream(name, sites[0], logged=False, delay_ms=DELAY_MS) for name in inputs}
    operator = msgspec.structs.replace(facts.operators["op"], inputs=inputs)
    return Topology(facts.sites, {**facts.streams, **streams}, {"op": operator})


class Play:
    """Rows by their event times, and what the log made of them."""

    def __init__(self, *inputs: str) -> None:
        self.stage = Stage(timed(*inputs), kind="windows").start()
        self._seqs: dict[str, int] = {}

    def write(self, *times_ms: int, stream: str = "in", site: str = "a", mark: int | None = None) -> None:
        producer = f"{stream}-{site}"
        seq = self._seqs[producer] = self._seqs.get(producer, 0) + 1
        rows: list[Row] = [(key_in(0), time_ms, 1) for time_ms in times_ms]
        self.stage.tell(site, m.Produce(producer, seq, stream, rows, mark), producer)

    def watermark(self, site: str = "a") -> int:
        found: int = self.stage.machines[site].inboxes["op"].watermark_ms
        return found

    def taken(self, site: str = "a") -> list[Any]:
        """Event times of the rows in the log, and watermarks in brackets, in order."""
        found: list[Any] = []
        for entry in self.stage.log(site):
            found += [row[1] for rows in entry.parts.values() for row in rows]
            if isinstance(entry.control, Watermark):
                found.append([entry.control.value_ms])
        return found


def test_a_stream_that_was_not_written_when_its_site_started_makes_a_watermark_all_the_same() -> None:
    play = Play("in")
    assert play.watermark() == -1
    play.write(100)
    assert [play.watermark(site) for site in "ab"] == [90, 90]
    play.write(95, 90, 150)
    assert play.taken() == [100, [90], 95, 150, [140]]


def test_rows_of_a_batch_that_comes_in_several_frames_are_not_late_for_each_other() -> None:
    play = Play("in")
    play.write(100, mark=-1)
    play.write(20, mark=90)
    play.write(80, 91)
    assert play.taken() == [100, 20, [90], 91]


def test_a_site_holds_others_back_from_its_first_row_on() -> None:
    play = Play("in")
    play.write(100)
    play.write(95, 80, site="b")  # 80 is behind what was concluded without this site
    play.write(200)
    assert [play.watermark(site) for site in "ab"] == [90, 90]
    assert play.taken() == [100, [90], 95, 200]
    play.write(170, site="b")
    assert [play.watermark(site) for site in "ab"] == [160, 160]


def test_the_first_watermark_of_a_site_does_not_overtake_the_rows_it_was_made_of() -> None:
    play = Play("in")
    play.stage.withholds = lambda sender, to, message: isinstance(message, m.LaneFrame)
    play.write(100, 20, site="b")  # of a key that site a owns
    assert [play.watermark(site) for site in "ab"] == [-1, -1]
    play.stage.deliver()
    assert play.taken() == [100, 20, [90]]


def test_a_site_that_missed_the_first_row_of_another_learns_of_it_when_they_meet_again() -> None:
    play = Play("in")
    play.stage.withholds = lambda sender, to, message: isinstance(message, m.WatermarkReport)
    play.write(100, site="b")
    play.stage.withholds = lambda sender, to, message: False
    play.stage.restart("b")
    play.write(200)
    assert play.watermark() == 90


def test_of_several_inputs_the_slowest_counts_and_one_that_was_never_written_holds_all_back() -> None:
    play = Play("in", "other")
    play.write(100)
    play.write(50)
    assert play.watermark() == -1
    play.write(70, stream="other", site="b")
    assert [play.watermark(site) for site in "ab"] == [60, 60]
    play.write(75, site="b")
    play.write(65, stream="other", site="b")  # behind its own input, not behind the watermark
    assert play.taken() == [100, 50, 70, [60], 75, 65]
    play.stage.restart("a")
    play.stage.restart("b")
    play.write(300, stream="other", site="b")
    assert play.watermark() == 65
