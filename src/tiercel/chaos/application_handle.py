"""The application from the supervisor's side: a child process that reports its progress until it is killed.

Responsible for: starting it, its latest reports, commands to it, its end.
Not responsible for: its work (application.py), when it is killed and restarted (supervisor.py).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tiercel.bench.loadgen.child import child_environment
from tiercel.chaos import protocol as protocol
from tiercel.chaos.plan import Change
from tiercel.chaos.processes import kill_all
from tiercel.chaos.targets import Targets

LOOK_S = 0.002
# A JVM that is killed after a minute is not worth optimising for: half of the processor time of its start.
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
LOG_CHARACTERS_MAX = 2_000  # of the end of its log, in an error


class ChangeProgress(msgspec.Struct):
    """One change: when it began and ended, and how."""

    what: str
    begun_s: float | None = None
    ended_s: float | None = None
    how: str = ""
    reason: str = ""

    def answered(self) -> bool:
        """Whether the application has accepted or refused the change."""
        return self.begun_s is not None or bool(self.how)

    def runs_at(self, moment_s: float) -> bool:
        return (
            self.begun_s is not None
            and self.begun_s <= moment_s
            and (self.ended_s is None or moment_s <= self.ended_s)
        )


class ApplicationHandle:
    """One incarnation of the application."""

    def __init__(
        self, storage: Path, records: Path, seed: int, master: str, scratch: Path, durability: str, log: Path
    ) -> None:
        self._log = log
        environment = child_environment() | {
            "TMPDIR": str(scratch),  # leftovers of killed processes are removed with it
            "SPARK_LOCAL_DIRS": str(scratch),
            "SPARK_SUBMIT_OPTS": f"-Djava.io.tmpdir={scratch} {QUICK_JVM}",
        }
        arguments = [str(storage), str(records), str(seed), master, str(scratch), durability]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tiercel.chaos.application", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                env=environment,
            )
        self.pid = self._process.pid
        self.victims = Targets(storage, self.pid)
        self.application = ""
        self.ready: protocol.Ready | None = None
        self.finished: protocol.Finished | None = None
        self.heartbeat = protocol.Heartbeat(0, 0, {})
        self.heartbeats = 0
        self.tracks: list[ChangeProgress] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    # -- its reports ----------------------------------------------------------------------------

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(msgspec.DecodeError):  # it was killed in the middle of a line
                self._take(protocol.decode_report(line))

    def _take(self, report: protocol.Report) -> None:
        match report:
            case protocol.Opened(application=application):
                self.application = application
            case protocol.Ready():
                self.ready = report
            case protocol.Begun(number=number, at_s=at_s):
                self.tracks[number].begun_s = at_s
            case protocol.Ended(number=number):
                track = self.tracks[number]
                track.ended_s, track.how, track.reason = report.at_s, report.how, report.reason
            case protocol.Heartbeat():
                self.heartbeat = report
                self.heartbeats += 1
            case protocol.Finished():
                self.finished = report

    def is_ready(self) -> bool:
        return self.ready is not None

    @property
    def dead(self) -> bool:
        return self._process.poll() is not None

    def wait(self, done: Callable[[], object], seconds: float) -> bool:
        """Wait until `done()`, its death, or the time-out; returns whether `done()`."""
        give_up = time.monotonic() + seconds
        while not done():
            if self.dead or time.monotonic() > give_up:
                return bool(done())
            time.sleep(LOOK_S)
        return True

    def wait_while_rows_flow(self, done: Callable[[], object], quiet_s: float) -> bool:
        """As `wait`, but the time-out counts from the last output: a slow machine is no failure."""

        def advanced(before: int) -> Callable[[], object]:
            return lambda: done() or self.heartbeat.received > before

        while not done():
            if not self.wait(advanced(self.heartbeat.received), quiet_s):
                return bool(done())
        return True

    def log_end(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS_MAX:]
        return ""

    # -- commands to it --------------------------------------------------------------------------

    def change(self, change: Change) -> ChangeProgress:
        track = ChangeProgress(change.what)
        self.tracks.append(track)
        self._ask(protocol.ChangeRequest(len(self.tracks) - 1, change))
        return track

    def finish(self) -> None:
        self._ask(protocol.Finish())

    def _ask(self, command: protocol.Command) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead; `dead` shows that
            self._process.stdin.write(protocol.encode(command) + b"\n")
            self._process.stdin.flush()

    # -- its end ---------------------------------------------------------------------------------

    def kill(self) -> None:
        """The driver and everything that it has started, with no warning."""
        kill_all(self.pid)
        self._process.wait()
        self._reading.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # the rest of the buffer has no reader
                pipe.close()

    def end(self, seconds: float) -> int | None:
        """Wait until it ends by itself, then kill what is left; its exit code, or None if it did not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        code = self._process.poll()
        self.kill()
        return code
