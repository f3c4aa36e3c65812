"""The relay of a router: bytes between a process elsewhere and another process of its site.

Responsible for: finding the process that was dialled, copying bytes both ways, slowing down a fast sender.
Not responsible for: trust. Both ends prove themselves to each other through the relay (connection.py).

    dialler --TCP--> router's port --[Relayed]--> Unix socket or port of the process

With a relay each site needs one open port. The router neither decodes nor logs what passes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import cast

from tiercel.runtime.net.connection import Connection
from tiercel.runtime.net.registry import Address

log = logging.getLogger(__name__)

RELAY_BYTES_MAX = 1024 * 1024  # of bytes that wait until the process is reached

Open = Callable[[Address, Callable[[], asyncio.Protocol]], Awaitable[object]]


class RelayedProcess(asyncio.Protocol):
    """The connection with the process that was dialled, behind the router."""

    def __init__(self, dialler: Connection, to: str, opening: bytes) -> None:
        self._dialler, self._to = dialler, to
        self._waiting = bytearray(opening)  # until the process is reached
        self._transport: asyncio.Transport | None = None
        self._closed = False

    async def connect(self, address: Address | None, open_connection: Open) -> None:
        """Reach the process, or end the dialler's connection: it dials again."""
        try:
            if address is None:
                log.info("%s dialled %s, which does not run here", self._dialler.peer, self._to)
                self._dialler.close()
            else:
                await open_connection(address, lambda: self)
        except OSError as error:
            log.info("%s dialled %s, which cannot be reached: %s", self._dialler.peer, self._to, error)
            self._dialler.close()

    # -- from the dialler ------------------------------------------------------------------------

    def forward(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
            return
        self._waiting += data
        if len(self._waiting) > RELAY_BYTES_MAX:
            self._dialler.close()

    def pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        self._closed = True
        if self._transport is not None:
            self._transport.close()

    # -- from the process ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._closed:
            transport.close()
            return
        self._transport.write(bytes(self._waiting))
        self._waiting.clear()

    def data_received(self, data: bytes) -> None:
        self._dialler.pass_on(data)

    def pause_writing(self) -> None:
        self._dialler.pause_reading()

    def resume_writing(self) -> None:
        self._dialler.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._dialler.close()
