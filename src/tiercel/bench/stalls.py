"""How often this machine takes a core away from who is at work: what no program on it can be faster than.

Responsible for: a bare loop on one core, then on all, that does nothing but look at the clock; its gaps.
Not responsible for: what a benchmark measures meanwhile: the loop has the machine for itself.

A virtual machine may share its cores. Where the gaps come only while all cores are busy, a figure of a few
milliseconds that is taken while they are has these gaps in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import msgspec

from tiercel.bench.report import Line

SECONDS = 4.0
GAP_MS = 0.5  # a loop on a core of its own never stops for so long


def machine_stalls(seconds: float = SECONDS) -> Line:
    """Gaps of a loop on one core, and of loops on all cores at once."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not cores:
        return {}  # nothing can be bound to a core here
    return {
        "seconds": seconds,
        "one_core": _told(_gaps(cores[:1], seconds), seconds),
        "all_cores": _told(_gaps(cores, seconds), seconds),
    }


def _gaps(cores: list[int], seconds: float) -> list[float]:
    loops = [
        subprocess.Popen(
            [sys.executable, "-m", "tiercel.bench.stalls", str(core), str(seconds)], stdout=subprocess.PIPE
        )
        for core in cores
    ]
    found: list[float] = []
    for loop in loops:
        found += msgspec.json.decode(loop.communicate()[0], type=list[float])
    return sorted(found)


def _told(gaps: list[float], seconds: float) -> Line:
    return {
        "gaps_per_s": round(len(gaps) / seconds, 1),
        "median_ms": round(gaps[len(gaps) // 2], 1) if gaps else None,
        "max_ms": round(gaps[-1], 1) if gaps else None,
    }


def loop(core: int, seconds: float) -> list[float]:
    """The gaps of a loop on this core, in ms."""
    os.sched_setaffinity(0, {core})
    clock, gaps = time.perf_counter, []
    before = clock()
    end = before + seconds
    while before < end:
        now = clock()
        if now - before > GAP_MS / 1e3:
            gaps.append((now - before) * 1e3)
        before = now
    return gaps


if __name__ == "__main__":
    print(msgspec.json.encode(loop(int(sys.argv[1]), float(sys.argv[2]))).decode())
