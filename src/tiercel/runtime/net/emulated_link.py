"""Emulated links between sites: latency, jitter and bandwidth for processes that are on one machine.

Responsible for: the facts of a link, checking them, delaying the bytes of one direction of a connection.
Not responsible for: connections (connection.py), which link a connection has (peers.py).

    send --> queue --transmission at `mbit`--> flight of `latency_ms` +- `jitter_ms` --> socket

First in, first out: jitter never reorders. Each direction of each connection has the bandwidth for itself.
The handshake is not delayed. TCP's own behaviour (slow start, loss, congestion) is not emulated. Without a
link there is no shaper, and nothing of this runs.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tiercel.core.errors import InvalidRequest

LATENCY_MS_MAX = 60_000.0
MBIT_MIN, MBIT_MAX = 0.001, 1_000_000.0
EXPECTED = 'two sites, as in links={"edge-1 cloud": Link(latency_ms=40, jitter_ms=2, mbit=100)}'


class Link(msgspec.Struct, frozen=True):
    """One way of a link takes `latency_ms` +- `jitter_ms`; `mbit` is megabits per second, None: no limit."""

    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    mbit: float | None = None

    def check(self, where: str) -> Link:
        """Refuse values that no link has."""
        for name in ("latency_ms", "jitter_ms"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= LATENCY_MS_MAX:
                raise InvalidRequest(
                    f"{where}: {name} = {value!r}",
                    f"expected a number from 0 to {LATENCY_MS_MAX:g}",
                    EXPECTED,
                )
        if self.jitter_ms > self.latency_ms:
            expected = f"expected at most latency_ms = {self.latency_ms:g}"
            raise InvalidRequest(f"{where}: jitter_ms = {self.jitter_ms:g}", expected, EXPECTED)
        if self.mbit is not None and (not _is_number(self.mbit) or not MBIT_MIN <= self.mbit <= MBIT_MAX):
            expected = f"expected megabits per second from {MBIT_MIN:g} to {MBIT_MAX:g}, or None for no limit"
            raise InvalidRequest(f"{where}: mbit = {self.mbit!r}", expected, EXPECTED)
        return self


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


Links = Mapping[str, Link]  # "a b", in the order of their names -> the link between two sites


def parse_links(links: Any, sites: Mapping[str, str | None]) -> dict[str, Link]:
    """Links by the names of their sites in order; `InvalidRequest` names what is wrong."""
    found: dict[str, Link] = {}
    if links is not None and not isinstance(links, Mapping):
        raise InvalidRequest(f"links = {links!r}", "expected a mapping", EXPECTED)
    for pair, link in (links or {}).items():
        where = f"links: {pair!r}"
        ends = pair.split() if isinstance(pair, str) else []
        if len(ends) != 2:
            raise InvalidRequest(where, "expected the names of two sites, separated by a space", EXPECTED)
        for end in ends:
            if end not in sites:
                raise InvalidRequest(f"{where}: unknown site {end!r}", f"expected one of: {', '.join(sites)}")
        if ends[0] == ends[1]:
            raise InvalidRequest(where, "expected two different sites", "inside a site there is no link")
        if not isinstance(link, Link):
            raise InvalidRequest(f"{where} = {link!r}", "expected a tiercel.Link", EXPECTED)
        name = " ".join(sorted(ends))
        if name in found:
            raise InvalidRequest(where, "expected each pair of sites once", "a link has both directions")
        found[name] = link.check(where)
    return found


def link_between(links: Links, a: str, b: str) -> Link | None:
    """The link between two sites; None inside a site, where a site is unknown, or if none was given."""
    return links.get(" ".join(sorted((a, b)))) if a and b and a != b else None


class LinkShaper:
    """Delays the bytes of one direction of one connection. `seed` makes the jitter the same in every run."""

    def __init__(self, link: Link, write: Callable[[bytes], object], seed: str) -> None:
        self._link = link
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._jitter = random.Random(seed)
        self._queue: deque[tuple[float, bytes]] = deque()  # when they arrive, in order
        self._free_s = 0.0  # when the transmission of all bytes so far ends
        self._last_s = 0.0  # when the last bytes arrive
        self._timer: asyncio.TimerHandle | None = None
        self.queued_bytes = 0

    def send(self, data: bytes) -> None:
        """Let bytes depart behind all earlier ones."""
        link = self._link
        self._free_s = max(self._free_s, self._loop.time())
        if link.mbit is not None:
            self._free_s += len(data) * 8 / (link.mbit * 1e6)
        flight_ms = link.latency_ms
        if link.jitter_ms:
            flight_ms += self._jitter.uniform(-link.jitter_ms, link.jitter_ms)
        self._last_s = max(self._last_s, self._free_s + flight_ms / 1e3)
        self._queue.append((self._last_s, data))
        self.queued_bytes += len(data)
        if self._timer is None:
            self._timer = self._loop.call_at(self._last_s, self._arrive)

    def _arrive(self) -> None:
        self._timer = None
        now_s = self._loop.time() + 1e-6  # a timer may be early by less than its resolution
        arrived: list[bytes] = []
        while self._queue and self._queue[0][0] <= now_s:
            arrived.append(self._queue.popleft()[1])
        if arrived:
            data = b"".join(arrived)
            self.queued_bytes -= len(data)
            self._write(data)
        if self._queue:
            self._timer = self._loop.call_at(self._queue[0][0], self._arrive)

    def finish(self) -> None:
        """Write what is under way at once, because the connection is being closed."""
        data = b"".join([data for _, data in self._queue])
        self.drop()
        if data:
            self._write(data)

    def drop(self) -> None:
        """Drop what is under way: the connection is lost."""
        self._queue.clear()
        self.queued_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
