"""The processes of one application on this machine: finding and killing them, and no others.

Responsible for: which process belongs to which, and killing them.
Not responsible for: which of them to kill, and when (outages.py, supervisor.py, recover_systems.py).

An application leads a process session of its own. All processes that it starts belong to the session: also
Python workers, which Spark puts into process groups of their own, and also processes whose parents are dead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from tiercel.errors import UserError

SESSION = 3  # the field of /proc/PID/stat, counted behind the name of the program
GONE_S_MAX = 20.0


def stats(session: int) -> Iterator[tuple[int, list[str]]]:
    """All processes of a session that still run, with the fields of their stat behind the name."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(fields[SESSION]) == session and fields[0] != "Z":
                yield int(stat.parent.name), fields


def members(session: int) -> list[int]:
    return [pid for pid, _ in stats(session)]


def kill_all(session: int) -> None:
    """Every process of a session gets SIGKILL, until none is left."""
    give_up = time.monotonic() + GONE_S_MAX
    while left := members(session):
        for pid in left:
            kill(pid)
        if time.monotonic() > give_up:
            raise UserError(f"processes {left} of session {session} do not end")
        time.sleep(0.01)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def ancestors(pid: int) -> Iterator[int]:
    """This process, the one that started it, and so on."""
    while pid > 1:
        yield pid
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        pid = int(stat.rpartition(")")[2].split()[1])


def below(process: int, session: int) -> list[int]:
    """Its descendants within the session."""
    found = []
    for pid in members(session):
        with contextlib.suppress(OSError):  # it has just ended
            if pid != process and process in ancestors(pid):
                found.append(pid)
    return found


def kill_with_all_below(process: int, session: int) -> None:
    """Kill a process with its descendants, as when a machine dies."""
    os.kill(process, signal.SIGSTOP)  # so that it starts no new processes
    for pid in [
        *below(process, session),
        process,
    ]:  # looked up first: orphans have no ancestors
        kill(pid)


def check_ours(pid: int, roots: Collection[int]) -> int:
    """Refuse pids that do not descend from `roots`, whatever a registry contains."""
    if not set(ancestors(pid)) & set(roots):
        raise UserError(f"process {pid} was not started from here", expected="a cluster on this machine")
    return pid


def executor_of(worker: int, roots: Collection[int]) -> int:
    """The JVM that a Python worker belongs to: the nearest one above it, and below one of `roots`."""
    for pid in ancestors(check_ours(worker, roots)):
        if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() == "java":
            return pid
    raise UserError(f"no JVM started process {worker}")
