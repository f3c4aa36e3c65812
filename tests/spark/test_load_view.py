"""The view that policies get: made of reports and routing tables, without a deployment."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tiercel.control.view import LinkView, View
from tiercel.core.model.routing import Route
from tiercel.core.model.topology import Operator, Stream, Topology
from tiercel.runtime.net.gauge_messages import GaugeReport, SiteReport
from tiercel.runtime.process.gauges import GaugeBoard
from tiercel.runtime.process.metrics import Meter, MetricsLine
from tiercel.spark.cluster.load_view import LoadReader

A, B, SPARE = "op@cloud#1", "op@edge#1", "op@cloud#2"
TOPOLOGY = Topology(
    {"cloud": None, "edge": "cloud", "far": "cloud"},
    {"out": Stream("out", "cloud")},
    {"op": Operator("op", ("in",), "out", (A, B))},
)


def view_of(board: GaugeBoard) -> View:
    routes = {0: Route(A, 1), 1: Route(B, 1)}
    reader = LoadReader(board, TOPOLOGY, ("cloud",))
    return reader.view(5.0, {A, B, SPARE}, {"op": (routes, {b"k": Route(B, 2)})}, {"op": ""}, free_slots=3)


def reported(tmp_path: Path) -> GaugeBoard:
    board = GaugeBoard()
    edge = Meter(tmp_path, "edge", None)
    edge.executor = "4"
    board.add(GaugeReport("edge", edge.write({"rows": 5}, 0.0, {"cloud": (81.5, 10.0, 20.0)}, 0.001)))
    board.add(GaugeReport(B, Meter(tmp_path, B, None).write({"rows": 50, "state_bytes": 9}, 0.0)))
    inbox = MetricsLine(
        at_ms=1,
        site="edge",
        process="edge",
        kind="inbox",
        operator="op",
        rate=0.0,
        outputs=0.0,
        latency_ms=None,
        lag=None,
        state_keys=None,
        state_bytes=None,
        busy=0.0,
        moves=0,
        arrivals=40.0,
        readers={B: (40.0, 7, 12.0)},
        heavy_keys=[(b"k", 30.0)],
        sent_on=[(b"x", 2), (b"y", 9)],
    )
    board.add(GaugeReport("edge", [msgspec.json.encode(inbox)]))
    board.add(SiteReport("edge", 2, {"op@edge#9": "its disk is full"}))
    return board


def test_a_view_has_what_every_process_and_agent_has_reported(tmp_path: Path) -> None:
    seen = view_of(reported(tmp_path))
    op = seen.operators["op"]
    assert [i.name for i in op.instances] == [A, B]
    assert op.spares == (SPARE,)
    at_edge = op.at("edge")[0]
    assert (at_edge.arrivals, at_edge.backlog_rows, at_edge.oldest_ms, at_edge.state_bytes) == (
        40.0,
        7,
        12.0,
        9,
    )
    assert op.entering["edge"].rate == 40.0
    assert [hot.key for hot in op.entering["edge"].sent_on] == [b"y", b"x"], "most rows first"
    assert seen.sites["edge"].links == {"cloud": LinkView(81.5, 10.0, 20.0)}
    assert seen.sites["edge"].executor == "4"
    assert seen.failed == {"op@edge#9": "its disk is full"}


def test_free_slots_are_those_of_the_application_of_a_site_and_none_where_its_driver_is_silent(
    tmp_path: Path,
) -> None:
    sites = view_of(reported(tmp_path)).sites
    assert {name: site.free_slots for name, site in sites.items()} == {"cloud": 3, "edge": 2, "far": 0}


def test_an_instance_without_a_report_is_there_with_zeros() -> None:
    instances = view_of(GaugeBoard()).operators["op"].instances
    assert [(i.name, i.rate, i.slots) for i in instances] == [(A, 0.0, 1), (B, 0.0, 2)]


def test_a_view_survives_a_file(tmp_path: Path) -> None:
    seen = view_of(reported(tmp_path))
    assert msgspec.json.decode(msgspec.json.encode(seen), type=View) == seen
