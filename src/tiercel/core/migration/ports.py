"""The interfaces of the router and of the coordinator for the router roles of a move.

Responsible for: the closed list of calls that an outgoing or incoming move may make.
Not responsible for: the calls of a router to its moves (core/router/moves.py).
"""

from __future__ import annotations

from typing import Protocol

from tiercel.core import messages as m
from tiercel.core.logs.inbox import Inbox
from tiercel.core.logs.sequencer import HeldRow
from tiercel.core.logs.site_outbox import FrameId, SiteOutbox
from tiercel.core.machine.step import Step
from tiercel.core.model.log import OutputFence
from tiercel.core.model.topology import Topology


class RouterPort(Protocol):
    """The interface of the router for the moves of its site."""

    @property
    def site(self) -> str: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def inboxes(self) -> dict[str, Inbox]: ...

    def send_router(self, step: Step, site: str, message: m.Message, *, durable: bool = False) -> None:
        """Send a message to another site's router, or deliver it directly to this one."""

    def outbox(self, to: str, inbox: str) -> SiteOutbox:
        """The site outbox for one inbox of another site."""

    def intake_promise(self, operator: str) -> int:
        """No row at or below this watermark enters the system at this site."""

    def output_promise(self, operator: str) -> int:
        """No output of this site comes from input at or below this watermark."""

    def unsettled_outputs(self, operator: str) -> set[FrameId]:
        """Frames with outputs of this operator that have not arrived."""

    def output_fences(self, operator: str) -> dict[str, OutputFence] | None:
        """Where outputs that must follow those of this site come; None: other operators read them."""

    def sequence_again(self, step: Step, inbox: Inbox, held: list[HeldRow]) -> None:
        """Sequence held rows again after the routing table has changed."""


class OutgoingPort(Protocol):
    """The interface of the coordinator for an outgoing move."""

    def report(self, step: Step, move: str) -> None:
        """Report the phase of a move to the client that requested it."""

    def on_notice(self, step: Step, sender: str, notice: m.AnyNotice) -> None:
        """Deliver a notice to the incoming move, if it is at the same router."""

    def shadow_backlog(self, move: str) -> int:
        """Shadow entries that the destination's site does not have durably."""

    def merged_at(self, instance: str) -> int:
        """The offset of the last end of a move into this instance that its checkpoint does not cover."""

    def end_outgoing(self, step: Step, move: str) -> None:
        """Delete a move whose roles have all ended."""


class IncomingPort(Protocol):
    """The interface of the coordinator for an incoming move."""

    def drop_incoming(self, step: Step, move: str) -> None:
        """Forget an undone move."""
