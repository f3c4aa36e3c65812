"""Gauges over the wire: from instances through routers to the controller, with the links between sites."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from deployment_in_process import (
    INPUT,
    OPERATOR,
    OUTPUT,
    instance_host,
    make_place,
    router_host,
    rows,
    running,
)
from tiercel.core.machine.effects import Effect
from tiercel.core.machine.events import Event, Received
from tiercel.core.model.topology import Stream, Topology, instance_name
from tiercel.runtime.client.producer import Producer
from tiercel.runtime.deployment import DeploymentDir, StreamFacts
from tiercel.runtime.net.emulated_link import Link
from tiercel.runtime.net.gauge_messages import GaugeReport, SiteReport
from tiercel.runtime.process import gauges
from tiercel.runtime.process.gauges import GaugeBoard
from tiercel.runtime.process.host import Host, HostConfig
from tiercel.runtime.process.metrics import Meter, MetricsLine
from waiting import WAIT_S_MAX

CLOUD, EDGE = "cloud", "edge-1"
INSTANCE = instance_name(OPERATOR, EDGE, 1)
LATENCY_MS = 20.0


class Listener:
    """Stands where the controller stands, and keeps what its machine is given."""

    def __init__(self) -> None:
        self.received: list[object] = []

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        if isinstance(event, Received):
            self.received.append(event.message)
        return []


def two_sites(directory: Path) -> DeploymentDir:
    """Rows enter at the cloud and are counted at the edge."""
    place = make_place(directory, checkpoint_ms=50)
    made = place.manifest()
    operator = msgspec.structs.replace(made.topology.operators[OPERATOR], instances=(INSTANCE,))
    topology = Topology({CLOUD: None, EDGE: CLOUD}, {OUTPUT: Stream(OUTPUT, CLOUD)}, {OPERATOR: operator})
    facts = made.streams | {INPUT: StreamFacts("{}", ("key",), sites=(CLOUD, EDGE))}
    place.write(msgspec.structs.replace(made, topology=topology, streams=facts))
    return place


def test_every_process_reports_to_the_controller_over_the_wire_without_a_shared_directory(
    tmp_path: Path,
) -> None:
    place, board, machine = two_sites(tmp_path / "storage"), GaugeBoard(), Listener()
    links = {f"{CLOUD} {EDGE}": Link(latency_ms=LATENCY_MS)}
    hosts = [
        router_host(place, site=CLOUD, metrics=tmp_path / "of the cloud", links=links),
        router_host(place, site=EDGE, metrics=tmp_path / "of the edge", links=links),
        instance_host(place, name=INSTANCE, metrics=tmp_path / "of the instance"),
        Host("controller", machine, HostConfig.of(place, dials=[CLOUD, EDGE], gauge_board=board)),
    ]
    with running(*hosts), Producer(place, INPUT, name="p", site=CLOUD) as producer:
        sent, give_up = 0, time.monotonic() + WAIT_S_MAX
        while not complete(lines := board.lines(), inboxes := board.inboxes()):
            assert time.monotonic() < give_up, (lines, inboxes)
            producer.send(rows(sent, 100))
            producer.flush(30)
            sent += 100
            time.sleep(0.05)
    assert not machine.received, "the controller's machine is not given gauges"
    assert inboxes[EDGE, OPERATOR].readers is not None
    assert set(inboxes[EDGE, OPERATOR].readers) == {INSTANCE}, "rows are read at the edge"
    assert lines[INSTANCE].cores
    assert lines[INSTANCE].gauges is not None
    assert rtt_ms(lines, CLOUD, EDGE) > 1.9 * LATENCY_MS, "there and back"
    sightings = board.take_sent_on(OPERATOR)
    assert sum(count for line in sightings for _, count in line.sent_on or ()) > 0
    assert board.take_sent_on(OPERATOR) == [], "each sighting is taken once"


def complete(lines: dict[str, MetricsLine], inboxes: dict[tuple[str, str], MetricsLine]) -> bool:
    """Whether every process, both inboxes and both directions of the link have reported work."""
    if set(lines) != {CLOUD, EDGE, INSTANCE} or set(inboxes) != {(CLOUD, OPERATOR), (EDGE, OPERATOR)}:
        return False
    entered = inboxes[CLOUD, OPERATOR]
    worked = lines[INSTANCE].rate and lines[CLOUD].rate and entered.arrivals and entered.heavy_slots
    return bool(worked and rtt_ms(lines, CLOUD, EDGE) and rtt_ms(lines, EDGE, CLOUD))


def rtt_ms(lines: dict[str, MetricsLine], a: str, b: str) -> float:
    rtt, sent, received = (lines[a].links or {}).get(b, (None, 0.0, 0.0))
    return rtt or 0.0 if sent and received else 0.0


def test_a_process_that_is_silent_leaves_the_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = GaugeBoard()
    board.add(GaugeReport("cloud", Meter(tmp_path, "cloud", None).write({"rows": 5}, 0.0)))
    board.add(SiteReport("edge-1", 2, {"count@edge-1#1": "its disk is full"}))
    assert board.lines()["cloud"].kind == "router"
    assert board.sites()["edge-1"].failed == {"count@edge-1#1": "its disk is full"}
    monkeypatch.setattr(gauges, "FRESH_S", -1.0)
    assert board.lines() == {}
    assert board.sites() == {}


def test_nobody_reads_and_the_board_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "REPORTS_MAX", 10)
    board, meter = GaugeBoard(), Meter(tmp_path, "cloud", None)
    for n in range(100):
        board.add(GaugeReport("cloud", meter.write({"lag": n}, 0.0)))
    assert len(board._reports) == 10
    assert board.lines()["cloud"].lag == 99
