"""The one process that survives: starts the application, strikes it, starts it again, and keeps count.

Responsible for: faults as planned, at the moments they are meant for; waiting until all is well again.
Not responsible for: what is planned (plan.py), the application (application.py), the verdict (judge.py).

    start --> ready --> ( change --> fault --> well again )* --> finish --> all out
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

from tiercel.bench.outages import spark_home
from tiercel.bench.report import check_place, writing
from tiercel.chaos.child import Child, Track
from tiercel.chaos.disk import Disk
from tiercel.chaos.keeping import disks_of, own_disks
from tiercel.chaos.plan import Fault, Kind, chosen, draw_move, plan
from tiercel.chaos.victims import kill_with_disk
from tiercel.errors import UserError

STARTS_MAX = 3  # in a row
START_S_MAX = 180.0  # Spark, its executors and all tasks, on a busy machine
QUIET_S_MAX = 180.0  # without one more row coming out, while some are missing: it stands still
COPIED_S_MAX = 120.0  # until replicas hold everything: their executor may have to start first
VICTIM_S_MAX = 20.0  # until there is somebody to strike
BEGIN_S_MAX = 40.0  # until a change is taken on: a router may have to start first
END_S_MAX = 60.0
LOOK_S = 0.02
TRIES = 4  # moves that are begun for one fault: some end before it can strike

Tell = Callable[[str, float], None]  # what happens, and how far the run is, 0 to 1


class Struck(msgspec.Struct):
    """A fault that was done."""

    kind: Kind
    victim: str
    at_s: float  # since the run began
    in_move: bool = False  # the handle of a move said so
    in_scale: bool = False


class Chronicle(msgspec.Struct):
    """What has happened in a run."""

    faults: list[Struck] = []
    changes: dict[str, int] = {}  # how they ended -> how many
    reasons: dict[str, int] = {}  # why some were refused, undone or not seen to end -> how many
    starts: int = 0
    failed_starts: list[str] = []  # the last words of each
    continued: int = 0  # moves of one application that were still open when the next one was up
    unasked: list[str] = []  # what nobody did: an application that died, a process that was given up
    stalled: str = ""  # nothing came out any more
    disk: str = ""


class Stalled(Exception):
    """Rows do not come out any more."""


def kinds_of(master: str, durability: str) -> list[Kind]:
    """All that can be done there: a local session has no executors of its own, nor need they have disks."""
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

    def __init__(self, out: Path, seed: int, master: str, durability: str, tell: Tell) -> None:
        self._out, self._seed, self._master, self._durability = out, seed, master, durability
        self._kinds = kinds_of(master, durability)
        self._tell = tell
        self._random = Random(f"supervisor/{seed}")  # moves beyond the planned ones
        self._applications: list[str] = []
        self._tracks: list[Track] = []  # of lives that are over
        self.chronicle = Chronicle()

    def run(self, seconds: float) -> Chronicle:
        """Faults for so long, counted from when rows flow first; then everything may come out."""
        with (
            tempfile.TemporaryDirectory(prefix="tiercel-chaos-", ignore_cleanup_errors=True) as scratch,
            Disk(Path(scratch) / "disk") as disk,
        ):
            self._scratch, self._disk = Path(scratch), disk
            self._storage = disk.directory / "storage"
            self.chronicle.disk = disk.way
            self._begun_s, self._seconds = time.monotonic(), seconds
            self._say("starting Spark and the deployment")
            self._child = self._new_child()
            try:
                self._until_ready()
                self._begun_s = time.monotonic()
                self._strike_on()
            except Stalled as stalled:
                self.chronicle.stalled = str(stalled)
            finally:
                self._child.kill()
                self._close_tracks()
                self._count_changes()
                for struck in self.chronicle.faults:  # some ends were told only after the fault
                    self._meet(struck)
                self._keep_evidence()
        return self.chronicle

    def _keep_evidence(self) -> None:
        """What executors have logged; of a run that stood still also what everyone had stored."""
        for application in self._applications:  # where a local cluster's executors have worked
            work = spark_home() / "work" / application
            for log in work.glob("*/stderr"):
                kept = self._out / "executors" / application
                kept.mkdir(parents=True, exist_ok=True)
                shutil.copy(log, kept / f"{log.parent.name}.log")
            shutil.rmtree(work, ignore_errors=True)
        if self.chronicle.stalled:
            for place in (self._storage, disks_of(self._storage)):
                if place.exists():
                    shutil.copytree(place, self._out / place.name, dirs_exist_ok=True)

    def _strike_on(self) -> None:
        """As planned, until the time is over; but each kind comes once, however slow this machine is."""
        for n, fault in enumerate(plan(self._seed, self._kinds)):
            if n >= len(self._kinds) and time.monotonic() - self._begun_s > self._seconds:
                break
            self._look_after()
            self._play(fault)
        self._look_after()
        self._say("letting everything come out")
        child = self._child
        child.finish()
        if not child.wait_while_going_on(lambda: child.finished is not None, QUIET_S_MAX):
            what = f"it died: {child.last_words()}" if child.dead else self._behind(child.beat.sent)
            raise Stalled(what)
        code = child.end(END_S_MAX)
        if code != 0:
            self.chronicle.unasked.append(f"the application ended with {code}; {child.last_words()}")

    # -- the application ---------------------------------------------------------------------------

    def _new_child(self) -> Child:
        self.chronicle.starts += 1
        return Child(
            self._storage,
            self._out / "recorded",
            self._seed,
            self._master,
            self._scratch,
            self._durability,
            self._out / "application.log",
        )

    def _until_ready(self) -> None:
        """A start that fails is tried again: on a busy machine Spark gives up workers that come up slowly."""
        for _ in range(STARTS_MAX):
            child = self._child
            ready = child.wait(child.is_ready, START_S_MAX)
            if child.application:
                self._applications.append(child.application)
            if ready:
                assert child.ready is not None
                self.chronicle.continued += child.ready.continued
                return
            self.chronicle.failed_starts.append(child.last_words())
            child.kill()
            self._child = self._new_child()
        raise Stalled(f"the application did not start; {self.chronicle.failed_starts[-1]}")

    def _again(self) -> None:
        """Kill what is left of it, and start it on the same storage."""
        self._child.kill()
        self._close_tracks()
        self._child = self._new_child()
        self._until_ready()

    def _look_after(self) -> None:
        """What nobody has asked for is noted; then the run can go on with a new application."""
        if self._child.dead:
            self.chronicle.unasked.append(f"the application died: {self._child.last_words()[-500:]}")
        elif self._child.beat.failures:
            given_up = "; ".join(f"{name}: {why}" for name, why in self._child.beat.failures.items())
            self.chronicle.unasked.append(f"given up: {given_up}")
        else:
            return
        self._say(self.chronicle.unasked[-1][:200])
        self._again()

    def _close_tracks(self) -> None:
        """Nobody will tell any more of what that application had begun."""
        for track in self._child.tracks:
            if track.ended_s is None:
                track.ended_s = time.monotonic()
        self._tracks += self._child.tracks
        self._child.tracks = []

    def _count_changes(self) -> None:
        counts = self.chronicle.changes
        for track in self._tracks:
            how = track.how or "interrupted"
            counts[how] = counts.get(how, 0) + 1
            if track.reason:
                self.chronicle.reasons[track.reason] = self.chronicle.reasons.get(track.reason, 0) + 1

    # -- one fault -----------------------------------------------------------------------------------

    def _play(self, fault: Fault) -> None:
        if fault.kind is Kind.LOST_DISK:
            self._until_copied()
        if fault.in_move:
            self._into_move(fault)
        else:
            if fault.change is not None:
                self._child.change(fault.change)
            time.sleep(fault.delay_s)
        if fault.kind is Kind.LOST_DISK:
            self._until_copied()  # what has just started has none yet
        sent = self._child.beat.sent
        struck = self._strike(fault)
        if struck is None:
            return
        self.chronicle.faults.append(struck)
        self._meet(struck)
        met = "  during a move" if struck.in_move else "  while scaling" if struck.in_scale else ""
        self._say(f"{struck.kind:<13} {struck.victim}{met}")
        if not fault.overlap or fault.kind is Kind.APPLICATION:
            self._until_well(sent)
        if fault.kind is Kind.LOST_DISK:
            self._until_copied()

    def _into_move(self, fault: Fault) -> None:
        """Returns in the middle of a move, if one can be had."""
        child, change = self._child, fault.change
        for _ in range(TRIES):
            assert change is not None
            track = child.change(change)
            child.wait(track.answered, BEGIN_S_MAX)
            time.sleep(fault.delay_s)
            if track.ended_s is None:
                return
            change = draw_move(self._random)

    def _strike(self, fault: Fault) -> Struck | None:
        """Do it, and wait until it is over where it lasts; None: there was nobody to strike."""
        child = self._child
        victims = child.victims
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
                struck = Struck(fault.kind, f"full for {fault.seconds:.1f} s", self._now_s())
                self._disk.fill(fault.seconds, victims.writers())
                return struck
            case Kind.APPLICATION:
                struck = Struck(fault.kind, f"pid {child.pid} and all below it", self._now_s())
                self._again()
                return struck

    def _done_to(
        self, fault: Fault, candidates: Callable[[], Mapping[str, int]], deed: Callable[[Fault, int], str]
    ) -> Struck | None:
        """To one of the candidates; the deed says what there is to say besides who it was."""
        give_up = time.monotonic() + VICTIM_S_MAX
        while time.monotonic() < give_up and not self._child.dead:
            if found := candidates():
                name, now_s = chosen(sorted(found), fault.victim), self._now_s()
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has just ended
                    more = deed(fault, found[name])
                    return Struck(fault.kind, f"{name} {more}".rstrip(), now_s)
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
        with contextlib.suppress(ProcessLookupError):  # somebody has lost patience with it
            os.kill(pid, signal.SIGCONT)
        return f"for {fault.seconds:.1f} s"

    def _kill_with_disk(self, fault: Fault, pid: int) -> str:
        return f"with disk {kill_with_disk(pid, self._child.pid, disks_of(self._storage))}"

    def _meet(self, struck: Struck) -> None:
        """Which changes ran at that moment, as far as was told."""
        moment_s = self._begun_s + struck.at_s
        running = {t.what for t in (*self._tracks, *self._child.tracks) if t.runs_at(moment_s)}
        struck.in_move, struck.in_scale = bool(running - {"scale"}), "scale" in running

    def _until_well(self, sent: int) -> None:
        """All that was sent before has come out, and what was given up or died is not waited for."""
        child = self._child
        beats = child.beats
        well = child.wait_while_going_on(
            lambda: child.beats > beats and (child.beat.received >= sent or child.beat.failures), QUIET_S_MAX
        )
        if not well and not child.dead:
            raise Stalled(self._behind(sent))

    def _until_copied(self) -> None:
        """With replicas: both copies of anything, lost at the same time, are more than was promised."""
        if self._durability != "replica":
            return
        child = self._child
        if not child.wait(lambda: not child.victims.without_copy(), COPIED_S_MAX) and not child.dead:
            single = ", ".join(child.victims.without_copy())
            raise Stalled(f"{single}: no second copy within COPIED_S_MAX ({COPIED_S_MAX:g} s)")

    def _behind(self, sent: int) -> str:
        received = self._child.beat.received
        return (
            f"did not catch up within QUIET_S_MAX ({QUIET_S_MAX:g} s): {received:,} of {sent:,} rows are out"
        )

    def _say(self, text: str) -> None:
        self._tell(text, min(1.0, (time.monotonic() - self._begun_s) / self._seconds))


def check_master(master: str) -> None:
    """Processes are killed by pid: only a cluster that descends from the application can be struck."""
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
