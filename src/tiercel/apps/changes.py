"""What happens to an application while it runs: a live move, a scale-out, a `kill -9`.

Responsible for: carrying out one change, and when it began and ended.
Not responsible for: when (run.py), what it does to latency (figures.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from time import monotonic_ns

import msgspec

from tiercel import Live, UserError
from tiercel.apps.app import SITE
from tiercel.chaos.processes import check_ours, kill

CHANGE_S_MAX = 180.0
SLOTS = 4096  # of an operator that does not say otherwise
MOVED_SHARE = 2  # a move takes every second slot of an instance


class Change(msgspec.Struct, frozen=True):
    """One change that was carried out."""

    kind: str
    begin_ns: int
    end_ns: int
    about: str

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


def move_half(live: Live, operator: str) -> str:
    """Half of what the first instance owns moves live to the second one."""
    source, destination = f"{operator}@{SITE}#1", f"{operator}@{SITE}#2"
    slots = range(0, SLOTS, MOVED_SHARE)
    moving = live.move(operator, slots=slots, source=source, to=destination, retries=3)
    return "; ".join(map(str, moving.wait(CHANGE_S_MAX)))


def scale_out(live: Live, operator: str) -> str:
    """One instance more."""
    before = sum(p.kind == "instance" and p.name.startswith(f"{operator}@") for p in live.status().processes)
    live.scale(operator, {SITE: before + 1}).wait()
    return f"{operator}: {before} to {before + 1} instances"


def kill_instance(live: Live, operator: str) -> str:
    """SIGKILL for the first instance; returns when its successor is attached."""
    name = f"{operator}@{SITE}#1"
    killed = next(p for p in live.status().processes if p.name == name)
    kill(check_ours(killed.pid, [os.getpid()]))
    give_up = time.monotonic() + CHANGE_S_MAX
    while time.monotonic() < give_up:
        found = next((p for p in live.status().processes if p.name == name), None)
        if found is not None and found.incarnation > killed.incarnation and found.state == "running":
            return f"{name}: process {killed.pid} killed, incarnation {found.incarnation} runs"
        time.sleep(0.05)
    raise UserError(f"{name} did not start again within {CHANGE_S_MAX:g} s after its process was killed")


def let_be(live: Live, operator: str) -> str:
    """Nothing, for a second: what the figures are without a change."""
    time.sleep(1.0)
    return "no change"


CHANGES: dict[str, Callable[[Live, str], str]] = {
    "none": let_be,
    "move": move_half,
    "scale": scale_out,
    "kill": kill_instance,
}


def perform(live: Live, operator: str, kind: str) -> Change:
    begin_ns = monotonic_ns()
    about = CHANGES[kind](live, operator)
    return Change(kind, begin_ns, monotonic_ns(), about)


def check_changes(kinds: list[str]) -> list[str]:
    for kind in kinds:
        if kind not in CHANGES:
            raise UserError(f"unknown change {kind!r}", expected=f"some of: {', '.join(CHANGES)}")
    return kinds
