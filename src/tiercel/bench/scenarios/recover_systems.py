"""Tiercel and Spark as the recovery benchmark sees them: rows in, outputs out, processes to kill.

Responsible for: starting and killing an application, sending it rows, the arrival time of each output.
Not responsible for: what runs in it (recover_apps.py), when it is killed and the figures (recover.py).

The application leads a process session of its own; only processes of that session are killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns

import msgspec
import numpy as np

import tiercel
from tiercel.bench.metrics import Outputs
from tiercel.bench.operators import INPUT, SITE
from tiercel.bench.scenarios.recover_apps import FAILURES, OPERATOR, Setup
from tiercel.chaos.outages import spark_home
from tiercel.chaos.processes import executor_of, kill, kill_all, kill_with_all_below, stats
from tiercel.core.model.topology import instance_name
from tiercel.errors import UserError
from tiercel.runtime.deployment import DeploymentDir
from tiercel.spark.api.clients import RowProducer, RowSubscriber

Reading = tuple[int, int, int, float]  # sensor, n, due_ns, value

VICTIM = instance_name(OPERATOR, SITE, 1)
READY_S_MAX = 120.0
FILE_NS = 100_000_000  # of rows in one file for Spark
DAEMON = b"pyspark.daemon"
LOOK_S = 0.002
MISSED_S_MAX = 10.0  # a query whose worker is missed fails long before


class System(ABC):
    """One application and both of its ends."""

    kind: str

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._lock = threading.Lock()
        self._sensor, self._due, self._emitted = array("q"), array("q"), array("q")
        self._log = setup.place / f"{self.kind}.log"
        self.launch()

    # -- its process -----------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the application; returns when its process runs, `wait_ready` when it works."""
        source = str(Path(tiercel.__file__).resolve().parent.parent)
        scratch = str(self.setup.place / "scratch")
        Path(scratch).mkdir(exist_ok=True)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
            "SPARK_LOCAL_DIRS": scratch,  # leftovers of killed processes are removed with the run
        }
        facts = msgspec.json.encode(self.setup).decode()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tiercel.bench.scenarios.recover_apps", self.kind, facts],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=environment,
            )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            words = self._log.read_text(encoding="utf-8", errors="replace")[-2_000:]
            raise UserError(f"the {self.kind} application ended with {self.process.wait()}:\n{words}")

    def kill_application(self) -> int:
        """The driver and everything that it has started; returns when that began."""
        begun_ns = monotonic_ns()
        kill_all(self.process.pid)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        return begun_ns

    def close(self) -> None:
        self.kill_application()
        if self.setup.cluster:  # where a local-cluster's executors have worked
            for left in (spark_home() / "work").glob("app-*"):
                if left.stat().st_mtime > self._log.stat().st_ctime - 3_600:
                    shutil.rmtree(left, ignore_errors=True)

    # -- its ends --------------------------------------------------------------------------------

    @abstractmethod
    def send(self, rows: Sequence[Reading]) -> None:
        """Hand over what is due."""

    @abstractmethod
    def kill(self, what: str) -> int:
        """Kill what has the state; returns when."""

    def _strike(self, what: str, worker: int) -> int:
        """Kill a worker, or its executor and all that runs there, as when its machine dies; returns when."""
        if what == "worker":
            kill(worker)
        else:
            kill_with_all_below(executor_of(worker, [self.process.pid]), self.process.pid)
        return monotonic_ns()  # tuples due from now on come from the recovered process

    def _came(self, sensors: Sequence[int], dues: Sequence[int], emitted: Sequence[int]) -> None:
        with self._lock:
            self._sensor.extend(sensors)
            self._due.extend(dues)
            self._emitted.extend(emitted)

    @property
    def received(self) -> int:
        return len(self._sensor)

    def outputs(self) -> Outputs:
        with self._lock:
            columns = [
                np.array(column, dtype=np.int64) for column in (self._sensor, self._due, self._emitted)
            ]
        return Outputs(*columns)


class Tiercel(System):
    """A router and an instance with all of the state; clients of the public API."""

    kind = "tiercel"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.wait_ready()
        self._place = DeploymentDir(setup.place / "storage")
        stream = self._place.manifest().topology.operators[OPERATOR].output
        self._producer = RowProducer(self._place, INPUT, name="recover")
        self._subscriber = RowSubscriber(self._place, stream, after=0)
        self._ending = False
        self.died: list[str] = []  # the last time
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while not self._ending:
            rows = self._subscriber.poll_values(0.05)
            if rows:
                now = monotonic_ns()
                self._came([row[0] for row in rows], [row[4] for row in rows], [now] * len(rows))

    def send(self, rows: Sequence[Reading]) -> None:
        self._producer.send_many(rows)

    def kill(self, what: str) -> int:
        address = self._place.registry.find(VICTIM)
        if address is None:
            raise UserError(f"{VICTIM} does not run")
        self.died = [VICTIM] if what == "worker" else self._beside(address.executor)
        return self._strike(what, address.pid)

    def kill_application(self) -> int:
        self.died = sorted(self._place.registry.names())
        return super().kill_application()

    def _beside(self, executor: str) -> list[str]:
        """All that runs there."""
        found = {name: self._place.registry.find(name) for name in self._place.registry.names()}
        return sorted(name for name, at in found.items() if at is not None and at.executor == executor)

    def lose_disk(self) -> None:
        """Delete what the dead instance has stored."""
        self._place.process(VICTIM).rename(self.setup.place / f"lost-{monotonic_ns()}")

    def recover_over(self, instances: int) -> None:
        assert self.process.stdin is not None
        asked = msgspec.json.encode({"instance": VICTIM, "over": instances})
        self.process.stdin.write(asked + b"\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self._ending = True
        super().close()
        for client in (self._producer.client, self._subscriber.client):
            with contextlib.suppress(UserError):
                client.close(0.0) if client is self._producer.client else client.close()


class Spark(System):
    """Its own query: files in, a sink that notes when it was given which rows."""

    kind = "spark"

    def __init__(self, setup: Setup) -> None:
        (setup.place / "inputs").mkdir(exist_ok=True)
        super().__init__(setup)
        self._rows: list[Reading] = []
        self._file_ns = monotonic_ns()
        self._seen: set[str] = set()
        self._ending = False
        self.wait_ready()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, rows: Sequence[Reading]) -> None:
        self._rows += rows
        now = monotonic_ns()
        if now - self._file_ns >= FILE_NS and self._rows:
            inputs = self.setup.place / "inputs"
            draft = inputs / f".{now}"  # Spark leaves such names alone
            draft.write_text("".join(f"{s},{n},{d},{v}\n" for s, n, d, v in self._rows), encoding="ascii")
            draft.rename(inputs / f"{now:020d}.csv")
            self._rows, self._file_ns = [], now

    def flush(self) -> None:
        """Hand over the rows of an unfinished file."""
        self._file_ns = 0
        self.send([])

    def rescale(self, partitions: int) -> dict[str, float]:
        """Stop the query, repartition its state, start it again; returns what was reached when, in ms."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(msgspec.json.encode({"partitions": partitions}) + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            words = self._log.read_text(encoding="utf-8", errors="replace")[-2_000:]
            raise UserError(f"Spark's query was not repartitioned:\n{words}")
        took = msgspec.json.decode(line, type=dict[str, float])
        return {phase: round(seconds * 1e3, 1) for phase, seconds in took.items()}

    def _read(self) -> None:
        while not self._ending:
            for path in sorted((self.setup.place / "outputs").glob("*.npy")):
                if path.name not in self._seen:
                    self._seen.add(path.name)
                    sensors, _, dues, emitted = np.load(path)
                    self._came(sensors.tolist(), dues.tolist(), emitted.tolist())
            time.sleep(0.02)

    def kill(self, what: str) -> int:
        """A worker is killed until the query fails of it: one that was just done is not missed."""
        while True:
            worker = self._busy_worker()
            if not worker:
                time.sleep(LOOK_S)
                continue
            before = self._failures()
            killed_ns = self._strike(what, worker)
            give_up = time.monotonic() + MISSED_S_MAX
            while what == "worker" and self._failures() == before and time.monotonic() < give_up:
                time.sleep(LOOK_S)
            if what != "worker" or self._failures() > before:
                return killed_ns

    def _failures(self) -> int:
        try:
            return (self.setup.place / FAILURES).stat().st_size
        except FileNotFoundError:
            return 0

    def _busy_worker(self) -> int:
        """A Python worker with work under way: one that is idle is not missed when it dies."""
        everyone = dict(stats(self.process.pid))
        daemons = [pid for pid in everyone if DAEMON in _command(pid)]
        for pid in daemons:
            if int(everyone[pid][1]) in daemons and everyone[pid][0] == "R":
                return pid
        return 0

    def close(self) -> None:
        self._ending = True
        super().close()


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
