"""Messages with the gauges of a second, from every process to the controller, and of links between sites."""

from __future__ import annotations

from tiercel.core.messages.base import Message


class GaugeReport(Message, frozen=True):
    """Instance -> router -> controller, and router -> controller: metrics lines as JSON, once a second."""

    process: str
    lines: list[bytes]


class SiteReport(Message, frozen=True):
    """Agent -> controller, once a second: room for instances at its site, and those that do not return."""

    site: str
    free_slots: int | None  # None: not known, or Spark adds executors
    failed: dict[str, str]  # instance -> the reason


class Ping(Message, frozen=True):
    """Router -> router of another site: answer at once."""

    sent_ns: int


class Pong(Message, frozen=True):
    """Router -> router of another site: the answer, with the sender's own time."""

    sent_ns: int
