"""The relay of a router: processes of two sites reach each other through one port; strangers reach nobody."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from certificates import make_authority, needs_openssl
from deployment_in_process import Running, running, until
from tiercel.core import messages as m
from tiercel.core.machine.effects import Effect, Exit, Send
from tiercel.core.machine.events import Connected, Disconnected, Event, Received
from tiercel.errors import UserError
from tiercel.runtime.net.registry import Registry
from tiercel.runtime.process.host import Host, HostConfig
from tiercel.runtime.sites.remote import Refused, ask
from waiting import until_in_loop

SECRET = b"secret of both sites"
HERE, THERE = "op@cloud#1", "op@edge#1"


class Noting:
    """A machine that notes what it hears, and says what it is given at every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        self.events.append(event)
        return []

    def is_connected(self, peer: str) -> bool:
        about = [e for e in self.events if isinstance(e, Connected | Disconnected) and e.peer == peer]
        return bool(about) and isinstance(about[-1], Connected)

    def heard(self, peer: str) -> list[m.Message]:
        return [e.message for e in self.events if isinstance(e, Received) and e.sender == peer]


class TwoSites:
    """An instance of each of two sites with registries of their own; each knows the other's router only."""

    def __init__(self, directory: Path) -> None:
        self.registries = {site: Registry(directory / site) for site in ("cloud", "edge")}
        self.routers = {site: self._router(site) for site in self.registries}
        for site, other in (("cloud", "edge"), ("edge", "cloud")):
            found = self.registries[other].find(other)
            assert found is not None
            self.registries[site].set_elsewhere({other: (found.host, found.port)})
        self.here, self.there = Noting(), Noting()
        self.hosts = {HERE: self._start(HERE, self.here), THERE: self._start(THERE, self.there)}

    def _router(self, site: str) -> Running:
        config = HostConfig(registry=self.registries[site], secret=SECRET, manifest=b"{}")
        return Running(Host(site, Noting(), config))

    def _start(self, name: str, machine: Noting) -> Running:
        registry = Registry(self.registries[name.partition("@")[2].partition("#")[0]]._directory)
        return Running(Host(name, machine, HostConfig(registry=registry, secret=SECRET)))

    def send(self, sender: str, to: str, *messages: m.Message) -> None:
        running = self.hosts[sender]
        running.call(lambda: running.host.perform([Send(to, message) for message in messages]))

    def restart(self, name: str) -> Noting:
        self.hosts[name].end()
        machine = Noting()
        self.hosts[name] = self._start(name, machine)
        return machine

    def router_port(self, site: str) -> int:
        found = self.registries[site].find(site)
        assert found is not None
        return found.port

    def end(self) -> None:
        for one in (*self.hosts.values(), *self.routers.values()):
            one.end()


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[TwoSites]:
    made = TwoSites(tmp_path)
    yield made
    made.end()


def test_a_message_to_an_instance_of_another_site_opens_a_connection_through_its_router(
    sites: TwoSites,
) -> None:
    assert not sites.here.is_connected(THERE), "nothing is dialled before there is something to send"
    sites.send(HERE, THERE, m.Forget("m1"))
    until(lambda: sites.here.is_connected(THERE) and sites.there.is_connected(HERE))
    large = [m.AbortNotice(f"m{n}" + "x" * 100_000) for n in range(200)]
    sites.send(HERE, THERE, *large)
    sites.send(THERE, HERE, m.Forget("m2"))
    until(lambda: len(sites.there.heard(HERE)) == len(large))
    assert sites.there.heard(HERE) == large
    until(lambda: sites.here.heard(THERE) == [m.Forget("m2")])


def test_an_instance_that_restarts_is_reached_again_and_its_end_is_noticed(sites: TwoSites) -> None:
    sites.send(HERE, THERE, m.Forget("m1"))
    until(lambda: sites.here.is_connected(THERE))
    sites.hosts[THERE].end()
    until(lambda: not sites.here.is_connected(THERE))
    there = sites.restart(THERE)
    until(lambda: sites.here.is_connected(THERE) and there.is_connected(HERE))


def test_strangers_at_the_port_of_a_router_reach_no_process_behind_it(sites: TwoSites) -> None:
    sites.send(HERE, THERE, m.Forget("m1"))
    until(lambda: sites.here.is_connected(THERE))
    other = Noting()
    registry = Registry(sites.registries["cloud"]._directory / "other")
    registry.set_elsewhere({"edge": ("127.0.0.1", sites.router_port("edge"))})
    config = HostConfig(registry=registry, secret=b"another secret", dials=[THERE], listens=False)
    with running(Host("op@cloud#9", other, config)):
        for garbage in (b"", b"\xff" * 64, os.urandom(2000), (2**31).to_bytes(4) + b"x" * 100):
            with socket.create_connection(("127.0.0.1", sites.router_port("edge"))) as stranger:
                stranger.sendall(garbage)
        sites.send(HERE, THERE, m.Forget("m3"))
        until(lambda: m.Forget("m3") in sites.there.heard(HERE))
    assert not other.is_connected(THERE)
    assert not sites.there.is_connected("op@cloud#9")


def test_a_process_that_does_not_run_is_dialled_until_it_does(sites: TwoSites) -> None:
    late = "op@edge#2"
    sites.send(HERE, late, m.Forget("m1"))
    until(lambda: bool(sites.hosts[HERE].host.is_connected(late)) is False)
    machine = Noting()
    sites.hosts[late] = sites._start(late, machine)
    until(lambda: machine.is_connected(HERE))


def test_sites_reach_each_other_through_the_router_of_their_parent(sites: TwoSites, tmp_path: Path) -> None:
    far = "op@pole#1"
    sites.registries["pole"] = Registry(tmp_path / "pole")
    sites.routers["pole"] = sites._router("pole")
    edge = ("127.0.0.1", sites.router_port("edge"))
    sites.registries["pole"].set_elsewhere({"edge": edge, "cloud": edge})
    sites.registries["edge"].set_elsewhere(
        {
            "cloud": ("127.0.0.1", sites.router_port("cloud")),
            "pole": ("127.0.0.1", sites.router_port("pole")),
        }
    )
    sites.routers["edge"].end()  # it reads where the others are when it starts
    sites.registries["edge"] = Registry(tmp_path / "edge")
    sites.routers["edge"] = sites._router("edge")
    edge = ("127.0.0.1", sites.router_port("edge"))
    sites.registries["pole"].set_elsewhere({"edge": edge, "cloud": edge})
    machine = Noting()
    sites.hosts[far] = sites._start(far, machine)
    sites.send(far, HERE, m.Forget("m1"))
    until(lambda: sites.here.is_connected(far) and machine.is_connected(HERE))
    sites.send(HERE, far, m.Forget("m2"))
    until(lambda: machine.heard(HERE) == [m.Forget("m2")])


@pytest.mark.parametrize("seed", range(3))
def test_garbage_oversized_and_replayed_frames_at_the_port_of_a_router_harm_nobody(
    sites: TwoSites, seed: int
) -> None:
    draw = Random(seed)
    port = sites.router_port("edge")
    sites.send(HERE, THERE, m.Forget("m1"))
    until(lambda: sites.here.is_connected(THERE))
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as tap:  # a man in the middle, who records one connection
        registry = Registry(sites.registries["cloud"]._directory / f"tapped-{seed}")
        registry.set_elsewhere({"edge": ("127.0.0.1", tap.getsockname()[1])})
        victim = Noting()
        config = HostConfig(registry=registry, secret=SECRET, dials=[THERE], listens=False)
        with running(Host("op@cloud#7", victim, config)):
            client, _ = tap.accept()
            with client, socket.create_connection(("127.0.0.1", port)) as router:
                for source, target in ((client, router), (router, client), (client, router)):
                    data = source.recv(65536)
                    heard.append(data)
                    target.sendall(data)
                until(lambda: sites.there.is_connected("op@cloud#7"))
    said = heard[0] + heard[2]
    events = len(sites.there.events)
    for n in range(40):
        kind = draw.choice(("replayed", "garbage", "oversized", "cut", "mixed"))
        data = {
            "replayed": said,
            "garbage": draw.randbytes(draw.randint(1, 3000)),
            "oversized": draw.randint(2**20, 2**32 - 1).to_bytes(4) + draw.randbytes(500),
            "cut": said[: draw.randint(1, len(said) - 1)],
            "mixed": heard[0] + draw.randbytes(draw.randint(1, 200)),
        }[kind]
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(data)
            if n % 4 == 0:
                stranger.settimeout(0.2)
                stranger.recv(4096)
    until(lambda: not sites.there.is_connected("op@cloud#7"))
    new = [e for e in sites.there.events[events:] if isinstance(e, Received | Connected)]
    assert new == [], "no stranger was taken for the process whose bytes he repeats"
    sites.send(HERE, THERE, m.Forget("m3"))
    until(lambda: m.Forget("m3") in sites.there.heard(HERE))


@needs_openssl
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # uvloop's, of TLS that fails
def test_who_has_another_certificate_or_secret_is_told_so_and_the_router_goes_on(tmp_path: Path) -> None:
    ours, others = make_authority(tmp_path / "ours"), make_authority(tmp_path / "others")
    registry = Registry(tmp_path / "edge")
    config = HostConfig(registry=registry, secret=SECRET, manifest=b"{}", tls=ours)
    with running(Host("edge", Noting(), config)):
        until(lambda: registry.find("edge") is not None)
        found = registry.find("edge")
        assert found is not None
        endpoint = (found.host, found.port)
        with pytest.raises(Refused, match="do not accept each other's certificates"):
            ask(endpoint, SECRET, others, 5.0)
        with pytest.raises(Refused, match="has another secret"):
            ask(endpoint, b"another secret", ours, 10.0)
        with pytest.raises(UserError, match="no router of a deployment answers"):
            ask(endpoint, SECRET, None, 1.0)
        assert ask(endpoint, SECRET, ours, 5.0).site == "edge"
    gc.collect()  # so that what it warns of is not taken for another test's


def test_a_process_ends_that_wants_to_reach_another_site_in_its_last_moment(tmp_path: Path) -> None:
    """An instance that was halted by a restart, and had something for a site that was cut off, hung here."""
    registry = Registry(tmp_path)
    registry.set_elsewhere({"edge": ("127.0.0.1", 1)})
    host = Host(HERE, Noting(), HostConfig(registry=registry, secret=SECRET))

    async def ends() -> bool:
        serving = asyncio.create_task(host.run())
        await until_in_loop(lambda: registry.find(HERE) is not None, "it does not listen")
        host.perform([Send(THERE, m.Forget("m1")), Exit("halted for m1")])
        ended, _ = await asyncio.wait({serving}, timeout=5.0)
        return bool(ended)

    assert asyncio.run(ends())
    assert host.ended_because == "halted for m1"
