"""Connections: whatever an unproven peer does, a running stream is not affected."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from certificates import make_authority, needs_openssl
from deployment_in_process import (
    INPUT,
    INSTANCE,
    OUTPUT,
    SITE,
    Running,
    assert_once_and_in_order,
    instance_host,
    make_place,
    payloads,
    router_host,
    rows,
    running,
    until,
)
from tiercel.core import messages as m
from tiercel.core.machine.effects import Effect, Send
from tiercel.core.machine.events import Connected, Disconnected, Event, Received
from tiercel.core.model.log import StreamEntry
from tiercel.errors import UserError
from tiercel.runtime.client.producer import Producer
from tiercel.runtime.client.subscriber import Subscriber
from tiercel.runtime.deployment import DeploymentDir
from tiercel.runtime.net import connection as link
from tiercel.runtime.net import peers
from tiercel.runtime.net.connection import Answer, Opening, Proof
from tiercel.runtime.net.registry import Registry
from tiercel.runtime.net.tls import TlsFiles
from tiercel.runtime.net.wire import FRAME_BYTES_MAX, encode_frame, pack
from tiercel.runtime.process.host import Host, HostConfig


class Stream:
    """Rows that go through a deployment all the time, and are counted."""

    def __init__(self, place: DeploymentDir) -> None:
        self.producer = Producer(place, INPUT, name="beside")
        self.subscriber = Subscriber(place, OUTPUT, after=0)
        self.sent = 0
        self.entries: list[StreamEntry] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._feed), threading.Thread(target=self._read)]
        for thread in self._threads:
            thread.start()

    def _feed(self) -> None:
        while not self._stop.is_set():
            self.producer.send(rows(self.sent, 10))
            self.sent += 10
            time.sleep(0.002)

    def _read(self) -> None:
        while not self._stop.is_set() or self.received < self.sent:
            self.entries += self.subscriber.poll(0.2)

    @property
    def received(self) -> int:
        return sum(len(entry.outputs) for entry in self.entries)

    def assert_goes_on(self) -> None:
        before = self.received
        until(lambda: self.received > before + 50, "the stream beside it has stopped")

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.subscriber.close()
        self.producer.close()


@contextlib.contextmanager
def stream_beside(place: DeploymentDir) -> Iterator[Stream]:
    """It goes on before, meanwhile and after, on connections that are never lost, and nothing is missing."""
    stream = Stream(place)
    try:
        stream.assert_goes_on()
        yield stream
        stream.assert_goes_on()
    finally:
        stream.stop()
    assert_once_and_in_order(payloads(stream.entries), stream.sent)


class Deployed:
    """A deployment that runs, and what its router lost of its peers."""

    def __init__(self, place: DeploymentDir, router: Running) -> None:
        self.place = place
        self.router = router

    @property
    def port(self) -> int:
        address = self.place.registry.find(SITE)
        assert address is not None
        return address.port

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)


@pytest.fixture
def deployed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Deployed]:
    caplog.set_level(logging.WARNING)
    place = make_place(tmp_path)
    with running(router_host(place), instance_host(place)) as (router, _):
        yield Deployed(place, router)


def ended(connection: socket.socket) -> bool:
    """Whether the other side ends the connection; whatever it says first is thrown away."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass
    return True


def read_frame(connection: socket.socket) -> bytes:
    file = connection.makefile("rb")
    return file.read(int.from_bytes(file.read(4)))


def shake_hands(connection: socket.socket, name: str, secret: bytes, incarnation: int) -> Answer:
    """As a dialler, by hand."""
    opening = Opening(name, b"n" * 32, incarnation)
    connection.sendall(pack(msgspec.msgpack.encode(opening)))
    answer = msgspec.msgpack.decode(read_frame(connection), type=Answer)
    said = ("dialler", name, opening.nonce, incarnation, answer.name, answer.nonce, answer.incarnation)
    proof = Proof(hmac.digest(secret, msgspec.msgpack.encode(said), hashlib.sha256))
    connection.sendall(pack(msgspec.msgpack.encode(proof)))
    return answer


def test_peer_with_another_secret_is_dropped(deployed: Deployed, caplog: pytest.LogCaptureFixture) -> None:
    with stream_beside(deployed.place), deployed.dial() as unproven:
        shake_hands(unproven, "mallory", b"guessed", 1)
        assert ended(unproven)
    assert "an unproven peer that calls itself 'mallory' at 127.0.0.1:" in caplog.text
    assert "does not know this deployment's secret" in caplog.text


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00\x00\x00\x05hello", bytes(1000)]
)
def test_peer_with_another_protocol_is_dropped(
    deployed: Deployed, caplog: pytest.LogCaptureFixture, garbage: bytes
) -> None:
    with stream_beside(deployed.place), deployed.dial() as unproven:
        unproven.sendall(garbage)
        assert ended(unproven)
    assert "drops an unproven peer at 127.0.0.1:" in caplog.text


def test_oversized_frame_is_refused_before_it_is_read(
    deployed: Deployed, caplog: pytest.LogCaptureFixture
) -> None:
    with stream_beside(deployed.place):
        with deployed.dial() as unproven:
            unproven.sendall((link.HANDSHAKE_BYTES_MAX + 1).to_bytes(4))
            assert ended(unproven)
        with deployed.dial() as member:
            shake_hands(member, "clumsy", deployed.place.secret, 1)
            member.sendall((FRAME_BYTES_MAX + 1).to_bytes(4))
            assert ended(member)
    assert f"a frame of {link.HANDSHAKE_BYTES_MAX + 1} bytes was announced" in caplog.text
    assert f"drops clumsy: a frame of {FRAME_BYTES_MAX + 1} bytes was announced" in caplog.text


@pytest.mark.parametrize(
    "frame",
    [
        pack(b"\xc1"),
        pack(msgspec.msgpack.encode({"type": "Nothing"})),
        encode_frame(m.Produce("clumsy", 1, INPUT, [(b"key",)])),  # type: ignore[list-item]
        encode_frame(m.Produce("clumsy", 1, INPUT, [("key", 0, 1)])),  # type: ignore[list-item]
    ],
)
def test_peer_that_sends_a_malformed_message_is_dropped(
    deployed: Deployed, caplog: pytest.LogCaptureFixture, frame: bytes
) -> None:
    with stream_beside(deployed.place), deployed.dial() as member:
        shake_hands(member, "clumsy", deployed.place.secret, 1)
        member.sendall(frame)
        assert ended(member)
    assert "drops clumsy: " in caplog.text


def test_silent_connection_is_dropped(
    deployed: Deployed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "HANDSHAKE_S_MAX", 0.2)
    with stream_beside(deployed.place), deployed.dial() as silent, deployed.dial() as half:
        half.sendall(b"\x00\x00")
        assert ended(silent)
        assert ended(half)
    assert "no handshake within 0.2 s" in caplog.text


def test_many_silent_connections_do_not_block_real_peers(
    deployed: Deployed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "IN_HANDSHAKE_MAX", 5)
    with stream_beside(deployed.place), contextlib.ExitStack() as stack:
        unproven_connections = [stack.enter_context(deployed.dial()) for _ in range(12)]
        assert ended(unproven_connections[0])
        Subscriber(deployed.place, OUTPUT).close()
    assert "more than 5 connections without a handshake" in caplog.text


def test_peer_with_the_name_of_another_is_refused(
    deployed: Deployed, caplog: pytest.LogCaptureFixture
) -> None:
    with stream_beside(deployed.place):
        for name in ("beside", INSTANCE):  # a producer and an instance that are connected
            with deployed.dial() as liar:
                assert shake_hands(liar, name, b"guessed", 2**62).refusal == ""
                assert ended(liar)
            assert f"an unproven peer that calls itself {name!r}" in caplog.text
            with deployed.dial() as zombie:  # knows the secret, but was started before the one that is here
                assert "started later" in shake_hands(zombie, name, deployed.place.secret, 0).refusal
                assert ended(zombie)
        with deployed.dial() as liar:
            assert "listens here" in shake_hands(liar, SITE, deployed.place.secret, 2**62).refusal
            assert ended(liar)


def test_producer_that_sends_as_another_is_dropped(
    deployed: Deployed, caplog: pytest.LogCaptureFixture
) -> None:
    with stream_beside(deployed.place), deployed.dial() as liar:
        shake_hands(liar, "liar", deployed.place.secret, 1)
        liar.sendall(encode_frame(m.Produce("beside", 1, INPUT, [])))
        assert ended(liar)
    assert "drops liar: it sends as producer 'beside'" in caplog.text


def test_occupied_port_is_named_in_the_error(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"cloud cannot listen at 127.0.0.1, port {port}: another"):
            asyncio.run(router_host(place, port=port).run())
    with running(router_host(place, port=port)):
        address = place.registry.find(SITE)
        assert address is not None
        assert address.port == port


# -- who dials whom ---------------------------------------------------------------------------


class Noting:
    """A machine that notes who comes and goes, and what it hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.say: list[Effect] = []

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        self.events.append(event)
        said, self.say = self.say, []
        return said

    def connected(self, peer: str) -> bool:
        about = [e for e in self.events if isinstance(e, Connected | Disconnected) and e.peer == peer]
        return bool(about) and isinstance(about[-1], Connected)


def test_peers_are_dialled_as_they_appear(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    early, late = Noting(), Noting()
    with running(
        Host("op@cloud#1", early, HostConfig(registry=registry, secret=b"secret", dials=registry.names))
    ):
        assert registry.names() == ["op@cloud#1"]
        for _ in range(2):
            with running(Host("op@cloud#2", late, HostConfig(registry=registry, secret=b"secret"))):
                assert registry.names() == ["op@cloud#1", "op@cloud#2"]
                until(lambda: early.connected("op@cloud#2") and late.connected("op@cloud#1"))
            until(lambda: not early.connected("op@cloud#2"))


def test_peers_that_are_removed_are_not_dialled_any_more(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    wanted = {"a", "b"}
    noting = Noting()
    with running(Host("host", noting, HostConfig(registry=registry, secret=b"secret", dials=lambda: wanted))):
        with running(
            Host("a", Noting(), HostConfig(registry=registry, secret=b"secret")),
            Host("b", Noting(), HostConfig(registry=registry, secret=b"secret")),
        ):
            until(lambda: noting.connected("a") and noting.connected("b"))
            wanted.discard("b")
            time.sleep(2 * peers.POLL_S)
            assert noting.connected("b")  # what is connected stays so
        until(lambda: not noting.connected("a") and not noting.connected("b"))
        with running(
            Host("a", Noting(), HostConfig(registry=registry, secret=b"secret")),
            Host("b", Noting(), HostConfig(registry=registry, secret=b"secret")),
        ):
            until(lambda: noting.connected("a"))
            time.sleep(2 * peers.POLL_S)
            assert not noting.connected("b")


@pytest.mark.parametrize("seed", range(4))
def test_two_processes_that_dial_each_other_keep_the_same_connection(tmp_path: Path, seed: int) -> None:
    registry = Registry(tmp_path)
    machines = {name: Noting() for name in ("a", "b")}
    order = ["a", "b"] if seed % 2 else ["b", "a"]
    hosts = {
        n: Host(n, machines[n], HostConfig(registry=registry, secret=b"secret", dials=["a", "b"]))
        for n in order
    }

    async def scenario() -> None:
        tasks = [asyncio.create_task(hosts[n].run()) for n in order]  # in one loop, so they really cross
        try:
            while not (machines["a"].connected("b") and machines["b"].connected("a")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            counts = [len(machine.events) for machine in machines.values()]
            kept = [hosts["a"]._peers.connections["b"], hosts["b"]._peers.connections["a"]]
            assert kept[0].dialler == kept[1].dialler
            for name, other in (("a", "b"), ("b", "a")):
                machines[name].say = [Send(other, m.RangeQuery(f"from {name}"))]
                hosts[name].deliver(Connected("nobody"))  # anything, so that it speaks
            while not all(isinstance(machine.events[-1], Received) for machine in machines.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert [
                len(machine.events) - n for machine, n in zip(machines.values(), counts, strict=True)
            ] == [2, 2]
        finally:
            for host in hosts.values():
                host.end("over")
            await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_of_two_crossing_connections_the_one_of_the_smaller_name_stays(tmp_path: Path) -> None:
    """Whatever order they open in: both sides look only at what both know."""

    async def scenario() -> None:
        board = Host("b", Noting(), HostConfig(registry=Registry(tmp_path), secret=b"secret"))._peers
        by_a, by_b, again = (link.Connection(board, expected) for expected in (None, "a", None))
        by_a.peer = again.peer = "a"
        assert (by_a.dialler, by_b.dialler) == ("a", "b")
        assert board._keeps(by_a, by_b)
        assert not board._keeps(by_b, by_a)
        assert not board._keeps(by_a, again)  # it dialled again: it has lost the older one
        by_b.peer_incarnation = 2  # a newer process, a process that dialled
        assert not board._keeps(by_a, by_b)
        assert board._keeps(by_b, by_a)

    asyncio.run(scenario())


# -- a process that is killed -----------------------------------------------------------------

CHILD = """
    import asyncio, logging, sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from deployment_in_process import router_host, instance_host
    from tiercel.runtime.deployment import DeploymentDir
    asyncio.run({make}(DeploymentDir(Path({place!r}))).run())
"""


def start(place: DeploymentDir, make: str) -> subprocess.Popen[bytes]:
    tests = str(Path(__file__).resolve().parent.parent)
    code = textwrap.dedent(CHILD).format(tests=tests, make=make, place=str(place.directory))
    return subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ))


@pytest.mark.parametrize("killed", ["router_host", "instance_host"])
def test_killed_process_returns_with_a_new_incarnation_and_loses_nothing(tmp_path: Path, killed: str) -> None:
    place = make_place(tmp_path)
    name = SITE if killed == "router_host" else INSTANCE
    other = instance_host if killed == "router_host" else router_host
    incarnations = []
    child = start(place, killed)
    try:
        with running(other(place)):
            until(lambda: place.registry.find(name) is not None)
            with stream_beside(place) as stream:
                for _ in range(2):
                    stream.assert_goes_on()
                    address = place.registry.find(name)
                    assert address is not None
                    incarnations.append(address.incarnation)
                    child.send_signal(signal.SIGKILL)
                    child.wait()
                    child = start(place, killed)
                    stream.assert_goes_on()
            address = place.registry.find(name)
            assert address is not None
            assert [*incarnations, address.incarnation] == [1, 2, 3]
    finally:
        child.kill()
        child.wait()


# -- TLS --------------------------------------------------------------------------------------


@needs_openssl
def test_tls_accepts_members_and_refuses_other_peers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = make_authority(tmp_path / "ours")
    others = make_authority(tmp_path / "others")
    place = make_place(tmp_path / "storage")
    place.write(msgspec.structs.replace(place.manifest(), tls=tls))
    with running(router_host(place, tls=tls), instance_host(place, tls=tls)), stream_beside(place):
        address = place.registry.find(SITE)
        assert address is not None
        assert address.local == ""  # no way around TLS
        noting = Noting()
        impostor = Host("x", noting, HostConfig.of(place, dials=[SITE], tls=others, listens=False))
        plain = Host("y", noting, HostConfig.of(place, dials=[SITE], listens=False))
        with running(impostor, plain):
            until(lambda: caplog.text.count("TLS fails") >= 2)
        assert noting.events == []
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text


def test_unusable_tls_files_are_named_in_the_error(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    missing = TlsFiles("our.pem", "our.key", "ca.pem")
    place.write(msgspec.structs.replace(place.manifest(), tls=missing))
    with pytest.raises(UserError, match=r"TLS cannot use our\.pem, our\.key and ca\.pem"):
        Subscriber(place, OUTPUT)
