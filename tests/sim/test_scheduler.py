"""The scheduler: order of calls, limits of a run, its story."""

from __future__ import annotations

import pytest

from tiercel.sim.engine.scheduler import NotQuiet, Scheduler


def test_calls_run_in_order_of_time_and_ties_in_order_of_insertion() -> None:
    scheduler, seen = Scheduler(1), []
    scheduler.call_at(2.0, seen.append, "late")
    scheduler.call_at(1.0, seen.append, "first")
    scheduler.call_after(1.0, seen.append, "second")
    scheduler.call_at(-5.0, seen.append, "overdue")
    assert scheduler.run() == 4
    assert seen == ["overdue", "first", "second", "late"]


def test_run_stops_at_the_given_time_and_continues_later() -> None:
    scheduler, seen = Scheduler(1), []
    scheduler.call_at(1.0, seen.append, 1)
    scheduler.call_at(3.0, seen.append, 3)
    scheduler.run(until_ms=2.0)
    assert (seen, scheduler.now_ms) == ([1], 2.0)
    scheduler.run(until_ms=4.0)
    assert (seen, scheduler.now_ms, scheduler.steps) == ([1, 3], 4.0, 2)


def test_run_that_never_becomes_quiet_is_reported_with_its_seed() -> None:
    scheduler = Scheduler(77)

    def again() -> None:
        scheduler.call_after(1.0, again)

    again()
    with pytest.raises(NotQuiet, match=r"seed 77: .*100\.000 ms after 100 steps") as failure:
        scheduler.run(steps_max=100)
    assert (failure.value.seed, failure.value.steps, failure.value.at_ms) == (77, 100, 100.0)


def test_story_is_kept_only_on_request_and_does_not_change_the_fingerprint() -> None:
    silent, telling = Scheduler(1), Scheduler(1, keep_story=True)
    for scheduler in (silent, telling):
        scheduler.trace("crash", "router", 3)
    assert silent.story is None
    assert telling.story == ["     0.000 crash router 3"]
    assert silent.trace_hash() == telling.trace_hash()
