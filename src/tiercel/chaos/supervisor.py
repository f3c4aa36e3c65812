"""The supervisor of a chaos run: starts the application, injects faults, restarts it, and counts.

Responsible for: injecting the planned faults at their moments; waiting until the deployment is healthy again.
Not responsible for: the plan (plan.py), the application (application.py), the verdict (verdict.py).

    start --> ready --> ( change --> fault --> healthy )* --> finish --> all rows out
                ^                      |
                +---- killed whole ----+
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

import msgspec

from tiercel.bench.report import check_place, writing
from tiercel.chaos.application_handle import ApplicationHandle, ChangeProgress
from tiercel.chaos.full_disk import Disk
from tiercel.chaos.outages import spark_home
from tiercel.chaos.plan import Fault, Kind, chosen, draw_move, plan
from tiercel.chaos.storage_options import disks_of, own_disks
from tiercel.chaos.targets import kill_with_disk
from tiercel.errors import UserError

STARTS_MAX = 3  # in a row
START_S_MAX = 180.0  # Spark, its executors and all tasks, on a busy machine
QUIET_S_MAX = 180.0  # without one more row coming out, while some are missing: it stands still
COPIED_S_MAX = 120.0  # until replicas hold everything: their executor may have to start first
VICTIM_S_MAX = 20.0  # until there is a process to hit
BEGIN_S_MAX = 40.0  # until a change is accepted: a router may have to start first
END_S_MAX = 60.0
LOOK_S = 0.02
TRIES = 4  # moves that are started for one fault: some end before it

ShowProgress = Callable[[str, float], None]  # (text, share of the run that is over)


class InjectedFault(msgspec.Struct):
    """A fault that was injected."""

    kind: Kind
    victim: str
    at_s: float  # since the run began
    in_move: bool = False  # according to the handle of a move
    in_scale: bool = False


class RunLog(msgspec.Struct):
    """The log of a run."""

    faults: list[InjectedFault] = []
    changes: dict[str, int] = {}  # how they ended -> how many
    reasons: dict[str, int] = {}  # why some were refused, undone or not seen to end -> how many
    starts: int = 0
    failed_starts: list[str] = []  # the end of the application's log, for each
    continued: int = 0  # moves of one application that were still open when the next one was up
    unexpected: list[str] = []  # failures without a fault: the application died, a process was given up
    stalled: str = ""  # nothing came out any more
    disk: str = ""


class Stalled(Exception):
    """Rows do not come out any more."""


def kinds_of(master: str, durability: str) -> list[Kind]:
    """The kinds of faults that are possible there: a local session has no executors of its own."""
    left_out = set()
    if master.startswith("local["):
        left_out |= {Kind.EXECUTOR, Kind.LOST_DISK}
    if not own_disks(durability):
        left_out.add(Kind.LOST_DISK)
    if durability != "replica":
        left_out.add(Kind.REPLICA)
    return [kind for kind in Kind if kind not in left_out]


class Supervisor:
    """One run."""

    def __init__(
        self, out: Path, seed: int, master: str, durability: str, show_progress: ShowProgress
    ) -> None:
        self._out, self._seed, self._master, self._durability = out, seed, master, durability
        self._kinds = kinds_of(master, durability)
        self._show_progress = show_progress
        self._random = Random(f"supervisor/{seed}")  # moves beyond the planned ones
        self._applications: list[str] = []
        self._tracks: list[ChangeProgress] = []  # of incarnations that have ended
        self.run_log = RunLog()

    def run(self, seconds: float) -> RunLog:
        """Inject faults for this time, from the first row on; then wait for all outputs."""
        with (
            tempfile.TemporaryDirectory(prefix="tiercel-chaos-", ignore_cleanup_errors=True) as scratch,
            Disk(Path(scratch) / "disk") as disk,
        ):
            self._scratch, self._disk = Path(scratch), disk
            self._storage = disk.directory / "storage"
            self.run_log.disk = disk.way
            self._begun_s, self._seconds = time.monotonic(), seconds
            self._log_line("starting Spark and the deployment")
            self._application = self._new_application()
            try:
                self._wait_until_ready()
                self._begun_s = time.monotonic()
                self._inject_faults()
            except Stalled as stalled:
                self.run_log.stalled = str(stalled)
            finally:
                self._application.kill()
                self._close_tracks()
                self._count_changes()
                for fault_done in self.run_log.faults:  # some ends were reported only after the fault
                    self._note_running_changes(fault_done)
                self._keep_evidence()
        return self.run_log

    def _keep_evidence(self) -> None:
        """Save the logs of executors, and after a stall also everything that was stored."""
        for application in self._applications:  # the work directories of a local cluster's executors
            work = spark_home() / "work" / application
            for log in work.glob("*/stderr"):
                kept = self._out / "executors" / application
                kept.mkdir(parents=True, exist_ok=True)
                shutil.copy(log, kept / f"{log.parent.name}.log")
            shutil.rmtree(work, ignore_errors=True)
        if self.run_log.stalled:
            for place in (self._storage, disks_of(self._storage)):
                if place.exists():
                    shutil.copytree(place, self._out / place.name, dirs_exist_ok=True)

    def _inject_faults(self) -> None:
        """Inject the planned faults until the time is over, but at least one of each kind."""
        for n, fault in enumerate(plan(self._seed, self._kinds)):
            if n >= len(self._kinds) and time.monotonic() - self._begun_s > self._seconds:
                break
            self._handle_unexpected_end()
            self._play(fault)
        self._handle_unexpected_end()
        self._log_line("waiting for the last outputs")
        application = self._application
        application.finish()
        if not application.wait_while_rows_flow(lambda: application.finished is not None, QUIET_S_MAX):
            what = (
                f"it died: {application.log_end()}"
                if application.dead
                else self._behind(application.heartbeat.sent)
            )
            raise Stalled(what)
        code = application.end(END_S_MAX)
        if code != 0:
            self.run_log.unexpected.append(f"the application ended with {code}; {application.log_end()}")

    # -- the application ---------------------------------------------------------------------------

    def _new_application(self) -> ApplicationHandle:
        self.run_log.starts += 1
        return ApplicationHandle(
            self._storage,
            self._out / "recorded",
            self._seed,
            self._master,
            self._scratch,
            self._durability,
            self._out / "application.log",
        )

    def _wait_until_ready(self) -> None:
        """A start that fails is tried again: on a busy machine Spark gives up workers that come up slowly."""
        for _ in range(STARTS_MAX):
            application = self._application
            ready = application.wait(application.is_ready, START_S_MAX)
            if application.application:
                self._applications.append(application.application)
            if ready:
                assert application.ready is not None
                self.run_log.continued += application.ready.continued
                return
            self.run_log.failed_starts.append(application.log_end())
            application.kill()
            self._application = self._new_application()
        raise Stalled(f"the application did not start; {self.run_log.failed_starts[-1]}")

    def _restart(self) -> None:
        """Kill what is left of it, and start it on the same storage."""
        self._application.kill()
        self._close_tracks()
        self._application = self._new_application()
        self._wait_until_ready()

    def _handle_unexpected_end(self) -> None:
        """Log a failure that no fault caused, and continue with a new application."""
        if self._application.dead:
            self.run_log.unexpected.append(f"the application died: {self._application.log_end()[-500:]}")
        elif self._application.heartbeat.failures:
            given_up = "; ".join(
                f"{name}: {why}" for name, why in self._application.heartbeat.failures.items()
            )
            self.run_log.unexpected.append(f"given up: {given_up}")
        else:
            return
        self._log_line(self.run_log.unexpected[-1][:200])
        self._restart()

    def _close_tracks(self) -> None:
        """Close the changes of an application that has ended: no more reports will come."""
        for track in self._application.tracks:
            if track.ended_s is None:
                track.ended_s = time.monotonic()
        self._tracks += self._application.tracks
        self._application.tracks = []

    def _count_changes(self) -> None:
        counts = self.run_log.changes
        for track in self._tracks:
            how = track.how or "interrupted"
            counts[how] = counts.get(how, 0) + 1
            if track.reason:
                self.run_log.reasons[track.reason] = self.run_log.reasons.get(track.reason, 0) + 1

    # -- one fault -----------------------------------------------------------------------------------

    def _play(self, fault: Fault) -> None:
        if fault.kind is Kind.LOST_DISK:
            self._wait_until_replicated()
        if fault.in_move:
            self._begin_move(fault)
        else:
            if fault.change is not None:
                self._application.change(fault.change)
            time.sleep(fault.delay_s)
        if fault.kind is Kind.LOST_DISK:
            self._wait_until_replicated()  # a process that has just started has no replica yet
        sent = self._application.heartbeat.sent
        fault_done = self._inject(fault)
        if fault_done is None:
            return
        self.run_log.faults.append(fault_done)
        self._note_running_changes(fault_done)
        met = "  during a move" if fault_done.in_move else "  while scaling" if fault_done.in_scale else ""
        self._log_line(f"{fault_done.kind:<13} {fault_done.victim}{met}")
        if not fault.overlap or fault.kind is Kind.APPLICATION:
            self._wait_until_healthy(sent)
        if fault.kind is Kind.LOST_DISK:
            self._wait_until_replicated()

    def _begin_move(self, fault: Fault) -> None:
        """Start a move and return while it runs; tries again if it ends too early."""
        application, change = self._application, fault.change
        for _ in range(TRIES):
            assert change is not None
            track = application.change(change)
            application.wait(track.answered, BEGIN_S_MAX)
            time.sleep(fault.delay_s)
            if track.ended_s is None:
                return
            change = draw_move(self._random)

    def _inject(self, fault: Fault) -> InjectedFault | None:
        """Inject the fault and wait until it is over; None if there was no process to hit."""
        application = self._application
        victims = application.victims
        match fault.kind:
            case Kind.INSTANCE:
                return self._done_to(fault, victims.instances, self._kill)
            case Kind.ROUTER:
                return self._done_to(fault, victims.routers, self._kill)
            case Kind.REPLICA:
                return self._done_to(fault, victims.replicas, self._kill)
            case Kind.EXECUTOR:
                return self._done_to(fault, victims.executors, self._kill)
            case Kind.LOST_DISK:
                return self._done_to(fault, victims.executors, self._kill_with_disk)
            case Kind.STOP:
                return self._done_to(fault, victims.everyone, self._stop)
            case Kind.DISK:
                fault_done = InjectedFault(fault.kind, f"full for {fault.seconds:.1f} s", self._now_s())
                self._disk.fill(fault.seconds, victims.writers())
                return fault_done
            case Kind.APPLICATION:
                fault_done = InjectedFault(
                    fault.kind, f"pid {application.pid} and all below it", self._now_s()
                )
                self._restart()
                return fault_done

    def _done_to(
        self, fault: Fault, candidates: Callable[[], Mapping[str, int]], deed: Callable[[Fault, int], str]
    ) -> InjectedFault | None:
        """Do `deed` to one of the candidates; its result describes the fault further."""
        give_up = time.monotonic() + VICTIM_S_MAX
        while time.monotonic() < give_up and not self._application.dead:
            if found := candidates():
                name, now_s = chosen(sorted(found), fault.victim), self._now_s()
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has just ended
                    more = deed(fault, found[name])
                    return InjectedFault(fault.kind, f"{name} {more}".rstrip(), now_s)
            time.sleep(LOOK_S)
        return None

    def _now_s(self) -> float:
        return time.monotonic() - self._begun_s

    def _kill(self, fault: Fault, pid: int) -> str:
        os.kill(pid, signal.SIGKILL)
        return ""

    def _stop(self, fault: Fault, pid: int) -> str:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(fault.seconds)
        with contextlib.suppress(ProcessLookupError):  # it was killed while it was stopped
            os.kill(pid, signal.SIGCONT)
        return f"for {fault.seconds:.1f} s"

    def _kill_with_disk(self, fault: Fault, pid: int) -> str:
        return f"with disk {kill_with_disk(pid, self._application.pid, disks_of(self._storage))}"

    def _note_running_changes(self, fault_done: InjectedFault) -> None:
        """Record which changes were running at the time of the fault, according to the reports."""
        moment_s = self._begun_s + fault_done.at_s
        running = {t.what for t in (*self._tracks, *self._application.tracks) if t.runs_at(moment_s)}
        fault_done.in_move, fault_done.in_scale = bool(running - {"scale"}), "scale" in running

    def _wait_until_healthy(self, sent: int) -> None:
        """Wait until everything sent before is out, or a process was given up or died."""
        application = self._application
        heartbeats = application.heartbeats
        well = application.wait_while_rows_flow(
            lambda: (
                application.heartbeats > heartbeats
                and (application.heartbeat.received >= sent or application.heartbeat.failures)
            ),
            QUIET_S_MAX,
        )
        if not well and not application.dead:
            raise Stalled(self._behind(sent))

    def _wait_until_replicated(self) -> None:
        """With replicas: wait for a second copy of everything. Losing both copies at once is not covered."""
        if self._durability != "replica":
            return
        application = self._application
        if (
            not application.wait(lambda: not application.victims.without_copy(), COPIED_S_MAX)
            and not application.dead
        ):
            single = ", ".join(application.victims.without_copy())
            raise Stalled(f"{single}: no second copy within COPIED_S_MAX ({COPIED_S_MAX:g} s)")

    def _behind(self, sent: int) -> str:
        received = self._application.heartbeat.received
        return (
            f"did not catch up within QUIET_S_MAX ({QUIET_S_MAX:g} s): {received:,} of {sent:,} rows are out"
        )

    def _log_line(self, text: str) -> None:
        self._show_progress(text, min(1.0, (time.monotonic() - self._begun_s) / self._seconds))


def check_master(master: str) -> None:
    """Refuse masters whose processes do not descend from the application: faults are injected by pid."""
    if not re.fullmatch(r"local\[\d+(,\d+)?\]|local-cluster\[\d+,\d+,\d+\]", master):
        expected = "local-cluster[EXECUTORS,CORES,MB] or local[SLOTS,ATTEMPTS]"
        raise UserError(f"--master {master!r}", expected=expected, hint="chaos needs a cluster of its own")


def recording_place(out: Path) -> Path:
    """The directory of a run: empty, or new."""
    check_place(out)
    with writing(out):
        if any(out.iterdir()):
            raise UserError(f"{out} is not empty", hint="give another directory: --out DIR")
    return out.resolve()
