"""Metrics lines: differences of counters, whole seconds, files of limited size."""

from __future__ import annotations

from pathlib import Path

import pytest

from averages import OPERATOR, averages, reading
from tiercel.bench.operators import SITE
from tiercel.runtime.process import metrics
from tiercel.runtime.process.metrics import Meter, MetricsLine, first_second, read_lines
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


def test_torn_line_is_skipped_and_a_range_reads_the_same_again(tmp_path: Path) -> None:
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


def test_router_and_instances_write_metrics(tmp_path: Path) -> None:
    def lines() -> list[MetricsLine]:
        return read_lines(tmp_path / "metrics", 0, 1 << 40)

    def has_worked(name: str) -> bool:
        return any(line.process == name and line.rate and line.outputs for line in lines())

    sensors = [f"sensor {n}" for n in range(50)]
    instances = [f"{OPERATOR}@{SITE}#{n}" for n in (1, 2)]
    with averages(tmp_path, checkpoint_ms=50.0) as deployment:
        deployment.produce([reading(sensor, n) for n in range(10) for sensor in sensors])
        until(lambda: all(map(has_worked, [SITE, *instances])), "a process says nothing of its work")
        until(lambda: sum(last_of(lines(), name).state_keys or 0 for name in instances) == 50)
        until(lambda: all(last_of(lines(), name).lag == 0 for name in [SITE, *instances]))
    router = next(line for line in lines() if line.process == SITE and line.rate)
    assert router.lag is not None
    assert router.state_keys is None
    for name in instances:
        worked = next(line for line in lines() if line.process == name and line.rate)
        assert worked.latency_ms is not None
        assert 0 < worked.busy <= 1
        last = last_of(lines(), name)
        assert last.state_keys is not None
        assert last.state_bytes is not None
        assert last.state_bytes > last.state_keys * 64


def last_of(lines: list[MetricsLine], process: str) -> MetricsLine:
    return [line for line in lines if line.process == process][-1]
