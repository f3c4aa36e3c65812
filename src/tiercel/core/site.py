"""The parts of a site's router, and the few helpers that all of them use.

Responsible for: holding the parts together.
Not responsible for: what they do (traffic.py: rows; movedesk.py: moves; router.py: events).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tiercel.core import messages as m
from tiercel.core.inbox import Inbox
from tiercel.core.lanes import FrameId, Inbound, Lane
from tiercel.core.readers import Reader
from tiercel.core.records import Row
from tiercel.core.routing import RoutingTable
from tiercel.core.settings import Settings
from tiercel.core.step import Journal, Step
from tiercel.core.streams import Producers, StreamLog
from tiercel.core.topology import Topology, site_of
from tiercel.core.watermarks import Promises

if TYPE_CHECKING:
    from tiercel.core.arrivals import Arrival
    from tiercel.core.departures import Departure


class Site(ABC):
    """State of one router."""

    def __init__(self, site: str, topology: Topology, settings: Settings, incarnation: int) -> None:
        self.site = site
        self.topology = topology.validate()
        named = {stream for o in topology.operators.values() for stream in (*o.inputs, o.output)}
        self._consumers = {stream: topology.consumers(stream) for stream in named}
        self.settings = settings
        self.mutant = settings.mutant
        self.incarnation = incarnation
        self.journal = Journal()
        self.inboxes = {
            name: Inbox(name, site, RoutingTable.initial(operator), settings)
            for name, operator in topology.operators.items()
        }
        for name, operator in topology.operators.items():
            for instance in operator.instances:
                if site_of(instance) == site:
                    self.inboxes[name].readers[instance] = Reader(0, 0, {})
        self.lanes: dict[tuple[str, str], Lane] = {}
        self.connected: set[str] = set()
        self.inbound: dict[FrameId, Inbound] = {}
        self.streams = {
            s.name: StreamLog(s.name, settings)
            for s in topology.streams.values()
            if s.home == site and s.logged
        }
        self.producers = Producers()
        self.departures: dict[str, Departure] = {}
        self.arrivals: dict[str, Arrival] = {}
        self.ended: dict[str, tuple[str, str]] = {}  # departures that are over: phase and reason
        self.merged: dict[str, None] = {}  # arrivals that are over
        self.promises = {
            name: Promises(topology.sites, topology.timed_inputs(name)) for name in topology.operators
        }
        for stream in topology.streams.values():
            for producer, at in stream.producers.items():
                for operator_name in topology.consumers(stream.name) if at == site else ():
                    self.promises[operator_name].sources[producer] = -1
        for name, inbox in self.inboxes.items():
            inbox.timed = topology.late_inputs(name)
            inbox.left_out = self.left_out
        self.looking: set[str] = set()  # streams with an idle time-out that is running
        self.last_rows_ms: dict[str, float] = {}  # of those streams, when rows of them came here last
        self.event_time = any(o.time_mode == "eventTime" for o in topology.operators.values())
        self.owed: dict[str, tuple[str, str]] = {}  # producers whose acknowledgement waits for a reader
        self.ticking: set[str] = set()
        self.late: dict[str, int] = {}  # operator -> rows that were late at this site, in this life
        self.rows = self.outputs = 0  # taken in and admitted in this life, for `gauges`
        self.boot: Callable[[Step], None] | None = None

    def consumers(self, stream: str) -> tuple[str, ...]:
        """The operators that read a stream."""
        return self._consumers.get(stream, ())

    def lane(self, to: str, inbox: str) -> Lane:
        lane = self.lanes.get((to, inbox))
        if lane is None:
            lane = self.lanes[to, inbox] = Lane(to, inbox, self.settings.lane_frames_max, self.mutant)
            lane.connected = to in self.connected
        return lane

    def gauges(self) -> dict[str, float]:
        """What this life has done, and what waits in the inboxes here."""
        return {
            "rows": self.rows,
            "outputs": self.outputs,
            "lag": sum(inbox.backlog_rows for inbox in self.inboxes.values()),
            "moves": len(self.departures) + len(self.arrivals),
        }

    def site_of(self, instance: str) -> str:
        return site_of(instance)

    def send_router(self, step: Step, site: str, message: m.Message, *, durable: bool = False) -> None:
        """To another site's router, or straight to ourselves."""
        if site == self.site:
            self.on_message(step, self.site, message)
        elif durable:
            step.send_durable(site, message)
        else:
            step.send(site, message)

    @abstractmethod
    def left_out(self, inbox: Inbox, row: Row) -> bool:
        """Whether a row that is about to be appended is late: then nobody sees it."""

    @abstractmethod
    def on_message(self, step: Step, sender: str, message: Any) -> None:
        """A message of a peer, or of ourselves."""

    @abstractmethod
    def on_notice(self, step: Step, sender: str, inbox: str, notice: m.AnyNotice) -> None:
        """A durable notice about a move, out of the lane of an inbox."""
