"""`tiercel bench skew`: one slot, or one key, has half of the load; before and after the policy `hot_keys`.

Responsible for: choosing the hot keys, the load on them, figures before and after.
Not responsible for: the policy (control/policies/hot_keys.py), the load's process (loadgen/).

`slot`: the keys of one slot share half of all rows; they can be split. `key`: one key has half of all rows.
It can only be isolated, and its instance stays as busy as its rows make it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tiercel.bench.deployments import OPERATOR, loaded
from tiercel.bench.loadgen.process import LoadProcess
from tiercel.bench.metrics import Outputs, count_faults, read_outputs
from tiercel.bench.operators import SITE, HeavyAverage
from tiercel.bench.report import Line, percentile
from tiercel.core.model.routing import slot_of
from tiercel.spark.api.deployment import Live
from tiercel.spark.cluster.session import open_session
from tiercel.spark.operators.processor_adapter import encode_key

ShowProgress = Callable[[str], None]

KINDS = ("slot", "key")
CHANGE_S_MAX = 60.0
SETTLE_S = 5.0  # after the last change: the backlog is worked off


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    kinds: Sequence[str]
    rate: int
    seconds: float  # of each half
    service_us: float
    keys: int
    seed: int


def measure(options: Options, show_progress: ShowProgress) -> tuple[list[Line], dict[str, Any]]:
    """Two rows for each kind: before and after."""
    spark = open_session("tiercel-bench", slots=10)
    rows: list[Line] = []
    decided: dict[str, list[str]] = {}
    try:
        for kind in options.kinds:
            show_progress(f"{kind}: starting")
            operator = HeavyAverage(0, options.service_us)
            with loaded(spark, options.keys, processor=operator, instances={SITE: 2}) as (live, loader):
                found, decided[kind] = _one(live, loader, kind, options, show_progress)
                rows += found
    finally:
        spark.stop()
    return rows, {"decisions": decided}


def hot_sensors(kind: str, live: Live, options: Options) -> list[int]:
    """The keys of the fullest slot of the first instance, or one key of it."""
    slots = live.deployment.manifest().topology.operators[OPERATOR].slots
    owners = live.owners(OPERATOR, list(range(options.keys)))
    first = min(owners.values())
    by_slot: dict[int, list[int]] = {}
    for sensor in range(options.keys):
        if owners[sensor] == first:
            by_slot.setdefault(slot_of(encode_key(sensor), slots), []).append(sensor)
    fullest = max(sorted(by_slot), key=lambda slot: len(by_slot[slot]))
    return by_slot[fullest] if kind == "slot" else by_slot[fullest][:1]


def _one(
    live: Live, loader: LoadProcess, kind: str, options: Options, show_progress: ShowProgress
) -> tuple[list[Line], list[str]]:
    hot = hot_sensors(kind, live, options)
    loader.heat(hot)
    live.autoscale(OPERATOR, policy="hot_keys", dry_run=True)
    loader.start(options.rate, [])
    begun_s = time.monotonic()
    show_progress(f"{kind}: before, {len(hot)} hot keys")
    time.sleep(options.seconds)
    busy_before = _busy(live)
    enabled_s = time.monotonic()
    live.remove_policy(f"{OPERATOR}: hot_keys")
    live.autoscale(OPERATOR, policy="hot_keys", cool_down_s=3.0, judge_after_s=3.0)
    show_progress(f"{kind}: the policy may act")
    changed_s = _until_calm(live)
    time.sleep(SETTLE_S)
    after_s = time.monotonic()
    show_progress(f"{kind}: after")
    time.sleep(options.seconds)
    busy_after = _busy(live)
    over_s = time.monotonic()
    decisions = live.policies()
    with tempfile.TemporaryDirectory(prefix="tiercel-records-") as place:
        inputs, outputs = Path(place) / "inputs.parquet", Path(place) / "outputs.parquet"
        loader.stop(inputs, outputs)
        found = read_outputs(outputs)
        faults = count_faults(live.spark, inputs, outputs)
    halves = (
        ("before", begun_s, enabled_s, busy_before, 0),
        ("after", after_s, over_s, busy_after, len(decisions.changes)),
    )
    rows = [
        {
            "hot": kind,
            "hot_keys": len(hot),
            "when": when,
            **_latency(found, first_s, last_s),
            "busiest": max(busy, default=0.0),
            "other": min(busy, default=0.0),
            "changes": changes,
            "until_calm_s": round(changed_s - enabled_s, 1) if when == "after" else None,
            **(faults if when == "after" else dict.fromkeys(faults, 0)),
        }
        for when, first_s, last_s, busy, changes in halves
    ]
    return rows, [str(decision) for decision in decisions.history]


def _busy(live: Live) -> list[float]:
    """The share of time at work of each instance, the mean of three seconds."""
    seen: dict[str, list[float]] = {}
    for _ in range(3):
        for instance in live.load().operators[OPERATOR].instances:
            seen.setdefault(instance.name, []).append(instance.work)
        time.sleep(1.0)
    return [round(sum(shares) / len(shares), 2) for shares in seen.values()]


def _until_calm(live: Live) -> float:
    """When the policy has changed something and nothing runs any more; or the time is over."""
    give_up = time.monotonic() + CHANGE_S_MAX
    calm_s = time.monotonic()
    while time.monotonic() < give_up and time.monotonic() - calm_s < 8.0:
        changed = live.policies().changes
        if not changed or live.load().operators[OPERATOR].changing:
            calm_s = time.monotonic()
        time.sleep(0.5)
    return calm_s


def _latency(found: Outputs, first_s: float, last_s: float) -> Line:
    due = found.due_ns / 1e9
    chosen = np.sort(found.latency_ms[(due >= first_s) & (due < last_s)])
    if not len(chosen):
        return {"tuples": 0, "p50_ms": None, "p99_ms": None}
    shares = {"p50_ms": 0.5, "p99_ms": 0.99}
    return {"tuples": len(chosen), **{name: round(percentile(chosen, s), 1) for name, s in shares.items()}}
