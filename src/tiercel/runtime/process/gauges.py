"""The gauges of a process on their way to the controller, once a second, over connections that exist anyway.

Responsible for: sending the metrics lines of this process, passing on those of a router's instances, round
    trips and bytes of links between sites, what all of that costs; the last lines of every process where the
    controller is.
Not responsible for: the lines (metrics.py), the view that a policy gets (spark/cluster/load_view.py).

    instance --GaugeReport--> its router --GaugeReport--> controller <--SiteReport-- agents
    router --Ping--> router of another site --Pong--> the same router: a round trip

A report is never repeated: the next one follows in a second. The lines are encoded once, for the file and the
wire; a router does not decode those of its instances.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from tiercel.core.messages import Message
from tiercel.core.model.topology import site_of
from tiercel.runtime.net.connection import Connection
from tiercel.runtime.net.gauge_messages import GaugeReport, Ping, Pong, SiteReport
from tiercel.runtime.process.metrics import LinkLine, Meter, MetricsLine

CONTROLLER: Final = "controller"
GAUGE_MESSAGES: Final = frozenset((GaugeReport, SiteReport, Ping, Pong))
ROUND_TRIPS = 5  # the shortest of so many counts: a busy process answers late
FRESH_S = 10.0  # a report is that of now for so long
REPORTS_MAX = 10_000  # that wait to be looked at; nobody looks while no policy runs


class Gauges:
    """The gauges of one process."""

    def __init__(
        self, name: str, meter: Meter | None, connections: Mapping[str, Connection], board: GaugeBoard | None
    ) -> None:
        self._name, self._meter, self._connections, self._board = name, meter, connections, board
        self._is_router = "@" not in name
        self._toward = CONTROLLER if self._is_router else site_of(name)
        self._round_trips: dict[str, deque[float]] = {}  # router -> the last ones, ms
        self._bytes: dict[str, tuple[int, int]] = {}  # router -> sent, received, at the last line
        self._at_s = time.monotonic()
        self._spent_s = 0.0  # of CPU time, on gauges

    def tick(self, busy_s: float) -> None:
        """Write and send the lines of a second soon after it has begun. Called a few times a second."""
        if self._meter is None or not self._meter.is_due():
            return
        begun_s = time.thread_time()
        now_s = time.monotonic()
        took_s, self._at_s = max(now_s - self._at_s, 1e-3), now_s
        links = self._links(took_s) if self._is_router else None
        lines = self._meter.tick(busy_s, links, min(1.0, self._spent_s / took_s))
        self._spent_s = 0.0
        if lines:
            self._send(self._toward, GaugeReport(self._name, lines))
        for router in links or ():
            self._send(router, Ping(time.monotonic_ns()))
        self._spent_s += time.thread_time() - begun_s

    def take(self, peer: str, messages: Sequence[Message]) -> list[Message]:
        """Handle the messages about gauges; returns the others."""
        others = [message for message in messages if type(message) not in GAUGE_MESSAGES]
        begun_s = time.thread_time()
        for message in messages:
            match message:
                case GaugeReport() | SiteReport() if self._board is not None:
                    self._board.add(message)
                case GaugeReport():
                    self._send(CONTROLLER, message)
                case Ping(sent_ns=sent_ns):
                    self._send(peer, Pong(sent_ns))
                case Pong(sent_ns=sent_ns):
                    trips = self._round_trips.setdefault(peer, deque(maxlen=ROUND_TRIPS))
                    trips.append((time.monotonic_ns() - sent_ns) / 1e6)
                case _:
                    pass
        self._spent_s += time.thread_time() - begun_s
        return others

    def _send(self, to: str, message: Message) -> None:
        connection = self._connections.get(to)
        if connection is not None:
            connection.send([message])

    def _links(self, took_s: float) -> dict[str, LinkLine]:
        """The links to the routers of other sites that are connected now."""
        found: dict[str, LinkLine] = {}
        for peer, connection in self._connections.items():
            if connection.peer_site == peer != self._name:  # a router is named like its site
                now = (connection.sent_bytes, connection.received_bytes)
                before = self._bytes.get(peer, now)
                grown = [max(0, a - b) / took_s for a, b in zip(now, before, strict=True)]
                self._bytes[peer] = now
                trips = self._round_trips.get(peer)
                rtt_ms = round(min(trips), 3) if trips else None
                found[peer] = (rtt_ms, round(grown[0], 1), round(grown[1], 1))
        return found


class GaugeBoard:
    """The last reports of all processes, where the controller is. Any thread may read it."""

    def __init__(self) -> None:
        self._reports: deque[tuple[float, GaugeReport]] = deque(maxlen=REPORTS_MAX)
        self._lock = threading.Lock()  # of all below
        self._lines: dict[tuple[str, str, str], tuple[float, MetricsLine]] = {}
        self._sent_on: dict[str, list[MetricsLine]] = {}  # operator -> lines with sightings, not taken yet
        self._sites: dict[str, tuple[float, SiteReport]] = {}

    def add(self, report: GaugeReport | SiteReport) -> None:
        """A report has arrived. In the controller's loop: it is decoded by whoever reads it."""
        now_s = time.monotonic()
        if isinstance(report, SiteReport):
            self._sites[report.site] = (now_s, report)
        else:
            self._reports.append((now_s, report))

    def lines(self) -> dict[str, MetricsLine]:
        """Process -> its last line, of those that have reported a moment ago."""
        return {process: line for (process, kind, _), line in self._fresh().items() if kind != "inbox"}

    def inboxes(self) -> dict[tuple[str, str], MetricsLine]:
        """(site, operator) -> the last line of its router."""
        return {(line.site, op): line for (_, kind, op), line in self._fresh().items() if kind == "inbox"}

    def take_sent_on(self, operator: str) -> list[MetricsLine]:
        """Lines of routers that sent rows of this operator on to another site, each of them once."""
        self._fresh()
        with self._lock:
            return self._sent_on.pop(operator, [])

    def sites(self) -> dict[str, SiteReport]:
        """Site of another application -> what its agent reported a moment ago."""
        now_s = time.monotonic()
        return {site: report for site, (at_s, report) in list(self._sites.items()) if now_s - at_s <= FRESH_S}

    def _fresh(self) -> dict[tuple[str, str, str], MetricsLine]:
        with self._lock:
            while self._reports:
                at_s, report = self._reports.popleft()
                for text in report.lines:
                    line = msgspec.json.decode(text, type=MetricsLine)
                    self._lines[line.process, line.kind, line.operator or ""] = (at_s, line)
                    if line.sent_on:
                        waiting = self._sent_on.setdefault(line.operator or "", [])
                        waiting.append(line)
                        del waiting[:-REPORTS_MAX]
            now_s = time.monotonic()
            self._lines = {
                key: (at_s, line) for key, (at_s, line) in self._lines.items() if now_s - at_s <= FRESH_S
            }
            return {key: line for key, (_, line) in self._lines.items()}
