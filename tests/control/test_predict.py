"""The cost model: which strategy is predicted to cost what, and which one `auto` takes."""

from __future__ import annotations

import pytest

from tiercel.control.predict import Costs, MoveFacts, choose, learn, predict
from tiercel.core.migration.strategies import STRATEGIES

SMALL = MoveFacts(keys=500, state_bytes=500_000, rate=2_500)
LARGE = MoveFacts(keys=50_000, state_bytes=200_000_000, rate=2_500)


def test_a_live_move_stops_its_keys_for_less_than_any_that_flips_first() -> None:
    for facts in (SMALL, LARGE):
        others = [predict(name, facts).stoppage_ms for name, s in STRATEGIES.items() if s.flips_first]
        assert predict("live", facts).stoppage_ms < min(others)


def test_the_stoppage_of_live_does_not_grow_with_the_state_and_that_of_pause_does() -> None:
    assert predict("live", LARGE).stoppage_ms == pytest.approx(predict("live", SMALL).stoppage_ms)
    assert predict("pause", LARGE).stoppage_ms > 50 * predict("pause", SMALL).stoppage_ms


def test_a_link_adds_its_latency_to_the_stoppage_and_its_bandwidth_to_the_transfer() -> None:
    far = MoveFacts(keys=500, state_bytes=50_000_000, latency_ms=40, mbit=100)
    near = MoveFacts(keys=500, state_bytes=50_000_000)
    assert predict("live", far).stoppage_ms - predict("live", near).stoppage_ms == pytest.approx(40)
    assert predict("pause", far).duration_ms > 4_000  # 50 MB at 100 Mbit/s


def test_only_what_changes_travels_to_a_standby() -> None:
    facts = MoveFacts(keys=10_000, state_bytes=10_000_000, rate=100, has_standby=True)
    assert predict("standby", facts).size_bytes < predict("live", facts).size_bytes / 50
    assert choose(facts).strategy == "standby"


def test_auto_takes_no_strategy_that_the_operator_cannot_have() -> None:
    choice = choose(MoveFacts(keys=500, state_bytes=500_000, deterministic=False))
    assert STRATEGIES[choice.strategy].flips_first
    found = {p.strategy: p.impossible for p in choice.predictions}
    assert "non-deterministic" in found["live"]


def test_auto_never_takes_a_strategy_whose_stoppage_is_far_above_the_least() -> None:
    for facts in (SMALL, LARGE, MoveFacts(keys=64, state_bytes=1_000), MoveFacts(keys=0, state_bytes=0)):
        choice = choose(facts)
        least = min(p.stoppage_ms for p in choice.predictions if not p.impossible)
        assert choice.prediction.stoppage_ms <= max(1.3 * least, least + 0.5)


def test_auto_does_not_take_a_strategy_that_waits_for_rows() -> None:
    found = {p.strategy: p.impossible for p in choose(SMALL).predictions}
    assert all(found[name] for name, strategy in STRATEGIES.items() if strategy.awaits_rows)


def test_the_choice_prints_every_strategy_and_the_reason() -> None:
    text = str(choose(SMALL))
    assert all(name in text for name in STRATEGIES if not name.startswith("push-"))
    assert "auto takes" in text


def test_a_backlog_is_in_the_peak_of_every_strategy() -> None:
    behind = MoveFacts(keys=500, state_bytes=500_000, backlog_rows=5_000, service_us=1_000)
    assert all(predict(name, behind).peak_ms > 5_000 for name in STRATEGIES)


def test_predictions_follow_the_moves_that_have_ended() -> None:
    before = predict("live", SMALL)
    after = predict("live", SMALL, learn(Costs(), [(before, 3 * before.duration_ms)]))
    assert after.duration_ms == pytest.approx(3 * before.duration_ms, rel=1e-3)
    again = learn(Costs(learnt={"live": 3.0}), [(after, after.duration_ms)])
    assert again.learnt["live"] == pytest.approx(3.0, rel=1e-3), "a right prediction changes nothing"
