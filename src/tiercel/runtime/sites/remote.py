"""A deployment that is reached over the network: an address and a secret instead of its storage directory.

Responsible for: asking a router what runs there; comparing that with what another site declares.
Not responsible for: producers and subscribers (client/), the handshake (net/connection.py).

The router at the address relays to every other process that a client needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any

import msgspec
import uvloop

from tiercel.core.machine.effects import Effect, Send
from tiercel.core.machine.events import Connected, Event, Received
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir, Manifest
from tiercel.runtime.net.connection import HandshakeFailed, Mistrusted, TlsFailed
from tiercel.runtime.net.registry import FixedAddress
from tiercel.runtime.net.site_messages import ManifestQuery, ManifestReply
from tiercel.runtime.net.tls import TlsFiles
from tiercel.runtime.process.host import Host, HostConfig
from tiercel.runtime.sites.deployment_file import Endpoint

ASK_S_MAX = 10.0


class Refused(UserError):
    """Somebody listens at the address, and does not let us in."""


class _ManifestClient:
    """Asks whoever answers at the address."""

    def __init__(self) -> None:
        self.reply: ManifestReply | None = None
        self.refusal: HandshakeFailed | None = None
        self.answered = asyncio.Event()

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        match event:
            case Connected(peer=peer):
                return [Send(peer, ManifestQuery())]
            case Received(message=ManifestReply() as reply):
                self.reply = reply
                self.answered.set()
            case _:
                pass
        return []

    def on_refused(self, peer: str, refusal: HandshakeFailed) -> None:
        self.refusal = refusal
        self.answered.set()


class RemoteDeployment(DeploymentDir):
    """A deployment at an address. Clients use it as they use a deployment directory."""

    def __init__(self, endpoint: Endpoint, secret: bytes, tls: TlsFiles | None, timeout_s: float) -> None:
        super().__init__(f"tiercel://{endpoint[0]}:{endpoint[1]}")
        self._endpoint, self._secret, self._tls = endpoint, secret, tls
        reply = ask(endpoint, secret, tls, timeout_s)
        self.site = reply.site
        self._manifest = msgspec.structs.replace(
            msgspec.json.decode(reply.manifest, type=Manifest),
            tls=tls,  # with the files of this machine
        )

    @property
    def registry(self) -> FixedAddress:
        return FixedAddress(*self._endpoint)

    @property
    def secret(self) -> bytes:
        return self._secret

    def manifest(self) -> Manifest:
        return self._manifest


def ask(endpoint: Endpoint, secret: bytes, tls: TlsFiles | None, timeout_s: float) -> ManifestReply:
    """What runs at an address; UserError if nothing answers there, or has another secret."""
    where = f"{endpoint[0]}:{endpoint[1]}"
    client = _ManifestClient()
    host = Host(
        f"visitor|{uuid.uuid4().hex}",
        client,
        HostConfig(
            registry=FixedAddress(*endpoint),
            secret=secret,
            dials=[""],
            tls=tls,
            listens=False,
            on_refused=client.on_refused,
        ),
    )

    async def answered() -> None:
        running = asyncio.create_task(host.run())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await client.answered.wait()
        host.end("answered")
        await running

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(answered())
    if client.reply is not None:
        return client.reply
    if isinstance(client.refusal, TlsFailed):
        what = f"the router at {where} and this program do not accept each other's certificates"
        hint = "both need a certificate that the authority of the deployment has signed, or no TLS at both"
        raise Refused(f"{what}: {client.refusal}", expected="the TLS files of the deployment", hint=hint)
    if isinstance(client.refusal, Mistrusted):
        what, hint = f"the router at {where} has another secret", "give the secret file of that deployment"
        raise Refused(what, expected="the secret of the deployment", hint=hint)
    if client.refusal is not None:
        raise Refused(f"the router at {where} refuses the connection: {client.refusal}")
    what = f"no router of a deployment answers at {where} within {timeout_s:g} s"
    raise UserError(what, expected="host:port of a site's router", hint="is it started, and reachable?")


def differences(mine: Manifest, theirs: Manifest) -> list[str]:
    """What two sites declare differently; every site must run the same program."""
    found: list[str] = []
    if mine.format != theirs.format:
        found.append(f"format {mine.format} here, {theirs.format} there")
    _compare(found, "site", mine.topology.sites, theirs.topology.sites)
    _compare(found, "stream", mine.streams, theirs.streams)
    _compare(found, "log of stream", mine.topology.streams, theirs.topology.streams)
    _compare(found, "operator", mine.topology.operators, theirs.topology.operators)
    _compare(found, "state of operator", mine.state, theirs.state)
    for name in sorted(mine.code.keys() & theirs.code.keys()):
        if mine.code[name] and theirs.code[name] and mine.code[name] != theirs.code[name]:
            found.append(f"operator {name!r} has other code here than there")
    for field in mine.settings.__struct_fields__:
        here, there = getattr(mine.settings, field), getattr(theirs.settings, field)
        if here != there:
            found.append(f"setting {field}: {here} here, {there} there")
    return found


def _compare(found: list[str], what: str, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name in sorted({*mine, *theirs}):
        if name not in theirs:
            found.append(f"{what} {name!r} is declared here only")
        elif name not in mine:
            found.append(f"{what} {name!r} is declared there only")
        elif mine[name] != theirs[name]:
            found.append(f"{what} {name!r} differs: {_fields(mine[name], theirs[name])}")


def _fields(mine: Any, theirs: Any) -> str:
    """The fields of two structs that differ."""
    here, there = msgspec.to_builtins(mine), msgspec.to_builtins(theirs)
    if not isinstance(here, dict) or not isinstance(there, dict):
        return f"{here!r} here, {there!r} there"
    unequal = [key for key in {**here, **there} if here.get(key) != there.get(key)]
    return "; ".join(f"{key} = {here.get(key)!r:.80} here, {there.get(key)!r:.80} there" for key in unequal)
