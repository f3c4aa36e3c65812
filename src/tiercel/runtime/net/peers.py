"""The connections of a process: listening, dialling, and which of two connections with one peer stays.

Responsible for: connected peers, reconnecting, unproven connections.
Not responsible for: the handshake (connection.py), the messages (core/), when they are sent
    (process/host.py).

A peer is reported after it has proven its identity. An unproven peer can only end its own connection; the
reason is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import ssl
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from tiercel.core.errors import ProtocolViolation
from tiercel.core.messages import Message
from tiercel.errors import UserError
from tiercel.runtime.net.connection import (
    HANDSHAKE_S_MAX,
    Connection,
    ConnectionRefused,
    HandshakeFailed,
    Mistrusted,
    Relay,
    TlsFailed,
)
from tiercel.runtime.net.emulated_link import Links, LinkShaper, link_between
from tiercel.runtime.net.registry import Address, Registry
from tiercel.runtime.net.relay import RelayedProcess
from tiercel.runtime.net.tls import TlsFiles

log = logging.getLogger(__name__)

DIAL_S = 0.05  # between attempts to reach a peer
DIAL_AGAIN_S = 1.0  # after a failed handshake: the next one will hardly succeed sooner
POLL_S = 0.25  # between checks which peers to dial, and whether this process must stop
RESTART_CHECK_S = 1.0  # between checks whether a silent peer has been started again
CLOSE_S_MAX = 1.0  # for a peer to take what was already written to it
MISTRUSTED_MAX = 3  # in a row; a single one may be another program at the old port of a restarted peer
ON_DEMAND_S = 60.0  # for this long after the last message to it a peer on demand is dialled
IN_HANDSHAKE_MAX = 128  # connections in their handshake; beyond it the oldest one is dropped


class PeerListener(Protocol):
    """The callbacks of `Peers`."""

    def peer_connected(self, peer: str) -> None: ...
    def peer_disconnected(self, peer: str) -> None: ...
    def peer_sent(self, peer: str, messages: list[Message]) -> None: ...


class Peers:
    """All connections of one process."""

    def __init__(
        self,
        host: PeerListener,
        name: str,
        secret: bytes,
        incarnation: int,
        registry: Registry,
        *,
        dials: Callable[[], Iterable[str]] | Iterable[str],
        bind: str,
        port: int,
        tls: TlsFiles | None,
        on_refused: Callable[[str, HandshakeFailed], object] | None,
        site: str = "",
        links: Links | None = None,
        relays: bool = False,
    ) -> None:
        self.name = name
        self.secret = secret
        self.incarnation = incarnation
        self.site = site
        self._links = links or {}
        self.relays = relays
        self.connections: dict[str, Connection] = {}  # those whose handshake is complete
        self._host = host
        self._registry = registry
        self._dials = dials
        self._bind, self._port = bind, port
        self._server_options = {} if tls is None else tls.server_options(HANDSHAKE_S_MAX)
        self._client_options = {} if tls is None else tls.client_options(HANDSHAKE_S_MAX)
        self._on_refused = on_refused
        self._mistrusted = 0  # handshakes in a row in which the dialled peer had another secret
        self._in_handshake: dict[Connection, None] = {}  # in their handshake, oldest first
        self._dropped: set[Connection] = set()  # ended by us, until the transport has ended too
        self._servers = contextlib.ExitStack()
        self._dialling: asyncio.Task[None] | None = None
        self._on_demand: dict[str, float] = {}  # peers of other applications -> until when they are dialled
        self._demanded = asyncio.Event()
        self._relayed: dict[Connection, asyncio.Task[None]] = {}

    # -- from start to end ----------------------------------------------------------------------------------

    async def listen(self) -> tuple[int, str]:
        """Accept connections; returns port and Unix socket."""
        server = await self._serve()
        self._servers.callback(server.close)
        port: int = server.sockets[0].getsockname()[1]
        socket_path = ""
        if not self._server_options:  # with TLS, there is no way around it
            directory = Path(tempfile.mkdtemp(prefix="tiercel-"))  # only this user may enter
            self._servers.callback(shutil.rmtree, directory, ignore_errors=True)
            socket_path = str(directory / "socket")
            unix_server = await asyncio.get_running_loop().create_unix_server(
                lambda: Connection(self), socket_path
            )
            self._servers.callback(unix_server.close)
        return port, socket_path

    async def _serve(self) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        try:
            return await loop.create_server(
                lambda: Connection(self), self._bind, self._port, **self._server_options
            )
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            what = f"{self.name} cannot listen at {self._bind}, port {self._port}: "
            what += "another process listens there" if taken else os.strerror(error.errno or 0)
            hint = "end that process, or choose another port; 0 takes any that is free"
            raise UserError(what, expected="a free port at an address of this machine", hint=hint) from error

    def dial(self) -> None:
        """Connect with all peers that are to be dialled, and reconnect when a connection ends."""
        self._dialling = asyncio.get_running_loop().create_task(self._update_dialled_peers())

    async def close(self) -> None:
        self._servers.close()
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.gather(self._dialling, return_exceptions=True)
        connections = [*self.connections.values(), *self._in_handshake, *self._relayed, *self._dropped]
        for connection in connections:
            connection.close()
        if connections:  # what was written leaves before the loop ends
            await asyncio.wait([connection.closed for connection in connections], timeout=CLOSE_S_MAX)
            for connection in connections:
                if not connection.closed.done():
                    connection.abort()
            await asyncio.sleep(0)

    # -- dialling ------------------------------------------------------------------------------

    async def _update_dialled_peers(self) -> None:
        """Dial the peers of now, and stop dialling the others."""
        loop, dials = asyncio.get_running_loop(), self._dials
        dialling: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                peers = set(dialling)  # as before, if the registry cannot be read
                with contextlib.suppress(OSError):
                    peers = {*(dials() if callable(dials) else dials), *self._demanded_peers(loop.time())}
                    peers -= {self.name}
                for peer in dialling.keys() - peers:
                    dialling.pop(peer).cancel()
                for peer in sorted(peers - dialling.keys()):
                    dialling[peer] = loop.create_task(self._keep_dialling(peer))
                self._demanded.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):  # wait_for of Python 3.11 can swallow a cancellation
                        await self._demanded.wait()
        finally:
            for task in dialling.values():
                task.cancel()
            await asyncio.gather(*dialling.values(), return_exceptions=True)

    def demand(self, peer: str) -> None:
        """Dial a process of another application, because there is something for it."""
        if self._registry.is_elsewhere(peer):
            if peer not in self._on_demand:
                self._demanded.set()
            self._on_demand[peer] = asyncio.get_running_loop().time() + ON_DEMAND_S

    def _demanded_peers(self, now_s: float) -> Iterable[str]:
        self._on_demand = {peer: until_s for peer, until_s in self._on_demand.items() if until_s > now_s}
        return self._on_demand

    async def _keep_dialling(self, peer: str) -> None:
        while True:
            connection = self.connections.get(peer)  # it may have dialled us
            if connection is None:
                try:
                    address = self._registry.find(peer)
                    connection = None if address is None else await self._dial(address)
                except ssl.SSLError as error:
                    self._tls_failed(peer, TlsFailed(error.reason or str(error)))
                except OSError:
                    pass  # the peer is being started again, with another address
            if connection is not None:
                await self._until_lost(connection, peer)
            await asyncio.sleep(DIAL_AGAIN_S if connection is not None and connection.failed else DIAL_S)

    async def _until_lost(self, connection: Connection, peer: str) -> None:
        """Wait until the connection ends; end it if a later incarnation of the peer is registered.

        The older one was stopped, or its machine is lost.
        """
        while not connection.closed.done():
            await asyncio.wait(
                [connection.closed], timeout=RESTART_CHECK_S
            )  # a plain await would cancel it when we are cancelled
            address = None
            with contextlib.suppress(OSError):  # the registry cannot be read now; we try again
                address = self._registry.find(peer)
            if (
                address is not None
                and address.incarnation > connection.peer_incarnation > 0
                and not connection.closed.done()
            ):
                log.warning("%s: %s has been started again; its older connection ends", self.name, peer)
                connection.abort()

    async def _dial(self, address: Address) -> Connection:
        connection = Connection(self, address.name)
        await self._open(address, lambda: connection)
        return connection

    async def _open(self, address: Address, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Connect by Unix socket if it is reachable, else by TCP. Both begin with the handshake."""
        loop = asyncio.get_running_loop()
        if address.local and not self._client_options:
            with contextlib.suppress(OSError):  # another machine, or another user
                await loop.create_unix_connection(protocol, address.local)
                return
        await loop.create_connection(protocol, address.host, address.port, **self._client_options)

    # -- callbacks of connections ------------------------------------------------------------------------

    def shaper(self, connection: Connection, write: Callable[[bytes], object]) -> LinkShaper | None:
        """The emulated link toward a peer at another site; None: there is none."""
        link = link_between(self._links, self.site, connection.peer_site) if self._links else None
        return None if link is None else LinkShaper(link, write, f"{self.name} {connection.peer}")

    def refusal(self, peer: str, incarnation: int) -> str:
        """Why a peer is refused; empty: it is not. Called before the peer has proven anything."""
        if peer == self.name:
            return f"{peer!r} is the name of the process that listens here"
        connection = self.connections.get(peer)
        if connection is not None and connection.peer_incarnation > incarnation:
            return f"a process that was started later has connected as {peer!r}"
        return ""

    def relay(self, connection: Connection, to: str, opening: bytes) -> Relay:
        """Pass the bytes of a connection on to another process."""
        self._in_handshake.pop(connection, None)
        relayed = RelayedProcess(connection, to, opening)
        reaching = relayed.connect(self._registry.find(to), self._open)
        self._relayed[connection] = asyncio.get_running_loop().create_task(reaching)
        return relayed

    def on_connection(self, connection: Connection) -> None:
        self._in_handshake[connection] = None
        if len(self._in_handshake) > IN_HANDSHAKE_MAX:
            reason = f"more than {IN_HANDSHAKE_MAX} connections without a handshake"
            next(iter(self._in_handshake)).drop(HandshakeFailed(reason))

    def on_failed(self, connection: Connection, failure: ProtocolViolation) -> None:
        self._in_handshake.pop(connection, None)
        self._dropped.add(connection)
        dialled = connection.dialler == self.name
        if isinstance(failure, Mistrusted) and dialled:
            self._mistrusted += 1
        if isinstance(failure, TlsFailed):
            self._tls_failed(connection.peer, failure)
            return
        hopeless = isinstance(failure, ConnectionRefused) or (dialled and self._mistrusted >= MISTRUSTED_MAX)
        if hopeless and isinstance(failure, HandshakeFailed) and self._on_refused is not None:
            self._on_refused(connection.peer, failure)

    def _tls_failed(self, peer: str, failure: TlsFailed) -> None:
        """A dialled peer does not accept our certificate, or we not his; several in a row are no accident."""
        self._mistrusted += 1
        if self._mistrusted >= MISTRUSTED_MAX and self._on_refused is not None:
            self._on_refused(peer, failure)

    def on_opened(self, connection: Connection) -> None:
        self._in_handshake.pop(connection, None)
        self._mistrusted = 0
        older = self.connections.get(connection.peer)
        if older is not None:
            if self._keeps(older, connection):
                connection.close()
                return
            if older.peer_incarnation != connection.peer_incarnation:
                log.warning(
                    "%s: %s has been started again, its older connection ends", self.name, connection.peer
                )
            self.on_closed(older)
            older.close()
        self.connections[connection.peer] = connection
        self._host.peer_connected(connection.peer)

    def _keeps(self, older: Connection, connection: Connection) -> bool:
        """Whether the older of two connections with one peer stays.

        Both sides must keep the same one, so the rule uses facts that both know.
        """
        if older.peer_incarnation != connection.peer_incarnation:
            return older.peer_incarnation > connection.peer_incarnation
        return older.dialler < connection.dialler  # the same peer twice: it has lost the older one

    def on_closed(self, connection: Connection) -> None:
        self._in_handshake.pop(connection, None)
        self._dropped.discard(connection)
        reaching = self._relayed.pop(connection, None)
        if reaching is not None:
            reaching.cancel()
        if self.connections.get(connection.peer) is connection:
            del self.connections[connection.peer]
            self._host.peer_disconnected(connection.peer)

    def on_messages(self, connection: Connection, messages: list[Message]) -> None:
        if self.connections.get(connection.peer) is connection:
            self._host.peer_sent(connection.peer, messages)
