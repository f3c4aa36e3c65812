"""Streams that make their own watermark: when there is one, at which sites, and which rows are late."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from machines_in_memory import SmallDeployment, key_in, topology
from tiercel.core import messages as m
from tiercel.core.machine.names import Timer, TimerKind
from tiercel.core.model.log import Row, Watermark
from tiercel.core.model.topology import Operator, Stream, Topology
from tiercel.core.router.watermarks import FOREVER
from tiercel.core.settings import Settings

DELAY_MS = 10


def timed(*inputs: str, sites: tuple[str, ...] = ("a", "b"), idle_ms: int | None = None) -> Topology:
    """Operator `op` in event time, over these streams."""
    facts = topology(sites, kind="windows")
    streams = {
        name: Stream(name, sites[0], logged=False, delay_ms=DELAY_MS, idle_ms=idle_ms) for name in inputs
    }
    operator = msgspec.structs.replace(facts.operators["op"], inputs=inputs)
    return Topology(facts.sites, {**facts.streams, **streams}, {"op": operator})


class Play:
    """Writes rows by their event times, and shows the rows and watermarks of the log."""

    def __init__(self, *inputs: str, idle_ms: int | None = None, **settings: float) -> None:
        facts = timed(*inputs, idle_ms=idle_ms)
        self.driver = SmallDeployment(facts, Settings(**settings), kind="windows").start()  # type: ignore[arg-type]
        self._seqs: dict[str, int] = {}

    def write(self, *times_ms: int, stream: str = "in", site: str = "a", mark: int | None = None) -> None:
        producer = f"{stream}-{site}"
        seq = self._seqs[producer] = self._seqs.get(producer, 0) + 1
        rows: list[Row] = [(key_in(0), time_ms, 1) for time_ms in times_ms]
        self.driver.send(site, m.Produce(producer, seq, stream, rows, mark), producer)

    def late(self, site: str = "a") -> int:
        found: int = self.driver.machines[site].watermarks.late.get("op", 0)
        return found

    def watermark(self, site: str = "a") -> int:
        found: int = self.driver.watermark_ms(site)
        return found

    def taken(self, site: str = "a") -> list[Any]:
        """Event times of the rows in the log, and watermarks in brackets, in order."""
        found: list[Any] = []
        for entry in self.driver.log(site):
            found += [row[1] for row in entry.all_rows()]
            if isinstance(entry.control, Watermark):
                found.append([entry.control.value_ms])
        return found


def test_the_first_row_of_a_stream_starts_its_watermark() -> None:
    play = Play("in")
    assert play.watermark() == -1
    play.write(100)
    assert [play.watermark(site) for site in "ab"] == [90, 90]
    play.write(95, 90, 150)
    assert play.taken() == [100, [90], 95, 150, [140]]


def test_rows_of_one_batch_in_several_frames_are_not_late_for_each_other() -> None:
    play = Play("in")
    play.write(100, mark=-1)
    play.write(20, mark=90)
    play.write(80, 91)
    assert play.taken() == [100, 20, [90], 91]


def test_a_site_holds_the_watermark_back_from_its_first_row_on() -> None:
    play = Play("in")
    play.write(100)
    play.write(95, 80, site="b")  # 80 is behind the watermark that was reached without this site
    play.write(200)
    assert [play.watermark(site) for site in "ab"] == [90, 90]
    assert play.taken() == [100, [90], 95, 200]
    play.write(170, site="b")
    assert [play.watermark(site) for site in "ab"] == [160, 160]


def test_the_first_watermark_of_a_site_does_not_overtake_its_rows() -> None:
    play = Play("in")
    play.driver.withholds = lambda sender, to, message: isinstance(message, m.SiteFrame)
    play.write(100, 20, site="b")  # of a key that site a owns
    assert [play.watermark(site) for site in "ab"] == [-1, -1]
    play.driver.release_withheld()
    assert play.taken() == [100, 20, [90]]


def test_a_lost_watermark_report_is_repeated_when_sites_reconnect() -> None:
    play = Play("in")
    play.driver.withholds = lambda sender, to, message: isinstance(message, m.WatermarkReport)
    play.write(100, site="b")
    play.driver.withholds = lambda sender, to, message: False
    play.driver.restart("b")
    play.write(200)
    assert play.watermark() == 90


def test_the_slowest_input_sets_the_watermark_and_an_unwritten_one_holds_it_back() -> None:
    play = Play("in", "other")
    play.write(100)
    play.write(50)
    assert play.watermark() == -1
    play.write(70, stream="other", site="b")
    assert [play.watermark(site) for site in "ab"] == [60, 60]
    play.write(75, site="b")
    play.write(65, stream="other", site="b")  # behind its own input, not behind the watermark
    assert play.taken() == [100, 50, 70, [60], 75, 65]
    play.driver.restart("a")
    play.driver.restart("b")
    play.write(300, stream="other", site="b")
    assert play.watermark() == 65


# -- rows behind a watermark that their own site does not know ---------------------------------------------


def test_a_log_drops_forwarded_rows_behind_its_own_watermark() -> None:
    play = Play("in")
    play.driver.withholds = lambda sender, to, message: isinstance(message, m.WatermarkReport)
    play.driver.machines["a"].watermarks.promises["op"].record_report("b", FOREVER)  # no rows there
    play.write(100)
    play.write(80, 95, site="b")  # b does not know of 90; a owns the key
    assert play.taken() == [100, [90], 95]
    assert (play.late("a"), play.late("b")) == (1, 0)


def test_late_rows_of_a_mobile_source_are_dropped() -> None:
    play = Play("in")
    play.write(100)
    rows = [(key_in(0), 80, 1, 1), (key_in(0), 120, 1, 2)]
    play.driver.send("b", m.ProduceMobile("car", "1", 1, "in", rows), "car")
    assert play.taken() == [100, [90], 120]


def test_an_operator_downstream_of_one_without_event_time_gets_no_late_rows() -> None:
    facts = timed("in", sites=("a",))
    first = msgspec.structs.replace(facts.operators["op"], time_mode="none")
    second = Operator(
        "then", ("out",), "end", ("then@a#0",), slots=4, time_mode="eventTime", dead_letters="d"
    )
    streams = {**facts.streams, "end": Stream("end", "a"), "d": Stream("d", "a")}
    chain = Topology(facts.sites, streams, {"op": first, "then": second})
    assert (chain.late_inputs("op"), chain.late_inputs("then")) == (frozenset(), frozenset({0}))
    driver = SmallDeployment(chain).start("a", "op@a#0", "then@a#0")
    for at in (100, 150, 60):
        driver.produce("a", (key_in(0), at, 1))
    assert [row[1] for entry in driver.log("a") for row in entry.all_rows()] == [
        100,
        150,
        60,
    ]
    seen = [row[1] for entry in driver.log("a", "then") for row in entry.all_rows()]
    assert seen == [100, 150]
    assert driver.machines["a"].watermarks.late == {"then": 1}


def test_a_second_stream_at_a_site_lowers_the_watermark_that_the_site_reports() -> None:
    play = Play("in", "other")
    play.write(100)
    play.write(100, stream="other", site="b")
    assert play.watermark() == 90
    play.write(300, stream="other", site="b")  # b promises 290
    play.write(150, site="b")  # ... but now has a source that is at 140
    play.write(400)
    assert [play.watermark(site) for site in "ab"] == [140, 140]
    play.write(145, site="b")
    assert play.taken() == [100, 100, [90], 300, 150, 400, [140], 145]


def test_a_log_adopts_the_watermark_that_another_log_has_reached() -> None:
    play = Play("in")
    play.driver.send("a", m.WatermarkReport("op", -1, (), concluded_ms=70), "b")
    assert play.watermark() == 70
    play.write(75)
    assert play.driver.messages("a", "b", m.WatermarkReport)[-1].concluded_ms == 70


# -- idle streams ------------------------------------------------------------------------------------------


def test_a_silent_site_holds_the_watermark_back_until_its_idle_timeout() -> None:
    for idle_ms, expected in ((None, 90), (500, 490)):
        play = Play("in", idle_ms=idle_ms)
        play.write(100, site="b")
        play.write(200)
        play.driver.advance_ms(400)
        play.write(500)
        assert play.watermark() == 90
        play.driver.advance_ms(400)
        assert [play.watermark(site) for site in "ab"] == [expected, expected]


def test_a_stream_with_steady_rows_never_becomes_idle() -> None:
    play = Play("in", idle_ms=100)
    for n in range(10):
        play.write(100 + n, site="b")
        play.write(1_000 + n)
        play.driver.advance_ms(60)
        assert play.watermark() == 90 + n
    timers = [name for name in play.driver.timers if name == ("b", Timer(TimerKind.IDLE, "in"))]
    assert len(timers) == 1


def test_an_idle_site_holds_the_watermark_back_again_after_its_next_row() -> None:
    play = Play("in", idle_ms=100)
    play.write(100, site="b")
    play.write(200)
    play.driver.advance_ms(60)
    play.write(300)
    play.driver.advance_ms(60)  # b is idle, a is not
    assert play.watermark() == 290
    play.write(250, 320, site="b")
    play.write(500)
    assert [play.watermark(site) for site in "ab"] == [310, 310]
    assert play.taken() == [100, [90], 200, 300, [290], 320, 500, [310]]
    assert play.late("b") == 1


def test_the_watermark_stays_when_all_sites_are_idle() -> None:
    play = Play("in", idle_ms=100)
    play.write(100)
    play.driver.advance_ms(300)
    assert [play.watermark(site) for site in "ab"] == [90, 90]
    assert not [
        name for _, name in play.driver.timers if isinstance(name, Timer) and name.kind is TimerKind.IDLE
    ]
    play.write(95, 120)
    assert play.taken() == [100, [90], 95, 120, [110]]


def test_idle_sites_agree_on_the_highest_watermark_among_them() -> None:
    """Found by seed 40757: `b` was idle before it learned that `a` is, and no later move could flip."""
    play = Play("in", idle_ms=100)
    play.write(100)
    play.write(100, site="b")
    play.driver.advance_ms(300)
    before = play.watermark("b")
    assert play.watermark("a") == before == 90
    play.driver.send("a", m.WatermarkReport("op", 500, ("in",), before), "b")  # while b was not idle yet
    assert play.watermark("a") == 500
    play.driver.send("a", m.WatermarkReport("op", FOREVER, ("in",), before), "b")
    play.driver.advance_ms(10)
    assert play.watermark("b") == 500


def test_a_stream_with_deferred_acknowledgements_is_not_idle() -> None:
    play = Play("in", idle_ms=100)
    play.write(100, site="b")
    deferred_acks = play.driver.machines["b"].state.deferred_acks
    deferred_acks["in-b"] = ("in-b", "in")  # as if its acknowledgement waited for a reader
    for n in range(5):
        play.write(1_000 + n)
        play.driver.advance_ms(60)
    assert play.watermark() == 90
    play.write(101, site="b")  # releases the deferred acknowledgement, too
    assert deferred_acks == {}
    for n in range(3):
        play.write(2_000 + n)
        play.driver.advance_ms(60)
    assert play.watermark() == 1_992


def test_an_unwritten_input_stops_holding_the_watermark_back_after_its_idle_timeout() -> None:
    play = Play("in", "other", idle_ms=100)
    play.driver.advance_ms(60)
    play.write(100)
    assert play.watermark() == -1
    play.driver.advance_ms(60)
    assert [play.watermark(site) for site in "ab"] == [90, 90]


def test_a_restart_begins_the_idle_timeout_again() -> None:
    play = Play("in", idle_ms=100)
    play.write(100, site="b")
    play.driver.advance_ms(90)
    play.driver.restart("b")
    play.write(300)
    play.driver.advance_ms(90)
    play.write(301)
    assert play.watermark() == 90
    play.driver.advance_ms(20)
    assert play.watermark() == 291


# -- sites that are cut off --------------------------------------------------------------------------------


@pytest.mark.parametrize(("site_idle_ms", "expected"), [(0.0, 90), (500.0, 790)])
def test_event_time_waits_for_a_site_that_is_cut_off_unless_told_otherwise(
    site_idle_ms: float, expected: int
) -> None:
    play = Play("in", site_idle_ms=site_idle_ms)
    play.write(100, site="b")
    play.write(200)
    play.driver.stop("b")
    play.driver.advance_ms(400)
    play.write(500)
    assert play.watermark() == 90, "it may come back soon"
    play.driver.advance_ms(200)
    play.write(800)
    assert play.watermark() == expected
    play.driver.start("b")
    play.write(2_000)
    assert play.watermark() == expected, "it is here again, and its stream is at 100"
    play.write(300, 900, site="b")
    assert play.late("a") + play.late("b") == (1 if site_idle_ms else 0), "300 came too late"
    assert [play.watermark(site) for site in "ab"] == [890, 890]
