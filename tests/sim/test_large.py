"""The large scenario: its size, and the arithmetic of its figures."""

from __future__ import annotations

from tiercel.sim.scenario import large


def test_the_large_scenario_is_as_large_as_it_says() -> None:
    scenario = large.scenario()
    moves = [action.strategy for action in scenario.actions]
    assert len(scenario.topology.sites) == 50
    assert len(moves) == 200
    assert set(moves) == {"live", "pause", "restart"}
    assert min(scenario.latency_ms.values()) >= 1.0
    assert max(scenario.latency_ms.values()) <= 30.0
    assert len({row[0] for t in scenario.traffic for frame in t.frames for row in frame}) == 20_000


def test_a_planted_stop_shows_as_the_stoppage_of_its_key() -> None:
    rows = [(due, 7.0 if due != 1_050 else 57.0) for due in range(800, 1_800, 10)]
    assert large.stoppage_ms(rows, 1_000.0, 1_100.0) == 50.0


def test_higher_latency_of_the_new_owner_is_not_a_stoppage() -> None:
    rows = [(due, 7.0 if due < 1_050 else 22.0) for due in range(800, 1_800, 10)]
    assert large.stoppage_ms(rows, 1_000.0, 1_100.0) == 0.0


def test_a_quantile_is_a_value_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [large.quantile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert large.quantile([], 0.5) is None
