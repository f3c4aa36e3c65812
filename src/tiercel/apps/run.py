"""Runs an application on an embedded session, changes it while it runs, and checks every output row.

Responsible for: the course of a run and its result.
Not responsible for: the load (load.py), changes (changes.py), figures (figures.py), comparing (verdict.py),
    showing any of it (cli/app.py).

    generate | deploy | first events | load, with changes evenly inside | last events | oracle | compare
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from pyspark.sql import DataFrame, SparkSession

import tiercel
from tiercel import Live, UserError
from tiercel.apps.app import SITE, App, Built, Event, parse_options
from tiercel.apps.changes import Change, Scene, check_changes
from tiercel.apps.figures import Arrivals, Phase, phases
from tiercel.apps.load import Receiver, Sender, rows_of
from tiercel.apps.verdict import HEAP, Comparison, compare, frame_of

SLOTS = 32  # of the session: routers, instances, warm workers, the oracle's batch job
RATE_MAX, SECONDS_MAX, EVENTS_MAX = 200_000, 3_600.0, 20_000_000
FAST_RATE = 100_000  # events that are generated for each second of a load without a rate
WARM_S_MAX = 3.0
SETTLE_S_MAX = 5.0
LOOK_S = 0.25
STUCK_S = 90.0  # without a new output row, while some are missing
QUIET_S = 1.0  # without a new output row: all of the first events were processed
LATE_S = 1.0  # for rows that come although all have come


@dataclass(frozen=True)
class Run:
    """What to run. `check` refuses what cannot work."""

    app: App[Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 1
    rate: int = 1_000  # 0: as fast as acknowledgements allow
    seconds: float = 10.0
    during: Sequence[str] = ()
    by_key: bool = False  # ask which keys each change is about
    rates: Sequence[int] = ()  # events in each second instead of `rate`, which is then their mean
    instances: int = 2  # of the operator that is changed, at first

    def check(self) -> Any:
        """The options of the application; UserError if the run cannot be done."""
        for name, value, least, most in (
            ("rate", self.rate, 0, RATE_MAX),
            ("seconds", self.seconds, 1, SECONDS_MAX),
            ("seed", self.seed, 0, 2**31),
            ("rate times seconds", self.events, 1, EVENTS_MAX),
        ):
            if not least <= value <= most:
                raise UserError(f"{name} = {value:,}", expected=f"a number from {least:,} to {most:,.0f}")
        check_changes(self.app, self.during)
        return parse_options(self.app, self.options)

    @property
    def events(self) -> int:
        return sum(self.rates) or round((self.rate or FAST_RATE) * self.seconds)

    def generate(self, options: Any) -> Iterator[Event]:
        return self.app.generate(options, self.seed, self.rate or FAST_RATE)


class Progress(msgspec.Struct, frozen=True):
    """What a person sees while an application runs."""

    step: str
    seconds: float = 0.0
    sent: int = 0
    received: Mapping[str, int] = {}
    recent_ms: Sequence[float] = ()
    findings: Sequence[str] = ()
    found: int = 0


ShowProgress = Callable[[Progress], None]


class Result(msgspec.Struct, frozen=True):
    """A run that has ended."""

    app: str
    options: dict[str, Any]
    seed: int
    rate: int
    seconds: float
    events: int
    events_per_s: float  # of the load, until the last one is acknowledged
    changes: list[Change]
    phases: list[Phase]
    outputs: dict[str, Comparison]
    found: int  # output rows that were findings
    findings: list[str]
    instances_mb: dict[str, float]  # memory of each instance at the end of the load

    @property
    def good(self) -> bool:
        """Whether every output row is what the oracle expects, and there are some."""
        return not self.faults and any(one.expected for one in self.outputs.values())

    @property
    def faults(self) -> int:
        return sum(one.faults for one in self.outputs.values())


@dataclass(frozen=True)
class Recording:
    """Raw figures of a run: rows, and the keys that each change was about, as codes."""

    arrivals: Arrivals
    begin_ns: int
    end_ns: int
    affected: list[list[int]]  # for each change
    empty_mb: dict[str, float]  # memory of each instance before the first event


def ignore_progress(progress: Progress) -> None:
    """For callers that show nothing."""


Beside = Callable[[Live, Built], AbstractContextManager[object]]


def beside_nothing(live: Live, built: Built) -> AbstractContextManager[object]:
    """For callers that watch nothing."""
    return nullcontext()


def run(wanted: Run, show: ShowProgress = ignore_progress, spark: SparkSession | None = None) -> Result:
    """Run an application to its end; with `spark` on that Spark application, which stays open."""
    return run_recorded(wanted, show, spark)[0]


def run_recorded(
    wanted: Run,
    show: ShowProgress = ignore_progress,
    spark: SparkSession | None = None,
    beside: Beside = beside_nothing,
) -> tuple[Result, Recording]:
    """As `run`, and the raw figures. `beside` is entered when the load begins, and left when it ends."""
    options = wanted.check()
    show(Progress("generating events"))
    more = wanted.generate(options)
    first, events = list(wanted.app.first_events(options, wanted.seed)), list(islice(more, wanted.events))
    show(Progress("starting Spark"))
    with ExitStack() as ends:
        session = spark
        if session is None:
            session = tiercel.session("tiercel-app", slots=SLOTS, config=HEAP)
            ends.callback(session.stop)
            if "kill" in wanted.during:
                session.sparkContext.setLogLevel("OFF")  # Spark prints the loss of each worker
        live = ends.enter_context(tiercel.start(session, [SITE]))
        show(Progress("deploying"))
        built = wanted.app.build(live, options, {SITE: wanted.instances})
        return _Course(wanted, options, live, built, show, first, events, more, beside).run()


class _Course:
    """One run of one application in a deployment that is built."""

    def __init__(
        self,
        wanted: Run,
        options: Any,
        live: Live,
        built: Built,
        show: ShowProgress,
        first: Sequence[Event],
        events: Sequence[Event],
        more: Iterator[Event],
        beside: Beside,
    ) -> None:
        self._beside = beside
        self._wanted, self._options, self._live, self._built = wanted, options, live, built
        self._show, self._app = show, wanted.app
        self._begun = time.monotonic()
        subscribers = {name: stream.subscribe(after=0) for name, stream in built.outputs.items()}
        self._sender = Sender(built.inputs, first, events, more, wanted.rate, wanted.seconds, wanted.rates)
        self._receivers = {
            name: Receiver(subscriber, self._app.outputs[name], self._sender)
            for name, subscriber in subscribers.items()
        }
        self._scene = Scene(
            live, self._app, options, built.operator, lambda: self._sender.events[: self._sender.sent]
        )
        self._affected: list[list[Any]] = []

    def run(self) -> tuple[Result, Recording]:
        app, sender = self._app, self._sender
        for receiver in self._receivers.values():
            receiver.start()
        try:
            empty_mb = self._instances_mb()
            self._fill()
            before = sender.sent
            self._begun = time.monotonic()
            sender.go_on = bool(self._wanted.during and self._wanted.rate)
            with self._beside(self._live, self._built):
                sender.start()
                changes = self._changes()
                sender.stop_after(self._settle_s if changes and self._wanted.rate else 0.0)
                while sender.is_alive():
                    self._report("running")
                    sender.join(LOOK_S)
                sender.end()
            end_ns, sent = sender.end_ns, sender.sent - before
            instances_mb = self._instances_mb()
            self._report("closing windows")
            sender.finish(app.last_events(self._options, sender.moments[-1] if sender.moments else 0))
            self._report("the oracle computes what is expected")
            expected = self._expected()
            self._wait_for({name: frame.count() for name, frame in expected.items()})
        finally:
            for receiver in self._receivers.values():
                receiver.ending.set()
        for receiver in self._receivers.values():
            receiver.end()
        self._report("comparing every row")
        begin_ns = sender.start_ns + int(min(WARM_S_MAX, self._wanted.seconds / 5) * 1e9)
        recording = self._recording(begin_ns, end_ns, empty_mb)
        result = Result(
            app.name,
            msgspec.to_builtins(self._options),
            self._wanted.seed,
            self._wanted.rate,
            self._wanted.seconds,
            sender.sent,
            round(sent / max((end_ns - sender.start_ns) / 1e9, 1e-9), 1),
            changes,
            phases(recording.arrivals, changes, begin_ns, end_ns),
            {name: self._compare(name, frame) for name, frame in expected.items()},
            sum(receiver.found for receiver in self._receivers.values()),
            [text for receiver in self._receivers.values() for text in receiver.findings],
            instances_mb,
        )
        return result, recording

    def _fill(self) -> None:
        """Send the first events, and wait until no output follows."""
        self._report("filling the state")
        self._sender.fill()
        seen, quiet_at = -1, 0.0
        while (self._sender.sent and time.monotonic() < quiet_at) or seen < 0:
            now = sum(len(receiver.rows) for receiver in self._receivers.values())
            if now > seen:
                seen, quiet_at = now, time.monotonic() + QUIET_S
            time.sleep(LOOK_S / 5)

    @property
    def _settle_s(self) -> float:
        """The least time between two changes, and behind the last one."""
        return min(SETTLE_S_MAX, self._wanted.seconds / (len(self._wanted.during) + 1) / 2)

    def _changes(self) -> list[Change]:
        """Carry the changes out, evenly over the time of the load; the load goes on until they have ended."""
        kinds = list(self._wanted.during)
        changes: list[Change] = []
        for n, kind in enumerate(kinds):
            at = self._begun + self._wanted.seconds * (n + 1) / (len(kinds) + 1)
            at = max(at, time.monotonic() + self._settle_s) if n else at
            while time.monotonic() < at and self._sender.is_alive():
                self._report("running")
                time.sleep(LOOK_S)
            keys = self._keys() if self._wanted.by_key else []
            owners = self._live.owners(self._built.operator, keys) if keys else {}
            self._report(f"{kind}: {self._built.operator}")
            change = self._scene.perform(kind)
            affected = self._scene.affected(change, keys, owners) if keys else []
            self._affected.append(affected)
            changes.append(msgspec.structs.replace(change, keys=len(affected)) if keys else change)
            self._report(f"{kind} took {change.seconds:.2f} s: {change.about}")
        return changes

    def _keys(self) -> list[Any]:
        """The keys of the changed operator that had output rows."""
        found: set[Any] = set()
        for name, place in self._key_places().items():
            rows = self._receivers[name].rows
            found.update(values[place] for values in rows[: len(rows)])
        return list(found)

    def _key_places(self) -> dict[str, int]:
        """Output -> place of the column with the operator's key."""
        keys = {name: self._app.outputs[name].key for name in self._built.outputs}
        return {n: self._built.outputs[n].schema.names.index(key) for n, key in keys.items() if key}

    def _instances_mb(self) -> dict[str, float]:
        pids = {p.name: p.pid for p in self._live.status().processes if p.kind == "instance"}
        return {name: memory_mb(pid) for name, pid in pids.items()}

    def _report(self, step: str) -> None:
        receivers = self._receivers.values()
        self._show(
            Progress(
                step,
                time.monotonic() - self._begun,
                self._sender.sent,
                {name: len(receiver.rows) for name, receiver in self._receivers.items()},
                [latency for receiver in receivers for latency in list(receiver.recent)],
                [text for receiver in receivers for text in list(receiver.findings)],
                sum(receiver.found for receiver in receivers),
            )
        )

    def _expected(self) -> Mapping[str, DataFrame]:
        spark = self._live.spark
        inputs = {
            name: frame_of(spark, rows_of(self._sender.events, name), stream.schema)
            for name, stream in self._built.inputs.items()
        }
        expected = self._app.oracle(spark, inputs, self._options)
        return {name: expected[name].cache() for name in self._built.outputs}

    def _wait_for(self, wanted: Mapping[str, int]) -> None:
        """Wait until all rows have come, or none comes any more: the comparison shows what is missing."""
        seen, give_up = -1, 0.0
        while any(len(self._receivers[name].rows) < count for name, count in wanted.items()):
            now = sum(len(receiver.rows) for receiver in self._receivers.values())
            if now > seen:
                seen, give_up = now, time.monotonic() + STUCK_S
            if time.monotonic() > give_up or any(r.failure for r in self._receivers.values()):
                return
            missing = sum(max(0, count - len(self._receivers[n].rows)) for n, count in wanted.items())
            self._report(f"waiting for {missing:,} output rows")
            time.sleep(LOOK_S)
        time.sleep(LATE_S)

    def _compare(self, name: str, expected: DataFrame) -> Comparison:
        stream, receiver = self._built.outputs[name], self._receivers[name]
        rows = [(*values, n) for n, values in enumerate(receiver.rows)]
        found = frame_of(self._live.spark, rows, stream.schema)
        return compare(expected, found, self._app.outputs[name], stream.codec.key)

    def _recording(self, begin_ns: int, end_ns: int, empty_mb: dict[str, float]) -> Recording:
        due = np.asarray(self._sender.due_ns, dtype=np.int64)
        places, codes = self._key_places(), dict[Any, int]()
        keys: list[int] = []
        for name, receiver in self._receivers.items():
            if name in places and self._wanted.by_key:
                place = places[name]
                keys += [codes.setdefault(values[place], len(codes)) for values in receiver.rows]
            else:
                keys += [-1] * len(receiver.rows)
        causes = np.concatenate([np.asarray(r.causes, dtype=np.int64) for r in self._receivers.values()])
        arrived = np.concatenate([np.asarray(r.arrived_ns, dtype=np.int64) for r in self._receivers.values()])
        known = causes >= 0
        arrivals = Arrivals(due[causes[known]], arrived[known], np.asarray(keys, dtype=np.int64)[known])
        affected = [[codes[key] for key in keys if key in codes] for keys in self._affected]
        return Recording(arrivals, begin_ns, end_ns, affected, empty_mb)


def memory_mb(pid: int) -> float:
    """The resident memory of a process of this machine; 0 if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return next((round(int(line.split()[1]) / 1024, 1) for line in lines if line.startswith("VmRSS:")), 0.0)
