"""The application as its supervisor sees it: a process that tells how it goes, until it is killed.

Responsible for: starting it, what it has told so far, asking it, its end.
Not responsible for: what it does (application.py), when it is killed and started again (supervisor.py).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

import tiercel
from tiercel.bench.processes import kill_all
from tiercel.chaos import talk
from tiercel.chaos.plan import Change
from tiercel.chaos.victims import Victims

LOOK_S = 0.002
# A JVM that is killed after a minute is not worth optimising for: half of the processor time of its start.
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
LOG_CHARACTERS_MAX = 2_000  # of its end, in an error


class Track(msgspec.Struct):
    """One change: from when to when it ran."""

    what: str
    begun_s: float | None = None
    ended_s: float | None = None
    how: str = ""
    reason: str = ""

    def answered(self) -> bool:
        """Whether it was taken on, or refused."""
        return self.begun_s is not None or bool(self.how)

    def runs_at(self, moment_s: float) -> bool:
        return (
            self.begun_s is not None
            and self.begun_s <= moment_s
            and (self.ended_s is None or moment_s <= self.ended_s)
        )


class Child:
    """One life of the application."""

    def __init__(
        self, storage: Path, records: Path, seed: int, master: str, scratch: Path, durability: str, log: Path
    ) -> None:
        self._log = log
        sources = str(Path(tiercel.__file__).resolve().parent.parent)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [sources, os.environ.get("PYTHONPATH", "")])),
            "TMPDIR": str(scratch),  # what a killed process leaves is removed with it
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
        self.victims = Victims(storage, self.pid)
        self.application = ""
        self.ready: talk.Ready | None = None
        self.finished: talk.Finished | None = None
        self.beat = talk.Beat(0, 0, {})
        self.beats = 0
        self.tracks: list[Track] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    # -- what it tells ---------------------------------------------------------------------------

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(msgspec.DecodeError):  # it was killed in the middle of a word
                self._take(talk.decode_told(line))

    def _take(self, told: talk.Told) -> None:
        match told:
            case talk.Opened(application=application):
                self.application = application
            case talk.Ready():
                self.ready = told
            case talk.Begun(number=number, at_s=at_s):
                self.tracks[number].begun_s = at_s
            case talk.Ended(number=number):
                track = self.tracks[number]
                track.ended_s, track.how, track.reason = told.at_s, told.how, told.reason
            case talk.Beat():
                self.beat = told
                self.beats += 1
            case talk.Finished():
                self.finished = told

    def is_ready(self) -> bool:
        return self.ready is not None

    @property
    def dead(self) -> bool:
        return self._process.poll() is not None

    def wait(self, done: Callable[[], object], seconds: float) -> bool:
        """Until that is so, or it is dead, or the time is over; says whether it is so."""
        give_up = time.monotonic() + seconds
        while not done():
            if self.dead or time.monotonic() > give_up:
                return bool(done())
            time.sleep(LOOK_S)
        return True

    def wait_while_going_on(self, done: Callable[[], object], quiet_s: float) -> bool:
        """The same, but the time counts from the last row that came out: a slow machine is not a loss."""

        def advanced(before: int) -> Callable[[], object]:
            return lambda: done() or self.beat.received > before

        while not done():
            if not self.wait(advanced(self.beat.received), quiet_s):
                return bool(done())
        return True

    def last_words(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS_MAX:]
        return ""

    # -- what it is asked ------------------------------------------------------------------------

    def change(self, change: Change) -> Track:
        track = Track(change.what)
        self.tracks.append(track)
        self._ask(talk.Wanted(len(self.tracks) - 1, change))
        return track

    def finish(self) -> None:
        self._ask(talk.Finish())

    def _ask(self, asked: talk.Asked) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead, and that is seen elsewhere
            self._process.stdin.write(talk.encode(asked) + b"\n")
            self._process.stdin.flush()

    # -- its end ---------------------------------------------------------------------------------

    def kill(self) -> None:
        """The driver and everything that it has started, with no warning."""
        kill_all(self.pid)
        self._process.wait()
        self._reading.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not sent yet, nobody reads
                pipe.close()

    def end(self, seconds: float) -> int | None:
        """It has finished and ends by itself; what it leaves running is killed. None: it did not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        code = self._process.poll()
        self.kill()
        return code
