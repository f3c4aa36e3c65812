"""The figures of `tiercel bench mobility`: faults, interruptions and whereabouts, from made-up drives."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from tiercel.bench.scenarios.mobility import figures
from tiercel.bench.scenarios.mobility.cars import Car, draw_cars
from tiercel.bench.scenarios.mobility.figures import Transfer

S = 1_000_000_000
SITES = {"cloud": None, "edge-1": "cloud", "edge-2": "cloud"}
CAR = Car("car-0", 50.0, [(0.0, "edge-1"), (5.0, "edge-2")])
UP = Transfer((0,), "edge-1", "cloud", 5.5, 6.0, "left")
DOWN = Transfer((0,), "cloud", "edge-2", 8.5, 9.0, "stayed")


def drive(late_ms: float = 40.0, stop_s: tuple[float, float] = (0.0, 0.0)) -> figures.Outputs:
    """50 rows a second for 14 s; those due within `stop_s` come at its end."""
    rows = []
    for n in range(700):
        due = n * S // 50
        got = due + int(late_ms * 1e6)
        if stop_s[0] <= due / S < stop_s[1]:
            got = int(stop_s[1] * S) + int(late_ms * 1e6)
        rows.append((0, n + 1, n + 1, due, got, 0))
    return np.array(rows, dtype=np.int64)


def test_a_drive_without_faults_has_none() -> None:
    assert sum(figures.count_faults(drive(), [700]).values()) == 0


@pytest.mark.parametrize("fault", ["lost", "doubled", "reordered", "wrong_state"])
def test_a_planted_fault_is_counted_as_what_it_is(fault: str) -> None:
    outputs = drive()
    match fault:
        case "lost":
            outputs = np.delete(outputs, 100, axis=0)
        case "doubled":
            outputs = np.insert(outputs, 100, outputs[100], axis=0)
        case "reordered":
            outputs[[100, 101]] = outputs[[101, 100]]
        case _:
            outputs[100, figures.COUNT] = 7
    found = figures.count_faults(outputs, [700])
    assert found == {name: int(name == fault) for name in found}


def test_a_planted_stop_shows_as_the_interruption_of_its_hand_over_and_not_in_the_floor() -> None:
    outputs = drive(stop_s=(5.7, 5.8))
    (found,) = figures.interruptions(outputs, 0, [UP], 1)
    assert found == pytest.approx(100.0, abs=1.0)
    (floor,) = figures.interruptions(outputs, 0, [UP], 1, shift_s=3.0)
    assert floor == 0.0


def test_a_longer_way_behind_a_hand_over_is_no_interruption() -> None:
    outputs = drive()
    behind = outputs[:, figures.DUE] >= 5.8 * S
    outputs[behind, figures.GOT] += 30_000_000
    assert figures.interruptions(outputs, 0, [UP], 1) == [0.0]


def test_outputs_are_told_apart_by_where_the_state_was() -> None:
    outputs = drive()
    labels = figures.whereabouts(outputs, 0, [CAR], [UP, DOWN], SITES)
    at = {second: labels[second * 50] for second in (1, 5, 7, 10)}
    assert at == {1: "home", 5: "away", 7: "ancestor", 10: "home"}


def test_cars_begin_somewhere_and_cross_to_neighbours() -> None:
    edges = ["edge-1", "edge-2", "edge-3", "edge-4"]
    cars = draw_cars(random.Random(1), 50, 5, 0.5, 50.0, edges, 10.0, 60.0)
    assert [car.rate for car in cars[:6]] == [50.0] * 5 + [0.5]
    for car in cars:
        places = [edges.index(site) for _, site in car.route]
        assert all((b - a) % 4 in (1, 3) for a, b in itertools.pairwise(places))
        assert car.site_at(car.route[-1][0]) == car.route[-1][1]
