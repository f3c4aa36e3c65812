"""Calls of user code: one per entry and key, atomic, with identities, dead letters and timers."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tiercel.core.errors import InvalidRequest, OperatorFailed
from tiercel.core.instance.user_code import ProcessorRunner
from tiercel.core.model.log import INITIAL, Output, Row
from tiercel.core.model.topology import Operator, Topology
from tiercel.core.state.handle import KeyState
from tiercel.core.state.table import StateTable
from tiercel.sim.workload import PlainCode

KEY = b"k"


class Obedient:
    """Counts the row, and then does as the payload asks."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n long")
        self.order = handle.getListState("order", "what string")

    def handleInputRows(self, key: Any, rows: Iterator[Any], times: Any) -> Iterator[Row]:
        for _, payload in rows:
            self.count.update(((self.count.get() or (0,))[0] + 1,))
            match payload:
                case "raise":
                    raise ValueError("no")
                case ("timer", expiry):
                    self.handle.registerTimer(expiry)
                case "remember":
                    self.seen = getattr(self, "seen", 0) + 1
                    yield (KEY, 0, ("seen", self.seen))
                    continue
                case "forget":
                    self.count.clear()
            yield (KEY, 0, (payload, (self.count.get() or (0,))[0]))

    def handleInitialState(self, key: Any, row: Any, times: Any) -> None:
        if row[1] == "raise":
            raise ValueError("no")
        self.count.update((row[1],))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        expiry = expiredTimerInfo.getExpiryTimeInMs()
        self.order.appendValue((str(expiry),))
        if expiry % 10 == 3:
            raise ValueError("thirteen")
        if expiry % 10 == 7:
            self.handle.registerTimer(expiry + 100)
        yield (KEY, 0, ("fired", expiry, list(self.handle.listTimers())))


class Play:
    """One key in one table, called entry by entry as an instance does it."""

    def __init__(self, time_mode: str = "processingTime", **policy: Any) -> None:
        operator = Operator("op", ("in",), "out", (), time_mode=time_mode, **policy)
        self.engine = ProcessorRunner(PlainCode(Obedient()), operator)
        self.space = StateTable(4, lambda key: 3, lambda key: (key,))
        self.offset = 0

    @property
    def state(self) -> KeyState:
        return self.space.state(KEY)

    def call(
        self, *payloads: Any, time_ms: int = 0, event_time: int = 1, watermark: int = -1
    ) -> list[Output]:
        self.offset += 1
        out: list[Output] = []
        rows: list[Row] = [(KEY, event_time, payload) for payload in payloads]
        state = self.state
        self.engine.call(state, KEY, rows, time_ms, watermark, self.offset, out)
        self.space.touched(KEY, state, self.engine.handle.new_timers)
        return out

    def tick(self, time_ms: int) -> list[Output]:
        self.offset += 1
        out: list[Output] = []
        for key in self.space.due(time_ms):
            self.engine.fire(self.space.keys[key], key, time_ms, time_ms, -1, self.offset, out)
            self.space.touched(key, self.space.keys[key], self.engine.handle.new_timers)
        return out

    def take_dead_letters(self) -> list[Output]:
        taken, self.engine.dead_letters = self.engine.dead_letters, []
        return taken


def payloads_of(outputs: list[Output]) -> list[Any]:
    return [o.row[2] for o in outputs]


# -- outputs -----------------------------------------------------------------------------------


def test_a_replay_gives_outputs_the_same_identity() -> None:
    first, again = Play(), Play()
    out = first.call("x", "y")
    assert [(o.key, o.epoch, o.offset, o.n) for o in out] == [(KEY, 3, 1, 0), (KEY, 3, 1, 1)]
    assert again.call("x", "y") == out


def test_outputs_of_timers_continue_the_numbers_of_the_call() -> None:
    play = Play()
    play.call(("timer", 5))
    out = play.call("x", time_ms=5)
    assert payloads_of(out) == [("x", 2), ("fired", 5, [5])]
    assert [o.n for o in out] == [0, 1]


# -- calls that raise --------------------------------------------------------------------------


def test_a_row_that_raises_changes_nothing_and_becomes_a_dead_letter() -> None:
    play = Play()
    play.call("x")
    assert play.call("raise") == []
    assert play.state.values == {"count": (1,)}
    (dead,) = play.take_dead_letters()
    assert (dead.offset, dead.key, dead.epoch, dead.n) == (2, KEY, 3, 0)
    assert dead.row == (KEY, 1, ("ValueError: no", KEY, 2, msgspec.msgpack.encode("raise")))


def test_only_failing_rows_become_dead_letters_and_output_numbers_have_no_gap() -> None:
    play = Play()
    out = play.call("x", "raise", "y", "raise", "z")
    assert payloads_of(out) == [("x", 1), ("y", 2), ("z", 3)]
    assert [o.n for o in out] == [0, 1, 2]
    assert [dead.n for dead in play.take_dead_letters()] == [0, 1]


def test_initial_state_that_raises_becomes_a_dead_letter() -> None:
    play = Play()
    assert play.call("raise", event_time=INITIAL) == []
    assert len(play.take_dead_letters()) == 1
    assert play.state.empty


def test_a_timer_whose_handler_raises_is_removed_and_its_changes_are_undone() -> None:
    play = Play()
    play.call(("timer", 3), ("timer", 4))
    assert payloads_of(play.tick(4)) == [("fired", 4, [4])]
    assert play.state.values["order"] == [("4",)]
    assert play.state.timers == set()
    assert [dead.row[2] for dead in play.take_dead_letters()] == [
        ("ValueError: thirteen", KEY, 2, msgspec.msgpack.encode("timer"))
    ]


@pytest.mark.parametrize("payloads", [(("timer", 8), "raise"), (("timer", 8), ("timer", 3))])
def test_a_timer_of_a_successful_row_fires_even_if_the_next_row_fails(payloads: tuple[Any, ...]) -> None:
    play = Play()
    play.call(*payloads, time_ms=3)
    assert 8 in play.state.timers
    assert payloads_of(play.tick(8)) == [("fired", 8, [8])]


# -- error policies ----------------------------------------------------------------------------


class Flaky(Obedient):
    """Raises the first times for any input, after it has changed state."""

    failures = 0  # of the class: attributes of the object do not survive a call

    def handleInputRows(self, key: Any, rows: Iterator[Any], times: Any) -> Iterator[Row]:
        yield from super().handleInputRows(key, rows, times)
        self._fail()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield from super().handleExpiredTimer(key, timerValues, expiredTimerInfo)
        self._fail()

    def _fail(self) -> None:
        if Flaky.failures:
            Flaky.failures -= 1
            raise OSError("not yet")


def flaky(failures: int, **policy: Any) -> Play:
    play = Play(**policy)
    play.engine = ProcessorRunner(PlainCode(Flaky()), play.engine.operator)
    Flaky.failures = failures
    return play


@pytest.mark.parametrize("payloads", [("x",), ("x", "y")])
def test_with_retry_a_call_is_made_again_until_it_succeeds(payloads: tuple[str, ...]) -> None:
    play = flaky(2, on_error="retry", retries=2)
    out = play.call(*payloads)
    assert payloads_of(out) == [(payload, n) for n, payload in enumerate(payloads, 1)]
    assert [o.n for o in out] == list(range(len(payloads)))
    assert play.take_dead_letters() == []


def test_with_retry_a_call_that_never_succeeds_becomes_a_dead_letter() -> None:
    play = flaky(4, on_error="retry", retries=3)
    assert play.call("x") == []
    assert play.state.empty
    assert Flaky.failures == 0
    assert [dead.row[2][0] for dead in play.take_dead_letters()] == ["OSError: not yet"]


def test_with_retry_a_timer_fires_again_until_it_succeeds() -> None:
    play = flaky(0, on_error="retry", retries=1)
    play.call(("timer", 8))
    Flaky.failures = 1
    assert payloads_of(play.tick(8)) == [("fired", 8, [8])]
    assert play.state.values["order"] == [("8",)]
    assert play.take_dead_letters() == []


def test_retries_apply_to_the_retry_policy_only() -> None:
    play = flaky(1, retries=5)
    play.call("x")
    assert len(play.take_dead_letters()) == 1


def test_with_fail_an_error_ends_the_operator_and_names_its_place() -> None:
    play = Play(on_error="fail")
    play.call("x")
    with pytest.raises(OperatorFailed) as failed:
        play.call("raise")
    assert str(failed.value) == "operator op failed at offset 2, key b'k': ValueError: no"
    assert play.state.values == {"count": (1,)}
    assert str(pickle.loads(pickle.dumps(failed.value))) == str(failed.value)


@pytest.mark.parametrize("policy", [{"on_error": "ignore"}, {"retries": -1}])
def test_an_invalid_error_policy_is_refused(policy: dict[str, Any]) -> None:
    operator = Operator("op", ("in",), "out", (), **policy)
    with pytest.raises(InvalidRequest, match="operator op"):
        Topology({}, {}, {"op": operator}).validate()


# -- timers ------------------------------------------------------------------------------------


def test_timers_fire_once_and_in_order_and_the_firing_one_is_listed() -> None:
    play = Play()
    play.call(("timer", 20), ("timer", 10), ("timer", 30))
    assert payloads_of(play.tick(20)) == [("fired", 10, [10, 20, 30]), ("fired", 20, [20, 30])]
    assert play.tick(20) == []
    assert payloads_of(play.tick(99)) == [("fired", 30, [30])]


def test_a_timer_registered_by_a_timer_fires_when_it_is_due() -> None:
    play = Play()
    play.call(("timer", 7))
    assert payloads_of(play.tick(50)) == [("fired", 7, [7, 107])]
    assert payloads_of(play.tick(107)) == [("fired", 107, [107, 207])]


def test_a_timer_registered_by_a_timer_and_already_due_fires_with_the_next_event() -> None:
    """Not at once: in Spark it fires with the next batch."""
    play = Play()
    play.call(("timer", 7))
    assert payloads_of(play.tick(300)) == [("fired", 7, [7, 107])]
    assert payloads_of(play.tick(300)) == [("fired", 107, [107, 207])]
    assert payloads_of(play.call("x", time_ms=300)) == [("x", 2), ("fired", 207, [207, 307])]
    assert play.tick(300) == []


def test_event_time_timers_wait_for_the_watermark() -> None:
    play = Play("eventTime")
    play.call(("timer", 10), time_ms=1_000)
    assert payloads_of(play.call("x", time_ms=2_000, watermark=9)) == [("x", 2)]
    assert payloads_of(play.call("y", watermark=10)) == [("y", 3), ("fired", 10, [10])]


# -- the view of a call ------------------------------------------------------------------------


def test_attributes_of_a_processor_do_not_survive_a_call() -> None:
    play = Play()
    assert payloads_of(play.call("remember", "remember")) == [("seen", 1), ("seen", 2)]
    assert payloads_of(play.call("remember")) == [("seen", 1)]


def test_initial_state_makes_no_outputs_and_the_first_row_finds_it() -> None:
    play = Play()
    assert play.call(41, event_time=INITIAL) == []
    assert payloads_of(play.call("x")) == [("x", 42)]


def test_a_key_that_deleted_its_state_starts_without_state() -> None:
    play = Play()
    play.call("x", "forget")
    assert KEY not in play.space.keys
    assert KEY in play.space.dirty
    assert payloads_of(play.call("x")) == [("x", 1)]
