"""The benchmarks of policies: their judge notices every kind of fault, and their loads are what they say."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from tiercel.bench.scenarios.elasticity.gauge_cost import sampling_s
from tiercel.bench.scenarios.elasticity.offload import BUSY, EDGES, ModeResult, demand
from tiercel.bench.scenarios.elasticity.offload import Options as OffloadOptions
from tiercel.bench.scenarios.elasticity.offload import draw as draw_offload
from tiercel.bench.scenarios.elasticity.ramp import by_second
from tiercel.bench.scenarios.elasticity.soak import Options as SoakOptions
from tiercel.bench.scenarios.elasticity.soak import draw as draw_soak
from tiercel.bench.scenarios.elasticity.timed_load import Judge

RIGHT = [("a", n, n * (n + 1) // 2) for n in range(1, 21)]


def verdict(outputs: list[tuple[str, int, int]], sent: int = 20) -> dict[str, int]:
    judge = Judge()
    for output in outputs:
        judge.take(*output)
    return judge.verdict({"a": sent})


def test_right_outputs_have_no_fault() -> None:
    assert set(verdict(RIGHT).values()) == {0}


@pytest.mark.parametrize(
    ("outputs", "sent", "fault"),
    [
        (RIGHT[:5] + RIGHT[6:], 20, "lost"),
        (RIGHT, 21, "lost"),
        ([*RIGHT, RIGHT[3]], 20, "doubled"),
        ([*RIGHT[:4], RIGHT[5], RIGHT[4], *RIGHT[6:]], 20, "reordered"),
        ([*RIGHT[:4], ("a", 5, 99), *RIGHT[5:]], 20, "wrong"),
    ],
)
def test_one_planted_fault_is_counted_as_what_it_is(
    outputs: list[tuple[str, int, int]], sent: int, fault: str
) -> None:
    assert verdict(outputs, sent) == {
        **dict.fromkeys(("lost", "doubled", "reordered", "wrong"), 0),
        fault: 1,
    }


def test_the_judge_counts_what_a_list_of_all_outputs_would_say() -> None:
    random = Random(3)
    outputs = [row for row in RIGHT * 2 if random.random() < 0.8]
    random.shuffle(outputs)
    found = verdict(outputs)
    numbers = [n for _, n, _ in outputs]
    assert found["lost"] == len(set(range(1, 21)) - set(numbers))
    assert found["doubled"] == len(numbers) - len(set(numbers))


def test_latency_by_second_is_that_of_the_rows_due_in_it() -> None:
    due_ns = np.array([10.1, 10.2, 11.5, 13.0]) * 1e9
    latency_ms = np.array([1.0, 5.0, 7.0, 9.0])
    assert by_second(due_ns.astype(np.int64), latency_ms, 10.0) == [(0.0, 5.0), (1.0, 7.0), (3.0, 9.0)]


def test_demand_rises_above_the_cost_and_falls_again(tmp_path: Path) -> None:
    options = OffloadOptions(("cloud",), 30, 600, 60.0, 200.0, 40, 40.0, 200.0, 1, tmp_path)
    rates = demand(options)
    assert len(rates) == 60
    assert (rates[0], max(rates), rates[-1]) == (30.0, 600.0, 30.0)
    assert sum(rate > options.cost for rate in rates) > 20
    assert BUSY in EDGES
    line = {"mode": "cloud"}
    draw_offload(
        [ModeResult(line, list(enumerate(rates)), [(0.5, 3)], [(1.0, 80.0)])], options, tmp_path / "o.png"
    )
    soak = SoakOptions(1.0, 100, 1_000.0, 4, True, 1, tmp_path)
    draw_soak([(0.0, 5.0), (1.0, 9.0)], [(0.5, 1)], [(0.0, 3.0)], [0.7], soak, tmp_path / "s.png")
    assert {path.name for path in tmp_path.glob("*.png")} == {"o.png", "s.png"}


def test_counting_a_row_takes_time_that_can_be_measured() -> None:
    assert 0 < sampling_s(100) < 1
