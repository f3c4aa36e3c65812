"""Rows that enter a router: watermarks of a stream's own, late rows, numbers of inputs, dead letters."""

from __future__ import annotations

from typing import Any

import msgspec

from tiercel.core import messages as m
from tiercel.core.machine.effects import Send, StorageKey, Write
from tiercel.core.machine.events import Connected, Durable, Received
from tiercel.core.model.log import INITIAL, Entry, Output, StreamEntry, Watermark
from tiercel.core.model.row_batch import count_rows, in_runs, singles
from tiercel.core.model.topology import Operator, Stream, Topology
from tiercel.core.router.router import Router
from tiercel.core.settings import Settings

TOPOLOGY = Topology(
    {"a": None},
    {
        "positions": Stream("positions", "a", logged=False, delay_ms=1_000),
        "tolls": Stream("tolls", "a", logged=False, delay_ms=0),
        "out": Stream("out", "a"),
    },
    {
        "windows": Operator("windows", ("positions",), "out", ("windows@a#1",), time_mode="eventTime"),
        "counts": Operator("counts", ("positions",), "out", ("counts@a#1",)),
        "join": Operator("join", ("positions", "tolls"), "out", ("join@a#1",)),
    },
)


class Site:
    """One router with a disk that never loses anything."""

    def __init__(self, disk: dict[StorageKey, Any] | None = None, topology: Topology = TOPOLOGY) -> None:
        self.disk = disk if disk is not None else {}
        self.router = Router("a", topology, Settings(), 1, self.disk)
        self.seq: dict[str, int] = {}
        self.take(Connected("p"))

    def take(self, event: Any) -> list[Any]:
        messages = []
        for effect in self.router.on_event(event, 50.0):
            if isinstance(effect, Write):
                self.disk.update(effect.puts)
                messages += self.take(Durable(effect.seq))
            elif isinstance(effect, Send):
                messages.append(effect.message)
        return messages

    def produce(self, stream: str, *times: int, **more: Any) -> None:
        self.seq["p"] = self.seq.get("p", 0) + 1
        rows = [(b"k", time, b"%d" % time) for time in times]
        self.take(Received("p", m.Produce("p", self.seq["p"], stream, rows, **more)))

    def log(self, operator: str) -> list[Entry]:
        found = {key[2]: value for key, value in self.disk.items() if key[:2] == ("inbox", operator)}
        return [found[offset] for offset in sorted(found)]

    def rows(self, operator: str) -> list[Any]:
        return [row for entry in self.log(operator) for row in entry.all_rows()]

    def watermarks(self, operator: str) -> list[int]:
        return [e.control.value_ms for e in self.log(operator) if isinstance(e.control, Watermark)]


def test_a_stream_with_a_delay_makes_its_own_watermark() -> None:
    site = Site()
    site.produce("positions", 5_000, 9_000, 7_000)
    site.produce("positions", 8_500)
    site.produce("positions", 12_000)
    assert site.watermarks("windows") == [8_000, 11_000]


def test_rows_of_the_frame_that_raises_the_watermark_are_not_late() -> None:
    site = Site()
    site.produce("positions", 2_000, 90_000)
    assert [row[1] for row in site.rows("windows")] == [2_000, 90_000]


def test_a_late_row_is_dropped_and_counted_only_for_event_time_operators() -> None:
    site = Site()
    site.produce("positions", 9_000)
    site.produce("positions", 8_000, 8_001)
    assert [row[1] for row in site.rows("windows")] == [9_000, 8_001]
    assert [row[1] for row in site.rows("counts")] == [9_000, 8_000, 8_001]
    assert site.router.watermarks.late == {"windows": 1}


def test_the_watermark_survives_a_restart_of_the_router() -> None:
    site = Site()
    site.produce("positions", 9_000)
    again = Site(site.disk)
    again.seq = site.seq
    again.produce("positions", 8_000)
    assert [row[1] for row in again.rows("windows")] == [9_000]


def test_initial_state_is_never_late_and_raises_no_watermark() -> None:
    site = Site()
    site.produce("positions", 9_000)
    site.produce("positions", 1, 99_000, initial=True)
    assert [row[1] for row in site.rows("windows")] == [9_000, INITIAL, INITIAL]
    assert site.watermarks("windows") == [8_000]


def test_rows_for_an_operator_of_several_inputs_carry_the_input_number() -> None:
    site = Site()
    site.produce("positions", 1)
    site.produce("tolls", 2)
    assert [row[2] for row in site.rows("join")] == [(0, b"1"), (1, b"2")]
    assert [row[2] for row in site.rows("counts")] == [b"1"]


def test_a_range_query_returns_the_readable_offsets_of_a_stream() -> None:
    site = Site()
    assert m.RangeReply("out", 1, 0) in site.take(Received("p", m.RangeQuery("out")))
    assert m.RangeReply("nowhere", -1, -1) in site.take(Received("p", m.RangeQuery("nowhere")))


def test_dead_letters_of_a_feed_are_logged_once_at_the_home_of_their_stream() -> None:
    streams = {
        name: Stream(name, home, holds_dead_letters=True) for name, home in (("here", "a"), ("there", "b"))
    }
    topology = Topology({"a": None, "b": "a"}, streams, {})
    site = Site(topology=topology)
    dead_letters = [(b"", 0, b"first"), (b"", 0, b"second")]
    for stream, seq in (("here", 1), ("here", 1), ("there", 2)):
        site.take(Received("p", m.Produce("p", seq, stream, dead_letters)))
    expected = [Output(1, b"p", 0, 0, dead_letters[0]), Output(1, b"p", 0, 1, dead_letters[1])]
    assert site.log("here") == [StreamEntry(1, expected)]
    site = Site(site.disk, topology)  # the producer's mark survives a restart
    site.take(Received("p", m.Produce("p", 1, "here", dead_letters)))
    assert len(site.log("here")) == 1
    [frame] = [x for x in site.take(Connected("b")) if isinstance(x, m.SiteFrame)]
    assert frame.inbox == "there"
    assert [(o.offset, o.row[2]) for o in frame.outputs or ()] == [(2, b"first"), (2, b"second")]


# -- broadcast streams -----------------------------------------------------------------------------------

BROADCAST = Topology(
    {"a": None},
    {name: Stream(name, "a", logged=name == "out") for name in ("positions", "tolls", "limits", "out")},
    {
        "one": Operator("one", ("positions",), "out", ("one@a#1",), broadcast="limits"),
        "two": Operator("two", ("positions", "tolls"), "out", ("two@a#1",), broadcast="limits"),
        "none": Operator("none", ("positions",), "out", ("none@a#1",)),
    },
)


def test_each_row_carries_the_broadcast_row_before_it() -> None:
    site = Site(topology=BROADCAST)
    site.produce("positions", 1)
    site.produce("limits", 50)
    site.produce("positions", 2)
    site.produce("tolls", 3)
    site.produce("limits", 60, 70)
    site.produce("positions", 4)
    assert [row[2] for row in site.rows("one")] == [(0, b"1", None), (0, b"2", b"50"), (0, b"4", b"70")]
    assert [row[2] for row in site.rows("two")] == [
        (0, b"1", None),
        (0, b"2", b"50"),
        (1, b"3", b"50"),
        (0, b"4", b"70"),
    ]
    assert [row[2] for row in site.rows("none")] == [b"1", b"2", b"4"]


def test_a_restarted_router_knows_the_last_broadcast_row() -> None:
    site = Site(topology=BROADCAST)
    site.produce("limits", 50)
    after = Site(dict(site.disk), BROADCAST)
    after.seq = site.seq
    after.produce("positions", 2)
    assert [row[2] for row in after.rows("one")] == [(0, b"2", b"50")]


def test_a_mobile_source_gets_the_broadcast_row_of_the_site_it_is_at() -> None:
    site = Site(topology=BROADCAST)
    site.produce("limits", 50)
    site.take(Received("car", m.ProduceMobile("car", "1", 1, "positions", [(b"k", 9, b"9", 1)])))
    assert [row[2] for row in site.rows("one")] == [(0, b"9", b"50")]


def test_the_rows_of_a_batch_share_the_broadcast_row() -> None:
    payloads = [msgspec.msgpack.encode((n,)) for n in range(3)]
    (joined,) = in_runs(payloads)
    rows = [(b"k", 0, (0, joined, b"50"))]
    assert count_rows(rows) == 3
    assert singles(rows[0]) == [(b"k", 0, (0, payload, b"50")) for payload in payloads]
