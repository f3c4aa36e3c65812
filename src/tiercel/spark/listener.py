"""Listeners: what happens in a deployment, as calls, like Spark's StreamingQueryListener.

Responsible for: the events, the thread that notices them and calls the listener.
Not responsible for: figures and states themselves (status.py, runtime/process/metrics.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tiercel.errors import UserError
from tiercel.runtime.process.metrics import MetricsLine, last_lines
from tiercel.spark.api.status import ProcessStatus, Status

log = logging.getLogger(__name__)

EVERY_S = 1.0


class ProgressEvent(msgspec.Struct, frozen=True):
    """The figures of all processes in one second."""

    at_ms: int
    processes: dict[str, MetricsLine]  # by name
    status: Status

    @property
    def rows_per_s(self) -> float:
        """Rows that instances have processed."""
        return sum(line.rate for line in self.processes.values() if line.kind == "instance")

    @property
    def lag(self) -> int:
        """Rows that wait for instances."""
        return sum(line.lag or 0 for line in self.processes.values() if line.kind == "router")


class Listener:
    """Override what you want to know. Calls come one after the other, from a thread of the driver."""

    def onProgress(self, event: ProgressEvent) -> None:
        """A second has passed."""

    def onProcessStarted(self, process: ProcessStatus) -> None:
        """A router, an instance or a replica has started, or started again (`incarnation`)."""

    def onProcessTerminated(self, process: ProcessStatus) -> None:
        """A process has ended, or has been given up (`reason`)."""

    def onMove(self, move: str, state: str) -> None:
        """A move has begun, or has a new state: queued, asked, done, aborted, failed."""


class ListenerThread:
    """Compares the status of each second with that of the last."""

    def __init__(self, listener: Listener, status: Callable[[], Status], metrics: Path) -> None:
        self._listener, self._status, self._metrics = listener, status, metrics
        self._ended = threading.Event()
        self._running: dict[str, ProcessStatus] = {}
        self._moves: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="tiercel-listener", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No call begins after this."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            try:
                self.look()
            except UserError:
                return  # the deployment was stopped
            except Exception:  # of the listener: the next second may go better
                log.exception("the listener %s", type(self._listener).__name__)

    def look(self) -> None:
        """One comparison."""
        status = self._status()
        running = {p.name: p for p in status.processes if p.state in ("running", "leaving")}
        before, self._running = self._running, running
        moves, self._moves = self._moves, dict(status.moves)
        for name, process in before.items():
            if name not in running:
                ended = [p for p in status.processes if p.name == name]
                self._listener.onProcessTerminated(ended[0] if ended else process)
        for name, process in running.items():
            if name not in before or before[name].incarnation != process.incarnation:
                self._listener.onProcessStarted(process)
        for move, state in status.moves.items():
            if moves.get(move) != state:
                self._listener.onMove(move, state)
        lines = {name: line for name, line in last_lines(self._metrics).items() if name in running}
        self._listener.onProgress(ProgressEvent(int(time.time() * 1e3), lines, status))
