"""`tiercel bench mobility`: cars drive from edge to edge, and their keys follow them, or not.

Responsible for: one cloud and some edges in one application with emulated links, the same drive for each
    mode, a row of results for each.
Not responsible for: the load (cars.py), the definitions and the picture (figures.py).

Modes: `none` (keys stay where they were), or the strategy by which keys follow. Every key begins at the edge
where its car is. Outputs are read in the cloud, where the log of the operator's output is, or with
`outputs_at="site"` where they are made.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tiercel.bench.report import Line
from tiercel.bench.scenarios.mobility import figures
from tiercel.bench.scenarios.mobility.cars import STREAM, Car, CarProcess, Plan, draw_cars
from tiercel.bench.scenarios.mobility.figures import Transfer
from tiercel.control.mobility import EndedHandOver, Threshold
from tiercel.core.settings import Settings
from tiercel.errors import UserError
from tiercel.runtime.net.emulated_link import Link
from tiercel.spark.api.deployment import Live, start
from tiercel.spark.cluster.session import open_session

ShowProgress = Callable[[str], None]

CLOUD, OPERATOR = "cloud", "trip"
NONE = "none"
POSITION = "car string, seq long, due long"
OUTPUT = "car string, seq long, n long, due long"
DRAIN_S_MAX = 120.0
LABELS = ("home", "ancestor", "away")
FLOOR_SHIFTS_S = (3.0, 5.0, 8.0)


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    modes: Sequence[str]
    cars: int
    probes: int
    rate: float
    probe_rate: float
    edges: int
    latency_ms: float
    state_bytes: int
    stay_s: float
    seconds: float
    tuples: int
    elsewhere_s: float
    wait_s: float
    direct: bool
    outputs_at: str
    seed: int
    out: Path | None

    @property
    def sites(self) -> dict[str, str | None]:
        return {CLOUD: None, **{f"edge-{n}": CLOUD for n in range(1, self.edges + 1)}}

    @property
    def edge_names(self) -> list[str]:
        return [site for site, parent in self.sites.items() if parent is not None]

    @property
    def links(self) -> dict[str, Link]:
        """Each edge has a link to the cloud; two edges reach each other through it."""
        edges = self.edge_names
        links = {f"{edge} {CLOUD}": Link(latency_ms=self.latency_ms) for edge in edges}
        between = Link(latency_ms=2 * self.latency_ms)
        return links | {f"{a} {b}": between for n, a in enumerate(edges) for b in edges[n + 1 :]}


class Trip:
    """The step of the operator: counts the rows of a car, and carries state of a given size along."""

    __name__ = "trip"

    def __init__(self, state_bytes: int) -> None:
        self._state_bytes = state_bytes

    def __call__(self, state: tuple[int, bytes], row: Any) -> tuple[tuple[int, bytes], tuple[Any, ...]]:
        n, body = state
        if not body:
            body = random.Random(row.car).randbytes(self._state_bytes)
        return (n + 1, body), (row.car, row.seq, n + 1, row.due)


@contextlib.contextmanager
def deployed(spark: Any, options: Options) -> Iterator[tuple[Live, str]]:
    """The deployment and the name of its output; every site has a router and an instance."""
    settings = Settings()
    with start(spark, options.sites, links=options.links, settings=settings) as live:
        positions = live.stream(STREAM, POSITION, key="car", sequence="seq", gap="30 seconds")
        trips = positions.fold(
            Trip(options.state_bytes),
            (0, b""),
            OUTPUT,
            state_schema="n long, body binary",
            name=OPERATOR,
            instances=dict.fromkeys(options.sites, 1),
            outputs_at=options.outputs_at,
        )
        live.deploy()
        live.watch_dead_letters()
        yield live, trips.name


def place(live: Live, cars: Sequence[Car]) -> None:
    """Bring the key of each car to the edge at which it begins."""
    by_site: dict[str, list[str]] = {}
    for car in cars:
        by_site.setdefault(car.route[0][1], []).append(car.name)
    for site, names in by_site.items():
        live.move(OPERATOR, keys=names, to=f"{OPERATOR}@{site}#1", strategy="pause", retries=3).wait(120.0)


def measure(options: Options, show_progress: ShowProgress) -> tuple[list[Line], dict[str, Any]]:
    """One row for each mode."""
    spark = open_session("tiercel-bench", slots=2 * (options.edges + 1) + 4)
    lines, pictures = [], {}
    transfers: dict[str, list[Line]] = {}
    try:
        for mode in options.modes:
            show_progress(f"{mode}: starting")
            with deployed(spark, options) as (live, output):
                line, by_label, moved = drive(live, output, mode, options, show_progress)
            lines.append(line)
            pictures[mode] = by_label
            transfers[mode] = moved
    finally:
        spark.stop()
    if options.out is not None:
        title = (
            f"{options.cars} cars over {options.edges} edges, {options.latency_ms:g} ms to the cloud one way"
        )
        path = options.out / f"mobility-{time.strftime('%Y%m%d-%H%M%S')}.png"
        to = "the cloud" if options.outputs_at == "home" else "the site of the state"
        figures.draw(pictures, title, to, path)
    return lines, {"hand_overs": {mode: moved[-50:] for mode, moved in transfers.items()}}


def drive(
    live: Live, output: str, mode: str, options: Options, show_progress: ShowProgress
) -> tuple[Line, dict[str, list[float]], list[Line]]:
    """One drive: its row, latencies by where the state was, and its hand-overs."""
    rng = random.Random(options.seed)
    cars = draw_cars(
        rng, options.cars, options.probes, options.rate, options.probe_rate, options.edge_names,
        options.stay_s, options.seconds,
    )  # fmt: skip
    show_progress(f"{mode}: placing {len(cars)} keys")
    place(live, cars)
    if mode != NONE:
        live.mobility(
            OPERATOR,
            mobility=Threshold(tuples=options.tuples, seconds=options.elsewhere_s),
            wait=Threshold(seconds=options.wait_s),
            direct=options.direct,
            strategy=mode,
        )
    with tempfile.TemporaryDirectory(prefix="tiercel-cars-") as directory:
        record = run_cars(live, output, cars, options, Path(directory) / "record.npz", mode, show_progress)
    dead = live.status().dead_letters
    began_ns = int(record["began_ns"][0])
    wall_to_drive = time.monotonic() - time.time() - began_ns / 1e9
    ended = live.hand_overs() if mode != NONE else []
    moved = [transfer_of(one, wall_to_drive, cars) for one in ended if not one.undone]
    outputs = record["outputs"]
    faults = figures.count_faults(outputs, record["sent"].tolist())
    labels = figures.whereabouts(outputs, began_ns, cars, moved, options.sites)
    late_ms = figures.latency_ms(outputs)
    by_label = {label: late_ms[labels == label].tolist() for label in LABELS}
    stopped = figures.interruptions(outputs, began_ns, moved, options.probes)
    floor: list[float] = []
    for shift_s in FLOOR_SHIFTS_S:
        floor += figures.interruptions(outputs, began_ns, moved, options.probes, shift_s=shift_s)
    line: Line = {
        "mode": mode,
        "crossings": sum(len(car.route) - 1 for car in cars),
        "moves": len(moved),
        "hand_overs": sum(len(one.cars) for one in moved),
        "undone": sum(1 for one in ended if one.undone),
        "measured": len(stopped),
        **figures.spread(stopped, "interruption"),
        **figures.spread(floor, "floor"),
        **figures.spread([one.duration_ms for one in ended if not one.undone], "duration"),
    }
    for label in LABELS:
        line |= figures.spread(by_label[label], label)
        line[f"{label}_share"] = round(len(by_label[label]) / max(1, len(outputs)), 3)
    line |= {"tuples": len(outputs), "dead_letters": sum(dead.values()), **faults}
    return line, by_label, [_shown(one) for one in moved]


def run_cars(
    live: Live,
    output: str,
    cars: list[Car],
    options: Options,
    path: Path,
    mode: str,
    show: ShowProgress,
    began: Callable[[], None] = lambda: None,
) -> dict[str, np.ndarray]:
    """Let the cars drive; returns what their process noted. `began` is called when they start."""
    storage = str(live.deployment.directory)
    sites = options.edge_names
    readers = list(options.sites) if options.outputs_at == "site" else [""]
    plan = Plan(storage, output, sites, readers, cars, options.seconds, str(path), options.seed)
    process = CarProcess(plan)
    try:
        process.wait_ready()
        process.begin()
        began()
        began_s = time.monotonic()
        while (passed := time.monotonic() - began_s) < options.seconds:
            show(f"{mode}: second {passed:.0f} of {options.seconds:.0f}")
            time.sleep(min(1.0, options.seconds - passed))
        show(f"{mode}: waiting for the last outputs")
        return process.finish(DRAIN_S_MAX)
    finally:
        process.kill()


def transfer_of(ended: EndedHandOver, wall_to_drive_s: float, cars: Sequence[Car]) -> Transfer:
    """A hand-over on the clock of the drive; it counts as over when the destination owns the keys."""
    numbers = tuple(int(msgspec.msgpack.decode(key)[0][4:]) for key in ended.keys)
    requested_s = ended.requested_s + wall_to_drive_s
    flipped_ms = ended.phases.get("emitting", ended.duration_ms)
    return Transfer(
        numbers,
        ended.source,
        ended.destination,
        requested_s,
        requested_s + flipped_ms / 1e3,
        ended.reason,
        ended.bytes_moved,
    )


def _shown(transfer: Transfer) -> Line:
    return {
        "source": transfer.source,
        "destination": transfer.destination,
        "keys": len(transfer.cars),
        "at_s": round(transfer.requested_s, 2),
        "took_ms": round((transfer.ended_s - transfer.requested_s) * 1e3, 1),
        "bytes": transfer.bytes_moved,
        "reason": transfer.reason,
    }


def check(options: Options) -> None:
    """Refuse options that measure nothing."""
    if options.probes > options.cars:
        raise UserError(f"--probes {options.probes}", expected=f"at most the number of cars, {options.cars}")
