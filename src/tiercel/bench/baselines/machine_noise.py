"""The noise of the machine: how often a running program loses its core.

Responsible for: a loop on one core, then on all, that only reads the clock, and the gaps between its
    readings.
Not responsible for: benchmarks; none may run at the same time.

A virtual machine may share its cores. If gaps appear only while all cores are busy, a figure of a
few milliseconds that is measured under such load contains these gaps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import msgspec

from tiercel.bench.report import Line

SECONDS = 4.0
GAP_MS = 0.5  # a loop on a core of its own has no gap of this length


def machine_stalls(seconds: float = SECONDS) -> Line:
    """Gaps of a loop on one core, and of loops on all cores at once."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not cores:
        return {}  # nothing can be bound to a core here
    return {
        "seconds": seconds,
        "one_core": _line(_gaps(cores[:1], seconds), seconds),
        "all_cores": _line(_gaps(cores, seconds), seconds),
    }


def _gaps(cores: list[int], seconds: float) -> list[float]:
    loops = [
        subprocess.Popen(
            [sys.executable, "-m", "tiercel.bench.baselines.machine_noise", str(core), str(seconds)],
            stdout=subprocess.PIPE,
        )
        for core in cores
    ]
    found: list[float] = []
    for loop in loops:
        found += msgspec.json.decode(loop.communicate()[0], type=list[float])
    return sorted(found)


def _line(gaps: list[float], seconds: float) -> Line:
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
