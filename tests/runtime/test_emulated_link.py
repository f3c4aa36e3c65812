"""Emulated links: delay, order and bandwidth of one direction; bad links are named."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

import pytest

from tiercel.core.errors import InvalidRequest
from tiercel.runtime.net.emulated_link import Link, LinkShaper, link_between, parse_links

SITES = {"cloud": None, "edge-1": "cloud", "edge-2": "cloud"}


class Clock:
    """A loop whose time a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, at_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        heapq.heappush(self._calls, (at_s, len(self._calls), call))
        return asyncio.TimerHandle(at_s, call, (), self)  # type: ignore[arg-type]

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: object) -> None:
        """Nothing: a call of a dropped queue does nothing."""

    def run(self) -> None:
        while self._calls:
            self.now_s, _, call = heapq.heappop(self._calls)
            call()


class Wire:
    """One direction, and what arrived when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, link: Link, seed: str = "a b") -> None:
        self.clock = Clock()
        self.arrived: list[tuple[float, bytes]] = []
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self.clock)
        self.shaper = LinkShaper(link, self._write, seed)

    def _write(self, data: bytes) -> None:
        self.arrived.append((round(self.clock.now_s * 1e3, 3), data))


def test_bytes_arrive_after_the_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch, Link(latency_ms=40))
    wire.shaper.send(b"a")
    wire.clock.run()
    assert wire.arrived == [(40.0, b"a")]


def test_bandwidth_delays_what_comes_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch, Link(latency_ms=10, mbit=8))  # 1,000 bytes per ms
    wire.shaper.send(b"a" * 5_000)
    wire.shaper.send(b"b" * 1_000)
    assert wire.shaper.queued_bytes == 6_000
    wire.clock.run()
    assert [(at, len(data)) for at, data in wire.arrived] == [(15.0, 5_000), (16.0, 1_000)]
    assert wire.shaper.queued_bytes == 0


def test_jitter_never_reorders_and_is_the_same_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for _ in range(2):
        wire = Wire(monkeypatch, Link(latency_ms=5, jitter_ms=5))
        for n in range(200):
            wire.shaper.send(bytes([n]))
            wire.clock.now_s += 0.0001
        wire.clock.run()
        assert b"".join(data for _, data in wire.arrived) == bytes(range(200))
        runs.append([at for at, _ in wire.arrived])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 10, "jitter that does not vary is none"


def test_what_is_under_way_is_written_at_a_close_and_lost_with_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed, lost = (Wire(monkeypatch, Link(latency_ms=40)) for _ in range(2))
    closed.shaper.send(b"a")
    closed.shaper.finish()
    lost.shaper.send(b"a")
    lost.shaper.drop()
    lost.clock.run()
    assert (closed.arrived, lost.arrived) == ([(0.0, b"a")], [])


def test_a_link_counts_in_both_directions_and_only_between_its_sites() -> None:
    links = parse_links({"edge-1 cloud": Link(latency_ms=40)}, SITES)
    assert link_between(links, "cloud", "edge-1") == link_between(links, "edge-1", "cloud") == Link(40)
    assert link_between(links, "cloud", "edge-2") is None
    assert link_between(links, "cloud", "cloud") is None
    assert link_between(links, "", "cloud") is None


@pytest.mark.parametrize(
    ("links", "named"),
    [
        ({"edge-1": Link(40)}, "two sites, separated by a space"),
        ({"edge-1 nowhere": Link(40)}, "unknown site 'nowhere'"),
        ({"cloud cloud": Link(40)}, "two different sites"),
        ({"edge-1 cloud": 40}, "tiercel.Link"),
        ({"edge-1 cloud": Link(40), "cloud edge-1": Link(1)}, "each pair of sites once"),
        ({"edge-1 cloud": Link(latency_ms=-1)}, "latency_ms = -1"),
        ({"edge-1 cloud": Link(latency_ms=1, jitter_ms=2)}, "jitter_ms = 2"),
        ({"edge-1 cloud": Link(mbit=0)}, "mbit = 0"),
        ({"edge-1 cloud": Link(mbit=1e12)}, "mbit = 1"),
        ([("edge-1 cloud", Link(1))], "expected a mapping"),
    ],
)
def test_a_link_that_cannot_be_is_named(links: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        parse_links(links, SITES)
