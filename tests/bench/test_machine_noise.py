"""The loop that measures gaps: it sees a stop, and no gap where there was none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import msgspec

from tiercel.bench.baselines import machine_noise as stalls


def test_a_stop_is_a_gap_of_its_length() -> None:
    core = min(os.sched_getaffinity(0))
    loop = subprocess.Popen(
        [sys.executable, "-m", "tiercel.bench.baselines.machine_noise", str(core), "4"],
        stdout=subprocess.PIPE,
    )
    time.sleep(2.0)  # it has begun
    os.kill(loop.pid, signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(loop.pid, signal.SIGCONT)
    gaps = msgspec.json.decode(loop.communicate()[0], type=list[float])
    assert max(gaps) > 250


def test_gaps_are_summarised_as_rate_median_and_maximum() -> None:
    assert stalls._line([], 4.0) == {"gaps_per_s": 0.0, "median_ms": None, "max_ms": None}
    assert stalls._line([0.6, 1.0, 7.04], 2.0) == {"gaps_per_s": 1.5, "median_ms": 1.0, "max_ms": 7.0}


def test_one_core_and_all_cores_are_measured() -> None:
    found = stalls.machine_stalls(0.1)
    assert found.keys() == {"seconds", "one_core", "all_cores"}
    assert found["one_core"].keys() == found["all_cores"].keys() == {"gaps_per_s", "median_ms", "max_ms"}
