"""`tiercel bench memory`: state that is larger than what may be in memory, beside the same without a limit.

Responsible for: both deployments under the same load, what they carry, how late they are, what they occupy.
Not responsible for: the load and whether outputs are right (loader.py, load.py).

Two loads: `even`, where every key comes as often as any other and each tuple finds its key outside of memory
if its turn was long ago, which is the worst case; `skewed`, where nine of ten tuples are of a tenth of the
keys. Each deployment is started, filled, measured and ended before the other one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from tiercel.bench.deployed import INSTANCES, SLOTS, loaded
from tiercel.bench.loader import Loader
from tiercel.bench.processors import LargeAverage
from tiercel.bench.report import Line, median_line, process_cpu_s
from tiercel.core.settings import Settings
from tiercel.runtime.metrics import Line as Metrics
from tiercel.runtime.place import Place
from tiercel.spark.live import Live
from tiercel.spark.session import open_session

Tell = Callable[[str], None]

LOADS = ("even", "skewed")
WARM_S = 2.0
SETTLE_S = 3.0  # what the filling has made dirty is stored, and leaves memory
UNDER_WAY = 2_000  # tuples, where the rate is what the deployment can carry
MB = 1_000_000


@dataclass(frozen=True)
class Wish:
    """What to measure."""

    state_mb: int
    times: float
    state_bytes: int
    rate: int
    seconds: float
    repeats: int

    @property
    def keys(self) -> int:
        return self.state_mb * MB // self.state_bytes

    @property
    def limit_bytes(self) -> int:
        """Of each instance."""
        return int(self.state_mb * MB / self.times / INSTANCES)


def measure(wish: Wish, tell: Tell) -> tuple[list[Line], list[Line]]:
    """A row for each limit and load, by the median; and every repeat."""
    limits = (0, wish.limit_bytes)
    every: list[Line] = []
    for repeat in range(1, wish.repeats + 1):
        for limit in limits:
            named = f"limit {limit * INSTANCES // MB} MB" if limit else "no limit"
            tell(f"{named}, repeat {repeat} of {wish.repeats}: filling {wish.keys:,} keys")
            every += [{"repeat": repeat, **line} for line in _one(wish, limit, named, tell)]
    rows = []
    for limit, load in product(limits, LOADS):
        wanted = (limit * INSTANCES // MB, load)
        mine = [line for line in every if (line["limit_mb"], line["load"]) == wanted]
        faults = {name: sum(line[name] for line in mine) for name in ("lost", "doubled", "wrong_state")}
        medians = {name: value for name, value in median_line(mine).items() if name != "repeat"}
        rows.append(medians | {"limit_mb": wanted[0]} | faults)
    return rows, every


def _one(wish: Wish, limit: int, named: str, tell: Tell) -> list[Line]:
    """In a session of its own: Spark's workers serve again, and keep the memory of what they did before."""
    spark = open_session("tiercel-bench", slots=SLOTS)
    settings, processor = Settings(memory_bytes_max=limit), LargeAverage(wish.state_bytes)
    try:
        with loaded(spark, wish.keys, processor=processor, settings=settings) as (live, loader):
            return _measured(wish, live, loader, limit, lambda what: tell(f"{named}: {what}"))
    finally:
        spark.stop()


def _measured(wish: Wish, live: Live, loader: Loader, limit: int, tell: Tell) -> list[Line]:
    pids = {p.name: p.pid for p in live.status().processes if "@" in p.name}
    empty_mb = resident_mb(pids)
    filled = loader.fill(UNDER_WAY)
    time.sleep(SETTLE_S)
    lines = []
    for load in LOADS:
        loader.favour(wish.keys // 10 if load == "skewed" else 0)
        tell(f"{load}, {wish.rate:,}/s")
        latency = loader.open_loop(wish.rate, wish.seconds, WARM_S)
        tell(f"{load}, as fast as it goes")
        used_s = sum(process_cpu_s(pids).values())
        speed = loader.closed_loop(wish.seconds, WARM_S, UNDER_WAY)
        cpu_us = (sum(process_cpu_s(pids).values()) - used_s) / max(1, speed["tuples"]) * 1e6
        metrics = last_metrics(live.place, pids)
        faults = [answer["faults"] for answer in (filled, latency, speed)]
        filled = {"faults": dict.fromkeys(filled["faults"], 0)}  # counted once
        lines.append(
            {
                "limit_mb": limit * INSTANCES // MB,
                "load": load,
                "state_mb": wish.state_mb,
                "events_per_s": speed["events_per_s"],
                "cpu_us": round(cpu_us, 1),
                "p50_ms": latency["p50_ms"],
                "p99_ms": latency["p99_ms"],
                "resident_mb": round(resident_mb(pids), 1),
                "empty_mb": round(empty_mb, 1),
                "hot_share": round(_share(metrics), 3),
                "read_back_per_s": round(sum(line.read_back or 0 for line in metrics)),
                "lost": sum(found["lost"] for found in faults),
                "doubled": sum(found["doubled_or_reordered"] for found in faults),
                "wrong_state": sum(found["wrong_state"] for found in faults),
            }
        )
    return lines


def _share(metrics: list[Metrics]) -> float:
    return sum(line.hot_keys or 0 for line in metrics) / max(1, sum(line.state_keys or 0 for line in metrics))


def resident_mb(pids: Mapping[str, int]) -> float:
    """What these processes occupy in the machine's memory, all together."""
    page = os.sysconf("SC_PAGE_SIZE")
    pages = [Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1] for pid in pids.values()]
    return sum(map(int, pages)) * page / MB


def last_metrics(place: Place, names: Mapping[str, Any]) -> list[Metrics]:
    """The busiest of the last few seconds of each: while it went as fast as it goes."""
    found = []
    for name in names:
        lines = (place.metrics / f"{name}.jsonl").read_bytes().splitlines()[-5:]
        decoded = [msgspec.json.decode(line, type=Metrics) for line in lines]
        found.append(max(decoded, key=lambda line: line.rate))
    return found
