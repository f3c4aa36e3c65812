"""A process's connections: listening, dialling, and which of two links with one peer stays.

Responsible for: who is connected, peers that come and go, strangers at the door.
Not responsible for: the handshake (link.py), what is said (core/), when it is said (host.py).

Nobody is told about a peer before it has proven who it is. Whatever a stranger does ends its own
connection, with the reason in the log, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from tiercel.core.faults import ProtocolViolation
from tiercel.core.messages import Message
from tiercel.errors import UserError
from tiercel.runtime.link import HANDSHAKE_S_MAX, HandshakeFailed, Link, Mistrusted, Refused
from tiercel.runtime.registry import Address, Registry
from tiercel.runtime.tls import TlsFiles

log = logging.getLogger(__name__)

DIAL_S = 0.05  # between attempts to reach a peer
DIAL_AGAIN_S = 1.0  # after one with whom no handshake succeeds: it will hardly be better soon
LOOK_S = 0.25  # between looks whom to dial, and whether we are still wanted
RENEWED_S = 1.0  # between looks whether a peer has been started again, while the older one says nothing
CLOSE_S_MAX = 1.0  # for a peer to take what was already written to it
MISTRUSTED_MAX = 3  # in a row; once may be a stranger at the port of a peer that is started again elsewhere
STRANGERS_MAX = 128  # connections without a handshake; beyond it the one that has taken longest ends


class Told(Protocol):
    """What a host hears of its peers."""

    def peer_connected(self, peer: str) -> None: ...
    def peer_disconnected(self, peer: str) -> None: ...
    def peer_said(self, peer: str, messages: list[Message]) -> None: ...


class Peers:
    """All links of one process."""

    def __init__(
        self,
        host: Told,
        name: str,
        secret: bytes,
        life: int,
        registry: Registry,
        *,
        dials: Callable[[], Iterable[str]] | Iterable[str],
        bind: str,
        port: int,
        tls: TlsFiles | None,
        on_refused: Callable[[str, HandshakeFailed], object] | None,
    ) -> None:
        self.name = name
        self.secret = secret
        self.life = life
        self.links: dict[str, Link] = {}  # those that have proven who they are
        self._host = host
        self._registry = registry
        self._dials = dials
        self._bind, self._port = bind, port
        self._serving = {} if tls is None else tls.serving(HANDSHAKE_S_MAX)
        self._calling = {} if tls is None else tls.dialling(HANDSHAKE_S_MAX)
        self._on_refused = on_refused
        self._mistrusted = 0  # handshakes in a row in which whom we dialled had another secret
        self._unproven: dict[Link, None] = {}  # in their handshake, oldest first
        self._doors = contextlib.ExitStack()
        self._dialling: asyncio.Task[None] | None = None

    # -- life ----------------------------------------------------------------------------------

    async def listen(self) -> tuple[int, str]:
        """Let peers in; returns port and Unix socket."""
        server = await self._serve()
        self._doors.callback(server.close)
        port: int = server.sockets[0].getsockname()[1]
        nearby = ""
        if not self._serving:  # who asked for TLS wants no way around it
            directory = Path(tempfile.mkdtemp(prefix="tiercel-"))  # only this user may enter
            self._doors.callback(shutil.rmtree, directory, ignore_errors=True)
            nearby = str(directory / "socket")
            near_server = await asyncio.get_running_loop().create_unix_server(lambda: Link(self), nearby)
            self._doors.callback(near_server.close)
        return port, nearby

    async def _serve(self) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        try:
            return await loop.create_server(lambda: Link(self), self._bind, self._port, **self._serving)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            what = f"{self.name} cannot listen at {self._bind}, port {self._port}: "
            what += "another process does" if taken else os.strerror(error.errno or 0)
            hint = "end that process, or choose another port; 0 takes any that is free"
            raise UserError(what, expected="a free port at an address of this machine", hint=hint) from error

    def dial(self) -> None:
        """Connect with everyone we are to dial, again and again."""
        self._dialling = asyncio.get_running_loop().create_task(self._keep_looking_whom_to_dial())

    async def close(self) -> None:
        self._doors.close()
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.gather(self._dialling, return_exceptions=True)
        links = [*self.links.values(), *self._unproven]
        for link in links:
            link.close()
        if links:  # their last words leave before the loop ends
            await asyncio.wait([link.closed for link in links], timeout=CLOSE_S_MAX)

    # -- dialling ------------------------------------------------------------------------------

    async def _keep_looking_whom_to_dial(self) -> None:
        """Peers come and go: those that are wanted now are dialled, the others no longer."""
        loop, dials = asyncio.get_running_loop(), self._dials
        dialling: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                wanted = set(dialling)  # as before, if the registry has a bad moment
                with contextlib.suppress(OSError):
                    wanted = set(dials() if callable(dials) else dials) - {self.name}
                for peer in dialling.keys() - wanted:
                    dialling.pop(peer).cancel()
                for peer in sorted(wanted - dialling.keys()):
                    dialling[peer] = loop.create_task(self._keep_dialling(peer))
                await asyncio.sleep(LOOK_S)
        finally:
            for task in dialling.values():
                task.cancel()
            await asyncio.gather(*dialling.values(), return_exceptions=True)

    async def _keep_dialling(self, peer: str) -> None:
        while True:
            link = self.links.get(peer)  # it may have dialled us
            if link is None:
                with contextlib.suppress(OSError):  # it is being started again, and will be elsewhere
                    address = self._registry.find(peer)
                    link = None if address is None else await self._dial(address)
            if link is not None:
                await self._until_lost(link, peer)
            await asyncio.sleep(DIAL_AGAIN_S if link is not None and link.failed else DIAL_S)

    async def _until_lost(self, link: Link, peer: str) -> None:
        """Until it ends, or a later life of the peer listens: this one was stopped, or its machine lost."""
        while not link.closed.done():
            await asyncio.wait([link.closed], timeout=RENEWED_S)  # a plain await would let our end cancel it
            address = None
            with contextlib.suppress(OSError):  # a bad moment of the registry; we look again
                address = self._registry.find(peer)
            if address is not None and address.life > link.peer_life > 0 and not link.closed.done():
                log.warning("%s: %s has been started again, we leave the older one", self.name, peer)
                link.abort()

    async def _dial(self, address: Address) -> Link:
        """By the nearest way: a Unix socket if we can see it, else TCP. Both begin with the handshake."""
        loop = asyncio.get_running_loop()
        if address.local and not self._calling:
            with contextlib.suppress(OSError):  # another machine, or another user
                return (await loop.create_unix_connection(lambda: Link(self, address.name), address.local))[1]
        where = (address.host, address.port)
        return (await loop.create_connection(lambda: Link(self, address.name), *where, **self._calling))[1]

    # -- what links say ------------------------------------------------------------------------

    def refusal(self, peer: str, life: int) -> str:
        """Why a peer may not come in; empty: it may. Asked before it has proven anything."""
        if peer == self.name:
            return f"{peer!r} is the name of the process that listens here"
        link = self.links.get(peer)
        if link is not None and link.peer_life > life:
            return f"a process that was started later has connected as {peer!r}"
        return ""

    def link_met(self, link: Link) -> None:
        self._unproven[link] = None
        if len(self._unproven) > STRANGERS_MAX:
            reason = f"more than {STRANGERS_MAX} connections without a handshake"
            next(iter(self._unproven)).drop(HandshakeFailed(reason))

    def link_failed(self, link: Link, failure: ProtocolViolation) -> None:
        self._unproven.pop(link, None)
        dialled = link.dialler == self.name
        if isinstance(failure, Mistrusted) and dialled:
            self._mistrusted += 1
        hopeless = isinstance(failure, Refused) or (dialled and self._mistrusted >= MISTRUSTED_MAX)
        if hopeless and isinstance(failure, HandshakeFailed) and self._on_refused is not None:
            self._on_refused(link.peer, failure)

    def link_opened(self, link: Link) -> None:
        self._unproven.pop(link, None)
        self._mistrusted = 0
        older = self.links.get(link.peer)
        if older is not None:
            if self._prefers(older, link):
                link.close()
                return
            if older.peer_life != link.peer_life:
                log.warning("%s: %s has been started again, its older connection ends", self.name, link.peer)
            self.link_closed(older)
            older.close()
        self.links[link.peer] = link
        self._host.peer_connected(link.peer)

    def _prefers(self, older: Link, link: Link) -> bool:
        """Of two links with one peer, both sides must keep the same: so the rule looks at what both know."""
        if older.peer_life != link.peer_life:
            return older.peer_life > link.peer_life
        return older.dialler < link.dialler  # the same one twice: it has lost the older

    def link_closed(self, link: Link) -> None:
        self._unproven.pop(link, None)
        if self.links.get(link.peer) is link:
            del self.links[link.peer]
            self._host.peer_disconnected(link.peer)

    def link_received(self, link: Link, messages: list[Message]) -> None:
        if self.links.get(link.peer) is link:
            self._host.peer_said(link.peer, messages)
