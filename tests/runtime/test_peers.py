"""Connections that are hard to hurt: whatever a stranger does, a stream that runs beside it goes on."""

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
from small import (
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
from tiercel.core.effects import Effect, Send
from tiercel.core.events import Connected, Disconnected, Event, Received
from tiercel.core.records import StreamEntry
from tiercel.errors import UserError
from tiercel.runtime import link, peers
from tiercel.runtime.client import Producer, Subscriber
from tiercel.runtime.host import Host
from tiercel.runtime.link import Answer, Opening, Proof
from tiercel.runtime.place import Place
from tiercel.runtime.registry import Registry
from tiercel.runtime.tls import TlsFiles
from tiercel.runtime.wire import FRAME_BYTES_MAX, encode_frame, pack


class Stream:
    """Rows that go through a deployment all the time, and are counted."""

    def __init__(self, place: Place) -> None:
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
def stream_beside(place: Place) -> Iterator[Stream]:
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

    def __init__(self, place: Place, router: Running) -> None:
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


def shake_hands(connection: socket.socket, name: str, secret: bytes, life: int) -> Answer:
    """As a dialler, by hand."""
    opening = Opening(name, b"n" * 32, life)
    connection.sendall(pack(msgspec.msgpack.encode(opening)))
    answer = msgspec.msgpack.decode(read_frame(connection), type=Answer)
    said = ("dialler", name, opening.nonce, life, answer.name, answer.nonce, answer.life)
    proof = Proof(hmac.digest(secret, msgspec.msgpack.encode(said), hashlib.sha256))
    connection.sendall(pack(msgspec.msgpack.encode(proof)))
    return answer


def test_who_does_not_know_the_secret_is_dropped(
    deployed: Deployed, caplog: pytest.LogCaptureFixture
) -> None:
    with stream_beside(deployed.place), deployed.dial() as stranger:
        shake_hands(stranger, "mallory", b"guessed", 1)
        assert ended(stranger)
    assert "a stranger who says to be 'mallory' at 127.0.0.1:" in caplog.text
    assert "does not know this deployment's secret" in caplog.text


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00\x00\x00\x05hello", bytes(1000)]
)
def test_who_does_not_speak_our_language_is_dropped(
    deployed: Deployed, caplog: pytest.LogCaptureFixture, garbage: bytes
) -> None:
    with stream_beside(deployed.place), deployed.dial() as stranger:
        stranger.sendall(garbage)
        assert ended(stranger)
    assert "drops a stranger at 127.0.0.1:" in caplog.text


def test_who_announces_a_frame_above_the_limit_is_dropped_before_it_is_read(
    deployed: Deployed, caplog: pytest.LogCaptureFixture
) -> None:
    with stream_beside(deployed.place):
        with deployed.dial() as stranger:
            stranger.sendall((link.HANDSHAKE_BYTES_MAX + 1).to_bytes(4))
            assert ended(stranger)
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
def test_a_member_that_sends_a_malformed_message_is_dropped(
    deployed: Deployed, caplog: pytest.LogCaptureFixture, frame: bytes
) -> None:
    with stream_beside(deployed.place), deployed.dial() as member:
        shake_hands(member, "clumsy", deployed.place.secret, 1)
        member.sendall(frame)
        assert ended(member)
    assert "drops clumsy: " in caplog.text


def test_who_connects_and_says_nothing_is_dropped(
    deployed: Deployed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "HANDSHAKE_S_MAX", 0.2)
    with stream_beside(deployed.place), deployed.dial() as silent, deployed.dial() as half:
        half.sendall(b"\x00\x00")
        assert ended(silent)
        assert ended(half)
    assert "no handshake within 0.2 s" in caplog.text


def test_many_silent_strangers_do_not_keep_members_out(
    deployed: Deployed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "STRANGERS_MAX", 5)
    with stream_beside(deployed.place), contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(deployed.dial()) for _ in range(12)]
        assert ended(strangers[0])
        Subscriber(deployed.place, OUTPUT).close()
    assert "more than 5 connections without a handshake" in caplog.text


def test_who_claims_the_name_of_another_is_not_let_in(
    deployed: Deployed, caplog: pytest.LogCaptureFixture
) -> None:
    with stream_beside(deployed.place):
        for name in ("beside", INSTANCE):  # a producer and an instance that are connected
            with deployed.dial() as liar:
                assert shake_hands(liar, name, b"guessed", 2**62).refusal == ""
                assert ended(liar)
            assert f"a stranger who says to be {name!r}" in caplog.text
            with deployed.dial() as zombie:  # knows the secret, but was started before the one that is here
                assert "started later" in shake_hands(zombie, name, deployed.place.secret, 0).refusal
                assert ended(zombie)
        with deployed.dial() as liar:
            assert "listens here" in shake_hands(liar, SITE, deployed.place.secret, 2**62).refusal
            assert ended(liar)


def test_a_producer_that_speaks_for_another_is_dropped(
    deployed: Deployed, caplog: pytest.LogCaptureFixture
) -> None:
    with stream_beside(deployed.place), deployed.dial() as liar:
        shake_hands(liar, "liar", deployed.place.secret, 1)
        liar.sendall(encode_frame(m.Produce("beside", 1, INPUT, [])))
        assert ended(liar)
    assert "drops liar: it sends as producer 'beside'" in caplog.text


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
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
    with running(Host("op@cloud#1", early, registry, b"secret", dials=registry.names)):
        assert registry.names() == ["op@cloud#1"]
        for _ in range(2):
            with running(Host("op@cloud#2", late, registry, b"secret")):
                assert registry.names() == ["op@cloud#1", "op@cloud#2"]
                until(lambda: early.connected("op@cloud#2") and late.connected("op@cloud#1"))
            until(lambda: not early.connected("op@cloud#2"))


def test_peers_that_are_no_longer_wanted_are_no_longer_dialled(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    wanted = {"a", "b"}
    noting = Noting()
    with running(Host("host", noting, registry, b"secret", dials=lambda: wanted)):
        with running(Host("a", Noting(), registry, b"secret"), Host("b", Noting(), registry, b"secret")):
            until(lambda: noting.connected("a") and noting.connected("b"))
            wanted.discard("b")
            time.sleep(2 * peers.LOOK_S)
            assert noting.connected("b")  # what is connected stays so
        until(lambda: not noting.connected("a") and not noting.connected("b"))
        with running(Host("a", Noting(), registry, b"secret"), Host("b", Noting(), registry, b"secret")):
            until(lambda: noting.connected("a"))
            time.sleep(2 * peers.LOOK_S)
            assert not noting.connected("b")


@pytest.mark.parametrize("seed", range(4))
def test_two_that_dial_each_other_keep_the_same_link(tmp_path: Path, seed: int) -> None:
    registry = Registry(tmp_path)
    machines = {name: Noting() for name in ("a", "b")}
    order = ["a", "b"] if seed % 2 else ["b", "a"]
    hosts = {n: Host(n, machines[n], registry, b"secret", dials=["a", "b"]) for n in order}

    async def scenario() -> None:
        tasks = [asyncio.create_task(hosts[n].run()) for n in order]  # in one loop, so they really cross
        try:
            while not (machines["a"].connected("b") and machines["b"].connected("a")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            counts = [len(machine.events) for machine in machines.values()]
            kept = [hosts["a"]._peers.links["b"], hosts["b"]._peers.links["a"]]
            assert kept[0].dialler == kept[1].dialler
            for name, other in (("a", "b"), ("b", "a")):
                machines[name].say = [Send(other, m.RangeQuery(f"from {name}"))]
                hosts[name].take(Connected("nobody"))  # anything, so that it speaks
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


def test_of_two_crossing_links_the_one_of_the_smaller_name_stays(tmp_path: Path) -> None:
    """Whatever order they open in: both sides look only at what both know."""

    async def scenario() -> None:
        board = Host("b", Noting(), Registry(tmp_path), b"secret")._peers
        by_a, by_b, again = (link.Link(board, expected) for expected in (None, "a", None))
        by_a.peer = again.peer = "a"
        assert (by_a.dialler, by_b.dialler) == ("a", "b")
        assert board._prefers(by_a, by_b)
        assert not board._prefers(by_b, by_a)
        assert not board._prefers(by_a, again)  # it dialled again: it has lost the older one
        by_b.peer_life = 2  # a newer process, whoever dialled
        assert not board._prefers(by_a, by_b)
        assert board._prefers(by_b, by_a)

    asyncio.run(scenario())


# -- a process that is killed -----------------------------------------------------------------

CHILD = """
    import asyncio, logging, sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from small import router_host, instance_host
    from tiercel.runtime.place import Place
    asyncio.run({make}(Place(Path({place!r}))).run())
"""


def start(place: Place, make: str) -> subprocess.Popen[bytes]:
    tests = str(Path(__file__).resolve().parent.parent)
    code = textwrap.dedent(CHILD).format(tests=tests, make=make, place=str(place.directory))
    return subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ))


@pytest.mark.parametrize("killed", ["router_host", "instance_host"])
def test_a_process_that_is_killed_comes_back_with_a_new_life_and_nothing_is_lost_or_doubled(
    tmp_path: Path, killed: str
) -> None:
    place = make_place(tmp_path)
    name = SITE if killed == "router_host" else INSTANCE
    other = instance_host if killed == "router_host" else router_host
    lives = []
    child = start(place, killed)
    try:
        with running(other(place)):
            until(lambda: place.registry.find(name) is not None)
            with stream_beside(place) as stream:
                for _ in range(2):
                    stream.assert_goes_on()
                    address = place.registry.find(name)
                    assert address is not None
                    lives.append(address.life)
                    child.send_signal(signal.SIGKILL)
                    child.wait()
                    child = start(place, killed)
                    stream.assert_goes_on()
            address = place.registry.find(name)
            assert address is not None
            assert [*lives, address.life] == [1, 2, 3]
    finally:
        child.kill()
        child.wait()


# -- TLS --------------------------------------------------------------------------------------


@needs_openssl
def test_with_tls_rows_come_through_and_strangers_do_not(
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
        impostor = Host("x", noting, place.registry, place.secret, dials=[SITE], tls=others, listens=False)
        plain = Host("y", noting, place.registry, place.secret, dials=[SITE], listens=False)
        with running(impostor, plain):
            until(lambda: caplog.text.count("TLS fails") >= 2)
        assert noting.events == []
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text


def test_tls_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    missing = TlsFiles("our.pem", "our.key", "ca.pem")
    place.write(msgspec.structs.replace(place.manifest(), tls=missing))
    with pytest.raises(UserError, match=r"TLS cannot use our\.pem, our\.key and ca\.pem"):
        Subscriber(place, OUTPUT)
