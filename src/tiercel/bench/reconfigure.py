"""`tiercel bench reconfigure`: what a move of keys does to the tuples that come meanwhile.

Responsible for: the same move under each strategy in turn, repeats, rows of medians, the record kept.
Not responsible for: the definitions (measures.py), the load (loader.py), moving (spark/live.py).

One repeat of one strategy, with an open-loop load all the time:

    warm-up | steady, up to 10 s | request ... end of the move | until the time is over | move back
"""

from __future__ import annotations

import contextlib
import functools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercel.bench.averages import SITE
from tiercel.bench.deployed import INSTANCES, OPERATOR, PROCESSES, loaded
from tiercel.bench.loader import Loader
from tiercel.bench.measures import Moments, judge
from tiercel.bench.processors import HeavyAverage
from tiercel.bench.records import count_faults, read_outputs
from tiercel.bench.report import Line, median_line
from tiercel.core import messages as m
from tiercel.core.instance import Instance
from tiercel.core.routing import RoutingTable
from tiercel.core.step import Step
from tiercel.core.topology import instance_name
from tiercel.spark.border import encode_key
from tiercel.spark.hosting import build_host
from tiercel.spark.live import Live
from tiercel.spark.session import open_session

Tell = Callable[[str], None]

PROBE_KEYS = 20
STEADY_S_MAX = 10.0
WARM_S = 3.0
MOVE_S_MAX = 120.0
COLUMNS = (
    "strategy",
    "stoppage_p50_ms",
    "stoppage_p99_ms",
    "stoppage_max_ms",
    "floor_p99_ms",
    "others_p99_ms",
    "peak_ms",
    "jitter_ms",
    "disruption_ms",
    "throughput_dip",
    "steady_p50_ms",
    "steady_p99_ms",
    "stabilise_ms",
    "duration_ms",
    "bytes_moved",
    "lost",
    "doubled",
    "reordered",
)
SUMMED = ("lost", "doubled", "reordered")  # a fault in one repeat is a fault


@dataclass(frozen=True)
class Wish:
    """What to measure."""

    keys: int
    state_bytes: int
    move: int
    rate: int
    seconds: float
    repeats: int
    strategies: Sequence[str]
    seed: int
    plant_stop_ms: float
    out: Path | None


class Stopping(Instance):
    """An instance that sleeps when it takes keys over: a bench that does not see that sees nothing."""

    def __init__(self, *facts: Any, stop_ms: float) -> None:
        self._stop_ms = stop_ms
        self._stopped: set[str] = set()  # moves; a notice that is repeated stops nobody again
        super().__init__(*facts)

    def _on_move_message(self, step: Step, message: Any) -> None:
        if isinstance(message, m.EmitFrom) and message.move.partition(".")[0] not in self._stopped:
            self._stopped.add(message.move.partition(".")[0])  # once, into however many pieces it was cut
            time.sleep(self._stop_ms / 1e3)
        super()._on_move_message(step, message)


@dataclass(frozen=True)
class Keys:
    """Which keys move, from where to where, and which of them are probes."""

    source: str
    destination: str
    moved: list[int]
    probes: list[int]


def choose_keys(live: Live, wish: Wish) -> Keys:
    """Up to `move` keys of the first instance; with the number of all keys, everything it owns."""
    source, destination = (instance_name(OPERATOR, SITE, n) for n in range(1, INSTANCES + 1))
    table = RoutingTable.initial(live.place.manifest().topology.operators[OPERATOR])
    owned = [n for n in range(wish.keys) if table.route(encode_key(n)).instance == source]
    rng = random.Random(wish.seed)
    moved = sorted(rng.sample(owned, min(wish.move, len(owned))))
    return Keys(source, destination, moved, sorted(rng.sample(moved, min(PROBE_KEYS, len(moved)))))


def measure(wish: Wish, tell: Tell) -> tuple[list[Line], list[Line]]:
    """Rows by the median, and every repeat."""
    build = functools.partial(
        build_host, make_instance=functools.partial(Stopping, stop_ms=wish.plant_stop_ms)
    )
    spark = open_session("tiercel-bench", slots=PROCESSES + 2)
    every: list[Line] = []
    try:
        tell("starting the deployment")
        with (
            _place(wish.out) as place,
            loaded(
                spark,
                wish.keys,
                processor=HeavyAverage(wish.state_bytes),
                build=build if wish.plant_stop_ms else None,
            ) as (live, loader),
        ):
            keys = choose_keys(live, wish)
            for repeat in range(1, wish.repeats + 1):
                for strategy in wish.strategies:
                    tell(f"{strategy}, repeat {repeat} of {wish.repeats}")
                    line = _one(live, loader, wish, keys, strategy, place / f"{strategy}-{repeat}")
                    every.append(
                        {"strategy": strategy, "repeat": repeat, "keys_moved": len(keys.moved)} | line
                    )
    finally:
        spark.stop()
    return [_row(strategy, every) for strategy in wish.strategies], every


def _row(strategy: str, every: list[Line]) -> Line:
    mine = [line for line in every if line["strategy"] == strategy]
    medians = median_line(mine) | {name: sum(line[name] for line in mine) for name in SUMMED}
    return {name: medians[name] for name in COLUMNS}


@contextlib.contextmanager
def _place(out: Path | None) -> Iterator[Path]:
    """Where the records go: beside the results, or nowhere for long."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="tiercel-records-") as place:
            yield Path(place)
    else:
        place_kept = out / f"reconfigure-{time.strftime('%Y%m%d-%H%M%S')}"
        place_kept.mkdir(parents=True)
        yield place_kept


def _one(live: Live, loader: Loader, wish: Wish, keys: Keys, strategy: str, record: Path) -> Line:
    inputs, outputs = record.with_suffix(".inputs.parquet"), record.with_suffix(".outputs.parquet")
    steady_s = min(STEADY_S_MAX, wish.seconds / 2)
    loader.start(wish.rate, keys.probes)
    time.sleep(WARM_S)
    steady_ns = time.monotonic_ns()
    time.sleep(steady_s)
    request_ns = time.monotonic_ns()
    moving = live.move(OPERATOR, keys=keys.moved, to=keys.destination, strategy=strategy)
    reports = moving.wait(MOVE_S_MAX)
    end_ns = int(moving.asked_s * 1e9 + max(r.duration_ms for r in reports) * 1e6)
    time.sleep(max(0.0, wish.seconds - steady_s - (time.monotonic_ns() - request_ns) / 1e9))
    over_ns = time.monotonic_ns()
    loader.stop(inputs, outputs)
    live.move(OPERATOR, keys=keys.moved, to=keys.source).wait(MOVE_S_MAX)
    at = Moments(steady_ns, request_ns, end_ns, over_ns)
    return {
        **judge(read_outputs(outputs), at, keys.probes, keys.moved),
        "bytes_moved": sum(r.bytes_moved for r in reports),
        "phases_ms": {phase: ms for r in reports for phase, ms in r.phases.items()},
        **count_faults(live.spark, inputs, outputs),
    }
