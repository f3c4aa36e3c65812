"""Runs an application on an embedded session, changes it while it runs, and checks every output row.

Responsible for: the course of a run and its result.
Not responsible for: the load (load.py), changes (changes.py), figures (figures.py), comparing (verdict.py),
    showing any of it (cli/app.py).

    generate | deploy | load, with changes evenly inside | last events | oracle | outputs complete | compare
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic_ns
from typing import Any

import msgspec
import numpy as np
from pyspark.sql import DataFrame, SparkSession

import tiercel
from tiercel import Live, UserError
from tiercel.apps.app import SITE, App, Built, parse_options
from tiercel.apps.changes import Change, check_changes, perform
from tiercel.apps.figures import Arrivals, Phase, phases
from tiercel.apps.load import Receiver, Sender, rows_of
from tiercel.apps.verdict import Comparison, compare, frame_of

SLOTS = 32  # of the session: routers, instances, warm workers, the oracle's batch job
RATE_MAX, SECONDS_MAX, EVENTS_MAX = 200_000, 3_600.0, 20_000_000
INSTANCES = {SITE: 2}
WARM_S_MAX = 3.0
LOOK_S = 0.25
STUCK_S = 90.0  # without a new output row, while some are missing
LATE_S = 1.0  # for rows that come although all have come


@dataclass(frozen=True)
class Run:
    """What to run. `check` refuses what cannot work."""

    app: App[Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 1
    rate: int = 1_000
    seconds: float = 10.0
    during: Sequence[str] = ()

    def check(self) -> Any:
        """The options of the application; UserError if the run cannot be done."""
        for name, value, least, most in (
            ("rate", self.rate, 1, RATE_MAX),
            ("seconds", self.seconds, 1, SECONDS_MAX),
            ("seed", self.seed, 0, 2**31),
            ("rate times seconds", self.rate * self.seconds, 1, EVENTS_MAX),
        ):
            if not least <= value <= most:
                raise UserError(f"{name} = {value:,g}", expected=f"a number from {least:,} to {most:,.0f}")
        check_changes(list(self.during))
        return parse_options(self.app, self.options)


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
    events_per_s: float  # that were sent, from the first to the last acknowledgement
    changes: list[Change]
    phases: list[Phase]
    outputs: dict[str, Comparison]
    found: int  # output rows that were findings
    findings: list[str]

    @property
    def good(self) -> bool:
        """Whether every output row is what the oracle expects, and there are some."""
        return not self.faults and any(one.expected for one in self.outputs.values())

    @property
    def faults(self) -> int:
        return sum(one.faults for one in self.outputs.values())


def ignore_progress(progress: Progress) -> None:
    """For callers that show nothing."""


def run(wanted: Run, show: ShowProgress = ignore_progress, spark: SparkSession | None = None) -> Result:
    """Run an application to its end; with `spark` on this session, which stays open."""
    options = wanted.check()
    show(Progress("generating events"))
    events = list(
        islice(wanted.app.generate(options, wanted.seed, wanted.rate), int(wanted.rate * wanted.seconds))
    )
    show(Progress("starting Spark"))
    with ExitStack() as ends:
        session = spark
        if session is None:
            session = tiercel.session("tiercel-app", slots=SLOTS)
            ends.callback(session.stop)
            if "kill" in wanted.during:
                session.sparkContext.setLogLevel("OFF")  # Spark prints the loss of each worker
        live = ends.enter_context(tiercel.start(session, [SITE]))
        show(Progress("deploying"))
        built = wanted.app.build(live, options, INSTANCES)
        return _Course(wanted, options, live, built, show).run(events)


class _Course:
    """One run of one application in a deployment that is built."""

    def __init__(self, wanted: Run, options: Any, live: Live, built: Built, show: ShowProgress) -> None:
        self._wanted, self._options, self._live, self._built = wanted, options, live, built
        self._show = show
        self._app = wanted.app
        self._begun = time.monotonic()

    def run(self, events: list[Any]) -> Result:
        app, built = self._app, self._built
        subscribers = {name: built.outputs[name].subscribe(after=0) for name in app.outputs}
        self._sender = sender = Sender(built.inputs, events, self._wanted.rate)
        self._receivers = {
            name: Receiver(subscriber, app.outputs[name], sender) for name, subscriber in subscribers.items()
        }
        for receiver in self._receivers.values():
            receiver.start()
        try:
            self._begun = time.monotonic()
            sender.start()
            changes = self._changes()
            while sender.is_alive():
                self._report("running")
                sender.join(LOOK_S)
            sender.end()
            ended_ns = monotonic_ns()
            begin_ns = sender.start_ns + int(min(WARM_S_MAX, self._wanted.seconds / 5) * 1e9)
            self._report("closing windows")
            sender.finish(app.last_events(self._options, sender.moments[-1] if sender.moments else 0))
            self._report("the oracle computes what is expected")
            expected = self._expected()
            wanted_rows = {name: frame.count() for name, frame in expected.items()}
            self._wait_for(wanted_rows)
        finally:
            for receiver in self._receivers.values():
                receiver.ending.set()
        for receiver in self._receivers.values():
            receiver.end()
        self._report("comparing every row")
        return Result(
            app.name,
            msgspec.to_builtins(self._options),
            self._wanted.seed,
            self._wanted.rate,
            self._wanted.seconds,
            sender.sent,
            round(len(events) / max((ended_ns - sender.start_ns) / 1e9, 1e-9), 1),
            changes,
            phases(self._arrivals(), changes, begin_ns, ended_ns),
            {name: self._compare(name, frame) for name, frame in expected.items()},
            sum(receiver.found for receiver in self._receivers.values()),
            [text for receiver in self._receivers.values() for text in receiver.findings],
        )

    def _changes(self) -> list[Change]:
        """Carry the changes out, evenly over the time of the load."""
        kinds = list(self._wanted.during)
        changes = []
        for n, kind in enumerate(kinds):
            at = self._begun + self._wanted.seconds * (n + 1) / (len(kinds) + 1)
            while time.monotonic() < at and self._sender.is_alive():
                self._report("running")
                time.sleep(LOOK_S)
            self._report(f"{kind}: {self._built.operator}")
            change = perform(self._live, self._built.operator, kind)
            changes.append(change)
            self._report(f"{kind} took {change.seconds:.2f} s: {change.about}")
        return changes

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
        return {name: expected[name].cache() for name in self._app.outputs}

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

    def _arrivals(self) -> Arrivals:
        due = np.asarray(self._sender.due_ns, dtype=np.int64)
        causes = np.concatenate([np.asarray(r.causes, dtype=np.int64) for r in self._receivers.values()])
        arrived = np.concatenate([np.asarray(r.arrived_ns, dtype=np.int64) for r in self._receivers.values()])
        known = causes >= 0
        return Arrivals(due[causes[known]], arrived[known])
