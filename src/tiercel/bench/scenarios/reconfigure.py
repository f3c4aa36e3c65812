"""`tiercel bench reconfigure`: the effect of a move of keys on the latency of tuples.

Responsible for: the same move under each strategy in turn, repeats, rows of medians, the record kept.
Not responsible for: the definitions (metrics.py), the load (process.py), moving (spark/), pictures
    (reconfigure_report.py).

One repeat of one strategy, with an open-loop load all the time:

    warm-up | steady, up to 10 s | request ... end of the move | until the time is over | move back
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiercel.bench.deployments import INSTANCES, OPERATOR, PROCESSES, loaded
from tiercel.bench.loadgen.process import LoadProcess
from tiercel.bench.metrics import Moments, count_faults, judge, read_outputs
from tiercel.bench.operators import EDGE, SITE, HeavyAverage, HeavyCount
from tiercel.bench.report import Line, median_line
from tiercel.bench.rivals.rival import RivalOptions, row_of
from tiercel.core import messages as m
from tiercel.core.instance.instance import Instance
from tiercel.core.machine.effects import Effect
from tiercel.core.machine.events import Event, Received
from tiercel.core.migration.strategies import STRATEGIES
from tiercel.core.model.routing import RoutingTable
from tiercel.core.model.topology import instance_name
from tiercel.errors import UserError
from tiercel.runtime.net.emulated_link import Link
from tiercel.spark.api.deployment import Live
from tiercel.spark.cluster.session import open_session
from tiercel.spark.cluster.task import build_host
from tiercel.spark.operators.processor_adapter import encode_key

ShowProgress = Callable[[str], None]

PROBE_KEYS = 20
STEADY_S_MAX = 10.0
WARM_S = 3.0
STANDBY_S = 3.0  # until the standby has everything
MOVE_S_MAX = 120.0
WORKLOADS = ("running-average", "key-count", *(f"key-count-zipf{z}" for z in (0.5, 1.0, 1.5)))
COLUMNS = (
    "strategy",
    "stoppage_p50_ms",
    "stoppage_p99_ms",
    "stoppage_max_ms",
    "floor_p99_ms",
    "others_p99_ms",
    "gap_ms",
    "gap_floor_ms",
    "beyond_backlog_ms",
    "peak_ms",
    "jitter_ms",
    "disruption_ms",
    "disruption_floor_ms",
    "throughput_dip",
    "steady_p50_ms",
    "steady_p99_ms",
    "stabilise_ms",
    "stabilise_floor_ms",
    "duration_ms",
    "bytes_moved",
    "lost",
    "doubled",
    "reordered",
)
SUMMED = ("lost", "doubled", "reordered")  # a fault in one repeat is a fault


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

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
    workload: str = WORKLOADS[0]
    share: float | None = None  # of the source's keys, instead of `move`
    service_us: float = 0.0
    overload: float = 0.0  # times the tuples that the source can process; only its keys get tuples
    warm_s: float = WARM_S
    sites: int = 1
    link: Link | None = None
    rivals: Sequence[str] = ()
    flink_python: str = ""

    @property
    def zipf(self) -> float:
        found = re.search(r"zipf([\d.]+)$", self.workload)
        return float(found[1]) if found else 0.0

    @property
    def tuples_per_s(self) -> int:
        """The rate of the load; with `overload` as many tuples as the source cannot process."""
        return round(self.overload * 1e6 / self.service_us) if self.overload else self.rate

    def check(self) -> None:
        """Refuse options that contradict each other."""
        if self.overload and not self.service_us:
            raise UserError(
                "--overload needs to know what the source can process",
                expected="a service time beside it",
                hint="--overload 1.2 --service-us 1000",
            )
        if self.link is not None and self.sites == 1:
            raise UserError(
                "--link between which sites?", expected="two sites", hint="--sites 2 --link 40,100"
            )


def parse_link(text: str) -> Link | None:
    """`40,100`: a latency in ms and megabits a second. The second number may be left out."""
    if not text:
        return None
    parts = text.split(",")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise UserError(f"--link {text}", expected="LATENCY_MS or LATENCY_MS,MBIT", hint="--link 40,100")
    return Link(latency_ms=numbers[0], mbit=numbers[1] if len(numbers) > 1 else None).check("--link")


class StoppingInstance(Instance):
    """An instance that sleeps when it takes keys over: a bench that does not see that sees nothing."""

    def __init__(self, *facts: Any, stop_ms: float) -> None:
        self._stop_ms = stop_ms
        self._stopped: set[str] = set()  # moves; a repeated message does not stop the instance again
        super().__init__(*facts)

    def on_event(self, event: Event, now_ms: float) -> list[Effect]:
        message = event.message if isinstance(event, Received) else None
        if isinstance(message, m.EmitFrom) and message.move.partition(".")[0] not in self._stopped:
            self._stopped.add(message.move.partition(".")[0])  # once, into however many moves it was split
            time.sleep(self._stop_ms / 1e3)
        return super().on_event(event, now_ms)


@dataclass(frozen=True)
class Keys:
    """Which keys move, from where to where, and which of them are probes."""

    source: str
    destination: str
    moved: list[int]
    probes: list[int]
    stays: list[int] = field(default_factory=list)  # other keys of the source


def choose_keys(live: Live, options: Options) -> Keys:
    """Up to `move` keys, or a `share`, of the first instance; at most everything it owns."""
    source = instance_name(OPERATOR, SITE, 1)
    destination = instance_name(OPERATOR, SITE, 2) if options.sites == 1 else instance_name(OPERATOR, EDGE, 1)
    table = RoutingTable.initial(live.deployment.manifest().topology.operators[OPERATOR])
    owned = [n for n in range(options.keys) if table.route(encode_key(n)).instance == source]
    rng = random.Random(options.seed)
    count = options.move if options.share is None else max(1, round(options.share * len(owned)))
    moved = sorted(rng.sample(owned, min(count, len(owned))))
    probes = sorted(rng.sample(moved, min(PROBE_KEYS, len(moved))))
    return Keys(source, destination, moved, probes, sorted(set(owned) - set(moved)))


def measure(options: Options, show_progress: ShowProgress) -> tuple[list[Line], list[Line]]:
    """Rows by the median, and every repeat. Strategies take turns, so that all see the same machine."""
    options.check()
    build = functools.partial(
        build_host, make_instance=functools.partial(StoppingInstance, stop_ms=options.plant_stop_ms)
    )
    processor = HeavyCount if options.workload.startswith("key-count") else HeavyAverage
    spark = open_session("tiercel-bench", slots=PROCESSES + 3)
    every: list[Line] = []
    try:
        show_progress("starting the deployment")
        with (
            _place(options.out) as place,
            loaded(
                spark,
                options.keys,
                processor=processor(options.state_bytes, options.service_us),
                build=build if options.plant_stop_ms else None,
                instances={SITE: INSTANCES} if options.sites == 1 else {SITE: 1, EDGE: 1},
                links=None if options.link is None else {f"{SITE} {EDGE}": options.link},
            ) as (live, loader),
        ):
            keys = choose_keys(live, options)
            if options.zipf or options.overload:
                sensors = sorted(keys.moved + keys.stays) if options.overload else range(options.keys)
                loader.draw(sensors, options.zipf, options.seed)
            for repeat in range(1, options.repeats + 1):
                for strategy in options.strategies:
                    show_progress(f"{strategy}, repeat {repeat} of {options.repeats}")
                    line = _one(live, loader, options, keys, strategy, place / f"{strategy}-{repeat}")
                    every.append(
                        {"strategy": strategy, "repeat": repeat, "keys_moved": len(keys.moved)} | line
                    )
                every += [_rival(name, repeat, options, show_progress) for name in options.rivals]
            if options.out is not None:
                from tiercel.bench.reconfigure_report import write_report

                show_progress("drawing")
                write_report(place, every, keys.moved, vars(options))
    finally:
        spark.stop()
    return [_row(strategy, every) for strategy in (*options.strategies, *options.rivals)], every


def _rival(name: str, repeat: int, options: Options, show_progress: ShowProgress) -> Line:
    """Another system under the same load, while ours rests."""
    from tiercel.bench.rivals import flink, spark

    wanted = RivalOptions(
        options.keys,
        options.state_bytes,
        options.rate,
        steady_s=min(STEADY_S_MAX, options.seconds / 2),
        flink_python=options.flink_python,
    )
    system, _, way = name.partition("-")
    found = (
        spark.measure(wanted, show_progress)
        if system == "spark"
        else flink.measure(wanted, way, show_progress)
    )
    return row_of(name, COLUMNS, {"repeat": repeat} | found)


def _row(strategy: str, every: list[Line]) -> Line:
    mine = [line for line in every if line["strategy"] == strategy]
    medians = (
        {"strategy": strategy}
        | median_line(mine)
        | {name: sum(line[name] for line in mine) for name in SUMMED if mine[0][name] is not None}
    )
    return {name: medians.get(name) for name in COLUMNS}


@contextlib.contextmanager
def _place(out: Path | None) -> Iterator[Path]:
    """The directory of the recordings: next to the results, or a temporary one."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="tiercel-records-") as place:
            yield Path(place)
    else:
        place_kept = out / f"reconfigure-{time.strftime('%Y%m%d-%H%M%S')}"
        place_kept.mkdir(parents=True)
        yield place_kept


def _one(live: Live, loader: LoadProcess, options: Options, keys: Keys, strategy: str, record: Path) -> Line:
    inputs, outputs = record.with_suffix(".inputs.parquet"), record.with_suffix(".outputs.parquet")
    steady_s = min(STEADY_S_MAX, options.seconds / 2)
    # probes are 4,000 tuples a second: with a service time they would be the load
    probes = [] if options.service_us else keys.probes
    loader.start(options.tuples_per_s, probes)
    if STRATEGIES[strategy].copies:
        live.set_standby(keys.source, keys.destination)
        time.sleep(STANDBY_S)
    time.sleep(options.warm_s)
    steady_ns = time.monotonic_ns()
    time.sleep(steady_s)
    request_ns = time.monotonic_ns()
    moving = live.move(OPERATOR, keys=keys.moved, to=keys.destination, strategy=strategy)
    reports = moving.wait(MOVE_S_MAX)
    end_ns = int(moving.requested_s * 1e9 + max(r.duration_ms for r in reports) * 1e6)
    time.sleep(max(0.0, options.seconds - steady_s - (time.monotonic_ns() - request_ns) / 1e9))
    over_ns = time.monotonic_ns()
    loader.stop(inputs, outputs)
    if STRATEGIES[strategy].copies:
        live.set_standby(keys.source, "")
    live.move(OPERATOR, keys=keys.moved, to=keys.source, strategy="replicate").wait(
        MOVE_S_MAX
    )  # the shortest
    at = Moments(steady_ns, request_ns, end_ns, over_ns)
    found = read_outputs(outputs)
    between, stays = options.sites > 1, keys.stays if options.service_us else ()
    return {
        **judge(found, at, probes or keys.moved, keys.moved, between_sites=between, stays=stays),
        "bytes_moved": sum(r.bytes_moved for r in reports),
        "phases_ms": {phase: ms for r in reports for phase, ms in r.phases.items()},
        "request_ns": request_ns,
        **count_faults(live.spark, inputs, outputs),
    }
