"""What a death cost, out of a record whose outage is known."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from tiercel.bench.metrics import Outputs
from tiercel.bench.scenarios import recover, recover_systems
from tiercel.bench.scenarios.recover import Steady, first_output_s, normal_s
from tiercel.bench.scenarios.recover_apps import FAILURES, Setup
from tiercel.bench.scenarios.recover_sweep import draw
from tiercel.bench.scenarios.recover_systems import Spark

MS = 1_000_000


def outage(length_ms: int, *, before_ms: int = 8_000, after_ms: int = 9_000) -> tuple[Outputs, int]:
    """A tuple each ms with 2 ms latency; those due within the outage come out at its end."""
    now = time.monotonic_ns()
    killed = now - after_ms * MS - length_ms * MS
    due = np.arange(killed - before_ms * MS, now, MS, dtype=np.int64)
    emitted = due + 2 * MS
    waiting = (due >= killed) & (due < killed + length_ms * MS)
    emitted[waiting] = killed + length_ms * MS
    return Outputs(np.zeros_like(due), due, emitted), killed


@pytest.mark.parametrize("length_ms", [250, 1_000, 3_500])
def test_planted_outage_is_measured_with_its_length(length_ms: int) -> None:
    outputs, killed = outage(length_ms)
    steady = Steady.of(outputs, killed - 8_000 * MS, killed)
    assert steady.p99_ms == pytest.approx(2.0)
    assert first_output_s(outputs, killed) == pytest.approx(length_ms / 1e3)
    assert normal_s(outputs, killed, steady.normal_ms) == pytest.approx(length_ms / 1e3, abs=0.25)


def test_missing_outputs_are_not_normal() -> None:
    outputs, killed = outage(500)
    seen = outputs.emitted_ns < killed + 100 * MS
    cut = Outputs(outputs.sensor[seen], outputs.due_ns[seen], outputs.emitted_ns[seen])
    assert first_output_s(cut, killed) is None
    assert normal_s(cut, killed, 10.0) is None


def test_first_output_of_a_doubled_tuple_counts() -> None:
    twice = Outputs(np.array([1, 1, 2]), np.array([5, 5, 5]), np.array([9, 7, 8]))
    once = recover._settled(twice)
    assert once.sensor.tolist() == [1, 2]
    assert once.emitted_ns.tolist() == [7, 8]


class Struck(Spark):
    """A query that does not miss the first worker that is killed."""

    def __init__(self, place: Path) -> None:
        self.setup = Setup(str(place), 1)
        self.killed: list[int] = []

    def _busy_worker(self) -> int:
        return len(self.killed) + 1

    def _strike(self, what: str, worker: int) -> int:
        self.killed.append(worker)
        if worker > 1:
            (self.setup.place / FAILURES).write_bytes(b".")
        return 1_000 * worker


def test_spark_worker_is_killed_until_the_query_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recover_systems, "MISSED_S_MAX", 0.05)
    assert Struck(tmp_path).kill("worker") == 2_000
    lost = Struck(tmp_path)
    assert lost.kill("executor") == 1_000
    assert lost.killed == [1]


def test_ratio_is_none_without_both_figures() -> None:
    assert recover._ratio(10.0, 2.0) == 5.0
    assert recover._ratio(None, 2.0) is None


def test_sweep_draws_a_picture(tmp_path: Path) -> None:
    rows = [
        {"how": "checkpoint", "checkpoint_s": 1, "replayed_s": 0.9, "first_output_s": 1.1, "normal_s": 1.5},
        {"how": "replay", "checkpoint_s": None, "replayed_s": 44.0, "first_output_s": 4.0, "normal_s": None},
        {"how": "source", "checkpoint_s": None, "replayed_s": 36.0, "first_output_s": 9.0, "normal_s": 12.0},
    ]
    draw(rows, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
