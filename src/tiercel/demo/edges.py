"""`tiercel demo --edges`: cars drive between two Spark applications, and their keys follow them.

Responsible for: the two applications as processes, the cars, where their keys are, an audit of every output.
Not responsible for: the program of a site (edge_program.py), the tables on the screen (cli/demo.py).

    cloud    driver, master, storage of its own  <---- one port each ---->  edge    the same
       ^ gateway                                                              ^ gateway
       +------------------------ cars drive from one to the other ------------+
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import tiercel
from tiercel.errors import UserError

SITES = ("cloud", "edge")
CARS = 12
ROWS_PER_S = 5.0
STAY_S = 8.0  # at one site
END_S_MAX = 60.0
ShowProgress = Callable[[str], None]


class EdgeDemo(msgspec.Struct, frozen=True):
    """What the demonstration gave."""

    cars: int
    rows: int
    outputs: int
    crossings: int
    hand_overs: list[str]
    followed: int  # looks at which a car's key was where the car was
    looks: int
    lost: int
    doubled: int
    reordered: int
    wrong: int
    drivers: dict[str, int]  # site -> process of its driver

    @property
    def good(self) -> bool:
        faults = self.lost + self.doubled + self.reordered + self.wrong
        return self.outputs > 0 and bool(self.hand_overs) and not faults


class SiteProgram:
    """The application of one site."""

    def __init__(self, file: Path, site: str) -> None:
        self.site = site
        self._log = file.with_name(f"{site}.log").open("ab")
        command = [sys.executable, "-m", "tiercel.demo.edge_program", str(file), site]
        self._process = subprocess.Popen(
            [*command, str(file.with_name(site))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # its JVM and workers end with it
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {"error": "it has ended"}
        if "error" in found:
            what = f"the application of site {self.site!r}: {found['error']}"
            raise UserError(what, hint=f"its log: {self._log.name}")
        return found

    def ask(self, cars: list[str]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(cars) + "\n")
        self._process.stdin.flush()
        return self.read()

    def end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S_MAX)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError), self._process:  # closes its pipes
            self._log.close()


class Cars:
    """Cars that drive from site to site, number their rows, and read what their operator says."""

    def __init__(self, addresses: dict[str, str], secret: Path) -> None:
        self.names = [f"car-{n}" for n in range(CARS)]
        self.sent = dict.fromkeys(self.names, 0)
        self.crossings = 0
        self.got: dict[str, list[tuple[int, int]]] = {name: [] for name in self.names}
        self._producers = {
            site: tiercel.connect(address, secret=secret).producer("positions", name=f"gateway-{site}")
            for site, address in addresses.items()
        }
        self._subscriber = tiercel.connect(addresses["cloud"], secret=secret).subscribe("speed.out", after=0)
        self._began_s = time.monotonic()
        self._places = dict.fromkeys(self.names, "")
        self._parked = self._over = False
        self._threads = [threading.Thread(target=work) for work in (self._drive, self._read)]
        for thread in self._threads:
            thread.start()

    def site_of(self, car: str) -> str:
        """Half of the cars begin at the edge; each crosses in its own rhythm."""
        n = int(car.rpartition("-")[2])
        passed = time.monotonic() - self._began_s + n * STAY_S / CARS
        return SITES[(int(passed / STAY_S) + n) % len(SITES)]

    def _drive(self) -> None:
        while not self._parked:
            for car in self.names:
                site = self.site_of(car)
                self.crossings += self._places[car] not in ("", site)
                self._places[car] = site
                self.sent[car] += 1
                speed = 50.0 + (7 * self.sent[car]) % 30
                self._producers[site].send((car, self.sent[car], speed))
            time.sleep(1 / ROWS_PER_S)
        for producer in self._producers.values():
            producer.flush(END_S_MAX)

    def _read(self) -> None:
        while not self._over:
            for received in self._subscriber.poll(0.2):
                row = received.row
                self.got[row["car"]].append((row["seq"], row["n"]))

    def park(self) -> None:
        """Stop, and wait for the last outputs."""
        self._parked = True
        self._threads[0].join()
        give_up = time.monotonic() + END_S_MAX
        while sum(map(len, self.got.values())) < sum(self.sent.values()) and time.monotonic() < give_up:
            time.sleep(0.1)
        time.sleep(1.0)  # a doubled one would come now
        self._over = True
        self._threads[1].join()
        for producer in self._producers.values():
            producer.close()
        self._subscriber.close()

    def audit(self) -> dict[str, int]:
        """Compare with the only right outputs: number and count of a car's n-th output are n."""
        found = dict.fromkeys(("lost", "doubled", "reordered", "wrong"), 0)
        for car, last in self.sent.items():
            numbers = [seq for seq, _ in self.got[car]]
            found["lost"] += last - len(set(numbers))
            found["doubled"] += len(numbers) - len(set(numbers))
            found["reordered"] += sum(1 for a, b in itertools.pairwise(numbers) if b < a)
            found["wrong"] += sum(1 for seq, n in self.got[car] if seq != n)
        return found


@contextlib.contextmanager
def applications(place: Path, show: ShowProgress) -> Iterator[tuple[dict[str, SiteProgram], dict[str, str]]]:
    """Both applications, deployed, and the addresses of their routers."""
    with contextlib.ExitStack() as servers:
        opened = [servers.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in SITES]
        addresses = {s: f"127.0.0.1:{o.getsockname()[1]}" for s, o in zip(SITES, opened, strict=True)}
    (place / "secret").write_bytes(secrets.token_bytes(32))
    file = place / "edges.toml"
    parents = {"cloud": "", "edge": 'parent = "cloud"\n'}
    sections = [f'[sites.{site}]\n{parents[site]}listen = "{addresses[site]}"\n' for site in SITES]
    file.write_text('name = "edges"\nsecret_file = "secret"\n' + "".join(sections), encoding="utf-8")
    programs: dict[str, SiteProgram] = {}
    try:
        for site in SITES:
            show(f"starting the Spark application of site {site}")
            programs[site] = SiteProgram(file, site)
        for site in SITES:
            programs[site].read()
        yield programs, addresses
    finally:
        for program in programs.values():
            program.end()


def run_edges(seconds: float, show: ShowProgress) -> EdgeDemo:
    """Drive for so long; returns what came of it."""
    with tempfile.TemporaryDirectory(prefix="tiercel-edges-") as directory:
        place = Path(directory)
        with applications(place, show) as (programs, addresses):
            cars = Cars(addresses, place / "secret")
            followed = looks = shown = 0
            hand_overs: list[str] = []
            end_s = time.monotonic() + seconds
            try:
                while time.monotonic() < end_s:
                    time.sleep(1.0)
                    found = programs["cloud"].ask(cars.names)
                    at_home = [c for c, owner in found["owners"].items() if f"@{cars.site_of(c)}#" in owner]
                    looks += len(cars.names)
                    followed += len(at_home)
                    hand_overs = found["hand_overs"]
                    for one in hand_overs[shown:]:
                        show(one)
                    shown = len(hand_overs)
            finally:
                cars.park()
            hand_overs = programs["cloud"].ask(cars.names)["hand_overs"]
            drivers = {site: program.pid for site, program in programs.items()}
    outputs = sum(map(len, cars.got.values()))
    faults = cars.audit()
    return EdgeDemo(
        *(len(cars.names), sum(cars.sent.values()), outputs, cars.crossings, hand_overs, followed, looks),
        *(faults["lost"], faults["doubled"], faults["reordered"], faults["wrong"], drivers),
    )
