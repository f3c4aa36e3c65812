"""Trying a processor: it runs on the real core, disturbances do not show, and carelessness is named."""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from tiercel.errors import UserError
from tiercel.testing import NotDeterministic, Trial, check_deterministic

NOON = datetime.datetime(2026, 6, 1, 12, tzinfo=datetime.UTC)
NOON_MS = int(NOON.timestamp() * 1000)
SPEEDS = "car string, speed double, at timestamp"


class Mean(StatefulProcessor):
    """The mean speed per car, and a list of all."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.sums = handle.getValueState("sums", "count int, total double, last timestamp")
        self.seen = handle.getMapState("seen", "speed double", "count int")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.speed < 0:
                raise ValueError("backwards")
            count, total, _ = self.sums.get() or (0, 0.0, None)
            count, total = count + 1, total + row.speed
            self.sums.update((count, total, row.at))
            self.seen.updateValue((row.speed,), ((self.seen.getValue((row.speed,)) or (0,))[0] + 1,))
            yield Row(car=key[0], mean=self.noise(total / count))

    def noise(self, mean: float) -> float:
        return mean

    def close(self) -> None:
        """Nothing to let go."""


class Minutes(Mean):
    """Tells the mean when a minute has passed, in whichever time."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            list(super().handleInputRows(key, iter([row]), timerValues))
            ms = int(row.at.timestamp() * 1000)
            now = timerValues.getCurrentProcessingTimeInMs()
            self.handle.registerTimer((ms if self.event_time else now) // 60_000 * 60_000 + 60_000)
        return iter(())

    def __init__(self, event_time: bool) -> None:
        self.event_time = event_time

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        count, total, _ = self.sums.get()
        self.sums.clear()
        yield Row(car=key.car, mean=total / count)


def speed(car: str, value: float, second: int = 0) -> dict[str, Any]:
    return {"car": car, "speed": value, "at": NOON + datetime.timedelta(seconds=second)}


def facts(**more: Any) -> dict[str, Any]:
    return {"schema": SPEEDS, "key": "car", "output": "car string, mean double", **more}


ROWS = [speed(car, value, n) for n, (car, value) in enumerate(zip("aabacab" * 2, range(14), strict=True))]


# -- a trial -----------------------------------------------------------------------------------


def test_rows_go_in_and_outputs_come_out() -> None:
    trial = Trial(Mean(), **facts())
    trial.send(speed("a", 70.0), speed("a", 80.0), speed("b", 1.0))
    assert trial.outputs("a") == [("a", 70.0), ("a", 75.0)]
    assert sorted((row.car, row.mean) for row in trial.outputs()) == [("a", 70.0), ("a", 75.0), ("b", 1.0)]
    assert trial.known_keys() == [("a",), ("b",)]


@pytest.mark.parametrize("strategy", ["live", "pause", "restart"])
def test_state_moves_with_its_key(strategy: str) -> None:
    trial = Trial(Mean(), **facts())
    owners = []
    for n in range(4):
        trial.send(speed("a", n))
        owners.append(trial.owner("a"))
        trial.move("a", strategy)
    assert owners[0] == owners[2] != owners[1] == owners[3]
    assert [row.mean for row in trial.outputs("a")] == [0.0, 0.5, 1.0, 1.5]


def test_crash_does_not_change_outputs() -> None:
    trial = Trial(Mean(), **facts())
    for n in range(4):
        trial.send(speed("a", n))
        trial.crash(after_checkpoint=n == 1)
    assert [row.mean for row in trial.outputs("a")] == [0.0, 0.5, 1.0, 1.5]


def test_state_has_the_form_that_user_code_sees() -> None:
    trial = Trial(Mean(), **facts())
    trial.send(speed("a", 3.0))
    trial.crash(after_checkpoint=True)
    trial.move("a")
    state = trial.state("a")
    assert (state["sums"]["count"], state["sums"].total) == (1, 3.0)
    assert state["sums"].last.timestamp() == NOON.timestamp()
    assert state["seen"] == {(3.0,): (1,)}
    assert trial.state("nobody") == {}


def test_a_row_that_raises_is_a_dead_letter_or_ends_the_trial() -> None:
    trial = Trial(Mean(), **facts())
    trial.send(speed("a", -1.0))
    assert trial.dead_letters("a") == [("ValueError: backwards", ("a", -1.0, NOON))]
    with pytest.raises(Exception, match="operator operator failed at offset 1"):
        Trial(Mean(), **facts(on_error="fail")).send(speed("a", -1.0))


def test_timers_fire_when_processing_time_has_passed() -> None:
    trial = Trial(Minutes(event_time=False), **facts(time_mode="processingTime"))
    trial.send(speed("a", 3.0))
    due = trial.timers("a")
    trial.advance_time(59_999)
    assert trial.outputs() == []
    trial.advance_time(1)
    assert (trial.now_ms, trial.outputs()) == (due[0], [("a", 3.0)])
    assert trial.timers("a") == []


def test_timers_fire_when_the_watermark_has_passed() -> None:
    trial = Trial(Minutes(event_time=True), **facts(time_mode="eventTime", event_time="at"))
    trial.send(speed("a", 3.0))
    trial.watermark(NOON_MS + 59_999)
    assert trial.outputs() == []
    trial.move("a")
    trial.watermark(NOON_MS + 60_000)
    assert trial.outputs() == [("a", 3.0)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"key": ()}, "no key column"),
        ({"key": "bus"}, "'bus' is not in the schema"),
        ({"time_mode": "eventTime"}, "without an event time"),
        ({"time_mode": "soon"}, "time mode 'soon'"),
        ({"output": "x blob"}, "(?i)blob"),
    ],
)
def test_invalid_arguments_of_a_trial_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Trial(Mean(), **facts(**wrong))


def test_misuse_of_a_trial_is_refused() -> None:
    trial = Trial(Mean(), **facts())
    for misuse, message in (
        (lambda: trial.watermark(5), "without event time"),
        (lambda: trial.advance_time(-1), "time does not go back"),
        (lambda: trial.move("a", "by post"), "strategy 'by post'"),
        (lambda: trial.move(5), "column car: 5"),
        (lambda: trial.send({"car": 1}), "column speed is missing"),
    ):
        with pytest.raises(UserError, match=message):
            misuse()


# -- is it deterministic -----------------------------------------------------------------------


def test_a_deterministic_processor_passes() -> None:
    check_deterministic(Mean(), [*ROWS, speed("a", -1.0)], **facts())


@pytest.mark.parametrize(
    ("processor", "time"),
    [
        (Minutes(event_time=False), {"time_mode": "processingTime"}),
        (Minutes(event_time=True), {"time_mode": "eventTime", "event_time": "at"}),
    ],
)
def test_a_deterministic_processor_with_timers_passes(processor: Minutes, time: dict[str, str]) -> None:
    check_deterministic(processor, ROWS, step_ms=20_000, **facts(**time))


class Random(Mean):
    def noise(self, mean: float) -> float:
        return mean + (random.Random().random() if mean >= 3.5 else 0.0)


class Now(Mean):
    def noise(self, mean: float) -> float:
        return float(time.perf_counter_ns())


class Counting(Mean):
    count = 0

    def noise(self, mean: float) -> float:
        self.count += 1
        return float(self.count)


class Collecting(Mean):
    def __init__(self) -> None:
        self.all: list[float] = []

    def noise(self, mean: float) -> float:
        self.all.append(mean)
        return float(len(self.all))


class Shared(Mean):
    everything: list[float] = []  # noqa: RUF012  that is the mistake

    def noise(self, mean: float) -> float:
        self.everything.append(mean)
        return float(len(self.everything))


class Hidden(Mean):
    """Its outputs are right, its state is not."""

    def noise(self, mean: float) -> float:
        self.seen.updateValue((time.perf_counter(),), (1,))
        return mean


@pytest.mark.parametrize(
    ("processor", "run", "column", "hint"),
    [
        (Random(), "run again", "column mean", "no random numbers"),
        (Now(), "run again", "column mean", "no now()"),
        (Counting(), "attributes of the processor survive", "column mean", "into state"),
        (Collecting(), "moved at every tuple", "column mean", "a list or dict in an attribute"),
        (Shared(), "run again", "column mean", "no now()"),
        (Hidden(), "run again", "state seen", "no now()"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Mean) else "",
)
def test_nondeterminism_is_named_with_its_cause(processor: Mean, run: str, column: str, hint: str) -> None:
    Shared.everything.clear()
    with pytest.raises(NotDeterministic) as found:
        check_deterministic(processor, ROWS, **facts())
    message = str(found.value)
    assert (found.value.run, found.value.column) == (run, column)
    assert type(processor).__name__ in message
    assert hint in message
    assert found.value.expected != found.value.found


def test_error_names_the_tuple_and_its_key() -> None:
    with pytest.raises(NotDeterministic) as found:
        check_deterministic(Random(), [speed("a", 1.0), speed("b", 3.5), speed("a", 1.0)], **facts())
    assert (found.value.tuple_number, found.value.key, found.value.expected > 3.5) == (2, ("b",), True)
