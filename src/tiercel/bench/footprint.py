"""`tiercel bench footprint`: memory and CPU of a deployment that has nothing to do, and memory for each key.

Responsible for: figures of each process without traffic, and of instances before and after keys get state.
Not responsible for: the load (loadgen/), memory limits (memory.py).

Memory is the private part of a process (`Private_Dirty`): what it would not need if it did not run. Shared
libraries count once for the machine, not once for each process. Idle CPU contains heartbeats, metrics lines
and what a task yields each second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tiercel.bench.deployments import SLOTS, loaded
from tiercel.bench.report import Line, process_cpu_s
from tiercel.spark.api.deployment import Live
from tiercel.spark.cluster.session import open_session

ShowProgress = Callable[[str], None]

SETTLE_S = 5.0  # first lines are written, and the heartbeat is regular
UNDER_WAY = 20_000  # tuples, while keys are filled
DRIVER = "driver"


def measure(keys: Sequence[int], seconds: float, show_progress: ShowProgress) -> list[Line]:
    """A row for each process without traffic, then one for the instances at each number of keys."""
    spark = open_session("tiercel-bench", slots=SLOTS)
    rows: list[Line] = []
    try:
        for n, count in enumerate(sorted(keys)):
            show_progress(f"starting a deployment for {count:,} keys")
            with loaded(spark, count) as (live, loader):
                time.sleep(SETTLE_S)
                pids = {process.name: process.pid for process in live.status().processes}
                if n == 0:
                    show_progress(f"no traffic for {seconds:g} s")
                    rows += _idle(pids | {DRIVER: os.getpid()}, seconds)
                before = _instances_mb(live, pids)
                show_progress(f"giving {count:,} keys state")
                loader.fill(UNDER_WAY)
                time.sleep(SETTLE_S)
                grown = _instances_mb(live, pids) - before
                rows.append(_line("instances", count, before + grown, None, grown * 1e6 / count))
    finally:
        spark.stop()
    return rows


def _idle(pids: dict[str, int], seconds: float) -> list[Line]:
    before = process_cpu_s(pids)
    time.sleep(seconds)
    after = process_cpu_s(pids)
    return [
        _line(name, 0, private_mb(pid), (after[name] - before[name]) / seconds * 100, None)
        for name, pid in pids.items()
    ]


def _instances_mb(live: Live, pids: dict[str, int]) -> float:
    return sum(private_mb(pid) for name, pid in pids.items() if "@" in name)


def private_mb(pid: int) -> float:
    """Memory that this process alone has."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:")]
    return sum(kilobytes) / 1e3


def _line(process: str, keys: int, mb: float, cpu_percent: float | None, key_bytes: float | None) -> Line:
    return {
        "process": process,
        "keys": keys,
        "private_mb": round(mb, 1),
        "idle_cpu_percent": None if cpu_percent is None else round(cpu_percent, 2),
        "bytes_per_key": None if key_bytes is None else round(key_bytes),
    }
