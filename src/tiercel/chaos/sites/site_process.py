"""The Spark application of one site, seen from outside: started, asked, killed, ended.

Responsible for: the process of a site's program and the JSON lines to and from it.
Not responsible for: the program (site_program.py), when it is killed (run.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tiercel.errors import UserError

END_S_MAX = 60.0
PROGRAM = "tiercel.chaos.sites.site_program"


class SiteEnded(UserError):
    """The application of a site has ended, and did not answer."""


class SiteProcess:
    """One application of one site."""

    def __init__(self, file: Path, site: str, ahead_s: float = 0.0) -> None:
        self.site = site
        self._log = file.with_name(f"{site}.log").open("ab")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tiercel.chaos.sites.site_program",
                str(file),
                site,
                str(file.with_name(site)),
                str(ahead_s),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # its JVM and workers are killed with it
        )

    @property
    def pid(self) -> int:
        """The process of the driver; all processes of the application are below it."""
        return self._process.pid

    def read(self) -> Any:
        """The next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            what = f"the application of site {self.site!r} has ended"
            raise SiteEnded(what, hint=f"its log: {self._log.name}")
        return json.loads(line)

    def send(self, **command: Any) -> None:
        """Give it a command; `read` returns the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def ask(self, **command: Any) -> Any:
        self.send(**command)
        return self.read()

    def kill(self) -> None:
        """Kill -9 of the driver with its JVM and all workers."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._close()

    def end(self) -> None:
        """Its standard input ends, and so does the program. One that has failed has ended already."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S_MAX)
        if self._process.poll() is None:
            self.kill()
        else:
            self._close()

    def _close(self) -> None:
        with contextlib.suppress(BrokenPipeError), self._process:  # closes its pipes
            self._log.close()
