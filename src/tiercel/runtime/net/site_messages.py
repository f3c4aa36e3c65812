"""Messages between the drivers of sites that are applications of their own, and to clients from afar."""

from __future__ import annotations

from tiercel.core.messages.base import Message


class LaunchInstance(Message, frozen=True):
    """Controller -> agent of a site: start this instance. Repeated until its router reports it."""

    instance: str


class RetireInstance(Message, frozen=True):
    """Controller -> agent of a site: end this instance for good; its router has released it."""

    instance: str


class ManifestQuery(Message, frozen=True):
    """Client or driver -> router: asks what runs here."""


class ManifestReply(Message, frozen=True):
    """Router -> client or driver: its site, the manifest as JSON, its version, and the time of its clock."""

    site: str
    manifest: bytes
    version: str = ""
    now_ms: float = 0.0
