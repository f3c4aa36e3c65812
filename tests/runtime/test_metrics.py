"""Lines of metrics: differences of counters, whole seconds, files that do not grow for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop

from tiercel.bench.averages import SITE, plan, topology
from tiercel.bench.load import PRODUCER, Load
from tiercel.core.events import TimerFired
from tiercel.core.settings import Settings
from tiercel.runtime import metrics
from tiercel.runtime.host import Host
from tiercel.runtime.metrics import Line, Meter, first_second, read_lines
from tiercel.runtime.place import Manifest, Place
from tiercel.spark.hosting import build_host
from waiting import until


def test_counters_become_rates_and_files_are_replaced_at_their_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "FILE_BYTES_MAX", 500)
    meter = Meter(tmp_path, "average@cloud#1", None)
    for n in range(20):
        meter.write({"rows": 100 * n, "waited": n, "waited_ms": 2.0 * n, "state_keys": 5, "moves": 1}, 0.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["average@cloud#1.1.jsonl", "average@cloud#1.jsonl"]
    assert max(p.stat().st_size for p in tmp_path.iterdir()) < 1000
    lines = read_lines(tmp_path, 0, 1 << 40)
    assert lines[-1].process == "average@cloud#1"
    assert (lines[-1].site, lines[-1].operator, lines[-1].kind) == ("cloud", "average", "instance")
    assert (lines[-1].latency_ms, lines[-1].state_keys, lines[-1].lag) == (2.0, 5, None)
    assert lines[-1].rate > 0


def test_a_line_that_was_cut_off_is_left_out_and_a_range_is_read_the_same_again(tmp_path: Path) -> None:
    meter = Meter(tmp_path, "cloud", None)
    meter.write({"lag": 3}, 0.0)
    [line] = read_lines(tmp_path, 0, 1 << 40)
    with (tmp_path / "cloud.jsonl").open("ab") as file:
        file.write(b'{"at_ms": 17')
    second = line.at_ms // 1000
    assert first_second(tmp_path) == second
    assert read_lines(tmp_path, second - 1, second) == [line]
    assert read_lines(tmp_path, second, second + 10) == []
    assert (line.kind, line.operator, line.lag, line.latency_ms) == ("router", None, 3, None)


def test_router_and_instances_say_what_they_do(tmp_path: Path) -> None:
    deployment = Place(tmp_path)
    deployment.write(Manifest("test", topology(1), {}, Settings()))
    names = [SITE, *topology(1).operators["average"].instances]

    def busy(name: str) -> bool:
        return any(line.process == name and line.rate and line.outputs for line in everything())

    def everything() -> list[Line]:
        return read_lines(tmp_path / "metrics", 0, 1 << 40)

    async def scenario() -> None:
        load = Load(50)
        hosts = [build_host(deployment, name, plan() if "@" in name else None) for name in names]
        client = Host(PRODUCER, load, deployment.registry, deployment.secret, dials=[SITE])
        tasks = [asyncio.create_task(host.run()) for host in (*hosts, client)]
        await until(lambda: load.connected, "no connection with the router")
        load.closed_loop_max = 2_000
        client.take(TimerFired("fill"))
        await until(lambda: all(busy(name) for name in names), "a process says nothing of its work")
        load.stop()
        for host in (*hosts, client):
            host.end("over")
        await asyncio.gather(*tasks)
        await asyncio.sleep(0.05)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
    router = next(line for line in everything() if line.kind == "router" and line.rate)
    assert router.lag is not None
    assert router.state_keys is None
    instance = next(line for line in everything() if line.kind == "instance" and line.rate)
    assert instance.latency_ms is not None
    assert instance.state_keys == 50
    assert instance.state_bytes is not None
    assert instance.state_bytes > 50 * 64
    assert 0 < instance.busy <= 1
