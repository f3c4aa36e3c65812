"""A connection with one peer. Both sides prove that they know the deployment's secret, then send messages.

Responsible for: the handshake, frames in both directions, limits before a peer is trusted.
Not responsible for: which peers to connect with (peers.py), the meaning of messages (core/).

    dialler                               listener
       | --- Opening(name, nonce, incarnation) ---> |
       | <-- Answer(name, nonce, incarnation, proof)|
       | --- Proof(proof) ------------------------> |
      OPEN                                        OPEN

    proof = HMAC(secret, role, both names, nonces and incarnations)

    NEW --opening or answer--> PROVING --proof--> OPEN --lost--> CLOSED

The proof covers the role, so an answer cannot be reflected. The secret itself is never sent. A listener that
refuses a peer gives the reason in its answer, which is proven as well, and ends the connection. A process
whose name a newer one has taken learns it this way, and does not connect again.

A router also listens for the other processes of its site: an opening names the process that the dialler
wants. If that is another one, the router relays the bytes to it (relay.py). The handshake is then between
the two ends; the router proves nothing and reads nothing.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import hmac
import logging
import secrets
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import msgspec

from tiercel.core.errors import ProtocolViolation
from tiercel.core.messages import Message
from tiercel.runtime.net.emulated_link import LinkShaper
from tiercel.runtime.net.wire import FRAME_BYTES_MAX, Frames, encode_frames, pack

log = logging.getLogger(__name__)

HANDSHAKE_BYTES_MAX = 1024  # names, nonces and proofs; an unproven peer gets no more memory than this
HANDSHAKE_S_MAX = 5.0
NONCE_BYTES = 32
KEEPALIVE = {  # detects a machine that vanished within half a minute, not within hours
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 10,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 4,
}
UNSENT_BYTES_MAX = (
    512 * 1024 * 1024
)  # a peer this far behind is disconnected, and gets what matters again later


class HandshakeFailed(ProtocolViolation):
    """The peer is not the expected one, or does not follow the protocol."""


class ConnectionRefused(HandshakeFailed):
    """The peer is the expected one, and refuses us with a reason."""


class Mistrusted(HandshakeFailed):
    """The peer claims the expected name, but has another secret."""


class TlsFailed(HandshakeFailed):
    """The two ends do not accept each other's certificates, or only one of them uses TLS."""


class Opening(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The dialler gives its name, and challenges the listener."""

    name: str
    nonce: bytes
    incarnation: int
    site: str = ""  # where the process is, for an emulated link; empty: not known
    to: str = ""  # the process that it wants to reach; empty: whoever listens


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The listener proves itself, and challenges the dialler."""

    name: str
    nonce: bytes
    incarnation: int
    proof: bytes
    refusal: str = ""
    site: str = ""


class Proof(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The dialler proves itself."""

    proof: bytes


_decode_handshake = msgspec.msgpack.Decoder(Opening | Answer | Proof).decode


class ConnectionPhase(enum.Enum):
    """How far a connection is."""

    NEW = "new"  # nothing was received
    PROVING = "proving"  # the listener has answered and waits for the dialler's proof
    OPEN = "open"  # both sides are proven
    RELAYED = "relayed"  # another process of this site was dialled: its bytes pass through
    CLOSED = "closed"


class Relay(Protocol):
    """The way to another process of the site."""

    def forward(self, data: bytes) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...


class ConnectionOwner(Protocol):
    """The callbacks of a connection."""

    name: str
    secret: bytes
    incarnation: int  # grows with each start of this process
    site: str  # where this process is; empty: not known
    relays: bool  # it passes connections on to other processes

    def shaper(self, connection: Connection, write: Callable[[bytes], object]) -> LinkShaper | None: ...
    def refusal(self, peer: str, incarnation: int) -> str: ...
    def relay(self, connection: Connection, to: str, opening: bytes) -> Relay: ...
    def on_connection(self, connection: Connection) -> None: ...
    def on_failed(self, connection: Connection, failure: ProtocolViolation) -> None: ...
    def on_opened(self, connection: Connection) -> None: ...
    def on_closed(self, connection: Connection) -> None: ...
    def on_messages(self, connection: Connection, messages: list[Message]) -> None: ...


class Connection(asyncio.Protocol):
    """One TCP connection. `expected` names the peer that was dialled; None for the listening side.

    An empty `expected` accepts whoever listens, if it proves itself.
    """

    def __init__(self, owner: ConnectionOwner, expected: str | None = None) -> None:
        self.peer = expected or ""
        self.peer_incarnation = 0
        self.peer_site = ""
        self._shaper: LinkShaper | None = None  # of an emulated link
        self.phase = ConnectionPhase.NEW
        self.sent_bytes = self.received_bytes = 0  # of messages
        self.failed = False  # the handshake did not succeed, or the peer broke the protocol
        self.closed = asyncio.get_running_loop().create_future()
        self._owner = owner
        self._expected = expected
        self._frames = Frames(HANDSHAKE_BYTES_MAX)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._peer_nonce = b""
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._relay: Relay | None = None

    # -- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass
        endpoint = transport.get_extra_info("socket")
        if endpoint is not None and endpoint.family != socket.AF_UNIX:
            for option, value in KEEPALIVE.items():
                endpoint.setsockopt(*option, value)
        self._owner.on_connection(self)
        self._deadline = asyncio.get_running_loop().call_later(HANDSHAKE_S_MAX, self._on_handshake_timeout)
        if self._expected is not None:
            owner = self._owner
            self._send_handshake(
                Opening(owner.name, self._nonce, owner.incarnation, owner.site, self._expected)
            )

    def data_received(self, data: bytes) -> None:
        if self._relay is not None:
            self._relay.forward(data)
            return
        self._frames.feed(data)
        try:
            while self.phase in (ConnectionPhase.NEW, ConnectionPhase.PROVING):
                body = self._frames.next()
                if body is None:
                    return
                self._on_handshake(body)
            if self.phase is ConnectionPhase.OPEN:
                self.received_bytes += len(data)
                messages = self._frames.messages()
                if messages:
                    self._owner.on_messages(self, messages)
        except ProtocolViolation as violation:
            self.drop(violation)

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, ssl.SSLError) and self.phase is ConnectionPhase.NEW and self._expected is not None:
            self.failed = True
            self._owner.on_failed(self, TlsFailed(exc.reason or str(exc)))
        self.phase = ConnectionPhase.CLOSED
        if self._shaper is not None:
            self._shaper.drop()
        if self._relay is not None:
            self._relay.close()
        if self._deadline is not None:
            self._deadline.cancel()
        if not self.closed.done():
            self.closed.set_result(None)
        self._owner.on_closed(self)

    # -- handshake -----------------------------------------------------------------------------

    def _on_handshake(self, body: bytes) -> None:
        try:
            received = _decode_handshake(body)
        except msgspec.DecodeError as error:
            reason = f"no handshake: {error}"
            raise HandshakeFailed(reason) from error
        match received:
            case Opening(to=to) if self._is_for_another(to):
                self.peer, self.phase = received.name, ConnectionPhase.RELAYED
                if self._deadline is not None:
                    self._deadline.cancel()  # the process that it wants sets its own
                self._relay = self._owner.relay(self, to, pack(body) + self._frames.rest())
            case Opening() if self._expected is None and self.phase is ConnectionPhase.NEW:
                self.peer, self._peer_nonce, self.peer_incarnation = (
                    received.name,
                    received.nonce,
                    received.incarnation,
                )
                self.peer_site = received.site
                self.phase = ConnectionPhase.PROVING
                refusal = self._owner.refusal(received.name, received.incarnation)
                proof = self._proof("listener" + refusal)
                self._send_handshake(
                    Answer(
                        *(self._owner.name, self._nonce, self._owner.incarnation, proof, refusal),
                        self._owner.site,
                    )
                )
                if refusal:
                    raise HandshakeFailed(refusal)
            case Answer() if self._expected is not None:
                self.peer = self._expected or received.name
                if received.name != self.peer:
                    reason = f"dialled {self._expected!r}, reached {received.name!r}"
                    raise HandshakeFailed(reason)
                self._peer_nonce, self.peer_incarnation = received.nonce, received.incarnation
                self.peer_site = received.site
                self._check(received.proof, "listener" + received.refusal)
                if received.refusal:
                    raise ConnectionRefused(received.refusal)
                self._send_handshake(Proof(self._proof("dialler")))
                self._open()
            case Proof() if self.phase is ConnectionPhase.PROVING:
                self._check(received.proof, "dialler")
                self._open()
            case _:
                reason = f"{type(received).__name__} is out of turn in phase {self.phase.value}"
                raise HandshakeFailed(reason)

    def _is_for_another(self, to: str) -> bool:
        """Whether the dialler wants another process than the one that listens here."""
        first = self._expected is None and self.phase is ConnectionPhase.NEW
        return first and self._owner.relays and to not in ("", self._owner.name)

    def _proof(self, role: str) -> bytes:
        """The proof of a role: the dialler's facts come first, on both sides."""
        mine = (self._owner.name, self._nonce, self._owner.incarnation)
        theirs = (self.peer, self._peer_nonce, self.peer_incarnation)
        dialler, listener = (theirs, mine) if self._expected is None else (mine, theirs)
        received = msgspec.msgpack.encode((role, *dialler, *listener))
        return hmac.digest(self._owner.secret, received, hashlib.sha256)

    def _check(self, proof: bytes, role: str) -> None:
        if not hmac.compare_digest(proof, self._proof(role)):
            reason = f"{self.peer!r} does not know this deployment's secret"
            raise Mistrusted(reason)

    def _open(self) -> None:
        self.phase = ConnectionPhase.OPEN
        self._frames.limit = FRAME_BYTES_MAX
        if self._deadline is not None:
            self._deadline.cancel()
        if self._transport is not None:
            self._shaper = self._owner.shaper(self, self._transport.write)
        self._owner.on_opened(self)

    def _send_handshake(self, what: Opening | Answer | Proof) -> None:
        if self._transport is not None:
            self._transport.write(pack(msgspec.msgpack.encode(what)))

    def _on_handshake_timeout(self) -> None:
        reason = f"no handshake within {HANDSHAKE_S_MAX:g} s"
        self.drop(HandshakeFailed(reason))

    # -- relayed bytes -------------------------------------------------------------------------

    def pass_on(self, data: bytes) -> None:
        """Write bytes that the relayed process has sent."""
        if self._transport is not None:
            self._transport.write(data)

    def pause_writing(self) -> None:
        if self._relay is not None:
            self._relay.pause()

    def resume_writing(self) -> None:
        if self._relay is not None:
            self._relay.resume()

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # -- messages ------------------------------------------------------------------------------

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages in one write."""
        transport = self._transport
        if self.phase is not ConnectionPhase.OPEN or transport is None or transport.is_closing():
            return  # a transport that has been aborted raises, and reports its end only in the next turn
        data = b"".join([encode_frames(message) for message in messages])
        self.sent_bytes += len(data)
        unsent = transport.get_write_buffer_size()
        if self._shaper is None:
            transport.write(data)
        else:
            self._shaper.send(data)
            unsent += self._shaper.queued_bytes
        if unsent > UNSENT_BYTES_MAX:
            log.warning("%s disconnects %s: it does not read", self._owner.name, self.peer)
            transport.abort()

    @property
    def dialler(self) -> str:
        """The name of the side that dialled."""
        return self._owner.name if self._expected is not None else self.peer

    def drop(self, violation: ProtocolViolation) -> None:
        """End the connection because the peer broke the protocol, and log the reason."""
        who = self.peer or "an unproven peer"
        if self._expected is None and self.phase is not ConnectionPhase.OPEN:
            who = f"an unproven peer that calls itself {self.peer!r}" if self.peer else who
            address = self._transport.get_extra_info("peername") if self._transport else None
            who += f" at {address[0]}:{address[1]}" if isinstance(address, tuple) else ""
        log.warning("%s drops %s: %s", self._owner.name, who, violation)
        self.failed = True
        self._owner.on_failed(self, violation)
        self.close()

    def abort(self) -> None:
        """End at once, without sending what was written."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Send what was written, then end."""
        if self._shaper is not None:
            self._shaper.finish()
        if self._transport is not None:
            self._transport.close()
