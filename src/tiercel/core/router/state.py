"""The data of one router, shared by its components.

Responsible for: holding the logs and outboxes of a site, and look-ups.
Not responsible for: changing them (intake.py, outputs.py, forwarding.py, watermarks.py, sessions.py).
"""

from __future__ import annotations

from tiercel.core.logs.inbox import Inbox
from tiercel.core.logs.output_log import OutputLog
from tiercel.core.logs.producers import ProducerTable
from tiercel.core.logs.site_outbox import FrameId, InboundFrame, SiteOutbox
from tiercel.core.machine.step import Journal
from tiercel.core.machine.stored import LogReader
from tiercel.core.model.log import site_origin
from tiercel.core.model.routing import RoutingTable
from tiercel.core.model.topology import Topology, site_of
from tiercel.core.router.load_sample import LoadSample
from tiercel.core.settings import Settings


class RouterState:
    """The data that more than one component of a router reads."""

    def __init__(self, site: str, topology: Topology, settings: Settings, incarnation: int) -> None:
        self.site = site
        self.topology = topology.validate()
        named = {stream for o in topology.operators.values() for stream in (*o.inputs, o.output)}
        self._consumers = {stream: topology.consumers(stream) for stream in named}
        self._broadcast_to = {
            o.broadcast: topology.broadcast_to(o.broadcast) for o in topology.operators.values()
        }
        self.settings = settings
        self.incarnation = incarnation
        self.journal = Journal()
        self.inboxes = {
            name: Inbox(name, site, RoutingTable.initial(operator), settings)
            for name, operator in topology.operators.items()
        }
        for name, operator in topology.operators.items():
            for instance in operator.instances:
                if site_of(instance) == site:
                    self.inboxes[name].readers[instance] = LogReader(0, 0, {})
        self.outboxes: dict[tuple[str, str], SiteOutbox] = {}
        self.connected: set[str] = set()
        self.inbound: dict[FrameId, InboundFrame] = {}
        self.storage = 0  # the incarnation that created this router's storage; 0: unknown yet
        self.streams = {name: OutputLog(name, settings) for name in topology.logs_at(site)}
        self._site_of_log = {
            log: at for stream in topology.streams for log, at in topology.logs_of(stream).items()
        }
        self._logs_of = {stream: tuple(topology.logs_of(stream)) for stream in topology.streams}
        self.producers = ProducerTable()
        # producers whose acknowledgement waits for a slow reader -> (peer, stream)
        self.deferred_acks: dict[str, tuple[str, str]] = {}
        self.congested_streams: set[str] = set()  # their named subscriptions lag: at home here, or elsewhere
        self.last_rows_ms: dict[str, float] = {}  # stream with an idle time-out -> time of its last rows
        self.entering = {name: LoadSample(operator.slots) for name, operator in topology.operators.items()}
        self.rows = self.outputs = 0  # accepted and admitted by this incarnation, for `gauges`

    @property
    def origin(self) -> str:
        """The name under which this site numbers rows and frames. Rule R43: each storage has its own."""
        return site_origin(self.site, self.storage)

    def consumers(self, stream: str) -> tuple[str, ...]:
        """The operators that read a stream."""
        return self._consumers.get(stream, ())

    def site_of_log(self, log: str) -> str:
        """The site of an output log; empty: there is no such log."""
        return self._site_of_log.get(log, "")

    def logs_of(self, stream: str) -> tuple[str, ...]:
        """The names of a stream's output logs, at any site."""
        return self._logs_of.get(stream, ())

    def broadcast_to(self, stream: str) -> tuple[str, ...]:
        """The operators whose rows carry the last row of this stream."""
        return self._broadcast_to.get(stream, ())

    def outbox(self, to: str, inbox: str) -> SiteOutbox:
        outbox = self.outboxes.get((to, inbox))
        if outbox is None:
            outbox = self.outboxes[to, inbox] = SiteOutbox(
                to, inbox, self.origin, self.settings.site_frames_max
            )
            outbox.connected = to in self.connected
        return outbox
