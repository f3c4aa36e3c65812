"""One connection with a peer: both sides prove that they know the deployment's secret, then talk.

Responsible for: the handshake, frames in and out, limits before anyone is trusted.
Not responsible for: whom to connect with and when (host.py), what messages mean (core/).

    dialler                          listener
       | --- Opening(name, nonce, life) ---> |
       | <-- Answer(name, nonce, life, proof)|  proof = HMAC(secret, role, both names, nonces and lives)
       | --- Proof(proof) -----------------> |
      OPEN                                  OPEN

    NEW --opening or answer--> PROVING --proof--> OPEN --lost--> CLOSED

The role is part of what is proven, so an answer cannot be reflected; the secret itself never travels.
A listener that does not want this peer says why in its answer, proven as well, and ends the connection:
so a process whose name a newer one has taken learns it, and does not come back.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import hmac
import logging
import secrets
import socket
from collections.abc import Sequence
from typing import Protocol, cast

import msgspec

from tiercel.core.faults import ProtocolViolation
from tiercel.core.messages import Message
from tiercel.runtime.wire import FRAME_BYTES_MAX, Frames, encode_frames, pack

log = logging.getLogger(__name__)

HANDSHAKE_BYTES_MAX = 1024  # names, nonces and proofs; a stranger gets no more memory than this
HANDSHAKE_S_MAX = 5.0
NONCE_BYTES = 32
KEEPALIVE = {  # a machine that vanished is noticed within half a minute, not within hours
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 10,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 4,
}
UNSENT_BYTES_MAX = 512 * 1024 * 1024  # a peer this far behind is cut off; what matters is sent again later


class HandshakeFailed(ProtocolViolation):
    """The peer is not who it should be, or does not speak our language."""


class Refused(HandshakeFailed):
    """The peer is who it should be, and does not want us: it says why."""


class Mistrusted(HandshakeFailed):
    """The peer says to be who it should be, but cannot prove it: it has another secret."""


class Opening(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The dialler says who it is, and challenges."""

    name: str
    nonce: bytes
    life: int


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The listener proves itself, and challenges."""

    name: str
    nonce: bytes
    life: int
    proof: bytes
    refusal: str = ""


class Proof(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The dialler proves itself."""

    proof: bytes


_decode_handshake = msgspec.msgpack.Decoder(Opening | Answer | Proof).decode


class Phase(enum.Enum):
    """How far a connection is."""

    NEW = "new"  # nothing was heard
    PROVING = "proving"  # the listener has answered and waits for the dialler's proof
    OPEN = "open"  # both are who they say
    CLOSED = "closed"


class Owner(Protocol):
    """What a link tells its host."""

    name: str
    secret: bytes
    life: int  # which start of this process: later ones are larger

    def refusal(self, peer: str, life: int) -> str: ...
    def link_met(self, link: Link) -> None: ...
    def link_failed(self, link: Link, failure: ProtocolViolation) -> None: ...
    def link_opened(self, link: Link) -> None: ...
    def link_closed(self, link: Link) -> None: ...
    def link_received(self, link: Link, messages: list[Message]) -> None: ...


class Link(asyncio.Protocol):
    """One TCP connection. `expected` names the peer that was dialled; None for the listening side."""

    def __init__(self, owner: Owner, expected: str | None = None) -> None:
        self.peer = expected or ""
        self.peer_life = 0
        self.phase = Phase.NEW
        self.failed = False  # the handshake did not succeed, or the peer broke the protocol
        self.closed = asyncio.get_running_loop().create_future()
        self._owner = owner
        self._expected = expected
        self._frames = Frames(HANDSHAKE_BYTES_MAX)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._peer_nonce = b""
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    # -- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name
        endpoint = transport.get_extra_info("socket")
        if endpoint is not None and endpoint.family != socket.AF_UNIX:
            for option, value in KEEPALIVE.items():
                endpoint.setsockopt(*option, value)
        self._owner.link_met(self)
        self._deadline = asyncio.get_running_loop().call_later(HANDSHAKE_S_MAX, self._too_slow)
        if self._expected is not None:
            self._say(Opening(self._owner.name, self._nonce, self._owner.life))

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        try:
            while self.phase in (Phase.NEW, Phase.PROVING):
                body = self._frames.next()
                if body is None:
                    return
                self._shake(body)
            if self.phase is Phase.OPEN:
                messages = self._frames.messages()
                if messages:
                    self._owner.link_received(self, messages)
        except ProtocolViolation as violation:
            self.drop(violation)

    def connection_lost(self, exc: Exception | None) -> None:
        self.phase = Phase.CLOSED
        if self._deadline is not None:
            self._deadline.cancel()
        if not self.closed.done():
            self.closed.set_result(None)
        self._owner.link_closed(self)

    # -- handshake -----------------------------------------------------------------------------

    def _shake(self, body: bytes) -> None:
        try:
            said = _decode_handshake(body)
        except msgspec.DecodeError as error:
            reason = f"no handshake: {error}"
            raise HandshakeFailed(reason) from error
        match said:
            case Opening() if self._expected is None and self.phase is Phase.NEW:
                self.peer, self._peer_nonce, self.peer_life = said.name, said.nonce, said.life
                self.phase = Phase.PROVING
                refusal = self._owner.refusal(said.name, said.life)
                proof = self._proof("listener" + refusal)
                self._say(Answer(self._owner.name, self._nonce, self._owner.life, proof, refusal))
                if refusal:
                    raise HandshakeFailed(refusal)
            case Answer() if self._expected is not None:
                if said.name != self._expected:
                    reason = f"dialled {self._expected!r}, reached {said.name!r}"
                    raise HandshakeFailed(reason)
                self._peer_nonce, self.peer_life = said.nonce, said.life
                self._check(said.proof, "listener" + said.refusal)
                if said.refusal:
                    raise Refused(said.refusal)
                self._say(Proof(self._proof("dialler")))
                self._open()
            case Proof() if self.phase is Phase.PROVING:
                self._check(said.proof, "dialler")
                self._open()
            case _:
                reason = f"{type(said).__name__} is out of turn in phase {self.phase.value}"
                raise HandshakeFailed(reason)

    def _proof(self, role: str) -> bytes:
        """Whoever dialled comes first in what is proven, on both sides."""
        mine = (self._owner.name, self._nonce, self._owner.life)
        theirs = (self.peer, self._peer_nonce, self.peer_life)
        dialler, listener = (theirs, mine) if self._expected is None else (mine, theirs)
        said = msgspec.msgpack.encode((role, *dialler, *listener))
        return hmac.digest(self._owner.secret, said, hashlib.sha256)

    def _check(self, proof: bytes, role: str) -> None:
        if not hmac.compare_digest(proof, self._proof(role)):
            reason = f"{self.peer!r} does not know this deployment's secret"
            raise Mistrusted(reason)

    def _open(self) -> None:
        self.phase = Phase.OPEN
        self._frames.limit = FRAME_BYTES_MAX
        if self._deadline is not None:
            self._deadline.cancel()
        self._owner.link_opened(self)

    def _say(self, what: Opening | Answer | Proof) -> None:
        if self._transport is not None:
            self._transport.write(pack(msgspec.msgpack.encode(what)))

    def _too_slow(self) -> None:
        reason = f"no handshake within {HANDSHAKE_S_MAX:g} s"
        self.drop(HandshakeFailed(reason))

    # -- talking -------------------------------------------------------------------------------

    def send(self, messages: Sequence[Message]) -> None:
        """All in one write."""
        transport = self._transport
        if self.phase is not Phase.OPEN or transport is None:
            return
        transport.write(b"".join([encode_frames(message) for message in messages]))
        if transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            log.warning("%s cuts off %s: it does not read", self._owner.name, self.peer)
            transport.abort()

    @property
    def dialler(self) -> str:
        """The name of the side that dialled."""
        return self._owner.name if self._expected is not None else self.peer

    def drop(self, violation: ProtocolViolation) -> None:
        """End the connection because of what the peer did, and say so."""
        who = self.peer or "a stranger"
        if self._expected is None and self.phase is not Phase.OPEN:
            who = f"a stranger who says to be {self.peer!r}" if self.peer else who
            address = self._transport.get_extra_info("peername") if self._transport else None
            who += f" at {address[0]}:{address[1]}" if isinstance(address, tuple) else ""
        log.warning("%s drops %s: %s", self._owner.name, who, violation)
        self.failed = True
        self._owner.link_failed(self, violation)
        self.close()

    def abort(self) -> None:
        """End at once: nobody is there to take what was written."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Send what was written, then end."""
        if self._transport is not None:
            self._transport.close()
