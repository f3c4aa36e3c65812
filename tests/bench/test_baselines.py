"""What Tiercel is compared with: Spark, the operator alone, an echo, a build without moves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from tiercel.bench.baselines import operator_alone as own_code
from tiercel.bench.baselines.echo import echoing, frame_sizes
from tiercel.bench.baselines.spark import best
from tiercel.bench.baselines.without_moves import build_without_moves
from tiercel.bench.loadgen.load import PRODUCER, Load
from tiercel.bench.loadgen.process import until, until_quiet
from tiercel.bench.operators import SITE, plan, topology
from tiercel.bench.scenarios.throughput import PROCESSORS
from tiercel.core.machine.events import TimerFired
from tiercel.core.settings import Settings
from tiercel.runtime.deployment import DeploymentDir, Manifest
from tiercel.runtime.process.host import Host, HostConfig


def test_spark_figure_is_the_best_batch_and_the_best_below_two_seconds() -> None:
    lines = [
        {"events_per_s": 5, "batch_max_ms": 800},
        {"events_per_s": 9, "batch_max_ms": 1_900},
        {"events_per_s": 20, "batch_max_ms": 26_000},
    ]
    assert best(lines) == {"spark_events_per_s": 20, "spark_events_per_s_below_2s": 9}
    assert best(lines[2:])["spark_events_per_s_below_2s"] is None


@pytest.mark.parametrize("name", PROCESSORS)
def test_cost_of_an_operator_alone_grows_with_its_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that counts rows: a step that takes three times as long is seen as that."""
    spent = [0.0]
    monkeypatch.setattr(own_code, "time", SimpleNamespace(process_time=lambda: spent[0]))

    def cost(seconds: float, form: str) -> float:
        operator = PROCESSORS[name][0][form]()
        method = "step" if form == "fold" else "handleInputRows"
        real = getattr(operator, method)

        def slowly(*facts: Any) -> Any:
            spent[0] += seconds
            return real(*facts)

        monkeypatch.setattr(operator, method, slowly)
        return own_code.own_code_us(operator)

    assert cost(3e-5, "fold") == pytest.approx(30)
    assert cost(1e-5, "fold") == pytest.approx(10)
    assert cost(3e-5, "processor") == pytest.approx(30 / own_code.ROWS)  # once for the rows of a call


def test_the_echo_sends_frames_of_real_sizes_through_two_processes_and_back() -> None:
    empty, row = frame_sizes()
    assert 20 < empty < 100
    assert 20 < row < 100
    with echoing() as echo:
        found = echo.open_loop(2_000, 0.3, 0.1)
    assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]


def test_build_without_moves_keeps_exactly_once_and_order(tmp_path: Path) -> None:
    place = DeploymentDir(tmp_path)
    place.write(Manifest("bare", topology(2), {}, Settings()))
    names = [SITE, *topology(2).operators["average"].instances]

    async def scenario() -> None:
        load = Load(50)
        hosts = [build_without_moves(place, name, plan() if "@" in name else None) for name in names]
        hosts.append(Host(PRODUCER, load, HostConfig.of(place, dials=[SITE], listens=False)))
        tasks = [asyncio.create_task(host.run()) for host in hosts]
        await until(lambda: load.connected, "no connection")
        load.closed_loop_max = 2_000
        hosts[-1].deliver(TimerFired("fill"))
        await until(lambda: load.received > 10_000, "nothing comes back")
        load.stop()
        await until_quiet(load)
        for host in hosts:
            host.end("over")
        await asyncio.gather(*tasks)
        assert load.faults.total == 0

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
