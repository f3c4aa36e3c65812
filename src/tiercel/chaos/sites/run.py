"""Chaos between sites that are Spark applications: cut links, killed drivers, routers and instances.

Responsible for: the applications and the links between them, the load, the faults, the verdict.
Not responsible for: faults inside one application (chaos/supervisor.py).

Producers at all sites send numbers that grow by one for each car. The operator adds them up, so the right
output of a car is known for every input: its number and the sum of all numbers up to it, once and in order.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec

import tiercel
from tiercel.chaos.sites.proxy import CUT, OPEN, LinkState, Proxy
from tiercel.chaos.sites.site_process import SiteProcess
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir

CARS_PER_SITE = 20
ROUNDS_PER_S = 50.0
STRATEGIES = ("live", "live", "live", "pause", "restart")
IN_MOVE = 0.7
LINK_S = 1.0  # the shortest fault of a link
CUT_S = 12.0  # the longest one, unless told otherwise
DELAY_S = (0.0, 0.3)
PAUSE_S = (0.5, 2.0)
QUIET_S_MAX = 120.0  # without any new output at the end, what is missing is lost

ShowProgress = Callable[[str, float], None]


class LinkFault(enum.StrEnum):
    """Kinds of faults between applications."""

    CUT = "link cut"
    ONE_WAY = "link one way"
    INSTANCE = "instance"
    ROUTER = "router"
    EDGE = "edge application"
    CLOUD = "cloud application"


DECK = {
    LinkFault.CUT: 4,
    LinkFault.ONE_WAY: 2,
    LinkFault.INSTANCE: 2,
    LinkFault.ROUTER: 3,
    LinkFault.EDGE: 1,
    LinkFault.CLOUD: 1,
}


class SitesVerdict(msgspec.Struct, frozen=True):
    """A run in numbers."""

    seed: int
    minutes: float
    inputs: int
    outputs: int
    lost: int
    doubled: int
    reordered: int
    wrong: int
    faults: dict[str, int]
    during_moves: dict[str, int]
    moves: dict[str, int]  # by how they ended
    unexpected: list[str]

    @property
    def good(self) -> bool:
        faulty = self.lost or self.doubled or self.reordered or self.wrong or self.unexpected
        return self.inputs > 0 and not faulty


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens at now."""
    with contextlib.ExitStack() as servers:
        opened = [servers.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in opened]


class Load:
    """Producers at every site, one subscriber, and every output as it came."""

    def __init__(self, addresses: dict[str, str], secret: Path) -> None:
        self.sent: dict[str, int] = {}  # car -> its last number
        self.found: dict[str, list[tuple[int, int]]] = {}
        self._stop = threading.Event()
        self._ended = threading.Event()
        self.failures: list[str] = []
        self._cars = {site: [f"{site}-{n}" for n in range(CARS_PER_SITE)] for site in addresses}
        self._threads = [
            threading.Thread(target=self._guard, args=(self._produce, site, address, secret))
            for site, address in addresses.items()
        ]
        home = next(iter(addresses.values()))
        self._reading = threading.Thread(target=self._guard, args=(self._read, home, secret))
        for thread in (*self._threads, self._reading):
            thread.start()

    def _guard(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        except UserError as error:
            self.failures.append(str(error))

    def _produce(self, site: str, address: str, secret: Path) -> None:
        producer = tiercel.connect(address, secret=secret).producer("cars", name=f"gateway-{site}")
        cars, n = self._cars[site], 0
        while not self._stop.is_set():
            n += 1
            producer.send_many([(car, n) for car in cars])
            self.sent.update(dict.fromkeys(cars, n))
            time.sleep(1 / ROUNDS_PER_S)
        producer.flush(QUIET_S_MAX)
        producer.close()

    def _read(self, address: str, secret: Path) -> None:
        subscriber = tiercel.connect(address, secret=secret).subscribe("sums.out", after=0)
        while not self._ended.is_set():
            for received in subscriber.poll(0.2):
                row = received.row
                self.found.setdefault(row.car, []).append((row.n, row.total))
        subscriber.close()

    @property
    def outputs(self) -> int:
        return sum(map(len, list(self.found.values())))

    def end(self) -> None:
        """Stop sending, and wait for the last outputs."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        inputs, last, since = sum(self.sent.values()), -1, time.monotonic()
        while self.outputs < inputs and time.monotonic() - since < QUIET_S_MAX:
            if self.outputs != last:
                last, since = self.outputs, time.monotonic()
            time.sleep(0.1)
        time.sleep(1.0)  # a doubled one would come now
        self._ended.set()
        self._reading.join()


def judge(sent: dict[str, int], found: dict[str, list[tuple[int, int]]]) -> Counter[str]:
    """Compare the outputs of each car with the only right ones."""
    counts: Counter[str] = Counter()
    for car, last in sent.items():
        numbers = [n for n, _ in found.get(car, [])]
        counts["inputs"] += last
        counts["outputs"] += len(numbers)
        counts["lost"] += len(set(range(1, last + 1)) - set(numbers))
        counts["doubled"] += len(numbers) - len(set(numbers))
        counts["reordered"] += sum(1 for a, b in itertools.pairwise(numbers) if b < a)
        counts["wrong"] += sum(1 for n, total in found.get(car, []) if total != n * (n + 1) // 2)
        counts["wrong"] += sum(1 for n in numbers if n > last)
    return counts


class SitesRun:
    """A cloud and its edges under load, each an application, with faults drawn from a seed.

    The clocks of the edges are `ahead_s` ahead of the cloud's; a link is cut for at most `cut_s`.
    """

    def __init__(
        self,
        place: Path,
        seed: int,
        show_progress: ShowProgress,
        *,
        applications: int = 2,
        cut_s: float = CUT_S,
        ahead_s: float = 0.0,
    ) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self._random, self._show = Random(seed), show_progress
        self._cut_s, self._ahead_s = cut_s, ahead_s
        self._seed = seed
        self.faults: Counter[str] = Counter()
        self.during_moves: Counter[str] = Counter()
        self.moves: Counter[str] = Counter()
        self.unexpected: list[str] = []
        edges = ["edge"] if applications == 2 else [f"edge-{n}" for n in range(1, applications)]
        ports = free_ports(2 * applications)
        listen, advertised = ports[:applications], ports[applications:]
        names = ["cloud", *edges]
        self.addresses = dict(zip(names, (f"127.0.0.1:{port}" for port in listen), strict=True))
        self.secret = place / "secret"
        self.secret.write_bytes(secrets.token_bytes(32))
        self.file = place / "sites.toml"
        parents = {"cloud": "", **dict.fromkeys(edges, 'parent = "cloud"')}
        sections = [
            f"[sites.{site}]\n{parents[site]}\n"
            f'listen = "{self.addresses[site]}"\nadvertise = "127.0.0.1:{port}"\n'
            for site, port in zip(parents, advertised, strict=True)
        ]
        head = 'name = "chaos"\nsecret_file = "secret"\n'
        self.file.write_text(head + "".join(sections), encoding="utf-8")
        self.links = {
            site: Proxy(port, target) for site, port, target in zip(parents, advertised, listen, strict=True)
        }
        self.sites: dict[str, SiteProcess] = {}

    def start(self, site: str) -> None:
        """Start the application of a site, and wait until it is deployed."""
        self.sites[site] = SiteProcess(self.file, site, 0.0 if site == "cloud" else self._ahead_s)
        answer = self.sites[site].read()
        if answer != "deployed":
            self.unexpected.append(f"{site} did not start: {answer}")

    def close(self) -> None:
        for site in self.sites.values():
            site.end()
        for link in self.links.values():
            link.close()

    def run(self, seconds: float) -> SitesVerdict:
        try:
            for site in self.addresses:
                self.start(site)
            load = Load(self.addresses, self.secret)
            try:
                begun = time.monotonic()
                for fault in self._drawn():
                    passed = time.monotonic() - begun
                    if passed > seconds and self.faults.keys() >= set(map(str, DECK)):
                        break
                    self._inject(fault, passed / seconds)
            finally:
                for link in self.links.values():
                    link.set(OPEN)
                self._show("waiting for the last outputs", 1.0)
                load.end()
        finally:
            self.close()
        counts = judge(load.sent, load.found)
        return SitesVerdict(
            self._seed,
            seconds / 60,
            counts["inputs"],
            counts["outputs"],
            counts["lost"],
            counts["doubled"],
            counts["reordered"],
            counts["wrong"],
            dict(self.faults),
            dict(self.during_moves),
            dict(self.moves),
            [*self.unexpected, *load.failures],
        )

    def _drawn(self) -> Iterator[LinkFault]:
        while True:
            deck = [kind for kind, count in DECK.items() for _ in range(count)]
            self._random.shuffle(deck)
            yield from deck

    def _inject(self, fault: LinkFault, share: float) -> None:
        draw = self._random
        time.sleep(draw.uniform(*PAUSE_S))
        cloud, moving, text = self.sites["cloud"], draw.random() < IN_MOVE, ""
        if moving:
            of, to = draw.choice(list(self.sites)), draw.choice(list(self.sites))
            strategy = draw.choice(STRATEGIES)
            keys = [f"{of}-{n}" for n in range(CARS_PER_SITE)]
            cloud.send(do="move", keys=keys, to=to, strategy=strategy)
            text = f" in a move to {to} ({strategy})"
            time.sleep(draw.uniform(*DELAY_S))
        self._show(f"{fault}{text}", min(1.0, share))
        self.faults[fault.value] += 1
        self.during_moves[fault.value] += moving
        self._carry_out(fault)
        if moving and fault is not LinkFault.CLOUD:
            self._note_move(cloud)

    def _note_move(self, cloud: SiteProcess) -> None:
        answer = cloud.read()
        if isinstance(answer, dict):
            first = str(answer["error"]).partition("\n")[0]
            if "was undone" in first:
                self.moves["undone"] += 1
            else:
                self.moves["not ended"] += 1
                self.unexpected.append(first)
        else:
            self.moves["done"] += 1

    def _carry_out(self, fault: LinkFault) -> None:
        draw = self._random
        match fault:
            case LinkFault.CUT | LinkFault.ONE_WAY:
                both = fault is LinkFault.CUT
                state = CUT if both else draw.choice((LinkState(toward=False), LinkState(back=False)))
                hit = list(self.links.values()) if both else [draw.choice(list(self.links.values()))]
                for link in hit:
                    link.set(state)
                time.sleep(draw.uniform(min(LINK_S, self._cut_s), self._cut_s))
                for link in hit:
                    link.set(OPEN)
            case LinkFault.INSTANCE | LinkFault.ROUTER:
                self._kill_process(draw.choice(list(self.sites)), fault)
            case LinkFault.EDGE:
                edge = draw.choice([site for site in self.sites if site != "cloud"])
                self.sites[edge].kill()
                self.start(edge)
            case LinkFault.CLOUD:
                self.sites["cloud"].kill()
                self.start("cloud")

    def _kill_process(self, site: str, fault: LinkFault) -> None:
        """Kill -9 of a worker. The registry of the site has its process id."""
        registry = DeploymentDir(self.file.with_name(site)).registry
        instances = [name for name in registry.names() if "#" in name]
        found = registry.find(self._random.choice(instances) if fault is LinkFault.INSTANCE else site)
        if found is not None and found.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(found.pid, signal.SIGKILL)
