"""Growth: keys of cars that cross together are moved, and one thing is varied.

Responsible for: crossings of a group of cars, a move of all their keys at each, a row for each value.
Not responsible for: the load (cars.py), the deployment (drive.py), the definitions (figures.py).

Every car is at the same edge and sends often. All cross to the next edge at once; shortly after, their keys
are moved there in one request.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiercel.bench.report import Line
from tiercel.bench.scenarios.mobility import figures
from tiercel.bench.scenarios.mobility.cars import Car
from tiercel.bench.scenarios.mobility.drive import OPERATOR, Options, ShowProgress, deployed, place, run_cars
from tiercel.bench.scenarios.mobility.figures import Transfer
from tiercel.spark.api.deployment import Live
from tiercel.spark.api.moves import MoveHandle
from tiercel.spark.cluster.session import open_session

FIRST_S, EVERY_S, BEHIND_S = 4.0, 5.0, 0.3  # first crossing, between two, and until the request
ROWS_PER_S_MAX = 2_000.0  # of all cars
FIELDS = {"latency": "latency_ms", "edges": "edges", "state": "state_bytes"}


def measure(
    options: Options, what: str, values: Sequence[int], together: int, rounds: int, show: ShowProgress
) -> list[Line]:
    """One row for each value and strategy."""
    lines = []
    for value in values:
        count = value if what == "keys" else together
        varied = options if what == "keys" else replace(options, **{FIELDS[what]: value})  # type: ignore[arg-type]
        varied = replace(varied, seconds=FIRST_S + EVERY_S * rounds + 1.0)
        for strategy in options.modes:
            spark = open_session("tiercel-bench", slots=2 * (varied.edges + 1) + 4)
            try:
                show(f"{what} {value}, {strategy}: starting")
                with deployed(spark, varied) as (live, output):
                    line = _cross(live, output, strategy, varied, count, rounds, show)
            finally:
                spark.stop()
            lines.append({"vary": what, "value": value, "strategy": strategy, "keys": count, **line})
    return lines


def _cross(
    live: Live, output: str, strategy: str, options: Options, count: int, rounds: int, show: ShowProgress
) -> Line:
    edges = options.edge_names
    crossings = [(FIRST_S + EVERY_S * n, edges[(n + 1) % len(edges)]) for n in range(rounds)]
    route = [(0.0, edges[0]), *crossings]
    rate = min(options.probe_rate, ROWS_PER_S_MAX / count)
    cars = [Car(f"car-{n}", rate, route) for n in range(count)]
    place(live, cars)
    mover = Mover(live, strategy, [car.name for car in cars], crossings)
    with tempfile.TemporaryDirectory(prefix="tiercel-cars-") as directory:
        path = Path(directory) / "record.npz"
        record = run_cars(live, output, cars, options, path, strategy, show, began=mover.begin)
    began_ns = int(record["began_ns"][0])
    moved = mover.transfers(began_ns, edges)
    outputs = record["outputs"]
    durations = [report.duration_ms for handle, _ in mover.handles for report in handle.reports()]
    return {
        "moves": len(moved),
        **figures.spread(figures.interruptions(outputs, began_ns, moved, count), "interruption"),
        **figures.spread(figures.interruptions(outputs, began_ns, moved, count, shift_s=2.5), "floor"),
        **figures.spread(durations, "duration"),
        "bytes_moved": sum(one.bytes_moved for one in moved),
        "tuples": len(outputs),
        **figures.count_faults(outputs, record["sent"].tolist()),
    }


class Mover:
    """Requests a move of all keys shortly after each crossing."""

    def __init__(
        self, live: Live, strategy: str, keys: list[str], crossings: Sequence[tuple[float, str]]
    ) -> None:
        self._live, self._strategy, self._keys = live, strategy, keys
        self._crossings = crossings
        self.handles: list[tuple[MoveHandle, str]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._began_s = 0.0

    def begin(self) -> None:
        self._began_s = time.monotonic()
        self._thread.start()

    def _run(self) -> None:
        for at_s, site in self._crossings:
            time.sleep(max(0.0, self._began_s + at_s + BEHIND_S - time.monotonic()))
            to = f"{OPERATOR}@{site}#1"
            handle = self._live.move(OPERATOR, keys=self._keys, to=to, strategy=self._strategy)
            self.handles.append((handle, site))

    def transfers(self, began_ns: int, edges: Sequence[str]) -> list[Transfer]:
        """What was moved, on the clock of the cars."""
        self._thread.join()
        found = []
        for handle, site in self.handles:
            reports: list[Any] = handle.wait(60.0)
            requested_s = handle.requested_s - began_ns / 1e9
            took_ms = max(r.phases.get("emitting", r.duration_ms) for r in reports)
            size = sum(r.bytes_moved for r in reports)
            cars = tuple(range(len(self._keys)))
            source = edges[edges.index(site) - 1]
            end_s = requested_s + took_ms / 1e3
            found.append(Transfer(cars, source, site, requested_s, end_s, "crossed", size))
        return found
