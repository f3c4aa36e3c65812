"""The demonstration: traffic through Spark, a live move, a scale-out, and an audit of every output.

Responsible for: the phases of the run and its result.
Not responsible for: the load (traffic.py), definitions of figures (bench/metrics.py), the operator and its
    audit (speed_monitor.py), pictures (plots.py), progress and tables (cli/demo.py).

    start Spark, deploy | warm up | steady | move 100 cars | settle | scale out 2 -> 3 | settle | audit
    on request: one load to plain Spark and to Tiercel | both are rescaled | settle (side_by_side.py)
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np

from tiercel.bench.metrics import Moments, Outputs, judge
from tiercel.bench.report import Cpu, Line, check_place, writing
from tiercel.demo import side_by_side
from tiercel.demo.audit import Audit
from tiercel.demo.side_by_side import SideBySide
from tiercel.demo.speed_monitor import POSITIONS, SPEEDS, SpeedMonitor, audit, positions_from_files
from tiercel.demo.traffic import (
    FileWriter,
    PositionProducer,
    SpeedSubscriber,
    car_name,
    car_number,
    write_file,
)
from tiercel.errors import UserError
from tiercel.spark.api.deployment import Live, start
from tiercel.spark.api.status import ProcessStatus
from tiercel.spark.cluster.session import open_session
from tiercel.spark.move_history import MoveReport

ShowProgress = Callable[[str], None]

SITE, OPERATOR = "local", "speed"
CARS = 300  # every other one reports through the producer, the others through files
MOVED_CARS, PROBE_CARS = 100, 20
SLOTS = 10  # a router, three instances, the micro-batches of feed and sink, the audit
WARM_S = 3.0
SINK_TRIGGER = "2 seconds"
MOVE_S_MAX = 60.0
CATCH_UP_S_MAX = 60.0
BESIDE_S_MIN = 4.0
PROGRESS = {"spark.sql.streaming.numRecentProgressUpdates": "10000"}
MARK = ".tiercel-demo"  # a directory with this file in it is ours to empty


@dataclass(frozen=True)
class Change:
    """One reconfiguration: when it was, and its figures."""

    name: str
    at: Moments
    cars: frozenset[int]  # cars that changed their instance
    figures: Line
    bytes_moved: int
    phases_ms: dict[str, float]


@dataclass
class Demonstration:
    """The result of a run."""

    outputs: Outputs
    begun_ns: int
    changes: list[Change]
    audit: Audit
    alerts: int
    processes: list[ProcessStatus]
    moved_by_file: int
    feed_batches: int
    cpu: Line
    spark: str
    beside: SideBySide | None = None
    took_s: float = 0.0
    recorded: Path = field(default_factory=Path)

    @property
    def good(self) -> bool:
        wrong = 0 if self.beside is None else self.beside.wrong
        return self.audit.faults == 0 and self.audit.inputs > 0 and wrong == 0


def recording_place(out: Path) -> Path:
    """An empty directory below `out`; one of an earlier demonstration is emptied, no other."""
    place = out / "recorded"
    check_place(out)
    with writing(out):
        if place.exists() and any(place.iterdir()) and not (place / MARK).exists():
            raise UserError(f"{place} holds something else", hint="give another directory: --out DIR")
        shutil.rmtree(place, ignore_errors=True)
        for name in ("produced", "files", "outputs"):
            (place / name).mkdir(parents=True)
        (place / MARK).touch()
    return place


def run(out: Path, seconds: float, show_progress: ShowProgress, *, beside: bool = False) -> Demonstration:
    """The whole demonstration; `seconds` is the steady time before the move, half of it after each change."""
    begun = time.monotonic()
    recorded = recording_place(out.resolve())
    show_progress("starting Spark")
    spark = open_session("tiercel-demo", slots=SLOTS, config=PROGRESS)
    try:
        with start(spark, [SITE]) as live:
            found = _deploy_and_run(live, recorded, seconds, show_progress)
            show_progress("auditing every output with a Spark batch job")
            found.audit = audit(spark, [recorded / "produced", recorded / "files"], recorded / "outputs")
        if beside:
            show_progress("one load, by plain Spark and by Tiercel, both rescaled in the middle")
            found.beside = side_by_side.run(spark, max(BESIDE_S_MIN, seconds / 2))
        show_progress("stopping")
    finally:
        spark.stop()
    found.recorded, found.took_s = recorded, time.monotonic() - begun
    return found


def _deploy_and_run(live: Live, recorded: Path, seconds: float, show_progress: ShowProgress) -> Demonstration:
    show_progress("deploying a router and two instances as Spark tasks")
    positions = live.stream("positions", POSITIONS, key="car")
    speeds = positions.transform_with_state(SpeedMonitor(), SPEEDS, name=OPERATOR, instances={SITE: 2})
    rows = positions_from_files(live.spark, recorded / "files")
    feed = positions.feed(rows, name="demo-positions", partitions=1)  # in the order of the files
    live.deploy()
    sink = (
        speeds.dataframe(startingOffset="earliest")
        .writeStream.format("parquet")
        .queryName("demo-speeds")
        .option("path", str(recorded / "outputs"))
        .option("checkpointLocation", str(recorded / "checkpoint"))
        .trigger(processingTime=SINK_TRIGGER)
        .start()
    )
    produced, filed = range(0, CARS, 2), range(1, CARS, 2)
    moved = _cars_to_move(live, produced, filed)
    probes = [n for n in moved if n % 2 == 0][:PROBE_CARS]
    with positions.producer("demo") as producer, speeds.subscribe(after=0) as subscriber:
        speed_subscriber = SpeedSubscriber(subscriber, produced)
        position_producer = PositionProducer(producer, probes, [n for n in produced if n not in probes])
        file_writer = FileWriter(recorded / "files", filed)
        tasks = (speed_subscriber, position_producer, file_writer)
        for task in tasks:
            task.start()
        try:
            show_progress("warming up")
            time.sleep(WARM_S)
            cpu, begun_ns = Cpu(), monotonic_ns()
            spans = _reconfigure(live, moved, seconds, show_progress)
            used = cpu.line()
            show_progress("waiting for the last outputs")
            position_producer.end()
            file_writer.end()
            assert feed.query is not None
            feed.query.processAllAvailable()
            _wait_for(speed_subscriber, len(position_producer.sent) + file_writer.positions)
        finally:
            for task in tasks:
                task.ending.set()
        speed_subscriber.end()
        write_file(recorded / "produced" / "all.parquet", position_producer.sent)
        status = live.status()
        sink.processAllAvailable()
        sink.stop()
        batches = len(feed.query.recentProgress)
    outputs = Outputs(*(np.array(column, dtype=np.int64) for column in _columns(speed_subscriber)))
    changes = [
        Change(name, at, cars, judge(outputs, at, probes if n == 0 else cars, cars), size, phases)
        for n, (name, at, cars, size, phases) in enumerate(spans)
    ]
    return Demonstration(
        outputs,
        begun_ns,
        changes,
        Audit(0, 0, 0, 0, 0, 0, 0),
        speed_subscriber.alerts,
        status.processes,
        sum(n % 2 for n in moved),
        batches,
        used,
        live.spark.version,
    )


def _columns(speed_subscriber: SpeedSubscriber) -> tuple[Any, Any, Any]:
    due, late = np.array(speed_subscriber.due_ns), np.array(speed_subscriber.late_ns)
    return speed_subscriber.cars, due, due + late


def _cars_to_move(live: Live, produced: Sequence[int], filed: Sequence[int]) -> list[int]:
    """Equally many cars of both halves, all owned by the first instance."""
    source = f"{OPERATOR}@{SITE}#1"
    owners = live.owners(OPERATOR, [car_name(n) for n in range(CARS)])
    halves = ([n for n in half if owners[car_name(n)] == source] for half in (produced, filed))
    return sorted(n for half in halves for n in half[: MOVED_CARS // 2])


Span = tuple[str, Moments, frozenset[int], int, dict[str, float]]


def _reconfigure(live: Live, moved: list[int], seconds: float, show_progress: ShowProgress) -> list[Span]:
    settle_s = seconds / 2
    steady_ns = monotonic_ns()
    show_progress(f"steady traffic for {seconds:g} s")
    time.sleep(seconds)
    show_progress(f"moving {len(moved)} cars live, then watching for {settle_s:g} s")
    asked_ns = monotonic_ns()
    moving = live.move(OPERATOR, keys=map(car_name, moved), to=f"{OPERATOR}@{SITE}#2")
    reports = moving.wait(MOVE_S_MAX)
    moved_ns = int(moving.requested_s * 1e9 + max(r.duration_ms for r in reports) * 1e6)
    time.sleep(settle_s)
    before = live.owners(OPERATOR, [car_name(n) for n in range(CARS)])
    show_progress(f"scaling out from 2 to 3 instances, then watching for {settle_s:g} s")
    scale_ns = monotonic_ns()
    live.scale(OPERATOR, {SITE: 3}).wait()
    scaled_ns = monotonic_ns()
    time.sleep(settle_s)
    over_ns = monotonic_ns()
    after = live.owners(OPERATOR, list(before))
    changed = frozenset(car_number(car) for car in before if before[car] != after[car])
    return [
        (
            f"live move of {len(moved)} cars",
            Moments(steady_ns, asked_ns, moved_ns, scale_ns),
            frozenset(moved),
            sum(r.bytes_moved for r in reports),
            _phases(reports, moving.requested_s * 1e3 - asked_ns / 1e6),
        ),
        ("scale-out, 2 to 3 instances", Moments(moved_ns, scale_ns, scaled_ns, over_ns), changed, 0, {}),
    ]


def _phases(reports: Sequence[MoveReport], asked_ms: float) -> dict[str, float]:
    """The time of each phase after our request."""
    return {phase: round(ms + asked_ms, 3) for report in reports for phase, ms in report.phases.items()}


def _wait_for(speed_subscriber: SpeedSubscriber, wanted: int) -> None:
    """Wait for all outputs, or until the time-out: the audit shows what is missing."""
    seen, give_up = speed_subscriber.outputs, time.monotonic() + CATCH_UP_S_MAX
    while speed_subscriber.outputs < wanted and time.monotonic() < give_up and speed_subscriber.is_alive():
        time.sleep(0.05)
        if speed_subscriber.outputs > seen:
            seen, give_up = speed_subscriber.outputs, time.monotonic() + CATCH_UP_S_MAX
