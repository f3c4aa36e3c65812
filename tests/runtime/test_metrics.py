"""Metrics lines: differences of counters, whole seconds, files of limited size."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from averages import OPERATOR, averages, reading
from tiercel.bench.operators import SITE
from tiercel.runtime.process import metrics
from tiercel.runtime.process.cpu_time import CpuTime
from tiercel.runtime.process.metrics import Meter, MetricsLine, first_second, read_lines
from waiting import until


def test_counters_become_rates_and_files_are_replaced_at_their_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "FILE_BYTES_MAX", 500)
    meter = Meter(tmp_path, "average@cloud#1", None)
    both = ["average@cloud#1.1.jsonl", "average@cloud#1.jsonl"]
    n = 0
    while n < 20 or sorted(p.name for p in tmp_path.iterdir()) != both:
        meter.write({"rows": 100 * n, "waited": n, "waited_ms": 2.0 * n, "state_keys": 5, "moves": 1}, 0.0)
        n += 1
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
        assert worked.cpu is not None
        assert 0 <= worked.cpu <= 1
        assert worked.cores


def test_a_router_reports_what_enters_and_waits_for_each_operator(tmp_path: Path) -> None:
    def inboxes() -> list[MetricsLine]:
        return [line for line in read_lines(tmp_path / "metrics", 0, 1 << 40) if line.kind == "inbox"]

    with averages(tmp_path, checkpoint_ms=50.0) as deployment:
        rows = [reading("hot" if n % 2 else f"sensor {n % 50}", n) for n in range(2_000)]
        deployment.produce(rows)
        until(lambda: any(line.arrivals for line in inboxes()), "nothing has arrived")
        until(lambda: inboxes()[-1].lag == 0)
    lines = inboxes()
    assert {(line.process, line.operator) for line in lines} == {(SITE, OPERATOR)}
    first = next(line for line in lines if line.heavy_slots)
    assert first.readers is not None
    assert set(first.readers) == {f"{OPERATOR}@{SITE}#{n}" for n in (1, 2)}
    assert lines[-1].oldest_ms == 0


def test_lines_are_read_from_the_end_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that keeps up does not read megabytes each second."""
    meter = Meter(tmp_path, "cloud", None)
    for n in range(30):
        meter.write({"lag": n}, 0.0)
    whole = read_lines(tmp_path, 0, 1 << 40)
    for size in (1, 7, 100, 1 << 20):
        monkeypatch.setattr(metrics, "BLOCK_BYTES", size)
        assert read_lines(tmp_path, 0, 1 << 40) == whole


def test_time_without_a_core_is_not_counted_as_cpu_time() -> None:
    cpu = CpuTime()
    begun = time.monotonic()
    time.sleep(0.2)
    ran, _ = cpu.shares(time.monotonic() - begun)
    assert ran < 0.5


def last_of(lines: list[MetricsLine], process: str) -> MetricsLine:
    return [line for line in lines if line.process == process][-1]
